"""Check that a Ray, and its node on this machine, answer.

Without an answer Ray's own calls wait for a minute or forever, or end this process.
"""

from __future__ import annotations

import functools
import math
import os
import socket
import time
from typing import Any

import grpc  # type: ignore[import-untyped]
from ray._common.network_utils import build_address  # type: ignore[attr-defined]
from ray._common.tls_utils import load_certs_from_env
from ray._private.ray_constants import GLOBAL_GRPC_OPTIONS
from ray._private.services import find_node_ids
from ray._raylet import AuthenticationMode, AuthenticationTokenLoader, get_authentication_mode  # type: ignore[attr-defined]
from ray.core.generated import gcs_pb2, gcs_service_pb2, gcs_service_pb2_grpc, node_manager_pb2, node_manager_pb2_grpc
from ray.exceptions import AuthenticationError

from kvstore.actors.session.rays import RaySession
from kvstore.bounds import clip
from kvstore.errors import ConfigError, StoreNotRunning

_CONNECT_S = 10.0
#: Interval at which to look for a node that is being started.
_LOOK_EVERY_S = 0.5
#: With less time, a working Ray might be taken for one that has failed.
_LEAST_S = 0.5
_MAX_PORT = 65535
#: The first bytes of an HTTP/2 client, such as gRPC: the preface, and an empty SETTINGS frame.
_HTTP2_CLIENT = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
#: The type of the server's first frame, after three bytes of length.
_HTTP2_SETTINGS = b"\x04"


def check_answers(address: str, deadline_s: float = math.inf, called: str = "address") -> bool:
    """Refuse a host:port where no GCS answers: ray.init would try for a minute, or forever.

    The program there must greet as an HTTP/2 server and answer a question that every GCS knows, both in time. The token
    is sent only if it asks for one and Ray is set to send it.

    Returns: whether it lets this process in. False where it wants a token, and this process showed none or another one;
        `refusal` is the error.

    Args:
        address: the host:port.
        deadline_s: by when the answer must come.
        called: the source of the address, for the error: the argument, or an environment variable.

    Raises:
        StoreNotRunning: no program listens there, or not a working GCS.
        ConfigError: this is not an address; the files that RAY_USE_TLS needs are not usable; or RAY_AUTH_MODE=token,
            and this process has no token.
    """
    host, _, port = address.rpartition(":")
    # isdigit() alone accepts "²", and int() of thousands of digits raises.
    if not host or not (port.isascii() and port.isdigit() and len(port) < 10) or int(port) > _MAX_PORT:
        raise ConfigError(f"{called}: wanted the host:port of a Ray cluster, 'auto' or 'local', got {clip(address)}")
    timeout_s = max(0.1, min(_CONNECT_S, deadline_s - time.monotonic()))
    try:
        return _reach(host, int(port), timeout_s)
    except (OSError, UnicodeError) as error:  # UnicodeError: this cannot be a host.
        raise StoreNotRunning(
            f"no Ray cluster answers at {address!r}: {error}; {_longer(timeout_s)}pass the address that "
            "`ray start --head` printed"
        ) from error


def refusal(address: str) -> StoreNotRunning:
    """Return the error for a Ray that answers, and refuses the token of this process; it has no token in it."""
    got = "none" if get_authentication_mode() != AuthenticationMode.TOKEN else f"that of {_token_source()}"
    mode = os.environ.get("RAY_AUTH_MODE")
    first = "" if mode in (None, "token") else f"RAY_AUTH_MODE is {clip(mode)} here, so set it to token; "
    return StoreNotRunning(
        f"the Ray at {address} lets only those in that show its token, got {got}; {first}copy the file "
        "~/.ray/auth_token of its head to this user's home, or put the token into RAY_AUTH_TOKEN"
    )


def _token_source() -> str:
    """Return where Ray takes the token of this process from; in Ray's order."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        if os.environ.get(name):
            return name
    return "~/.ray/auth_token"


def check_goes_on(session: RaySession, advice: str, timeout_s: float = math.inf) -> None:
    """Refuse this process's Ray if it has ended: most calls hang there, and after a minute Ray ends the process.

    Args:
        session: of that Ray.
        advice: the remedy, for the error.
        timeout_s: limit for its answer.

    Raises:
        StoreNotRunning: it has ended, or does not answer.
    """
    host, _, port = session.address.rpartition(":")
    timeout_s = min(_CONNECT_S, max(_LEAST_S, timeout_s))
    try:
        _reach(host, int(port), timeout_s)
    except ConnectionRefusedError as error:
        raise StoreNotRunning(f"the Ray at {session.address} has ended, and its stores with it; {advice}") from error
    except (OSError, ValueError, OverflowError) as error:
        raise StoreNotRunning(
            f"the Ray at {session.address} does not answer: {error}; {_longer(timeout_s)}{advice}"
        ) from error


def _longer(timeout_s: float) -> str:
    """Return advice for a caller that gave Ray less time than a working one may need."""
    if timeout_s >= _CONNECT_S:
        return ""
    return f"it had {max(0.0, timeout_s):.1f} s, so try a longer timeout_s= first; "


def check_node(address: str, deadline_s: float = math.inf) -> None:
    """Refuse a Ray whose node here does not answer: ray.init would wait a minute, or end this process.

    Waits for a node that is being started.

    Raises:
        StoreNotRunning: no node of it runs here, or its raylet does not answer.
    """
    timeout_s = min(deadline_s - time.monotonic(), _CONNECT_S)
    end_s = time.monotonic() + timeout_s
    try:
        for node in _nodes_here(address, end_s):
            # The first question of Ray's core, which ends the process without an answer.
            where = build_address(node.node_manager_address, node.node_manager_port)
            request = node_manager_pb2.GetSystemConfigRequest()  # type: ignore[attr-defined]
            _ask(f"its raylet at {where}", where, node_manager_pb2_grpc.NodeManagerServiceStub, request, end_s)
    except OSError as error:
        raise StoreNotRunning(
            f"the Ray at {address} answers, but not its node on this machine: {error}; {_longer(timeout_s)}wait if "
            "that was suspended, else end what is left of this node and start it again with `ray start`"
        ) from error


def _nodes_here(address: str, end_s: float) -> list[Any]:
    """Return this machine's living nodes, of which ray.init takes one; none if the GCS wants another token."""
    request = gcs_service_pb2.GetAllNodeInfoRequest  # type: ignore[attr-defined]
    alive = gcs_pb2.GcsNodeInfo.ALIVE  # type: ignore[attr-defined]
    while True:
        # Node ids of all Rays of this machine, found from processes, as Ray does it.
        node_ids = sorted(find_node_ids())  # type: ignore[no-untyped-call]
        here = [request.NodeSelector(node_id=bytes.fromhex(node_id)) for node_id in node_ids]
        if here:
            reply = _ask_gcs(address, request(node_selectors=here, state_filter=alive), end_s)
            if reply is None:
                return []
            if nodes := list(reply.node_info_list):
                return [node for node in nodes if node.is_head_node][:1] or nodes
        if time.monotonic() + _LOOK_EVERY_S >= end_s:
            raise OSError("no raylet of it runs here")
        time.sleep(_LOOK_EVERY_S)


def _left_s(end_s: float) -> float:
    """Return the time left, never 0: for a socket a timeout of 0 means no waiting."""
    return max(0.01, end_s - time.monotonic())


def _reach(host: str, port: int, timeout_s: float) -> bool:
    """Check that a GCS greets and answers within a time, and return whether it took the token; raise OSError if not."""
    end_s = time.monotonic() + timeout_s
    with socket.create_connection((host.strip("[]"), port), timeout=timeout_s) as sock:
        if not _uses_tls():
            sock.settimeout(_left_s(end_s))
            sock.sendall(_HTTP2_CLIENT)
            begin = b""
            while len(begin) < 4:
                sock.settimeout(_left_s(end_s))
                if not (more := sock.recv(4 - len(begin))):
                    break
                begin += more
            if begin[3:] != _HTTP2_SETTINGS:
                raise OSError(f"what listens there is no GCS of Ray: it begins with {begin!r}")
    request = gcs_service_pb2.GetClusterIdRequest()  # type: ignore[attr-defined]
    return _ask_gcs(f"{host}:{port}", request, end_s) is not None


def _uses_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")  # As Ray reads it.


def _channel(address: str) -> Any:
    options = list(GLOBAL_GRPC_OPTIONS)
    if not _uses_tls():
        return grpc.insecure_channel(address, options)
    try:
        certificate, key, authority = load_certs_from_env()  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"RAY_USE_TLS is set, and its files cannot be used: {error}") from error
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, key, certificate), options)


def _ask_gcs(address: str, request: Any, end_s: float) -> Any:
    """Ask a GCS about its nodes, and return the reply; None if it wants a token that we do not have."""
    ask = functools.partial(_ask, "a GCS", address, gcs_service_pb2_grpc.NodeInfoGcsServiceStub, request, end_s)
    reply = ask()
    if reply is None and get_authentication_mode() == AuthenticationMode.TOKEN:
        try:
            shown = tuple(AuthenticationTokenLoader.instance().get_token_for_http_header().items())
        except AuthenticationError as error:
            raise ConfigError(
                f"RAY_AUTH_MODE: wanted a token for the Ray at {address}, got none in {_token_source()}; copy the file "
                "~/.ray/auth_token of its head to this user's home, or put the token into RAY_AUTH_TOKEN"
            ) from error
        return ask(shown) if shown else None
    return reply


def _ask(who: str, address: str, stub: Any, request: Any, end_s: float, shown: tuple[tuple[str, str], ...] = ()) -> Any:
    """Ask the question of a request, and return the reply; None if `who` wants another token.

    Raises:
        OSError: no answer by `end_s`.
    """
    with _channel(address) as channel:
        ask = getattr(stub(channel), type(request).__name__.removesuffix("Request"))
        try:
            return ask(request, timeout=_left_s(end_s), metadata=shown)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return None
            raise OSError(f"no answer of {who} in time: {error.code().name}") from error

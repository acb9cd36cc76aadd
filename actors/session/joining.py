"""Join the Ray of an address, of this process or of this machine; or start one for this process."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import ray
from ray import _raylet
from ray import exceptions as ray_errors
from ray._common.network_utils import build_address  # type: ignore[attr-defined]
from ray._common.tls_utils import load_certs_from_env
from ray._private import external_storage, gcs_pubsub
from ray._private.ray_constants import GLOBAL_GRPC_OPTIONS
from ray._private.services import find_node_ids
from ray._raylet import (  # type: ignore[attr-defined]
    AuthenticationMode,
    AuthenticationTokenLoader,
    Config,
    get_authentication_mode,
)
from ray.core.generated import (
    gcs_pb2,
    gcs_service_pb2,
    gcs_service_pb2_grpc,
    node_manager_pb2,
    node_manager_pb2_grpc,
)

from kvstore.actors.calls import RAY_NAMESPACE, check_not_forked, node_address
from kvstore.actors.session.keeper import KEEPER
from kvstore.actors.session.leftovers import end_children, ray_children
from kvstore.actors.session.rays import OWN_RAY_NAMESPACE, RaySession, current_session, rays_here, recorded_address
from kvstore.bounds import clip
from kvstore.errors import ConfigError, KVStoreError, StoreNotRunning, StoreUnavailable, WrongCluster

LOCAL = "local"
AUTO = "auto"
#: Errors of ray.init when the program itself called it first.
_INIT_FAILURES = (OSError, RuntimeError, ValueError, AssertionError, AttributeError, KeyError, ray_errors.RayError)
#: How long to wait for the end of a Ray that an earlier call began and abandoned.
_SETTLE_S = 60.0
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

# Ray draws a driver's subscriber id from this generator. Engines seed Python's generator, usually with the same number
# (vLLM: 0), and drivers with one id end each other's polls: a thousand requests a second while both live. Set once and
# permanently: seeding Python's generator around ray.init is not safe with other threads.
for _module in (_raylet, external_storage, gcs_pubsub):
    _module.random = random.SystemRandom()  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Joined:
    """The Ray that this process is connected to now.

    Args:
        session: its session.
        started: whether this call began it.
        connected: whether this call connected this process to it.
        why: the reason for this Ray, for the log.
        passed_by: addresses of lasting Rays on this machine that were not joined.
    """

    session: RaySession
    started: bool
    connected: bool
    why: str
    passed_by: tuple[str, ...] = ()


def join_ray(address: str | None, *, may_start: bool, deadline_s: float = math.inf) -> Joined:
    """Connect this process to Ray, or start one for it.

    In this order: the Ray of this process; `address`; RAY_ADDRESS; the Ray that `ray start` began on this machine; a
    new one if `may_start`, else the only one that runs here. Only one thread at a time may call this.

    Args:
        address: host:port, "auto", "local", or None.
        may_start: whether to start one if there is none to join.
        deadline_s: by when a new Ray must be up, or an existing one must answer.

    Raises:
        StoreNotRunning: no cluster answers, or not its node on this machine, or the Ray of this process has ended.
        StoreUnavailable: a new one does not start, or not in time.
        WrongCluster: this process is connected to another one than `address`.
        ConfigError: several run here; the address is not usable; or no token can be written.
        ForkedClient: this is a fork of a process that was connected to Ray.
    """
    check_not_forked()
    KEEPER.settle(min(deadline_s, time.monotonic() + _SETTLE_S))
    if ray.is_initialized():
        session = current_session()
        _check_same(address, session)
        check_goes_on(session, "call ray.shutdown() and start again", deadline_s - time.monotonic())
        return Joined(session, False, False, "this process was connected to it")
    named = address or os.environ.get("RAY_ADDRESS") or None
    called = "address" if address else "RAY_ADDRESS"
    if named and "://" in named:
        raise ConfigError(
            f"{called}: wanted the host:port of a Ray cluster, got {named!r}: a store's clients need a Ray node on "
            "their machine; run this process on a node of the cluster, with `ray job submit` for example"
        )
    if named == LOCAL and not may_start:
        raise ConfigError(
            f"wanted a cluster to join, got {LOCAL!r}, which starts one; leave address and RAY_ADDRESS out"
        )
    why = "address= names it" if address else "RAY_ADDRESS names it"
    passed_by: tuple[str, ...] = ()
    if named in (None, AUTO):
        found, why = find_ray(deadline_s)
        if found is None and named is None and may_start:
            named, passed_by = LOCAL, tuple(one.address for one in rays_here() if one.outlives_starter)
        else:
            named = found or _only_ray_here()
    if named == LOCAL:
        ensure_token()
        _begin_ray(deadline_s)
        return Joined(current_session(), True, True, why, passed_by)
    assert named is not None
    with _token_shown():
        check_answers(named, deadline_s, called)
        check_node(named, deadline_s)
        try:
            _init_ray(RAY_NAMESPACE, address=named)
        except Exception as error:
            raise StoreNotRunning(
                f"no Ray cluster lets this process in at {named!r}: {error}; if something runs there, does it want "
                "another token (~/.ray/auth_token, RAY_AUTH_TOKEN), or has this process another RAY_AUTH_MODE?"
            ) from error
    return Joined(current_session(), False, True, why)


def check_named(address: str | None) -> None:
    """Refuse an ambiguous Ray before something is ended in it.

    Raises:
        ConfigError: several run here, and none of `address`, RAY_ADDRESS and a Ray of this process selects one. "auto"
            selects none.
    """
    if (address or os.environ.get("RAY_ADDRESS") or AUTO) != AUTO or ray.is_initialized():
        return
    if len(addresses := [one.address for one in rays_here()]) > 1:
        raise ConfigError(_several(addresses))


def find_ray(deadline_s: float = math.inf) -> tuple[str | None, str]:
    """Return the address of the Ray that `ray start` began here, or None; and how it was found.

    The recorded address counts only while a Ray of this user runs here at it: any other program may listen there later,
    and would get the user's token.

    Raises:
        StoreNotRunning: it does not answer by `deadline_s`.
        ConfigError: several were started to stay.
    """
    recorded = recorded_address()
    if recorded is None:
        return None, "`ray start` began none on this machine in the folder where Ray looks first"
    address, file = recorded
    here = rays_here()
    try:
        if not any(_are_same(one.address, address) for one in here):
            raise StoreNotRunning("no process of it is left here, or they are another user's")
        check_answers(address, deadline_s)
    except StoreNotRunning as error:
        raise StoreNotRunning(
            f"`ray start` began a Ray at {address} on this machine, and it does not answer: {error}. Start it again "
            f"with `ray start --head`, pass address=, or, for a Ray of this process alone, address={LOCAL!r}; it is "
            f"forgotten when {file} is removed"
        ) from error
    others = [
        one.address
        for one in here
        if one.outlives_starter and not _are_same(one.address, address) and Path(one.folder) == file.parent
    ]
    if others:
        raise ConfigError(_several([address, *others]))
    return address, "`ray start` began it on this machine"


def _only_ray_here() -> str:
    addresses = [one.address for one in rays_here()]
    if len(addresses) > 1:
        raise ConfigError(_several(addresses))
    if not addresses:
        raise StoreNotRunning("no Ray cluster runs here and none was named; pass address= or set RAY_ADDRESS")
    return addresses[0]


def _several(addresses: list[str]) -> str:
    return (
        f"wanted the Ray of this machine, got {len(addresses)}: {', '.join(sorted(addresses))}; say which with "
        "address= or RAY_ADDRESS"
    )


def _check_same(address: str | None, session: RaySession) -> None:
    """Refuse an address that differs from that of this process's Ray."""
    if address in (None, "", AUTO) or (address == LOCAL and session.is_own):
        return
    assert address is not None
    if _are_same(address, session.address):
        return
    raise WrongCluster(
        f"wanted the Ray at {address!r}, got a process that is connected to the one at {session.address}; leave "
        "address= out, or call ray.shutdown() first"
    )


def _are_same(one: str, other: str) -> bool:
    """Return whether two host:port name the same place, as seen from this machine."""
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    return one == other or (port == other_port and bool(_addresses_of(host) & _addresses_of(other_host)))


def _addresses_of(host: str) -> set[str]:
    try:
        address = socket.gethostbyname(host.strip("[]"))
    except (OSError, UnicodeError):
        return {host}
    return {address, node_address()} if address.startswith("127.") else {address}


def check_answers(address: str, deadline_s: float = math.inf, called: str = "address") -> None:
    """Refuse a host:port where no GCS answers: ray.init would try for a minute, or forever.

    The program there must greet as an HTTP/2 server and answer a question that every GCS knows, both in time. The token
    is sent only if it asks for one and Ray is set to send it.

    Args:
        address: the host:port.
        deadline_s: by when the answer must come.
        called: the source of the address, for the error: the argument, or an environment variable.

    Raises:
        StoreNotRunning: no program listens there, or not a working GCS.
        ConfigError: this is not an address, or the files that RAY_USE_TLS needs are not usable.
    """
    host, _, port = address.rpartition(":")
    # isdigit() alone accepts "²", and int() of thousands of digits raises.
    if not host or not (port.isascii() and port.isdigit() and len(port) < 10) or int(port) > _MAX_PORT:
        raise ConfigError(f"{called}: wanted the host:port of a Ray cluster, 'auto' or 'local', got {clip(address)}")
    timeout_s = max(0.1, min(_CONNECT_S, deadline_s - time.monotonic()))
    try:
        _reach(host, int(port), timeout_s)
    except (OSError, UnicodeError) as error:  # UnicodeError: this cannot be a host.
        raise StoreNotRunning(
            f"no Ray cluster answers at {address!r}: {error}; {_longer(timeout_s)}pass the address that "
            "`ray start --head` printed"
        ) from error


def check_goes_on(session: RaySession, advice: str, timeout_s: float = math.inf) -> None:
    """Refuse this process's Ray if it has ended, because most calls hang there.

    Ray itself notices the end after a minute, and then ends the process.

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
            _ask_raylet(build_address(node.node_manager_address, node.node_manager_port), end_s)
    except OSError as error:
        raise StoreNotRunning(
            f"the Ray at {address} answers, but not its node on this machine: {error}; {_longer(timeout_s)}wait if "
            "that was suspended, else end what is left of this node and start it again with `ray start`"
        ) from error


def _nodes_here(address: str, end_s: float) -> list[Any]:
    """Return this machine's living nodes, of which ray.init takes one; none if the GCS wants another token.

    Raises:
        OSError: the GCS does not answer, or there is no such node by `end_s`.
    """
    request = gcs_service_pb2.GetAllNodeInfoRequest  # type: ignore[attr-defined]
    while True:
        here = [request.NodeSelector(node_id=bytes.fromhex(node_id)) for node_id in sorted(_node_ids_here())]
        if here:
            alive = request(node_selectors=here, state_filter=gcs_pb2.GcsNodeInfo.ALIVE)  # type: ignore[attr-defined]
            reply = _ask_gcs(address, "GetAllNodeInfo", alive, end_s)
            nodes = [] if reply is None else list(reply.node_info_list)
            if nodes or reply is None:
                return [node for node in nodes if node.is_head_node][:1] or nodes
        if time.monotonic() + _LOOK_EVERY_S >= end_s:
            raise OSError("no raylet of it runs here")
        time.sleep(_LOOK_EVERY_S)


def _node_ids_here() -> set[str]:
    """Return the node ids of all Rays of this machine, found from processes, as Ray does it."""
    return set(find_node_ids())  # type: ignore[no-untyped-call]


def _left_s(end_s: float) -> float:
    """Return the time left, never 0: for a socket a timeout of 0 means no waiting."""
    return max(0.01, end_s - time.monotonic())


def _reach(host: str, port: int, timeout_s: float) -> None:
    """Check that a GCS greets and answers within a time; raise OSError if not."""
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
    _ask_gcs(f"{host}:{port}", "GetClusterId", gcs_service_pb2.GetClusterIdRequest(), end_s)  # type: ignore[attr-defined]


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


def _ask_gcs(address: str, question: str, request: Any, end_s: float) -> Any:
    """Ask a GCS about its nodes, and return the reply; None if it wants a token that we do not have.

    Raises:
        OSError: none answers.
    """
    with _channel(address) as channel:
        ask = getattr(gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel), question)  # type: ignore[no-untyped-call]
        shown: tuple[tuple[str, str], ...] = ()
        while True:
            try:
                return ask(request, timeout=_left_s(end_s), metadata=shown)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAUTHENTICATED:
                    raise OSError(f"no answer of a GCS in time: {error.code().name}") from error
            if shown or get_authentication_mode() != AuthenticationMode.TOKEN:
                return None  # A GCS that wants a token, or another one: Ray reports that when it joins.
            shown = tuple(AuthenticationTokenLoader.instance().get_token_for_http_header().items())
            if not shown:
                return None


def _ask_raylet(address: str, end_s: float) -> None:
    """Ask a raylet the first question of Ray's core, which ends the process without an answer; raise OSError."""
    with _channel(address) as channel:
        stub = node_manager_pb2_grpc.NodeManagerServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            stub.GetSystemConfig(node_manager_pb2.GetSystemConfigRequest(), timeout=_left_s(end_s))  # type: ignore[attr-defined]
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAUTHENTICATED:  # That is an answer as well.
                raise OSError(f"no answer of its raylet at {address} in time: {error.code().name}") from error


@contextlib.contextmanager
def _token_shown() -> Iterator[None]:
    """Make Ray send the user's token, if there is one and RAY_AUTH_MODE is not set.

    `ray start` and a new Ray ask for a token as soon as there is one, but Ray does not send it by itself when it joins.
    The address is one that the caller named, or of a Ray of this user. A cluster that wants no token ignores it. If
    joining fails, nothing has changed.
    """
    if "RAY_AUTH_MODE" in os.environ or not AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        yield
        return
    # As Ray does for a Ray that it starts.
    os.environ["RAY_AUTH_MODE"] = "token"
    Config.initialize("")
    try:
        yield
    except BaseException:
        del os.environ["RAY_AUTH_MODE"]
        Config.initialize("")
        raise


def ensure_token() -> None:
    """Write a token for a new Ray where Ray looks for one, if there is none, readable by its owner only.

    Ray would write one that every user of the machine can read.

    Raises:
        ConfigError: it cannot be written.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token").lower()
    if mode != "token" or os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    path = Path.home() / ".ray" / "auth_token"
    mine = path.with_name(f"auth_token.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        if path.exists():
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Linked when it is complete: another process may look for it now.
        with open(os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(mine, path)
        except FileExistsError:
            pass  # Another process was first.
        finally:
            mine.unlink()
    except OSError as error:
        raise ConfigError(
            f"wanted to write the token of a new Ray to {path}, got: {error}; set RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH, or RAY_AUTH_MODE=disabled for a Ray that everybody on this machine may use"
        ) from error


def _begin_ray(deadline_s: float) -> None:
    """Begin a Ray that lives until this process ends or shuts it down, beyond the calling thread."""
    if threading.current_thread() is threading.main_thread():
        # As ray.init does on the main thread: then the exit handlers run, which end the store and its Ray.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
    ray_log = logging.getLogger("ray._private.worker")
    ray_log.addFilter(_without_sigterm)
    try:
        KEEPER.do(
            lambda: _init_ray(OWN_RAY_NAMESPACE, address=LOCAL, include_dashboard=False), ray.shutdown, deadline_s
        )
    except KVStoreError:
        raise
    except Exception as error:  # Ray raises a plain Exception if its node is late.
        raise StoreUnavailable(
            f"wanted to begin a Ray for this process, got {type(error).__name__}: {error}; see its logs in the folder "
            "ray of RAY_TMPDIR, try again when this machine has less to do, or join one with address="
        ) from error
    finally:
        ray_log.removeFilter(_without_sigterm)


def _without_sigterm(record: logging.LogRecord) -> bool:
    """Drop Ray's log line that it sets no SIGTERM handler off the main thread: it is set here."""
    return "SIGTERM handler is not set" not in record.getMessage()


def _init_ray(namespace: str, **options: Any) -> None:
    begins = options.get("address") == LOCAL
    before = ray_children() if begins else set()
    try:
        ray.init(log_to_driver=False, configure_logging=False, namespace=namespace, **options)
    except BaseException as error:
        # Shut down what it has begun: Ray forgets a node without a connection, and the node lives on. Not if the
        # program itself called ray.init meanwhile, which then caused this error.
        if not ray.is_initialized() or not isinstance(error, _INIT_FAILURES):
            ray.shutdown()
            if begins:
                end_children(ray_children() - before)  # Ray forgets a node that did not start.
        raise

"""Joining the Ray that an address names, that this process has, or that runs here; or starting one for this process."""

from __future__ import annotations

import os
import random
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import exceptions as ray_errors
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from kvstore.actors.calls import RAY_NAMESPACE, check_not_forked, node_address
from kvstore.actors.ray_sessions import OWN_RAY_NAMESPACE, RaySession, current_session, rays_here, recorded_address
from kvstore.errors import ConfigError, StoreNotRunning, WrongCluster

LOCAL = "local"
AUTO = "auto"
_CONNECT_S = 10.0
#: With less time a Ray that works might be taken for one that does not.
_LEAST_S = 0.5
#: What a client of HTTP/2, as gRPC is, begins with: the preface, and a frame of settings with none in it.
_HTTP2_CLIENT = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
#: And the server: the kind of its first frame, behind three bytes of length.
_HTTP2_SETTINGS = b"\x04"


@dataclass(frozen=True, slots=True)
class Joined:
    """The Ray that this process is connected to now.

    Args:
        session: of it.
        started: this call began it.
        why: this one and no other, for the log.
        passed_by: addresses of Rays on this machine that were started to stay, and were not joined.
    """

    session: RaySession
    started: bool
    why: str
    passed_by: tuple[str, ...] = ()


def join_ray(address: str | None, *, may_start: bool, timeout_s: float | None = None) -> Joined:
    """Connect this process to Ray, or start one for it.

    In this order: the Ray of this process; `address`; RAY_ADDRESS; what `ray start` began on this machine; a new one
    if `may_start`, else the only one that runs here.

    Args:
        address: of the cluster, "auto" or "local"; None leaves the choice to the order above.
        may_start: whether a new Ray may be started.
        timeout_s: how long the Ray that this process has already may take to answer.

    Raises:
        StoreNotRunning: no cluster answers, or the Ray of this process has ended.
        WrongCluster: this process is connected to another one than `address`.
        ConfigError: several run here; the address is of no use; or no token can be written.
        ForkedClient: this is a fork of a process that was connected to Ray.
    """
    check_not_forked()
    if ray.is_initialized():
        session = current_session()
        _check_same(address, session)
        check_goes_on(session, "call ray.shutdown() and start again", timeout_s)
        return Joined(session, False, "this process was connected to it")
    named = address or os.environ.get("RAY_ADDRESS") or None
    if named and "://" in named:
        raise ConfigError(
            f"wanted the host:port of a Ray cluster, got {named!r}: a store's clients need a Ray node on their "
            "machine; run this process on a node of the cluster, with `ray job submit` for example"
        )
    if named == LOCAL and not may_start:
        raise ConfigError(
            f"wanted a cluster to join, got {LOCAL!r}, which starts one; leave address and RAY_ADDRESS out"
        )
    why = "address= names it" if address else "RAY_ADDRESS names it"
    passed_by: tuple[str, ...] = ()
    if named in (None, AUTO):
        found, why = find_ray()
        if found is None and named is None and may_start:
            named, passed_by = LOCAL, tuple(one.address for one in rays_here() if one.outlives_starter)
        else:
            named = found or _only_ray_here()
    if named == LOCAL:
        ensure_token()
        _init_ray(OWN_RAY_NAMESPACE, address=LOCAL, include_dashboard=False)
        return Joined(current_session(), True, why, passed_by)
    assert named is not None
    check_answers(named)
    _show_token()
    try:
        _init_ray(RAY_NAMESPACE, address=named)
    except (ConnectionError, RuntimeError, ValueError, ray_errors.RayError) as error:
        raise StoreNotRunning(
            f"no Ray cluster lets this process in at {named!r}: {error}; if something runs there, does it want another "
            "token (~/.ray/auth_token, RAY_AUTH_TOKEN), or has this process another RAY_AUTH_MODE?"
        ) from error
    return Joined(current_session(), False, why)


def find_ray() -> tuple[str | None, str]:
    """Return the address of the Ray that `ray start` began on this machine, None without one, and how it was found.

    Raises:
        StoreNotRunning: it does not answer.
        ConfigError: several were started to stay.
    """
    recorded = recorded_address()
    if recorded is None:
        return None, "`ray start` began none on this machine in the folder where Ray looks first"
    address, file = recorded
    try:
        check_answers(address)
    except StoreNotRunning as error:
        raise StoreNotRunning(
            f"`ray start` began a Ray at {address} on this machine, and it does not answer: {error}. Start it again "
            f"with `ray start --head`, pass address=, or, for a Ray of this process alone, address={LOCAL!r}; it is "
            f"forgotten when {file} is removed"
        ) from error
    others = [
        one.address
        for one in rays_here()
        if one.outlives_starter and one.address != address and Path(one.folder) == file.parent
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
    """Refuse an address that is not the one of the Ray that this process has already."""
    if address in (None, "", AUTO) or (address == LOCAL and session.is_own):
        return
    assert address is not None
    host, _, port = address.rpartition(":")
    own_host, _, own_port = session.address.rpartition(":")
    if port == own_port and _addresses_of(host) & _addresses_of(own_host):
        return
    raise WrongCluster(
        f"wanted the Ray at {address!r}, got a process that is connected to the one at {session.address}; leave "
        "address= out, or call ray.shutdown() first"
    )


def _addresses_of(host: str) -> set[str]:
    try:
        address = socket.gethostbyname(host.strip("[]"))
    except OSError:
        return {host}
    return {address, node_address()} if address.startswith("127.") else {address}


def check_answers(address: str) -> None:
    """Refuse a host:port where no GCS answers: ray.init would go on trying for a minute, or for ever.

    What listens there has to greet as an HTTP/2 server does, in time: a GCS that hangs, or another program, does not.

    Raises:
        StoreNotRunning: nobody listens there, or not a GCS that works.
        ConfigError: this is no address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"address: wanted the host:port of a Ray cluster, 'auto' or 'local', got {address!r}")
    try:
        _greet(host, int(port), _CONNECT_S)
    except (OSError, UnicodeError, OverflowError) as error:  # The latter two: this cannot be a host, or a port.
        raise StoreNotRunning(
            f"no Ray cluster answers at {address!r}: {error}; pass the address that `ray start --head` printed"
        ) from error


def check_goes_on(session: RaySession, advice: str, timeout_s: float | None = None) -> None:
    """Refuse a Ray that this process is connected to and that has ended: most calls hang there.

    Ray itself notices after a minute, and then ends the process.

    Args:
        session: of that Ray.
        advice: what to do, for the error.
        timeout_s: how long it may take to answer.

    Raises:
        StoreNotRunning: it has ended, or does not answer.
    """
    host, _, port = session.address.rpartition(":")
    limit_s = _CONNECT_S if timeout_s is None else min(_CONNECT_S, max(_LEAST_S, timeout_s))
    try:
        _greet(host, int(port), limit_s)
    except ConnectionRefusedError as error:
        raise StoreNotRunning(f"the Ray at {session.address} has ended, and its stores with it; {advice}") from error
    except (OSError, ValueError, OverflowError) as error:
        raise StoreNotRunning(f"the Ray at {session.address} does not answer: {error}; {advice}") from error


def _greet(host: str, port: int, timeout_s: float) -> None:
    with socket.create_connection((host.strip("[]"), port), timeout=timeout_s) as sock:
        if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
            sock.sendall(_HTTP2_CLIENT)
            begin = b""
            while len(begin) < 4 and (more := sock.recv(4 - len(begin))):
                begin += more
            if begin[3:] != _HTTP2_SETTINGS:
                raise OSError(f"what listens there is no GCS of Ray: it begins with {begin!r}")


def _show_token() -> None:
    """Have Ray show the user's token, if there is one and nobody said whether; a cluster that wants none ignores it.

    `ray start` and a new Ray ask for the token as soon as there is one; joining, Ray would not show it by itself.
    """
    if "RAY_AUTH_MODE" in os.environ or not AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        return
    # As Ray does it for a Ray that it starts.
    os.environ["RAY_AUTH_MODE"] = "token"
    Config.initialize("")


def ensure_token() -> None:
    """Write the token that a new Ray will want, where Ray looks for one and none is there, for its owner's eyes only.

    Ray would write one itself, and let every user of the machine read it.

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
        # Linked when it is whole: another process may look for it now.
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


def _init_ray(namespace: str, **options: Any) -> None:
    """Call ray.init with a generator of random numbers that nobody has seeded; the caller's goes on as before.

    Ray draws from it the id under which a driver listens to the cluster. Engines are seeded, as a rule with the same
    number (vLLM: 0), and drivers of one id end each other's polls: a thousand requests a second while both live.
    """
    seeded = random.getstate()
    random.seed()
    try:
        ray.init(log_to_driver=False, configure_logging=False, namespace=namespace, **options)
    finally:
        random.setstate(seeded)

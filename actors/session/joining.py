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

import ray
from ray import _raylet
from ray import exceptions as ray_errors
from ray._private import external_storage, gcs_pubsub
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from kvstore.actors.calls import RAY_NAMESPACE, check_not_forked, node_address
from kvstore.actors.session.keeper import KEEPER
from kvstore.actors.session.leftovers import end_children, ray_children
from kvstore.actors.session.probing import check_answers, check_goes_on, check_node, refusal
from kvstore.actors.session.rays import OWN_RAY_NAMESPACE, RaySession, current_session, rays_here, recorded_address
from kvstore.bounds import clip
from kvstore.errors import ConfigError, KVStoreError, StoreNotRunning, StoreUnavailable, WrongCluster

LOCAL = "local"
AUTO = "auto"
#: Errors of ray.init when the program itself called it first.
_INIT_FAILURES = (OSError, RuntimeError, ValueError, AssertionError, AttributeError, KeyError, ray_errors.RayError)
#: How long to wait for the end of a Ray that an earlier call began and abandoned.
_SETTLE_S = 60.0

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
        StoreNotRunning: no cluster answers, or not its node on this machine, or it wants another token, or the Ray of
            this process has ended.
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
        elif found is None:
            named, why = _only_ray_here(), "the only Ray of this user on this machine"
        else:
            named = found
    if named == LOCAL:
        ensure_token()
        _begin_ray(deadline_s)
        return Joined(current_session(), True, True, why, passed_by)
    assert named is not None
    with _token_shown():
        if not check_answers(named, deadline_s, called):
            raise refusal(named)
        check_node(named, deadline_s)
        try:
            _init_in_time(deadline_s, RAY_NAMESPACE, address=named)
        except KVStoreError:
            raise
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
    _check_one([one.address for one in rays_here()])


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
        others = ", ".join(sorted({one.address for one in here if not _are_same(one.address, address)}))
        running = f" (running here: {others})" if others else ""
        raise StoreNotRunning(
            f"`ray start` began a Ray at {address} on this machine, and it does not answer: {error}. Start it again "
            f"with `ray start --head`, pass address={running}, or, for a Ray of this process alone, address={LOCAL!r}; "
            f"it is forgotten when {file} is removed"
        ) from error
    beside = [one.address for one in here if one.outlives_starter and Path(one.folder) == file.parent]
    _check_one([address, *(other for other in beside if not _are_same(other, address))])
    return address, "`ray start` began it on this machine"


def _only_ray_here() -> str:
    addresses = [one.address for one in rays_here()]
    _check_one(addresses)
    if not addresses:
        raise StoreNotRunning(
            "no Ray cluster runs here and none was named; start one with `ray start --head`, pass address= or set "
            "RAY_ADDRESS"
        )
    return addresses[0]


def _check_one(addresses: list[str]) -> None:
    if len(addresses) > 1:
        raise ConfigError(
            f"wanted the Ray of this machine, got {len(addresses)}: {', '.join(sorted(addresses))}; say which with "
            "address= or RAY_ADDRESS"
        )


def _check_same(address: str | None, session: RaySession) -> None:
    """Refuse an address that differs from that of this process's Ray."""
    if not address or address == AUTO or (address == LOCAL and session.is_own):
        return
    if not _are_same(address, session.address):
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


@contextlib.contextmanager
def _token_shown() -> Iterator[None]:
    """Make Ray send the user's token, if there is one and RAY_AUTH_MODE is not set; undo it if the body fails.

    `ray start` and a new Ray ask for a token as soon as there is one, but Ray does not send it by itself when it joins.
    The address is one that the caller named, or of a Ray of this user. A cluster that wants no token ignores it.
    """
    if "RAY_AUTH_MODE" in os.environ or not _has_token():
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


def _has_token() -> bool:
    try:
        return bool(AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True))
    except ray_errors.AuthenticationError as error:
        raise ConfigError(
            f"RAY_AUTH_TOKEN_PATH: wanted a file with the token of a Ray cluster, got "
            f"{clip(os.environ.get('RAY_AUTH_TOKEN_PATH'))}, which cannot be read or is empty; name another file, or "
            "leave it out for ~/.ray/auth_token"
        ) from error


def ensure_token() -> None:
    """Write a token for a new Ray, if there is none: Ray would write one that all users of the machine can read.

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
            with contextlib.suppress(FileExistsError):  # Another process was first.
                os.link(mine, path)
        finally:
            mine.unlink()
    except OSError as error:
        raise ConfigError(
            f"wanted to write the token of a new Ray to {path}, got: {error}; set RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH, or RAY_AUTH_MODE=disabled for a Ray that everybody on this machine may use"
        ) from error


def _begin_ray(deadline_s: float) -> None:
    """Begin a Ray that lives until this process ends or shuts it down, beyond the calling thread."""
    try:
        _init_in_time(deadline_s, OWN_RAY_NAMESPACE, address=LOCAL, include_dashboard=False)
    except KVStoreError:
        raise
    except Exception as error:  # Ray raises a plain Exception if its node is late.
        raise StoreUnavailable(
            f"wanted to begin a Ray for this process, got {type(error).__name__}: {error}; see its logs in the folder "
            "ray of RAY_TMPDIR, try again when this machine has less to do, or join one with address="
        ) from error


def _init_in_time(deadline_s: float, namespace: str, **options: Any) -> None:
    """Call ray.init where it can be given up: it waits for minutes for a GCS that hangs or ends meanwhile."""
    if threading.current_thread() is threading.main_thread():
        # As ray.init does on the main thread: then the exit handlers run, which end the store and its Ray.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
    ray_log = logging.getLogger("ray._private.worker")
    ray_log.addFilter(_without_sigterm)
    try:
        KEEPER.do(lambda: _init_ray(namespace, **options), ray.shutdown, deadline_s)
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

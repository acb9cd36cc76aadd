"""Starting a store in a Ray cluster, or joining the one that runs there."""

from __future__ import annotations

import atexit
import contextlib
import logging
import secrets
import time
from typing import Any

import ray

from kvstore.actors.calls import RAY_NAMESPACE, actor_name, call, find_actor, ray_failures
from kvstore.actors.cluster import Store
from kvstore.actors.ending import end_actors, node_stores, starter_of
from kvstore.actors.joining import Joined
from kvstore.actors.ray_sessions import RaySession
from kvstore.actors.ray_use import USE
from kvstore.actors.supervisor import Supervisor, alive_nodes
from kvstore.config import PROTOCOL_VERSION, StoreConfig
from kvstore.errors import (
    ConfigError,
    IncompatibleStore,
    KVStoreError,
    PeerLost,
    StoreNotRunning,
    StoreUnavailable,
    TransferTimeout,
)

logger = logging.getLogger(__name__)

_CALL_S = 10.0
#: How long a store that is being ended is given before it is looked for again.
_ENDS_S = 0.2
#: How long each part of a store that did not come up in time is given to end by itself: the time is over already.
_UNDO_S = 2.0


def start(config: StoreConfig, address: str | None, timeout_s: float) -> Store:
    """Start or join a store; see kvstore.start."""
    deadline_s = time.monotonic() + timeout_s
    with USE.joined(address, config.name, deadline_s, may_start=True) as joined:
        store = _start(config, deadline_s, joined.session)
        USE.hold(store)
    if joined.session.is_own:
        # Ray ends with this process without telling its actors, which leave their sockets.
        atexit.register(_stop_at_exit, store)
    _log_joined(store, joined)
    return store


def _start(config: StoreConfig, deadline_s: float, session: RaySession) -> Store:
    while (store := _start_once(config, deadline_s, session)) is None:
        if time.monotonic() + _ENDS_S > deadline_s:
            raise StoreUnavailable(
                f"store {config.name!r} is being ended by another process; where that was interrupted, `kvstore stop` "
                "or destroy() completes it"
            )
        time.sleep(_ENDS_S)
    return store


def _start_once(config: StoreConfig, deadline_s: float, session: RaySession) -> Store | None:
    """Start a store or join the one that runs; None when that is just being ended."""
    name, own_id = actor_name(config.name, "supervisor"), secrets.token_hex(8)
    try:
        supervisor = find_actor(name)
    except StoreNotRunning:
        _check_room(config)
    else:
        return _join(config, session, supervisor, own_id, deadline_s)
    try:
        with ray_failures(name):
            supervisor = (
                ray.remote(Supervisor)
                .options(
                    name=name,
                    namespace=RAY_NAMESPACE,
                    lifetime="detached",
                    get_if_exists=True,
                    num_cpus=0,
                    max_restarts=-1,
                    max_concurrency=4,
                )
                .remote(config.to_json(), own_id)
            )
        return _join(config, session, supervisor, own_id, deadline_s)
    except BaseException:  # Of who is interrupted, too: nobody else would end what this call began.
        _end_if_started(config.name, own_id)
        raise


def _join(config: StoreConfig, session: RaySession, supervisor: Any, own_id: str, deadline_s: float) -> Store | None:
    try:
        running = call("supervisor", supervisor.config, timeout_s=max(0.0, deadline_s - time.monotonic()))
    except PeerLost:
        return None
    if running["is_ending"]:
        return None
    _check_compatible(config, running)
    # Several calls may have wanted to make the supervisor at once; it knows which one did.
    store = Store(config, session, own_id if running["starter"] == own_id else None)
    _wait_ready(store, supervisor, deadline_s)
    return store


def _end_if_started(name: str, own_id: str) -> None:
    """End a store that this process began and will not have: its supervisor, which may only come up, would make it."""
    try:
        if starter_of(name, _UNDO_S) == own_id:
            end_actors(name, _UNDO_S)
    except KVStoreError as error:
        logger.warning("store %r may have been started, and could not be asked: %s; destroy() ends it", name, error)


def _check_room(config: StoreConfig) -> None:
    too_small = {
        node: int(resources.get("memory", 0))
        for node, resources in alive_nodes().items()
        if resources.get("memory", 0) < config.capacity_bytes
    }
    if too_small:
        raise ConfigError(
            f"wanted {config.capacity_bytes} bytes on every node, got nodes with less Ray memory: {too_small}; "
            "lower capacity= or start Ray with more --memory"
        )


def _log_joined(store: Store, joined: Joined) -> None:
    how = "joined" if store._started_as is None else "started"
    if joined.passed_by:
        logger.warning(
            "store %r %s in a Ray of this process alone, at %s: %s. Not joined: %s; address= names one",
            store.config.name, how, store.address, joined.why, ", ".join(joined.passed_by),
        )  # fmt: skip
        return
    ray_is = "a Ray of this process alone" if joined.started else "the Ray"
    logger.info("store %r %s in %s at %s: %s", store.config.name, how, ray_is, store.address, joined.why)


def _stop_at_exit(store: Store) -> None:
    with contextlib.suppress(KVStoreError):
        store.stop()


def _wait_ready(store: Store, supervisor: Any, deadline_s: float) -> None:
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            problems = call("supervisor", supervisor.problems, timeout_s=_CALL_S)
            unfinished = call("supervisor", supervisor.unfinished, timeout_s=_CALL_S)
            raise StoreUnavailable(f"not every node had a store in time: {unfinished | problems}")
        try:
            served = call("supervisor", supervisor.reconcile, timeout_s=left_s)
        except TransferTimeout:
            continue
        problems = call("supervisor", supervisor.problems, timeout_s=_CALL_S)
        if problems and set(problems) >= set(alive_nodes()):
            raise ConfigError(f"no node could start a store: {problems}")
        handles = node_stores(store.config.name)
        if served and set(served) == set(alive_nodes()) <= set(handles):
            for node in served:
                left_s = max(0.1, deadline_s - time.monotonic())
                if not call(f"mover of node {node}", handles[node].ready, left_s, timeout_s=left_s + 1):
                    raise StoreUnavailable(
                        f"the mover of node {node} was not ready in time; see `kvstore doctor` and its log"
                    )
            return
        time.sleep(0.1)


def _check_compatible(config: StoreConfig | None, running: dict[str, Any]) -> StoreConfig:
    if running["protocol"] != PROTOCOL_VERSION:
        raise IncompatibleStore(
            f"wanted protocol {PROTOCOL_VERSION}, the running store speaks {running['protocol']}; "
            "run one version of raykv everywhere"
        )
    theirs = StoreConfig.from_json(running["config"])
    differences = {} if config is None else config.differences(theirs)
    if differences:
        text = ", ".join(f"{key}: wanted {a!r}, runs with {b!r}" for key, (a, b) in differences.items())
        raise IncompatibleStore(
            f"a store named {theirs.name!r} runs with other settings ({text}); connect() to it, stop it first, or "
            "choose another name="
        )
    return theirs


def connect(name: str, address: str | None, timeout_s: float) -> Store:
    """Find a running store; see kvstore.connect."""
    deadline_s = time.monotonic() + timeout_s
    with USE.joined(address, name, deadline_s, may_start=False) as joined:
        supervisor = find_actor(actor_name(name, "supervisor"))
        running = call("supervisor", supervisor.config, timeout_s=max(0.0, deadline_s - time.monotonic()))
        store = Store(_check_compatible(None, running), joined.session)
        USE.hold(store)
    _log_joined(store, joined)
    return store

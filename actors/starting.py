"""Start a store in a Ray cluster, or join the one that runs there."""

from __future__ import annotations

import atexit
import contextlib
import logging
import secrets
import time
from typing import Any

import ray

from kvstore.actors.calls import actor_name, answer, begin, call, find_actor, is_answered, is_silent
from kvstore.actors.cluster import Store
from kvstore.actors.ending import end_actors
from kvstore.actors.finding import alive_nodes, constructor_refusal, make_actor, node_stores, own_version
from kvstore.actors.session.handles import USE
from kvstore.actors.session.joining import Joined
from kvstore.actors.session.rays import RaySession
from kvstore.actors.supervisor import ASKED_GROUP, Supervisor
from kvstore.config import PROTOCOL_VERSION, StoreConfig
from kvstore.errors import (
    ConfigError,
    IncompatibleStore,
    KVStoreError,
    PeerLost,
    RegistrationFailed,
    StoreNotRunning,
    StoreUnavailable,
    TransferTimeout,
)

logger = logging.getLogger(__name__)

_CALL_S = 10.0
_GAVE_UP = "its start gave up"
#: Pause before looking again for a store that is ending.
_ENDS_S = 0.2
#: How long each part of a store that did not start in time may take to end: the caller's time is already used up.
_UNDO_S = 2.0
#: Interval at which a waiting call notifies the supervisor, for which a silent call is gone.
_SAY_EVERY_S = 3.0
#: The advice of errors that become part of one with its own.
_AGAIN = "; try again"


def start(config: StoreConfig, address: str | None, timeout_s: float) -> Store:
    """Start or join a store; see kvstore.start."""
    deadline_s = time.monotonic() + timeout_s
    with USE.joined(address, config.name, deadline_s, may_start=True) as joined:
        store = _start(config, deadline_s, joined.session)
        USE.hold(store)
    if joined.session.is_own:
        # Ray ends with this process without notice to its actors, which would leave their sockets.
        atexit.register(_stop_at_exit, store)
    _log_joined(store, joined)
    return store


def _start(config: StoreConfig, deadline_s: float, session: RaySession) -> Store:
    own_id = secrets.token_hex(8)
    try:
        is_first, is_ending = True, False
        silence: KVStoreError | None = None
        while time.monotonic() < deadline_s or is_first:
            try:
                store = _start_once(config, deadline_s, session, own_id)
            except (TransferTimeout, PeerLost) as error:
                if not is_silent(error):
                    raise
                silence = None if is_ending else error
            else:
                if store is not None:
                    return store
                silence, is_ending = None, True
            is_first = False
            time.sleep(min(_ENDS_S, max(0.0, deadline_s - time.monotonic())))
        if silence is not None:
            raise StoreUnavailable(
                f"the supervisor of store {config.name!r} did not answer in time: {silence}; where the machine is "
                "busy, try a longer timeout_s=; where the supervisor hangs, kvstore.connect() joins a store that runs, "
                "and `kvstore stop` ends it for all"
            ) from silence
        raise StoreUnavailable(
            f"store {config.name!r} is being ended by another process, or its supervisor goes away again and again; "
            "where an end was interrupted, `kvstore stop` or destroy() completes it"
        )
    except BaseException:  # Interrupts as well: nothing else would end what this call began.
        _give_up(config.name, own_id)
        raise


def _start_once(config: StoreConfig, deadline_s: float, session: RaySession, own_id: str) -> Store | None:
    """Start a store or join the running one; return None when that is ending, or was lost meanwhile."""
    try:
        supervisor = _find_supervisor(config.name, deadline_s)
    except StoreNotRunning:
        supervisor = None
        _check_room(config)
    try:
        if supervisor is None:
            name, args = actor_name(config.name, "supervisor"), (config.to_json(), own_id)
            supervisor = make_actor(name, Supervisor, ASKED_GROUP, args, max_restarts=-1, max_concurrency=4)
        return _join(config, session, supervisor, own_id, deadline_s)
    except PeerLost as error:  # Another call may end a supervisor even between Ray's two steps of making it.
        if is_silent(error):
            raise
        if why := constructor_refusal(error):
            raise IncompatibleStore(
                f"wanted a supervisor of {own_version()}, got a node that refuses its settings: {why}; install one "
                "version of raykv on every node"
            ) from error
        return None


def _find_supervisor(name: str, deadline_s: float) -> Any:
    """Find a store's supervisor within the deadline; Ray would ask a dead GCS until it ends this process."""
    return find_actor(actor_name(name, "supervisor"), max(_ENDS_S, deadline_s - time.monotonic()))


def _join(config: StoreConfig, session: RaySession, supervisor: Any, own_id: str, deadline_s: float) -> Store | None:
    running = call("supervisor", supervisor.join, own_id, timeout_s=deadline_s - time.monotonic())
    if running["is_ending"]:
        return None
    check_compatible(config, running)
    _wait_ready(config.name, supervisor, own_id, deadline_s)
    # Several calls may have tried to make the supervisor at once; it knows the starter, or the call that replaced it.
    with contextlib.suppress(TransferTimeout):
        running = call("supervisor", supervisor.have, own_id, timeout_s=_UNDO_S)
        if running["is_ending"]:  # The starter failed, and this call counted as gone.
            return None
    return Store(config, session, own_id if running["starter"] == own_id else None)


def _give_up(name: str, own_id: str) -> None:
    """End a store that this call began and failed to get, unless others have joined it meanwhile.

    Its supervisor, which may still be starting, would otherwise make it.
    """
    try:
        supervisor = find_actor(actor_name(name, "supervisor"), _UNDO_S)
        if call("supervisor", supervisor.leave, own_id, timeout_s=_UNDO_S):
            end_actors(name, _UNDO_S, _GAVE_UP)
    except StoreNotRunning:
        return
    except KVStoreError as error:
        logger.warning(
            "what this start of store %r began could not be ended: %s; `kvstore status` says whether the store runs, "
            "and `kvstore stop` ends it for all",
            name, error,
        )  # fmt: skip


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


def _wait_ready(name: str, supervisor: Any, own_id: str, deadline_s: float) -> None:
    """Wait until every node has a store that serves, at most until the deadline.

    Raises:
        ConfigError: no node can have a store with these settings.
        RegistrationFailed: of several nodes one cannot read from the others: its mover cannot begin.
        StoreUnavailable: not every node had one in time.
        PeerLost: the supervisor, or a store, is gone.
    """
    last = ""
    while time.monotonic() < deadline_s:
        try:
            served = _served(supervisor, own_id, deadline_s)
            if _are_ready(name, supervisor, served, deadline_s):
                return
        except (ConfigError, PeerLost, RegistrationFailed):
            raise
        except KVStoreError as error:
            if not ray.is_initialized():
                raise
            last = f"; {error}".removesuffix(_AGAIN)
        time.sleep(0.1)
    try:
        unfinished, problems = (
            call("supervisor", ask, timeout_s=_UNDO_S) for ask in (supervisor.unfinished, supervisor.problems)
        )
        last = f"{_by_node(unfinished | problems)}{last}"
    except KVStoreError as error:
        last = str(error).removesuffix(_AGAIN)
    raise StoreUnavailable(
        f"not every node had a store in time: {last}; try again when the machines have less to do, or with a longer "
        "timeout_s="
    )


def _served(supervisor: Any, own_id: str, deadline_s: float) -> list[str]:
    """Have the supervisor make a round, which may be long, and keep telling it that this call waits."""
    made = begin("supervisor", supervisor.reconcile)
    while (left_s := deadline_s - time.monotonic()) > 0:
        call("supervisor", supervisor.join, own_id, timeout_s=min(_CALL_S, left_s))
        if is_answered("supervisor", made, min(_SAY_EVERY_S, left_s)):
            served: list[str] = answer("supervisor", made, 0.0)
            return served
    raise TransferTimeout("the supervisor looks after the nodes still")


def _are_ready(name: str, supervisor: Any, served: list[str], deadline_s: float) -> bool:
    """Return whether `served` names all nodes, and their movers are ready."""
    hopeless = call("supervisor", supervisor.hopeless, timeout_s=_CALL_S)
    nodes = set(alive_nodes())
    if hopeless and set(hopeless) >= nodes:
        raise ConfigError(f"no node could start a store: {_by_node(hopeless)}")
    handles = node_stores(name)
    if not served or not set(served) == nodes <= set(handles):
        return False
    for node in served:
        left_s = max(0.1, min(_SAY_EVERY_S, deadline_s - time.monotonic()))
        try:
            is_ready = call(f"mover of node {node}", handles[node].ready, left_s, timeout_s=left_s + 1)
        except RegistrationFailed as error:
            if len(nodes) > 1:
                raise RegistrationFailed(
                    f"node {node} has no mover, which reads blocks of other nodes: {error}"
                ) from error
            logger.warning("store %r begins on its only node without a mover, which reads from others: %s", name, error)
            continue
        if not is_ready:
            raise StoreUnavailable(f"the mover of node {node} is not ready; see `kvstore doctor` and its log")
    return True


def _by_node(problems: dict[str, str]) -> str:
    return "; ".join(f"node {node}: {text}" for node, text in sorted(problems.items())) or "no node says why"


def check_compatible(config: StoreConfig | None, running: dict[str, Any]) -> StoreConfig:
    """Return the settings of a running store.

    Args:
        config: settings that it must have; None for any.
        running: its supervisor's answer.

    Raises:
        IncompatibleStore: it has other settings, or is of another version of raykv; it goes on.
    """
    if running["protocol"] != PROTOCOL_VERSION:
        raise _other_version(running, "")
    try:
        theirs = StoreConfig.from_json(running["config"])
    except ConfigError as error:
        raise _other_version(running, f": {error}") from error
    if text := config.differences(theirs) if config else "":
        # What a restart keeps can only be given to a store that begins.
        changes = "" if "num_directory_shards: " in text else "change it with Store.restart(), "
        raise IncompatibleStore(
            f"a store named {theirs.name!r} runs with other settings ({text}); connect() to it, {changes}stop it "
            "first, or choose another name="
        )
    return theirs


def _other_version(running: dict[str, Any], why: str) -> IncompatibleStore:
    theirs = running.get("version", f"protocol {running['protocol']}")
    where = f", whose supervisor is on the node at {running['host']}" if "host" in running else ""
    return IncompatibleStore(
        f"wanted a store of {own_version()}, got one of {theirs}{where}{why}; install one version of raykv on every "
        "node and in the environments of jobs, then end the store with `kvstore stop` and start it again"
    )


def connect(name: str, address: str | None, timeout_s: float) -> Store:
    """Find a running store; see kvstore.connect."""
    deadline_s = time.monotonic() + timeout_s
    with USE.joined(address, name, deadline_s, may_start=False) as joined:
        store = Store(_running_config(name, deadline_s), joined.session)
        USE.hold(store)
    _log_joined(store, joined)
    return store


def _running_config(name: str, deadline_s: float) -> StoreConfig:
    """Ask the supervisor for a store's settings; if it hangs or is gone, a node's store, which serves on.

    A node's store does not say its version: its clients compare that when they connect.
    """
    half_s = (deadline_s - time.monotonic()) / 2
    try:
        supervisor = _find_supervisor(name, time.monotonic() + half_s)
        running = call("supervisor", supervisor.config, timeout_s=min(half_s, _CALL_S))
    except (StoreNotRunning, TransferTimeout, PeerLost) as error:  # A restart that was killed may leave none.
        for node, handle in node_stores(name).items():
            left_s = deadline_s - time.monotonic()
            with contextlib.suppress(TransferTimeout, PeerLost):
                settings = call(f"store of node {node}", handle.settings, timeout_s=min(_CALL_S, left_s))
                logger.warning("the supervisor of store %r does not answer, and its nodes do: %s", name, error)
                return StoreConfig.from_json(settings)
        raise
    return check_compatible(None, running)

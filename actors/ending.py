"""End the actors of one store, and nothing else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import ray

from kvstore.actors.calls import actor_name, ask_all, call, find_actor, ray_failures, stop_for, within
from kvstore.actors.finding import actors_of, stores_here
from kvstore.errors import KVStoreError, StoreNotRunning, StoreUnavailable
from kvstore.runtime.life import ASKED_TO_STOP

_CALL_S = 10.0
#: Limit for ending a store that does not answer: its supervisor, then its nodes, get `_CALL_S` each.
_END_S = 45.0
#: Ray gets this long to name an actor, even if no time is left.
_LEAST_S = 0.1
_LOOK_S = 0.1


def end_actors(name: str, patience_s: float = _CALL_S, reason: str = ASKED_TO_STOP) -> None:
    """End the actors of a store on every node, which log the reason. Kill those that do not answer in `patience_s`.

    All actors named after the store belong to it, even if its supervisor is gone. So does what appears during this
    call, for example of a restart that runs; but not what another call starts anew once the store's supervisor is gone.

    The supervisor makes no actors from the beginning of this call, but is ended last: after an interrupt, another call
    finds through it what is left to end.

    Raises:
        TransferTimeout, PeerLost: Ray cannot say which actors there are, or where some of them run. Those were not
            ended, nor was the supervisor, which refuses starts until its process dies. If it is the supervisor that
            cannot be found, none was ended: it would make them anew. Another call ends the rest.
    """
    supervisor, stopped = actor_name(name, "supervisor"), None
    # AttributeError here and below: an actor of another version may have no such method.
    with contextlib.suppress(KVStoreError, AttributeError):
        stopped = find_actor(supervisor, patience_s)
        stop_for("supervisor", stopped, reason, patience_s)
    # By handle: a new store may have the names later.
    own, unknown = _find(actors_of(name), time.monotonic() + patience_s)
    if supervisor in unknown:
        raise unknown[supervisor]
    if unknown:
        own.pop(supervisor, None)
    # First, so that a restart which runs looks, and touches none of the stores that are ending.
    if (restart := own.get(actor_name(name, "restart"))) is not None:
        with contextlib.suppress(KVStoreError), ray_failures("restart"):
            ray.kill(restart)
    if (late := own.get(supervisor)) is not None and not _is_same(late, stopped):  # A restart has just made it.
        with contextlib.suppress(KVStoreError, AttributeError):
            stop_for("supervisor", late, reason, patience_s)
    _end(own, name, patience_s, reason)
    if unknown:
        raise next(iter(unknown.values()))
    with contextlib.suppress(KVStoreError):  # All that was there has ended, even if Ray says no more now.
        end_left(name, "" if restart is None else restart._actor_id.hex(), patience_s, reason)
        _end_late_restarts(name, patience_s, reason)


def end_left(
    name: str, restart_id: str, patience_s: float = _CALL_S, reason: str = ASKED_TO_STOP, spare_s: float = 0.0
) -> None:
    """End what appeared while a store was being stopped: what the restart that was interrupted made, or nobody leads.

    A supervisor that was not made by this restart leads a store that began since: that one goes on.

    Args:
        name: of the store.
        restart_id: of the restart; "" if none ran.
        patience_s: as for `end_actors`; also how long this looks for actors whose leader is not known.
        reason: which they log.
        spare_s: how long stores may end by themselves: where another call is ending them, and must not be disturbed.

    Raises:
        KVStoreError: Ray does not say which actors there are.
    """
    path, others = actor_name(name, "supervisor"), {actor_name(name, kind) for kind in ("supervisor", "restart")}
    spare_until_s = time.monotonic() + spare_s
    deadline_s = spare_until_s + patience_s
    while time.monotonic() < deadline_s:
        own, _ = _find(within("actors", patience_s, lambda: actors_of(name)), deadline_s)
        own.pop(actor_name(name, "restart"), None)  # Of another restart, which finds no store.
        if not own:
            return
        is_known = True
        if (supervisor := own.get(path)) is not None and not restart_id:
            return
        if supervisor is None:
            # A restart of a new store holds its name while it replaces the supervisor.
            is_known = others.isdisjoint(within("actors", patience_s, lambda: actors_of(name)))
        else:
            try:
                said = call("supervisor", supervisor.config, timeout_s=max(_LEAST_S, deadline_s - time.monotonic()))
                if said.get("of_restart") != restart_id:
                    return
                if not said["ends_stores"]:
                    stop_for("supervisor", supervisor, reason, patience_s)
                    continue  # What it made until now can be seen now.
            except KVStoreError:  # It is ending.
                is_known = False
        if is_known and (set(own) == {path} or time.monotonic() >= spare_until_s):
            _end(own, name, patience_s, reason)
        else:
            time.sleep(_LOOK_S)


def _end_late_restarts(name: str, patience_s: float, reason: str) -> None:
    """End restarts that waited for the one which was interrupted, or began since, and what they made of the store."""
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        try:
            restart = find_actor(actor_name(name, "restart"), patience_s)
        except StoreNotRunning:
            return
        restart_id = restart._actor_id.hex()
        with contextlib.suppress(StoreNotRunning):
            supervisor = find_actor(actor_name(name, "supervisor"), patience_s)
            if call("supervisor", supervisor.config, timeout_s=patience_s).get("of_restart") != restart_id:
                return  # It restarts a store that began since.
        with ray_failures("restart"):
            ray.kill(restart)
        end_left(name, restart_id, patience_s, reason)


def _end(own: dict[str, Any], name: str, patience_s: float, reason: str) -> None:
    """End these actors of a store, its supervisor last, and wait until Ray names them no more."""
    supervisor = actor_name(name, "supervisor")
    stops, ends = dict[str, Any](), dict[str, Any]()
    for path, handle in own.items():
        _, _, node = path.partition(f"{actor_name(name, 'node')}/")
        _, _, holder = path.partition(f"{actor_name(name, 'handover')}/")
        with contextlib.suppress(AttributeError):
            stops |= {node: handle.stop} if node else {}
            # A holder of memory removes the file of its socket, which a killed one leaves.
            ends |= {holder: handle.end} if holder else {}
    # A store of an older version, which takes no reason, has the usual one.
    ask_all(stops, *([] if reason == ASKED_TO_STOP else [reason]), timeout_s=patience_s)
    ask_all(ends, timeout_s=patience_s)
    for path in sorted(own, key=lambda path: path == supervisor):
        with contextlib.suppress(KVStoreError), ray_failures(path):
            ray.kill(own[path])
    deadline_s = time.monotonic() + patience_s
    while own and time.monotonic() < deadline_s:  # Ray lists ended actors a moment longer.
        now, unsaid = _find(own, deadline_s)
        is_there = {path for path, handle in now.items() if _is_same(handle, own[path])}
        own = {path: handle for path, handle in own.items() if path in is_there or path in unsaid}
        time.sleep(0.02)


def _still(seen: dict[str, Any], paths: Iterable[str]) -> list[str]:
    """Return which of these actors are those that were seen, or cannot be told; others are of a store that began."""
    now, unknown = _find(paths, time.monotonic() + _CALL_S)
    return [*unknown, *(path for path, handle in now.items() if _is_same(handle, seen.get(path)))]


def _is_same(handle: Any, other: Any) -> bool:
    return other is not None and bool(handle._actor_id == other._actor_id)


def _find(paths: Iterable[str], deadline_s: float) -> tuple[dict[str, Any], dict[str, KVStoreError]]:
    """Return the handles of those actors that there are, and why Ray cannot say whether there are others."""
    found, unknown = dict[str, Any](), dict[str, KVStoreError]()
    for path in paths:
        try:
            found[path] = find_actor(path, max(_LEAST_S, deadline_s - time.monotonic()))
        except StoreNotRunning:
            continue
        except KVStoreError as error:
            unknown[path] = error
    return found, unknown


def end_store(name: str, say: Callable[[str], None]) -> None:
    """End a store of this process's cluster, in any state.

    Args:
        name: of the store.
        say: called before the end, with the actors that will be ended.

    Raises:
        StoreNotRunning: this store has no actors.
        StoreUnavailable: some actors are left.
        TransferError: the cluster does not answer.
    """
    found = within("actors", _CALL_S, lambda: actors_of(name))
    seen, _ = _find(found, time.monotonic() + _CALL_S)
    if not found:
        raise StoreNotRunning(f"no actor of a store {name!r} runs there; stores: {', '.join(stores_here()) or 'none'}")
    say(f"{len(found)} actors: {', '.join(found)}")
    within(f"the end of store {name!r}", _END_S, lambda: end_actors(name))
    deadline_s = time.monotonic() + _CALL_S
    while left := _still(seen, within("actors", _CALL_S, lambda: actors_of(name))):
        if time.monotonic() > deadline_s:
            raise StoreUnavailable(f"wanted to end store {name!r}, and still there are {', '.join(left)}; try again")
        time.sleep(0.1)

"""End the actors of one store, and nothing else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import ray

from kvstore.actors.calls import actor_name, ask_all, find_actor, ray_failures, stop_for, within
from kvstore.actors.finding import actors_of, stores_here
from kvstore.errors import KVStoreError, StoreNotRunning, StoreUnavailable
from kvstore.runtime.life import ASKED_TO_STOP

_CALL_S = 10.0
#: Limit for ending a store that does not answer: its supervisor, then its nodes, get `_CALL_S` each.
_END_S = 45.0
#: Ray gets this long to name an actor, even if no time is left.
_LEAST_S = 0.1


def end_actors(name: str, patience_s: float = _CALL_S, reason: str = ASKED_TO_STOP) -> None:
    """End the actors of a store on every node, which log the reason. Kill those that do not answer in `patience_s`.

    All actors named after the store belong to it, even if its supervisor is gone.

    The supervisor makes no actors from the beginning of this call, but is ended last: after an interrupt, another call
    finds through it what is left to end.

    Raises:
        TransferTimeout, PeerLost: Ray cannot say which actors there are, or where some of them run. Those were not
            ended, nor was the supervisor, which refuses starts until its process dies. If it is the supervisor that
            cannot be found, none was ended: it would make them anew. Another call ends the rest.
    """
    supervisor = actor_name(name, "supervisor")
    # AttributeError here and below: an actor of another version may have no such method.
    with contextlib.suppress(KVStoreError, AttributeError):
        stop_for("supervisor", find_actor(supervisor, patience_s), reason, patience_s)
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
        is_there = {path for path, handle in now.items() if handle._actor_id == own[path]._actor_id}
        own = {path: handle for path, handle in own.items() if path in is_there or path in unsaid}
        time.sleep(0.02)
    if unknown:
        raise next(iter(unknown.values()))


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
    if not found:
        raise StoreNotRunning(f"no actor of a store {name!r} runs there; stores: {', '.join(stores_here()) or 'none'}")
    say(f"{len(found)} actors: {', '.join(found)}")
    within(f"the end of store {name!r}", _END_S, lambda: end_actors(name))
    deadline_s = time.monotonic() + _CALL_S
    while left := within("actors", _CALL_S, lambda: actors_of(name)):
        if time.monotonic() > deadline_s:
            raise StoreUnavailable(f"wanted to end store {name!r}, and still there are {', '.join(left)}; try again")
        time.sleep(0.1)

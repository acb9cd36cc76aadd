"""Make, ask and end the processes that hold a node's memory between two of its stores."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvstore.actors.calls import actor_name, call, find_actor, ray_failures
from kvstore.actors.finding import actors_of, make_actor
from kvstore.actors.restart.holder import Holder
from kvstore.errors import KVStoreError

_CALL_S = 10.0
#: How long a holder may take to start, and an old store to stop.
HOLDER_S, STOPS_S = 60.0, 20.0
#: How long a holder keeps the memory for a new store, once the old one gave it.
_KEEP_S = 180.0


def make_holder(name: str, node_id: str, wait_s: float) -> tuple[Any, str]:
    """Make a process on the node that holds its memory; return its handle and path, or None and why there is none.

    The path is "" if the store gave its memory already: for a restart that was killed.
    """
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    path, args = (
        actor_name(name, "handover", f"{node_id}-{secrets.token_hex(3)}"),
        (name, node_id, wait_s + STOPS_S, _KEEP_S),
    )
    try:
        holder = make_actor(path, Holder, {}, args, max_restarts=0, scheduling_strategy=here)
        return holder, str(call("holder", holder.path, timeout_s=HOLDER_S))
    except KVStoreError as error:
        return None, str(error)


def holders_of(name: str, node_id: str) -> list[Any]:
    """Return what may hold the node's memory, for this restart or for one that was killed."""
    begins, found = actor_name(name, "handover", f"{node_id}-"), list[Any]()
    for path in [path for path in actors_of(name) if path.startswith(begins)]:
        with contextlib.suppress(KVStoreError):
            found.append(find_actor(path))
    return found


def kept_s(name: str, node_id: str) -> float:
    """Return how long the node's memory is still kept for a next store; 0.0 if nobody has it, or nobody says so."""
    longest_s = 0.0
    with contextlib.suppress(KVStoreError):
        for holder in holders_of(name, node_id):
            with contextlib.suppress(KVStoreError, AttributeError):  # AttributeError: it is of an older version.
                longest_s = max(longest_s, call("holder", holder.kept_s, timeout_s=_CALL_S))
    return longest_s


def keep_longer(name: str, node_ids: Iterable[str]) -> bool:
    """Have the time for which the memory of nodes is kept begin anew; return whether any is kept."""
    kept_s = 0.0
    with contextlib.suppress(KVStoreError):
        for holder in [holder for node_id in node_ids for holder in holders_of(name, node_id)]:
            with contextlib.suppress(KVStoreError, AttributeError):  # AttributeError: it is of an older version.
                kept_s = max(kept_s, call("holder", holder.keep_longer, timeout_s=_CALL_S))
    return kept_s > 0


def has_nothing(holder: Any) -> bool:
    """Return whether a holder says that it has no memory."""
    with contextlib.suppress(KVStoreError):
        return not call("holder", holder.kept_s, timeout_s=_CALL_S)
    return False


def tell_why(holder: Any, why: str) -> None:
    """Have a holder tell the next store why it gets no memory."""
    with contextlib.suppress(KVStoreError, AttributeError):  # AttributeError: it is of an older version.
        call("holder", holder.tell_why, why, timeout_s=_CALL_S)


def end_holder(holder: Any) -> None:
    """End a holder, and free what it has."""
    with contextlib.suppress(KVStoreError, AttributeError):  # Killed alone, it would leave the file of its socket.
        call("holder", holder.end, timeout_s=_CALL_S)
    with contextlib.suppress(KVStoreError), ray_failures("holder"):
        ray.kill(holder)

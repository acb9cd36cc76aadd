"""Restart a store's nodes one after the other; each next store takes over the memory of the one before."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvstore.actors.calls import actor_name, answer, begin, call, find_actor, is_answered, ray_failures
from kvstore.actors.finding import actors_of, alive_nodes, make_actor
from kvstore.actors.restart.changing import replace_supervisor
from kvstore.actors.restart.holder import Holder
from kvstore.bounds import check_flag, check_node_id, check_seconds, clip
from kvstore.config import StoreConfig
from kvstore.errors import InvalidRequest, KVStoreError, StoreNotRunning, StoreUnavailable

logger = logging.getLogger(__name__)

_CALL_S = 10.0
#: How long a holder may take to start, an old store to stop, and a new one to serve.
_HOLDER_S, _STOPS_S, _SERVES_S = 60.0, 20.0, 120.0
#: How long a holder keeps the memory for a new store, after the old one had its time to give it.
_KEEP_S = 180.0
#: How long the end of the old store is no loss: it stops, and the supervisor sees that.
_PLANNED_S = 60.0
_ROUND_EVERY_S = 1.0
_COLD = "cold was asked for"
_LOST = "the memory is lost: a store that had taken it, or was to take it, ended before it served"


def restart_store(
    name: str,
    node_ids: Sequence[str] | None,
    changes: Mapping[str, Any],
    *,
    cold: bool,
    wait_s: float,
    on_node: Callable[[str, dict[str, Any]], object] = lambda node_id, said: None,
) -> tuple[StoreConfig, dict[str, dict[str, Any]]]:
    """Restart node stores, as `Store.restart` says; `on_node` is called after each node, with its result.

    Returns:
        The settings from now on, and the result by node.
    """
    check_flag("cold", cold)
    wait_s = check_seconds("wait_s", wait_s)
    alive = sorted(alive_nodes())
    wanted = alive if node_ids is None else _named(node_ids, alive)
    supervisor, config = replace_supervisor(name, changes)
    results: dict[str, dict[str, Any]] = {}
    for node_id in wanted:
        try:
            results[node_id] = _restart_node(name, node_id, supervisor, cold=cold, wait_s=wait_s)
        except KVStoreError as error:
            raise StoreUnavailable(
                f"node {node_id} has no store again: {error}; restarted: {sorted(results) or 'none'}; the others serve "
                "on as they were, and another restart goes on with them"
            ) from error
        on_node(node_id, results[node_id])
    return config, results


def _named(node_ids: Sequence[str], alive: list[str]) -> list[str]:
    """Return the nodes with these ids, or with ids that begin so, each once."""
    if isinstance(node_ids, str | bytes) or not isinstance(node_ids, Iterable):
        raise InvalidRequest(f"node_ids: wanted a list of nodes' ids, or None for all, got {clip(node_ids)}")
    wanted = list[str]()
    for text in (check_node_id("node_ids", each) for each in node_ids):
        found = [text] if text in alive else [node_id for node_id in alive if node_id.startswith(text)]
        if len(found) != 1:
            which = "several nodes' ids begin" if found else "no node's id begins"
            raise InvalidRequest(f"node_ids: {which} with {text!r}; nodes: {', '.join(found or alive)}")
        wanted += found
    return list(dict.fromkeys(wanted))


def _restart_node(name: str, node_id: str, supervisor: Any, *, cold: bool, wait_s: float) -> dict[str, Any]:
    path, old, holder, why_cold = actor_name(name, "node", node_id), None, None, _COLD if cold else ""
    with contextlib.suppress(StoreNotRunning):
        old = find_actor(path)
    try:
        if old is None:
            why_cold = "the node had no store"
        if cold:
            _end_holders(name, node_id)
        elif old is not None:
            holder, where = _make_holder(name, node_id, wait_s)
            why_cold = _give(old, where, wait_s) if holder is not None else f"no process can hold the memory: {where}"
        before = _hopeless(supervisor, node_id)
        if old is not None:
            with contextlib.suppress(KVStoreError):
                call("supervisor", supervisor.plan_end, node_id, _PLANNED_S, timeout_s=_CALL_S)
            _end(path, old)
        said = _wait_for_next(path, node_id, None if old is None else old._actor_id, supervisor, before)
    finally:
        if holder is not None:
            with contextlib.suppress(KVStoreError), ray_failures("holder"):
                ray.kill(holder)
    result = said if said["is_warm"] else {**said, "why_cold": why_cold or said["why_cold"] or _LOST}
    logger.info("node %s was restarted: %s", node_id, result)
    return result


def _make_holder(name: str, node_id: str, wait_s: float) -> tuple[Any, str]:
    """Make a process on the node that holds its memory; return its handle and path, or None and why there is none.

    The path is "" if the store gave its memory already: for a restart that was killed.
    """
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    path, args = (
        actor_name(name, "handover", f"{node_id}-{secrets.token_hex(3)}"),
        (name, node_id, wait_s + _STOPS_S + _KEEP_S),
    )
    try:
        holder = make_actor(path, Holder, {}, args, max_restarts=0, scheduling_strategy=here)
        return holder, str(call("holder", holder.path, timeout_s=_HOLDER_S))
    except KVStoreError as error:
        return None, str(error)


def _end_holders(name: str, node_id: str) -> None:
    """End what still holds the node's memory for a restart that was killed: the next store would take it."""
    begins = actor_name(name, "handover", f"{node_id}-")
    for path in [path for path in actors_of(name) if path.startswith(begins)]:
        with contextlib.suppress(StoreNotRunning), ray_failures(path):
            ray.kill(find_actor(path))


def _give(old: Any, path: str, wait_s: float) -> str:
    """Have a store give its memory to the holder; return why it did not, "" if it did, now or before."""
    if not path:
        return ""
    try:
        call("store", old.hand_over, path, wait_s, timeout_s=wait_s + _STOPS_S)
    except (KVStoreError, AttributeError) as error:  # AttributeError: it is of a version that cannot.
        return f"the old store gave nothing: {error}"
    return ""


def _end(path: str, old: Any) -> None:
    with contextlib.suppress(KVStoreError, AttributeError):
        call("store", old.stop, timeout_s=_STOPS_S)
    with contextlib.suppress(KVStoreError), ray_failures(path):
        ray.kill(old)


def _hopeless(supervisor: Any, node_id: str) -> str:
    """Return why a node can have no store with these settings; "" if nothing is known."""
    with contextlib.suppress(KVStoreError):
        return str(call("supervisor", supervisor.hopeless, timeout_s=_CALL_S).get(node_id, ""))
    return ""


def _has_ended(round_: Any) -> bool:
    with contextlib.suppress(KVStoreError):  # The supervisor logs it, and the next round tries again.
        if not is_answered("supervisor", round_, 0.0):
            return False
        answer("supervisor", round_, 0.0)
    return True


def _has_left(node_id: str) -> bool:
    with contextlib.suppress(KVStoreError):  # A cluster that says nothing has not said that the node left.
        return node_id not in alive_nodes()
    return False


def _wait_for_next(path: str, node_id: str, old_id: Any, supervisor: Any, before: str) -> dict[str, Any]:
    """Wait until the node has another store that serves and whose mover is ready; return how it began.

    `before` is why the node could have no other store as long as it had the old one.
    """
    deadline_s, next_round_s, last, round_ = time.monotonic() + _SERVES_S, 0.0, "not made yet", None
    while (now_s := time.monotonic()) < deadline_s:
        # One at a time, and each is heard: Ray prints the errors of calls that nobody waits for.
        if round_ is not None and _has_ended(round_):
            round_ = None
        if round_ is None and now_s > next_round_s:
            next_round_s = now_s + _ROUND_EVERY_S
            with contextlib.suppress(KVStoreError):
                round_ = begin("supervisor", supervisor.reconcile)
        try:
            handle = find_actor(path)
            if handle._actor_id != old_id:
                said: dict[str, Any] = call("store", handle.beginning, timeout_s=_CALL_S)
                if call("mover", handle.ready, _CALL_S, timeout_s=_CALL_S + 1):
                    return said
                last = "its mover is not ready"
        except KVStoreError as error:
            last = str(error)
        if (problem := _hopeless(supervisor, node_id)) not in ("", before):
            raise StoreUnavailable(problem)
        if _has_left(node_id):
            raise StoreUnavailable("it left the cluster while it was restarted")
        time.sleep(0.1)
    raise StoreUnavailable(f"no store in {_SERVES_S:g} s: {last}")

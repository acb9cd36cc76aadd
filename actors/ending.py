"""End the actors of one store, and nothing else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import ray

from kvstore.actors.calls import RAY_NAMESPACE, actor_name, answer, begin, call, find_actor, ray_failures, within
from kvstore.actors.supervisor import alive_nodes
from kvstore.errors import KVStoreError, StoreNotRunning, StoreUnavailable

_CALL_S = 10.0
#: Limit for ending a store that does not answer: its supervisor, then its nodes, get `_CALL_S` each.
_END_S = 45.0
#: Errors after which an actor is killed without `stop`: it does not answer, or its version has no such method.
_NOT_TOLD = (KVStoreError, AttributeError)


def starter_of(name: str, timeout_s: float = _CALL_S) -> str | None:
    """Return the id of the call that started the running store; None when no store runs.

    Raises:
        KVStoreError: the cluster or the supervisor does not answer.
    """
    try:
        supervisor = find_actor(actor_name(name, "supervisor"))
    except StoreNotRunning:
        return None
    return str(call("supervisor", supervisor.config, timeout_s=timeout_s)["starter"])


def node_stores(name: str) -> dict[str, Any]:
    """Return the handles of a store's node stores by node id."""
    found = {}
    for node in alive_nodes():
        with contextlib.suppress(StoreNotRunning):
            found[node] = find_actor(actor_name(name, "node", node))
    return found


def end_actors(name: str, patience_s: float = _CALL_S) -> None:
    """End the actors of a store on every node. Kill those that do not answer within `patience_s`.

    All actors named after the store belong to it, even if its supervisor is gone.

    The supervisor makes no actors from the beginning of this call, but is ended last: after an interrupt, another call
    finds through it what is left to end.
    """
    own: dict[str, Any] = {}
    with contextlib.suppress(KVStoreError):
        own = {path: handle for path in actors_of(name) if (handle := _found(path)) is not None}
    supervisor = None
    with contextlib.suppress(*_NOT_TOLD):
        supervisor = find_actor(actor_name(name, "supervisor"))
        call("supervisor", supervisor.stop, timeout_s=patience_s)
    deadline_s = time.monotonic() + patience_s
    handles = node_stores(name)
    stopping = {}
    for node, handle in handles.items():
        with contextlib.suppress(*_NOT_TOLD):
            stopping[node] = begin(f"store of node {node}", handle.stop)
    for node, handle in handles.items():
        with contextlib.suppress(KVStoreError):
            if node in stopping:
                answer(f"store of node {node}", stopping[node], max(0.1, deadline_s - time.monotonic()))
        with contextlib.suppress(KVStoreError), ray_failures(f"store of node {node}"):
            ray.kill(handle)
    with contextlib.suppress(KVStoreError):
        directory = find_actor(actor_name(name, "directory"))
        with ray_failures("directory"):
            ray.kill(directory)
    if supervisor is not None:
        with contextlib.suppress(KVStoreError), ray_failures("supervisor"):
            ray.kill(supervisor)
    # For example actors on nodes that do not count as living. By handle: a new store may have the names by now.
    for path, handle in own.items():
        with contextlib.suppress(KVStoreError), ray_failures(path):
            ray.kill(handle)
    deadline_s = time.monotonic() + patience_s
    while own and time.monotonic() < deadline_s:  # Ray lists ended actors a moment longer.
        own = {path: handle for path, handle in own.items() if _is_there(path, handle)}
        time.sleep(0.02)


def _found(path: str) -> Any:
    with contextlib.suppress(KVStoreError):
        return find_actor(path)
    return None


def _is_there(path: str, handle: Any) -> bool:
    found = _found(path)
    return found is not None and found._actor_id == handle._actor_id


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


def actors_of(name: str) -> list[str]:
    """Return the names of a store's actors in this process's cluster."""
    return sorted("/".join(path) for path in _paths() if path[1] == name)


def stores_here() -> list[str]:
    """Return the names of the stores in this process's cluster, including partly ended ones."""
    return sorted({path[1] for path in _paths()})


def _paths() -> list[list[str]]:
    """Return the names of all actors of stores, split into their parts."""
    with ray_failures("actors"):
        actors = ray.util.list_named_actors(all_namespaces=True)
    paths = [actor["name"].split("/") for actor in actors if actor["namespace"] == RAY_NAMESPACE]
    return [path for path in paths if path[0] == "raykv" and len(path) > 2]

"""Ending the actors of one store, and nothing else."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from kvstore.actors.calls import RAY_NAMESPACE, actor_name, answer, begin, call, find_actor, ray_failures
from kvstore.actors.supervisor import alive_nodes
from kvstore.errors import KVStoreError, StoreNotRunning, TransferTimeout

_CALL_S = 10.0


def starter_of(name: str, timeout_s: float = _CALL_S) -> str | None:
    """Return the id that the call which started the running store drew for itself; None when no store runs.

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
    """End the actors of a store, on every node. What does not answer within `patience_s` is killed.

    The supervisor goes last, though it makes nothing any more from the beginning: where this call is interrupted,
    another one finds by it what is left to end.
    """
    supervisor = None
    with contextlib.suppress(KVStoreError):
        supervisor = find_actor(actor_name(name, "supervisor"))
        call("supervisor", supervisor.stop, timeout_s=patience_s)
    deadline_s = time.monotonic() + patience_s
    handles = node_stores(name)
    stopping = {}
    for node, handle in handles.items():
        with contextlib.suppress(KVStoreError):
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


def stores_here() -> list[str]:
    """Return the names of the stores of the cluster that this process is connected to."""
    with ray_failures("actors"):
        actors = ray.util.list_named_actors(all_namespaces=True)
    paths = [actor["name"].split("/") for actor in actors if actor["namespace"] == RAY_NAMESPACE]
    return sorted(path[1] for path in paths if path[0] == "raykv" and path[-1] == "supervisor")


def within(what: str, timeout_s: float, do: Callable[[], Any]) -> Any:
    """Run something that may hang, as every question to a GCS that does; returns what it returns.

    Raises:
        TransferTimeout: it was not done in time. It goes on.
    """
    done = threading.Event()
    answer: list[Any] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            answer.append(do())
        except Exception as error:  # noqa: BLE001 - raised below, in the caller.
            failed.append(error)
        done.set()

    try:
        threading.Thread(target=run, name="raykv-within", daemon=True).start()
    except RuntimeError:
        return do()  # Python starts no thread any more while it ends.
    if not done.wait(timeout_s):
        raise TransferTimeout(f"{what}: not done within {timeout_s:g} s; does its Ray still answer?")
    if failed:
        raise failed[0]
    return answer[0]

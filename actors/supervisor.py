"""The supervisor: a stateless, restarting Ray actor that keeps one store on every living node.

It knows nothing but the configuration it was made with; everything else it reads from the cluster each
time, so it can die and come back anywhere. Stores and directory do not depend on it to serve.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import ray
from ray import exceptions as ray_errors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvstore.actors.calls import RAY_NAMESPACE, actor_name, call, find_actor
from kvstore.actors.directory import Directory
from kvstore.actors.node_store import NodeStore
from kvstore.config import PROTOCOL_VERSION, StoreConfig
from kvstore.errors import ConfigError, KVStoreError, StoreNotRunning

logger = logging.getLogger(__name__)

_PERIOD_S = 2.0
_CALL_S = 5.0


def alive_nodes() -> dict[str, dict[str, float]]:
    """Return the resources of each living node by its Ray id."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: dict(node["Resources"]) for node in nodes if node["Alive"]}


class Supervisor:
    """Keeps a directory and one node store per node alive.

    Args:
        config_json: settings of the store.
        watch: False does nothing on its own, only when `reconcile` is called; for tests.
    """

    def __init__(self, config_json: str, watch: bool = True) -> None:
        self._config = StoreConfig.from_json(config_json)
        self._config_json = config_json
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._problems: dict[str, str] = {}
        if watch:
            threading.Thread(target=self._watch, name="raykv-supervisor", daemon=True).start()

    def config(self) -> dict[str, Any]:
        """Return what a connecting process has to agree with."""
        return {"protocol": PROTOCOL_VERSION, "config": self._config_json}

    def problems(self) -> dict[str, str]:
        """Return why nodes have no store, by node id."""
        return dict(self._problems)

    def stop(self) -> None:
        """Make nothing any more; the caller ends the actors."""
        self._stopping.set()
        with self._lock:
            pass  # A reconciliation that was running is over now.

    def reconcile(self) -> list[str]:
        """Make what is missing; returns the ids of the nodes that have a living store."""
        with self._lock:
            if self._stopping.is_set():
                return []
            self._ensure_directory()
            served = []
            for node_id, resources in alive_nodes().items():
                try:
                    self._ensure_node_store(node_id, resources)
                    served.append(node_id)
                    self._problems.pop(node_id, None)
                except KVStoreError as error:
                    if self._problems.get(node_id) != str(error):
                        logger.warning("node %s has no store: %s", node_id, error)
                    self._problems[node_id] = str(error)
            return served

    def _watch(self) -> None:
        while not self._stopping.wait(_PERIOD_S):
            try:
                self.reconcile()
            except Exception:
                logger.exception("supervisor: could not reconcile; will try again")

    def _ensure_directory(self) -> None:
        name = actor_name(self._config.name, "directory")
        # Ray restarts it by itself; this makes the first one, and another should Ray have given up.
        _get_or_create(name, Directory, {"max_restarts": -1, "max_concurrency": 8})

    def _ensure_node_store(self, node_id: str, resources: dict[str, float]) -> None:
        name = actor_name(self._config.name, "node", node_id)
        try:
            handle = find_actor(name)
            call(f"store of node {node_id}", handle.ping.remote(), _CALL_S)
            return
        except KVStoreError:
            pass
        wanted, room = self._config.capacity_bytes, resources.get("memory", 0.0)
        if wanted > room:
            raise ConfigError(
                f"wanted {wanted} bytes of Ray memory on node {node_id}, it has {int(room)}; lower capacity= or "
                "start the node with more --memory"
            )
        options = {
            "max_restarts": 0,
            "max_concurrency": 16,
            "memory": wanted,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        }
        _get_or_create(name, NodeStore, options, node_id, self._config_json)


def _get_or_create(name: str, cls: type, options: dict[str, Any], *args: Any) -> Any:
    """Return a named actor that answers, made if need be; `get_if_exists` may first hand back a dead one."""
    last: KVStoreError = StoreNotRunning(f"{name} could not be made")
    for _ in range(4):
        try:
            handle: Any = (
                ray.remote(cls)
                .options(
                    name=name,
                    namespace=RAY_NAMESPACE,
                    lifetime="detached",
                    get_if_exists=True,
                    num_cpus=0,
                    **options,
                )
                .remote(*args)
            )
            probe = handle.ping.remote() if hasattr(cls, "ping") else handle.address.remote()
            call(name, probe, 30.0)
            return handle
        except KVStoreError as error:
            last = error
            if "creation task" in str(error):
                break  # Ray's words for a constructor that raised: it would again.
            time.sleep(0.2)
        except (ray_errors.RayError, ValueError) as error:
            last = StoreNotRunning(f"{name}: {error}")
            time.sleep(0.2)
    raise last

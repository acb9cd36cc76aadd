"""Starting, finding and stopping a store in a Ray cluster, and the Store object that users hold."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray

from kvstore.actors.calls import RAY_NAMESPACE, actor_name, call, find_actor
from kvstore.actors.clearing import clear_everywhere
from kvstore.actors.joining import join_ray
from kvstore.actors.supervisor import Supervisor, alive_nodes
from kvstore.config import PROTOCOL_VERSION, StoreConfig
from kvstore.errors import (
    ConfigError,
    IncompatibleStore,
    KVStoreError,
    StoreNotRunning,
    StoreUnavailable,
)
from kvstore.hashing import BlockHashes, Namespace
from kvstore.part import Part

if TYPE_CHECKING:
    from kvstore.client import Client

logger = logging.getLogger(__name__)

_CALL_S = 10.0


class Store:
    """A store that runs in a Ray cluster. Cheap, may be sent to other actors and tasks.

    Made by `kvstore.start` and `kvstore.connect`.
    """

    def __init__(self, config: StoreConfig, owns_ray: bool = False) -> None:
        self.config = config
        self._owns_ray = owns_ray

    def __repr__(self) -> str:
        return f"Store({self.config.name!r}, {self.config.capacity_bytes} bytes a node)"

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config.to_json()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.config, self._owns_ray = StoreConfig.from_json(state["config"]), False

    def client(
        self, space: Namespace, part: Part | Sequence[int] | None = None, *, node_id: str | None = None
    ) -> Client:
        """Open a client on this process's node.

        Args:
            space: what the blocks mean.
            part: which part of each block this rank of several holds: (tp_rank, tp_size, pp_rank, pp_size).
            node_id: another node whose store shares this machine, as in a cluster simulated on one host.

        Raises:
            StoreNotRunning: this node has no store, or it is on another machine.
            ConfigError: the store's slots are too small for these blocks.
            LayoutMismatch: these blocks cannot be divided among so many ranks.
        """
        from kvstore.client import Client  # With it comes torch, which starting and stopping a store need not wait for.

        handle = node_store(node_id, self.config.name)
        path = call("node store", handle.control_path.remote(), _CALL_S)
        return Client(str(path), space, part)

    def node_ids(self) -> list[str]:
        """Return the ids of the living nodes."""
        return sorted(alive_nodes())

    def locate(self, hashes: BlockHashes) -> list[tuple[str, int]]:
        """Return (node id, usable prefix length) for routers, longest first. Hints.

        Raises:
            PeerLost, TransferTimeout: the directory is away; try again in a second.
        """
        handle = find_actor(actor_name(self.config.name, "directory"))
        found: list[tuple[str, int]] = call("directory", handle.locate.remote(list(hashes)), _CALL_S)
        return found

    def clear(self, space: Namespace) -> int:
        """Make everything of a namespace a miss from now on, on every node; returns how many blocks it was.

        For when weights changed. Readers that hold a lease finish on the old bytes, and what was asked to be saved
        before is not stored. A node that cannot be reached now hears of it from the directory, or from the first peer
        it exchanges blocks with.

        Raises:
            StoreUnavailable: no store could be asked, or neither the directory nor all of the stores, so that the last
                clearing is not known; nothing was cleared.
            StaleVersion: others went on clearing this namespace in between; some nodes may have been cleared.
        """
        directory = None
        with contextlib.suppress(StoreNotRunning):
            directory = find_actor(actor_name(self.config.name, "directory"))
        return clear_everywhere(space.digest, self._handles(), directory)

    def drain(self, node_id: str, timeout_s: float = 30.0, *, hand_over_bytes: int = 1 << 30) -> dict[str, int]:
        """Take a node out of service for a rolling restart.

        It grants nothing to its workers any more, hands its most recently used chains to another node, then
        waits for leases and writes to end. `node_store(id).undrain` puts it back.

        Returns:
            {"num_handed_over", "num_leases", "num_writes"}: blocks now elsewhere, and what was still held
            when the time was over.

        Raises:
            StoreNotRunning: the node has no store.
        """
        deadline_s = time.monotonic() + timeout_s
        handles = self._handles()
        if node_id not in handles:
            raise StoreNotRunning(f"node {node_id!r} has no store; nodes: {sorted(handles)}")
        chains = call("drain", handles[node_id].begin_drain.remote(hand_over_bytes), _CALL_S)
        handed_over = 0
        others = [handle for node, handle in handles.items() if node != node_id]
        if chains and others:
            share_s = max(0.1, (deadline_s - time.monotonic()) / 2)
            with contextlib.suppress(KVStoreError):
                handed_over = int(call("drain", others[0].adopt.remote(chains, share_s), share_s + 5))
        left_s = max(0.0, deadline_s - time.monotonic())
        left = call("drain", handles[node_id].drain.remote(left_s), left_s + _CALL_S)
        logger.info("drained node %s: %d chains offered, %d blocks moved", node_id, len(chains), handed_over)
        return {"num_handed_over": handed_over, **left}

    def stats(self) -> dict[str, Any]:
        """Return the counts of every node's store by node id, and what the supervisor could not do."""
        nodes: dict[str, Any] = {}
        for node, handle in self._handles().items():
            try:
                nodes[node] = call(f"store of node {node}", handle.stats.remote(), _CALL_S)
            except KVStoreError as error:
                nodes[node] = {"error": str(error)}
        supervisor = find_actor(actor_name(self.config.name, "supervisor"))
        return {
            "name": self.config.name,
            "nodes": nodes,
            "problems": call("supervisor", supervisor.problems.remote(), _CALL_S),
        }

    def stop(self) -> None:
        """End this store on every node, and the local Ray if `start` began it. Nothing else is touched."""
        name = self.config.name
        with contextlib.suppress(KVStoreError):
            supervisor = find_actor(actor_name(name, "supervisor"))
            call("supervisor", supervisor.stop.remote(), _CALL_S)
            ray.kill(supervisor)
        deadline_s = time.monotonic() + _CALL_S
        stopping = [(node, handle, handle.stop.remote()) for node, handle in self._handles().items()]
        for node, handle, stopped in stopping:
            with contextlib.suppress(KVStoreError):
                call(f"store of node {node}", stopped, max(0.1, deadline_s - time.monotonic()))
            ray.kill(handle)
        with contextlib.suppress(KVStoreError):
            ray.kill(find_actor(actor_name(name, "directory")))
        if self._owns_ray:
            ray.shutdown()

    def _handles(self) -> dict[str, Any]:
        found = {}
        for node in alive_nodes():
            with contextlib.suppress(StoreNotRunning):
                found[node] = find_actor(actor_name(self.config.name, "node", node))
        return found


def start(config: StoreConfig, address: str | None, timeout_s: float) -> Store:
    """Start or join a store; see kvstore.start."""
    owns_ray = join_ray(address, may_start=True)
    try:
        return _start(config, timeout_s, owns_ray)
    except BaseException:
        if owns_ray:
            ray.shutdown()
        raise


def _start(config: StoreConfig, timeout_s: float, owns_ray: bool) -> Store:
    deadline_s = time.monotonic() + timeout_s
    name = actor_name(config.name, "supervisor")
    too_small = {
        node: int(resources.get("memory", 0))
        for node, resources in alive_nodes().items()
        if resources.get("memory", 0) < config.capacity_bytes
    }
    running = True
    try:
        supervisor = find_actor(name)
    except StoreNotRunning:
        running = False
        if too_small:
            raise ConfigError(
                f"wanted {config.capacity_bytes} bytes on every node, got nodes with less Ray memory: {too_small}; "
                "lower capacity= or start Ray with more --memory"
            ) from None
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
            .remote(config.to_json())
        )
    _check_compatible(config, call("supervisor", supervisor.config.remote(), timeout_s))
    store = Store(config, owns_ray)
    try:
        _wait_ready(store, supervisor, deadline_s)
    except KVStoreError:
        if not running:
            store.stop()
        raise
    return store


def _wait_ready(store: Store, supervisor: Any, deadline_s: float) -> None:
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise StoreUnavailable(
                f"not every node had a store in time: {call('supervisor', supervisor.problems.remote(), _CALL_S)}"
            )
        served = call("supervisor", supervisor.reconcile.remote(), left_s)
        problems = call("supervisor", supervisor.problems.remote(), _CALL_S)
        if problems and set(problems) >= set(alive_nodes()):
            raise ConfigError(f"no node could start a store: {problems}")
        handles = store._handles()
        if served and set(served) == set(alive_nodes()) <= set(handles):
            for node in served:
                left_s = max(0.1, deadline_s - time.monotonic())
                if not call(f"mover of node {node}", handles[node].ready.remote(left_s), left_s + _CALL_S):
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
    join_ray(address, may_start=False)
    supervisor = find_actor(actor_name(name, "supervisor"))
    return Store(_check_compatible(None, call("supervisor", supervisor.config.remote(), timeout_s)))


def node_store(node_id: str | None = None, name: str = "default") -> Any:
    """Return the actor handle of a node's store; see kvstore.node_store."""
    if not ray.is_initialized():
        raise StoreNotRunning("Ray is not initialised in this process; call kvstore.connect() first")
    wanted = node_id or ray.get_runtime_context().get_node_id()
    try:
        return find_actor(actor_name(name, "node", wanted))
    except StoreNotRunning as error:
        raise StoreNotRunning(
            f"node {wanted} has no store named {name!r}; nodes of this cluster: {sorted(alive_nodes())}"
        ) from error

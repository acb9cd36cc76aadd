"""Replay a trace with real stores on the nodes of a private Ray, and compare every loaded byte.

One request after the other, in the order of the trace, as the simulator does it (kvstore.replay.tiers): so the hits of
both can be compared.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from kvstore.actors.bench.cluster import on_node, private_nodes
from kvstore.actors.bench.replay_worker import ReplayWorker, Served, space_of
from kvstore.actors.calls import ask_all, call
from kvstore.actors.cluster import Store
from kvstore.actors.finding import locate, node_store
from kvstore.actors.starting import start
from kvstore.blocks.hashing import BlockHashes
from kvstore.config import EVICTION_POLICIES, StoreConfig
from kvstore.disk.records import PAGE_BYTES, RECORD_BYTES
from kvstore.errors import KVStoreError, StoreUnavailable
from kvstore.replay.model import percentile
from kvstore.replay.report import Plan, RealSettings, Rows, common_columns, node_columns
from kvstore.replay.simulate import choose_node
from kvstore.replay.tiers import hits_of
from kvstore.replay.traces import Found, Outcome, Request, TierOutcome, Trace

_TIMEOUT_S = 120.0
#: How long the disks may take to write what waits, and the directory to hear of old blocks.
_SETTLE_S, _LOOK_AGAIN_S = 60.0, 0.002
#: Counts of a node's disk that are summed up.
_DISK_COUNTS = ("num_written", "num_written_bytes", "num_read", "num_bytes", "num_damaged", "num_failed")


def replay_real(trace: Trace, plan: Plan, settings: RealSettings, begin: Callable[[str], Callable[[], None]]) -> Rows:
    """Replay the trace once for each policy and capacity; return a row for each.

    Args:
        trace: the requests.
        plan: policies, capacities, nodes, disks.
        settings: what real stores need besides.
        begin: called with the name of each replay; what it returns is called after each request.

    Raises:
        KVStoreError: a loaded block has a wrong byte, or a store failed.
    """
    most_blocks = max(len(request.blocks) for request in trace.requests)
    with private_nodes(plan.num_nodes) as node_ids:
        workers = {node: on_node(ReplayWorker, node).remote(settings.block_bytes, most_blocks) for node in node_ids}
        return [
            _row(trace, plan, settings, policy, capacity, workers, begin(f"real, {policy}, {capacity:,} blocks"))
            for capacity in plan.capacities
            for policy in plan.policies
        ]


def _config(plan: Plan, settings: RealSettings, policy: str, capacity: int, folder: str) -> StoreConfig:
    disk: dict[str, Any] = {}
    if plan.disk_blocks:
        slot_bytes = PAGE_BYTES + settings.block_bytes + RECORD_BYTES
        disk = {"disk_path": folder, "disk_capacity_bytes": plan.disk_blocks * slot_bytes, "disk_timeout_s": 60.0}
    return StoreConfig(
        name=f"replay-{policy}-{capacity}",
        capacity_bytes=capacity * settings.block_bytes,
        # As in the simulator, where the blocks of one request may be all that is pinned.
        max_pinned_fraction=1.0,
        # A slow machine must not turn a hit into a miss.
        call_timeout_s=60.0,
        transfer_timeout_s=60.0,
        eviction=EVICTION_POLICIES[0] if policy == "default" else policy,
        **disk,
    )


class _Fleet:
    """Real stores on all nodes, with an engine on each.

    Args:
        config: of the stores.
        workers: the engines, by node id.
        block_bytes: of each block.
    """

    def __init__(self, config: StoreConfig, workers: dict[str, Any], block_bytes: int) -> None:
        self._config, self._workers, self._digest = config, workers, space_of(block_bytes).digest
        #: Counts of the stores that have ended.
        self.counts: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._store: Store | None = None

    def begin(self) -> None:
        """Start the stores and attach the engines."""
        self._store = store = start(self._config, None, _TIMEOUT_S)
        self._stores = {node: node_store(node, self._config.name) for node in self._workers}
        for worker in self._workers.values():
            call("worker", worker.open, store, timeout_s=_TIMEOUT_S)
        # Which node gets which folder is chance, and its blocks make a node what it is.
        folders = {node: (stats["disk"] or {}).get("path", "") for node, stats in self._stats().items()}
        #: The engines, in the order of their nodes' folders.
        self.order = [self._workers[node] for node in sorted(self._workers, key=lambda node: (folders[node], node))]
        self._wait(lambda disk: not disk["is_off"])

    def end(self) -> None:
        """Stop the stores, and add their counts."""
        for stats in self._stats().values():
            self.counts["num_evicted"] += stats["pool"]["num_evicted"]
            if disk := stats["disk"]:
                self.counts["num_disk_evicted"] += disk["pool"]["num_evicted"]
                self.counts.update({name: disk[name] for name in _DISK_COUNTS})
                self.dropped.update(disk["dropped"])
        for worker in self._workers.values():
            call("worker", worker.close, timeout_s=_TIMEOUT_S)
        self.stop()

    def stop(self) -> None:
        """Stop the stores, if they run."""
        store, self._store = self._store, None
        if store is not None:
            store.stop()

    def chain_of(self, trace: Trace, request: Request) -> BlockHashes:
        """Return the blocks of a request, as the engines name them."""
        return BlockHashes(self._digest, self._digest, 0, trace.digests[request.blocks].tobytes())

    def num_here(self, worker: Any, chain: BlockHashes) -> int:
        """Return how many leading blocks an engine's node has."""
        count: int = call("worker", worker.num_here, chain, timeout_s=_TIMEOUT_S)
        return count

    def settle(self) -> None:
        """Wait until the disks have written what waits."""
        self._wait(lambda disk: not disk["num_unwritten"])

    def wait_known(self, chain: BlockHashes) -> None:
        """Wait until the directory knows what the nodes have of a chain."""
        wanted = {node: self.num_here(worker, chain) for node, worker in self._workers.items()}
        wanted = {node: count for node, count in wanted.items() if count}
        until_s = time.monotonic() + _SETTLE_S
        while dict(locate(self._config, chain, _TIMEOUT_S)) != wanted:
            if time.monotonic() > until_s:
                raise StoreUnavailable(f"the directory has not heard of the old blocks within {_SETTLE_S:g} s")
            time.sleep(_LOOK_AGAIN_S)

    def _wait(self, is_done: Callable[[dict[str, Any]], bool]) -> None:
        until_s = time.monotonic() + _SETTLE_S
        while True:
            disks = [stats["disk"] for stats in self._stats().values() if stats["disk"]]
            if all(is_done(disk) for disk in disks):
                return
            if time.monotonic() > until_s:
                why = "; ".join(disk["reason"] for disk in disks if disk["reason"]) or "they are slow"
                raise StoreUnavailable(f"the disks were not ready within {_SETTLE_S:g} s: {why}")
            time.sleep(_LOOK_AGAIN_S)

    def _stats(self) -> dict[str, dict[str, Any]]:
        said = ask_all({node: handle.stats for node, handle in self._stores.items()}, timeout_s=_TIMEOUT_S)
        for answer in said.values():
            if isinstance(answer, KVStoreError):
                raise answer
        return said


@contextlib.contextmanager
def _folder(path: str) -> Iterator[str]:
    if path:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="raykv-replay-") as folder:
        yield folder


def _row(
    trace: Trace,
    plan: Plan,
    settings: RealSettings,
    policy: str,
    capacity: int,
    workers: dict[str, Any],
    tick: Callable[[], None],
) -> dict[str, Any]:
    began_s = time.monotonic()
    with _folder(settings.disk_path) as folder:
        fleet = _Fleet(_config(plan, settings, policy, capacity, folder), workers, settings.block_bytes)
        try:
            served, given = _serve_all(trace, plan, settings, fleet, tick)
            fleet.end()
        finally:
            fleet.stop()
    counts, found = fleet.counts, [Found(memory=each.memory, disk=each.disk, peer=each.peer) for each in served]
    outcome = Outcome(
        hits=hits_of(found),
        num_evictions=counts["num_evicted"],
        node_references=tuple(given),
        tiers=TierOutcome(
            found=found,
            num_disk_evictions=counts["num_disk_evicted"],
            num_disk_written=counts["num_written"],
            num_disk_read=counts["num_read"],
            dropped=dict(fleet.dropped),
        ),
    )
    return {
        **common_columns(trace, plan, policy, capacity, outcome),
        **_byte_columns(served, counts, settings.block_bytes),
        "load_p50_s": round(percentile([each.load_s for each in served], 50), 5),
        "load_p99_s": round(percentile([each.load_s for each in served], 99), 5),
        "num_verified": outcome.num_hits,
        "num_wrong_bytes": 0,  # The first one ends the replay.
        "num_damaged": counts["num_damaged"],
        "failed": dict(Counter(each.reason for each in served if each.reason)),
        "took_s": round(time.monotonic() - began_s, 1),
        **node_columns(plan, outcome),
    }


def _byte_columns(served: list[Served], counts: Counter[str], block_bytes: int) -> dict[str, Any]:
    num_written, num_read = counts["num_written_bytes"], counts["num_bytes"]
    return {
        "memory_bytes": block_bytes * sum(each.memory for each in served),
        "disk_bytes": block_bytes * sum(each.disk for each in served),
        "peer_bytes": sum(each.num_peer_bytes for each in served),
        "disk_written_bytes": num_written,
        "disk_read_bytes": num_read,
        "written_per_read_byte": round(num_written / num_read, 3) if num_read else None,
    }


def _serve_all(
    trace: Trace, plan: Plan, settings: RealSettings, fleet: _Fleet, tick: Callable[[], None]
) -> tuple[list[Served], list[int]]:
    served, given = list[Served](), [0] * plan.num_nodes
    fleet.begin()
    for index, request in enumerate(trace.requests):
        if settings.is_settled:
            fleet.settle()
        if plan.restart_at and index == plan.restart_at:
            fleet.end()
            fleet.begin()
            for earlier in trace.requests[:index]:
                fleet.wait_known(fleet.chain_of(trace, earlier))
        chain = fleet.chain_of(trace, request)
        looks = [lambda asked, worker=worker: fleet.num_here(worker, asked) for worker in fleet.order]
        worker = fleet.order[node := choose_node(plan.nodes, index, given, looks, chain)]
        served.append(call("worker", worker.serve, index, node, chain, list(request.blocks), timeout_s=_TIMEOUT_S))
        given[node] += len(chain)
        tick()
    if settings.is_settled:
        fleet.settle()
    return served, given

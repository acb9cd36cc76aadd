"""Loads reported to vLLM as received while their copies go on.

The engine's stream, and not its thread, waits for such a load. Why: docs/adr/0013-loads-that-land.md.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from kvstore.blocks.part import Part
from kvstore.blocks.shape import KVShape
from kvstore.client.client import Client
from kvstore.client.job import Job
from kvstore.client.results import LoadResult
from kvstore.errors import CopyStuck, KVStoreError
from kvstore.integrations.vllm.stats import Stats


@dataclass(slots=True)
class Running:
    """A load or save under way."""

    plan: Any
    client: Client
    job: Job[Any]
    begin_s: float
    #: Of a load: set when nothing can refuse it any more, so that a thread waiting for its copies may go on.
    queued: threading.Event = field(default_factory=threading.Event)
    #: Of this rank's part of a block.
    part_bytes: int = 0


class Landing:
    """The loads of one worker that were reported as received early."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self.loads: dict[str, Running] = {}
        #: How the number of these loads changed for each request since the last report; see `WorkerReport.landing`.
        self.changes: Counter[str] = Counter()

    def begin(self, load: Running) -> None:
        """Let the engine's stream wait for a queued load, so that the engine's thread does not.

        The launches of a step take milliseconds, and can begin meanwhile. Nothing can refuse the load any more
        (`Client.load`).
        """
        load.job.wait_on(timeout=0.0)
        self.loads[load.plan.req_id] = load
        self.changes[load.plan.req_id] += 1
        self._stats.count("num_landing_loads")

    def poll(self) -> None:
        """Take in the loads that have ended.

        Raises:
            CopyStuck: blocks do not hold the requested KV, and the engine may have used them.
        """
        for req_id in [req_id for req_id, load in self.loads.items() if load.job.done()]:
            self._end(req_id, 0.0)

    def settle(self, req_ids: Collection[str], timeout_s: float) -> None:
        """Wait for the loads of requests whose blocks are about to be given away; raises as `poll`."""
        for req_id in [req_id for req_id in req_ids if req_id in self.loads]:
            self._end(req_id, timeout_s)

    def has_landed(self, req_id: str, wait_s: float) -> bool:
        """Return whether no load of a request is landing any more; waits up to `wait_s`. Raises as `poll`."""
        load = self.loads.get(req_id)
        if load is None:
            return True
        ended = threading.Event()
        load.job.add_done_callback(lambda _: ended.set())
        if not load.job.done() and not ended.wait(wait_s):
            return False
        self._end(req_id, wait_s)
        return True

    def _end(self, req_id: str, wait_s: float) -> None:
        load = self.loads[req_id]
        wanted = f"wanted the copies of {load.job!r} in place"
        why = "the engine has computed from their blocks meanwhile; restart it"
        try:
            result: LoadResult = load.job.result(wait_s)
        except KVStoreError as error:
            raise CopyStuck(f"{wanted}, got: {error}; {why}") from error
        if result.num_blocks < len(load.plan.hashes):
            raise CopyStuck(f"{wanted}, got {result.num_blocks} blocks ({result.failed[0].detail}); {why}")
        del self.loads[req_id]
        self.changes[req_id] -= 1
        count_load(self._stats, load, result)


def count_load(stats: Stats, load: Running, result: LoadResult, verb: str = "load") -> None:
    """Count an ended load, or an ended fetch of a hand-off."""
    stats.time(verb, time.perf_counter() - load.begin_s)
    for tier, num_blocks in (("local", result.num_local), ("peer", result.num_peer), ("disk", result.num_disk)):
        stats.count(f"num_{verb}ed_{tier}_blocks", num_blocks)
        stats.count(f"num_{verb}ed_{tier}_bytes", num_blocks * load.part_bytes)


@functools.cache
def part_bytes(part: Part, shape: KVShape) -> int:
    """Return the bytes of a rank's part of a block."""
    return part.held(shape).block_bytes

"""Loads reported to vLLM as received while their copies go on, and how long an idle step waits for copies.

The engine's stream, and not its thread, waits for such a load. Why: docs/adr/0013-loads-that-land.md.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.client.client import Client
from kvstore.client.job import Job
from kvstore.client.results import LoadResult
from kvstore.errors import CopyStuck, KVStoreError
from kvstore.integrations.vllm.plan import StepPlan, Wakeup
from kvstore.integrations.vllm.stats import Stats

#: An engine with nothing to compute would step in a loop. It waits instead for a job's end, and leaves the cores to
#: copying threads. The wait is short, as new requests may have come. Workers in other processes get no answers.
_ANSWER_WAIT_S, _TOKEN_WAIT_S, LONGEST_WAIT_S = 0.0003, 0.15e-6, 0.005
#: For a load into a cache on the CPU: the shortest step that computes takes longer there, and most loads end in the
#: step that begins them.
LONGEST_LOAD_WAIT_S = 0.05


@dataclass(slots=True)
class Running:
    """A load or save under way."""

    plan: Any
    client: Client
    job: Job[Any]
    begin_s: float
    #: Of a load: set when nothing can refuse it any more, so that a thread waiting for its copies may go on.
    queued: threading.Event = field(default_factory=threading.Event)


class Landing:
    """The loads of one worker that were reported as received early.

    Args:
        stats: gets times and counts.
    """

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._loads: dict[str, Running] = {}
        self._changes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._loads)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._loads

    def begin(self, load: Running) -> None:
        """Let the engine's stream wait for a queued load, so that the engine's thread does not.

        The launches of a step take milliseconds, and can begin meanwhile. Nothing can refuse the load any more
        (`Client.load`).
        """
        load.job.wait_on(timeout=0.0)
        self._loads[load.plan.req_id] = load
        self._changes[load.plan.req_id] += 1
        self._stats.count("num_landing_loads")

    def poll(self) -> None:
        """Take in the loads that have ended.

        Raises:
            CopyStuck: blocks do not hold the requested KV, and the engine may have used them.
        """
        for req_id in [req_id for req_id, load in self._loads.items() if load.job.done()]:
            self._end(req_id, 0.0)

    def settle(self, req_ids: Collection[str], timeout_s: float) -> None:
        """Wait for the loads of requests whose blocks are about to be given away; raises as `poll`."""
        for req_id in [req_id for req_id in req_ids if req_id in self._loads]:
            self._end(req_id, timeout_s)

    def has_landed(self, req_id: str, wait_s: float) -> bool:
        """Return whether no load of a request is landing any more; waits up to `wait_s`. Raises as `poll`."""
        load = self._loads.get(req_id)
        if load is None:
            return True
        ended = threading.Event()
        load.job.add_done_callback(lambda _: ended.set())
        if not load.job.done() and not ended.wait(wait_s):
            return False
        self._end(req_id, wait_s)
        return True

    def take_changes(self) -> Counter[str]:
        """Return how the landing loads of each request changed since the last call; see `WorkerReport.landing`."""
        changes, self._changes = self._changes, Counter()
        return changes

    def clear(self) -> None:
        """Forget all loads."""
        self._loads.clear()

    def _end(self, req_id: str, wait_s: float) -> None:
        load = self._loads[req_id]
        wanted = f"wanted the copies of {load.job!r} in place"
        why = "the engine has computed from their blocks meanwhile; restart it"
        try:
            result: LoadResult = load.job.result(wait_s)
        except KVStoreError as error:
            raise CopyStuck(f"{wanted}, got: {error}; {why}") from error
        if result.num_blocks < len(load.plan.hashes):
            raise CopyStuck(f"{wanted}, got {result.num_blocks} blocks ({result.failed[0].detail}); {why}")
        del self._loads[req_id]
        self._changes[req_id] -= 1
        count_load(self._stats, load, result)


def count_load(stats: Stats, load: Running, result: LoadResult, verb: str = "load") -> None:
    """Count an ended load, or an ended fetch of a hand-off."""
    stats.time(verb, time.perf_counter() - load.begin_s)
    stats.count(f"num_{verb}ed_local_blocks", result.num_local)
    stats.count(f"num_{verb}ed_peer_blocks", result.num_peer)


def wait_idle(
    plan: StepPlan,
    loads: Mapping[str, Running],
    saves: Mapping[str, list[Running]],
    job_ended: threading.Event,
    *,
    is_on_gpu: bool,
) -> None:
    """Wait a little in a step with nothing to compute: for an answer of the store, or for a copy."""
    if plan.num_waiting and plan.answered is not None:
        plan.answered.wait(_answer_wait_s(plan, plan.answered))
    elif loads or saves:
        deadline_s = time.monotonic() + (LONGEST_LOAD_WAIT_S if loads and not is_on_gpu else LONGEST_WAIT_S)
        while True:
            job_ended.clear()  # Before the jobs are checked, so that no end is missed.
            left_s = deadline_s - time.monotonic()
            if _has_ended(loads, saves) or left_s <= 0:
                break
            job_ended.wait(left_s)


def _answer_wait_s(plan: StepPlan, answered: Wakeup) -> float:
    if answered.is_shared:
        return LONGEST_WAIT_S
    return min(plan.num_waiting * _ANSWER_WAIT_S + plan.num_unhashed_tokens * _TOKEN_WAIT_S, LONGEST_WAIT_S)


def _has_ended(loads: Mapping[str, Running], saves: Mapping[str, list[Running]]) -> bool:
    """Whether a load can be reported; if there is no load, whether a save can."""
    if loads:
        return any(load.queued.is_set() or load.job.done() for load in loads.values())
    return any(save.job.done() for its in saves.values() for save in its)

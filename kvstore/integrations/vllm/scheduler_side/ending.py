"""Blocks of requests that ended while copies of them were under way.

If the workers share the scheduler's process, vLLM gets the blocks back at once, so that `reset_prefix_cache` and others
need not wait for saves. A freed block keeps its bytes until vLLM gives it to another request. vLLM reports that before
it launches anything of that step, and the saves that read the block end then. If workers are separate processes, vLLM
keeps the blocks until it is notified of the copies' end. Why: docs/adr/0022-blocks-of-ended-requests.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from kvstore.integrations.vllm.plan import Copies, StepPlan
from kvstore.integrations.vllm.scheduler_side.tracked import Tracked

#: Wait for the load of an ended request: its last token was computed behind the copies; only the report is missing.
_LANDED_S = 0.02


class Ending:
    """The ended requests of one engine.

    Args:
        engine_block_size: tokens of vLLM's blocks.
        num_workers: workers that report the end of each save.
        keeps_memory: whether the cache's memory stays while the engine is idle.
    """

    def __init__(self, engine_block_size: int, num_workers: int, *, keeps_memory: bool) -> None:
        self._engine_block_size, self._num_workers, self._keeps_memory = engine_block_size, num_workers, keeps_memory
        #: One for each worker; empty if any worker is in another process.
        self._copies: list[Copies] = []
        self.requests: dict[str, Tracked] = {}
        #: Blocks that were given to requests since the last step was planned.
        self._given: set[int] = set()
        #: Whether blocks were given without their ids, as older vLLMs do for another connector beside this one.
        self._is_blind = False

    def open(self, copies: Sequence[Copies | None]) -> None:
        """Take in each worker's copies; None for a worker in another process."""
        found = [each for each in copies if each is not None]
        self._copies = found if len(found) == self._num_workers else []

    def add(self, plan: StepPlan, tracked: Tracked) -> bool:
        """Take in a request with copies under way; returns whether vLLM has to keep its blocks."""
        req_id = tracked.request.request_id
        self.requests[req_id] = tracked
        # A landing load still writes, so it is waited for; the last token was computed behind it.
        if self._copies and self._keeps_memory:
            tracked.is_freed = not tracked.num_landing or all(
                each.has_landed(req_id, _LANDED_S) for each in self._copies
            )
        if not tracked.is_freed:
            plan.ending.add(req_id)
            return True
        # No later step may come that would carry the late saves, and the blocks still hold the request's KV.
        late = [save for save in plan.late_saves if save.req_id == req_id]
        plan.late_saves = [save for save in plan.late_saves if save.req_id != req_id]
        for each in self._copies:
            for save in late:
                each.begin_save(save)
        return False

    def given(self, blocks: Any, num_engine_tokens: int) -> None:
        """Note the blocks that a request was given; it only reads those of its hit in the engine's own cache."""
        if self.requests:
            ids = blocks.get_block_ids()[0]
            self._is_blind = self._is_blind or not ids
            self._given.update(ids[num_engine_tokens // self._engine_block_size :])

    def settle(self, plan: StepPlan, new_block_ids: Sequence[Any]) -> None:
        """End saves whose blocks other requests got, before the step that overwrites them is launched.

        Args:
            plan: of the step; late saves of such blocks are removed from it.
            new_block_ids: blocks that vLLM's scheduler gave to running requests.

        Raises:
            CopyStuck: a copy does not end.
        """
        given, self._given = self._given, set()
        is_blind, self._is_blind = self._is_blind, False
        for each in self._copies if plan.settle else ():
            each.end_saves(plan.settle)  # Some model runners write to new blocks before they notify the workers.
        given.update(*(ids[0] for ids in new_block_ids if ids))
        taken = {
            req_id: tracked
            for req_id, tracked in self.requests.items()
            if tracked.is_freed and tracked.num_saves_open and (is_blind or not given.isdisjoint(tracked.block_ids))
        }
        if not taken:
            return
        for save in plan.late_saves:
            if save.req_id in taken:
                taken[save.req_id].num_saves_open -= self._num_workers
        plan.late_saves = [save for save in plan.late_saves if save.req_id not in taken]
        for each in self._copies:
            each.end_saves(taken.keys())
        for req_id, tracked in taken.items():
            tracked.block_ids = []  # They belong to other requests now.
            if not tracked.is_copied:
                del self.requests[req_id]

    def drop_saves(self) -> None:
        """End all saves at once where workers share this process: they are of no use, or memory goes away."""
        with ExitStack() as steps:  # All workers are asked before the error of any one is raised.
            for each in self._copies:
                steps.callback(each.drop_saves)

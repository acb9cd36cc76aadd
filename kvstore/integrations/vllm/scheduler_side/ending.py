"""Requests that ended with copies under way: what becomes of their blocks.

Where the workers share the scheduler's process, vLLM gets the blocks back at once: what asks for all of them, such as
`reset_prefix_cache`, need not wait for saves. Freed blocks keep their bytes until they are given to others, and vLLM
says so before anything of that step is launched; the saves that read them end then. Where workers are processes of
their own, vLLM keeps the blocks until it hears of the copies' end. Why: docs/adr/0022-blocks-of-ended-requests.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from kvstore.integrations.vllm.plan import Copies, Door, StepPlan
from kvstore.integrations.vllm.scheduler_side.tracked import Tracked

#: The token that ended a request was computed behind its load; what is missing is that a thread says so.
_LANDED_S = 0.02


class Ending:
    """The ended requests of one engine.

    Args:
        engine_block_size: tokens of vLLM's blocks.
        num_workers: that report about each save.
        keeps_memory: whether the cache's memory stays while the engine has nothing to do.
    """

    def __init__(self, engine_block_size: int, num_workers: int, *, keeps_memory: bool) -> None:
        self._engine_block_size, self._num_workers, self._keeps_memory = engine_block_size, num_workers, keeps_memory
        #: Of all workers; none where one is in another process.
        self._copies: list[Copies] = []
        self._requests: dict[str, Tracked] = {}
        #: Blocks that were given to requests since the last step was planned.
        self._given: set[int] = set()
        #: Whether some were given that nobody named, by older vLLMs to another connector beside this one.
        self._is_blind = False

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self._requests.values())

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._requests

    def get(self, req_id: str) -> Tracked | None:
        """Return what is known of a request that is among them."""
        return self._requests.get(req_id)

    def open(self, doors: Sequence[Door]) -> None:
        """Take in how the workers are reached."""
        found = [door.copies for door in doors if door.copies is not None]
        self._copies = found if len(found) == self._num_workers else []

    @property
    def has_pending_frees(self) -> bool:
        """Whether vLLM keeps blocks until copies end."""
        return any(not tracked.is_freed for tracked in self)

    @property
    def has_news_to_come(self) -> bool:
        """Whether steps are wanted although vLLM keeps nothing, to hear of the end of copies."""
        return any(tracked.is_freed for tracked in self)

    def add(self, plan: StepPlan, tracked: Tracked) -> bool:
        """Take in a request with copies under way; returns whether vLLM has to keep its blocks."""
        req_id = tracked.request.request_id
        self._requests[req_id] = tracked
        # What lands is written, so that is waited for; its token came behind it.
        if self._copies and self._keeps_memory:
            tracked.is_freed = not tracked.num_landing or all(
                each.has_landed(req_id, _LANDED_S) for each in self._copies
            )
        if not tracked.is_freed:
            plan.ending.add(req_id)
            return True
        # No step may follow that would carry them, and its blocks still hold what it computed.
        late = [save for save in plan.late_saves if save.req_id == req_id]
        plan.late_saves = [save for save in plan.late_saves if save.req_id != req_id]
        for each in self._copies:
            for save in late:
                each.begin_save(save)
        return False

    def forget(self, req_id: str) -> None:
        """No copy of a request is under way any more."""
        self._requests.pop(req_id, None)

    def given(self, blocks: Any, num_engine_tokens: int) -> None:
        """Take in which blocks a request was given; those of its hit in the engine's own cache it only reads."""
        if self._requests:
            ids = blocks.get_block_ids()[0]
            self._is_blind = self._is_blind or not ids
            self._given.update(ids[num_engine_tokens // self._engine_block_size :])

    def settle(self, plan: StepPlan, new_block_ids: Sequence[Any]) -> None:
        """End the saves whose blocks others were given, before anything of the step that writes them is launched.

        Args:
            plan: of the step; loses late saves of such blocks.
            new_block_ids: that running requests were given, as vLLM's scheduler says.

        Raises:
            CopyStuck: a copy does not end.
        """
        given, self._given = self._given, set()
        is_blind, self._is_blind = self._is_blind, False
        for each in self._copies if plan.settle else ():
            each.end_saves(plan.settle)  # Some model runners write new blocks before they say so to the workers.
        freed = [tracked for tracked in self if tracked.is_freed and tracked.num_saves_open]
        if not freed:
            return
        for ids in new_block_ids:
            given.update(ids[0] if ids else ())
        taken = {
            tracked.request.request_id: tracked
            for tracked in freed
            if is_blind or not given.isdisjoint(tracked.block_ids)
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
            tracked.block_ids = []  # Theirs no more.
            if not tracked.is_copied:
                self.forget(req_id)

    def drop_saves(self) -> None:
        """End the saves of all requests at once, where that can be done: they are of no use, or memory goes away."""
        with ExitStack() as steps:  # All workers are asked, before an error of one is raised.
            for each in self._copies:
                steps.callback(each.drop_saves)

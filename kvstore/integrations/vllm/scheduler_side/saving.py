"""Which computed blocks of a request are saved."""

from __future__ import annotations

import logging

from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.integrations.vllm.plan import SavePlan
from kvstore.integrations.vllm.scheduler_side.keys import hash_blocks
from kvstore.integrations.vllm.scheduler_side.tracked import Tracked
from kvstore.integrations.vllm.stats import Stats

logger = logging.getLogger(__name__)


class Saving:
    """The saves of one engine.

    Args:
        space: namespace of the blocks.
        engine_block_size: tokens of vLLM's blocks.
        num_workers: of this engine; each saves its part.
        has_answers: whether blocks of answers are saved too.
        stats: gets counts.
    """

    def __init__(
        self, space: Namespace, engine_block_size: int, num_workers: int, has_answers: bool, stats: Stats
    ) -> None:
        self._space, self._engine_block_size, self._num_workers = space, engine_block_size, num_workers
        self._has_answers, self._stats = has_answers, stats

    def plan(self, saves: list[SavePlan], tracked: Tracked, begin: int, end: int) -> None:
        """Plan to save the blocks that become full while a request computes tokens [begin, end)."""
        self.leave(tracked, self._why_unsure(tracked, begin, end))
        tracked.num_planned_tokens = end
        if tracked.question is not None and tracked.hashes is None:
            tracked.hashes = tracked.question.hashes
        if not tracked.may_save or tracked.hashes is None:
            return
        size, req_id = self._space.shape.block_size, tracked.request.request_id
        if self._has_answers:
            try:
                tracked.hashes = self._with_answer(tracked, tracked.hashes, end)
            except Exception:  # As in `SchedulerSide.begin`.
                tracked.may_save = False
                self._stats.count("num_request_errors")
                logger.exception("no more of request %s is saved", req_id)
                return
        # After a failed load or a preemption, the blocks behind that point are computed and saved again.
        tracked.num_saved = min(tracked.num_saved, -(-begin // size))
        if tracked.question is not None and tracked.num_saved < tracked.question.num_blocks <= begin // size:
            tracked.num_saved = tracked.question.num_blocks  # The engine had them itself, and the store has them too.
        num_full = min(len(tracked.hashes), end // size)
        if num_full <= tracked.num_saved:
            return
        ids = tracked.block_ids[: -(-num_full * size // self._engine_block_size)]
        hashes, priority, priority_s = tracked.hashes[:num_full], tracked.priority, tracked.priority_s
        plan = SavePlan(req_id=req_id, hashes=hashes, block_ids=ids, priority=priority, priority_s=priority_s)
        saves.append(plan)
        tracked.num_saved = num_full
        tracked.num_saves_open += self._num_workers

    def leave(self, tracked: Tracked, why: str) -> None:
        """Store no more blocks of a request, as they may not match their hashes; no effect without a reason."""
        if why and (tracked.may_save or tracked.may_publish):
            tracked.may_save = tracked.may_publish = False
            self._stats.count("num_unsaved_requests")
            logger.warning("no more of request %s is saved: %s", tracked.request.request_id, why)

    def _why_unsure(self, tracked: Tracked, begin: int, end: int) -> str:
        """Return why blocks up to token `end` may not hold KV of a request; empty when they do."""
        num_known = max(tracked.num_planned_tokens, tracked.num_engine_tokens + tracked.num_external_tokens)
        if begin > num_known:
            return f"vLLM goes on from token {begin}, and only {num_known} are known to be computed, cached or loaded"
        size = self._engine_block_size
        ids = tracked.block_ids[: -(-end // size)]
        if len(ids) * size < end:
            return f"vLLM computes up to token {end}, and gave {len(ids)} blocks of {size}"
        if 0 in ids:
            return "vLLM has put its block 0, which stands for none, where tokens were"
        return ""

    def _with_answer(self, tracked: Tracked, hashes: BlockHashes, end: int) -> BlockHashes:
        """Return hashes and those of the answer's full blocks up to `end` whose tokens are known.

        Drafts become tokens of a request only when accepted, so `end` may include planned drafts. It must not include
        rejected ones: tokens sampled since then are in their places.
        """
        request, size = tracked.request, self._space.shape.block_size
        first, last = len(hashes) * size, min(end, request.num_tokens) // size * size
        if last <= first:
            return hashes
        return BlockHashes.join(
            hashes,
            hash_blocks(self._space, request, list(request.all_token_ids[first:last]), hashes, tracked.media),
        )

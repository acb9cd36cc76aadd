"""The state of one request in the scheduler's half, and from which tiers its loaded tokens come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvstore.blocks.hashing import BlockHashes
from kvstore.blocks.priority import Priority
from kvstore.blocks.ticket import HandoffTicket
from kvstore.integrations.vllm.plan import LoadPlan
from kvstore.integrations.vllm.scheduler_side.lookups import Question

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # Older releases count no hits by tier, and never ask.
    CacheHitSource = None


@dataclass(slots=True)
class Tracked:
    """The state of one request until it and its copies have ended."""

    request: Any
    media: dict[int, bytes] = field(default_factory=dict)  # see keys.py
    question: Question | None = None
    hashes: BlockHashes | None = None
    block_ids: list[int] = field(default_factory=list)
    num_engine_tokens: int = 0  # in the engine's own prefix cache, when vLLM asked last
    num_external_tokens: int = 0  # behind those, planned to be loaded since
    num_planned_tokens: int = 0  # computed once the last planned step is done
    num_saved: int = 0
    num_saves_open: int = 0  # on all workers
    num_landing: int = 0  # loads still copying although vLLM has them as received, on all workers
    is_loading: bool = False
    may_load: bool = True
    may_save: bool = True
    may_publish: bool = False
    may_tell: bool = True  # whether events name what its saves brought; not after a clearing
    priority: Priority = Priority.NORMAL  # of what is saved, for `priority_s`; and of its load
    priority_s: float | None = None
    arriving: tuple[HandoffTicket, ...] = ()  # that the request brought, not used yet
    leaving: tuple[HandoffTicket, ...] = ()  # published for another engine
    tail: bytes = b""  # digest of what is behind the prompt's full blocks; of hand-offs only
    is_fetching: bool = False
    is_freed: bool = False  # ended; vLLM may give its blocks to others, and its saves end before they are overwritten

    def plan_load(
        self, hashes: BlockHashes, block_ids: list[int], tickets: tuple[HandoffTicket, ...], prompt: BlockHashes | None
    ) -> LoadPlan:
        """Return the plan to bring blocks into the engine's; `tickets` are those of a hand-off, of the whole prompt."""
        return LoadPlan(
            req_id=self.request.request_id,
            hashes=hashes,
            block_ids=block_ids,
            num_engine_tokens=self.num_engine_tokens,
            tickets=tickets,
            prompt=prompt,
            priority=self.priority,
        )

    @property
    def is_copied(self) -> bool:
        """Whether copies that vLLM does not know of may still use its blocks."""
        return bool(self.num_saves_open or self.num_landing)


def tokens_by_tier(tracked: Tracked, block_size: int, num_tokens: int) -> dict[str, int]:
    """Return how many of the tokens behind the engine's own are in which tier, as the last lookup saw it.

    Args:
        tracked: the request.
        block_size: tokens of a stored block.
        num_tokens: that are loaded; the counts add up to it, and none of them is 0.
    """
    begin, question = tracked.num_engine_tokens, tracked.question
    end, counts = begin + num_tokens, dict[str, int]()
    # What is handed off comes from the GPU or the memory of the engine that computed it.
    is_here = question is not None and not (tracked.is_fetching or tracked.arriving)
    tiers = [("HOST", question.num_local), ("DISK", question.num_here)] if is_here and question is not None else []
    for tier, num_blocks in (*tiers, ("P2P", None)):
        reached = end if num_blocks is None else max(begin, min(end, num_blocks * block_size))
        if reached > begin:
            counts[tier] = reached - begin
        begin = reached
    return counts


def hits_by_source(tracked: Tracked | None, block_size: int, num_tokens: int) -> dict[Any, int]:
    """Return the counts of `tokens_by_tier` under vLLM's names; empty where vLLM has none."""
    if CacheHitSource is None or tracked is None or num_tokens <= 0:
        return {}
    return {CacheHitSource[tier]: count for tier, count in tokens_by_tier(tracked, block_size, num_tokens).items()}

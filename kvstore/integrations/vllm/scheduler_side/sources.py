"""Say from which tiers a request's loaded tokens come, for vLLM's counts of cache hits."""

from __future__ import annotations

from typing import Any

from kvstore.integrations.vllm.scheduler_side.tracked import Tracked

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # Older releases count no hits by tier, and never ask.
    CacheHitSource = None


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

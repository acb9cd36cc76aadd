"""Make an eviction policy from its name."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.bounds import clip
from kvstore.errors import ConfigError
from kvstore.pool.eviction.learned import LearnedReuse, ghosts_for
from kvstore.pool.eviction.lru import LeastRecentlyUsed
from kvstore.pool.eviction.policy import EvictionPolicy
from kvstore.runtime import clock


def make_policy(
    name: str, num_slots: int, now_s: Callable[[], float] = clock.now_s, *, most_blocks: int | None = None
) -> EvictionPolicy:
    """Return the policy of one pool.

    Args:
        name: one of `kvstore.config.EVICTION_POLICIES`: "learned" or "lru".
        num_slots: of the pool.
        now_s: the clock by which the ages of blocks count, in seconds; LRU needs none.
        most_blocks: how many of these slots have blocks that this policy orders; all when None.

    Raises:
        ConfigError: there is no such policy.
    """
    if name == "learned":
        return LearnedReuse(num_slots, now_s, num_ghosts=ghosts_for(num_slots if most_blocks is None else most_blocks))
    if name == "lru":
        return LeastRecentlyUsed(num_slots)
    raise ConfigError(f"eviction: wanted 'learned' or 'lru', got {clip(name)}")

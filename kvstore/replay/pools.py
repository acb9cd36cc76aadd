"""Make the pool that a policy is replayed with."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.pool.pool import Pool

#: Policies of the real pool, in the order of the table.
POOL_POLICIES = ("default", "lru")


def make_pool(policy_name: str, num_blocks: int, now_s: Callable[[], float]) -> Pool:
    """Return an empty pool.

    Args:
        policy_name: one of `POOL_POLICIES`.
        num_blocks: its capacity.
        now_s: the clock of the trace, for policies that look at one. LRU does not, and it is the store's default.
    """
    assert policy_name in POOL_POLICIES, policy_name
    del now_s
    return Pool(num_blocks)

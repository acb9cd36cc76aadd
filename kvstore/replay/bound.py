"""Say what no policy can exceed: the prefix hits of a cache that knows the future.

Belady's rule for prefixes. A cache of C blocks keeps, after each request, the C blocks that are used again soonest; a
new block that is used later than all of those is not stored. A block is never used later than what is built on it. So
the block whose next use is the farthest, and of several the deepest, has nothing built on it in the cache: it is always
a leaf, and the cache keeps whole prefixes without looking for them.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence

from kvstore.replay.traces import Outcome, Request

#: Bits of a key below those of the next use: the depth of the block.
_DEPTH_BITS = 32


def next_uses(requests: Sequence[Request]) -> list[array[int]]:
    """Return the index of the next request that names it, for each block of each request; their number if none does."""
    never = len(requests)
    following: dict[int, int] = {}
    found = []
    for index in range(never - 1, -1, -1):
        blocks = requests[index].blocks
        found.append(array("q", [following.get(block, never) for block in blocks]))
        following.update(dict.fromkeys(blocks, index))
    found.reverse()
    return found


def replay_bound(requests: Sequence[Request], num_blocks: int, tick: Callable[[], None]) -> Outcome:
    """Return what a cache of `num_blocks` blocks that knows the future hits; `tick` is called after each request."""
    never = len(requests) << _DEPTH_BITS
    #: Of each block in the cache: its next use, and its depth. The heap has these and older ones, the largest first.
    keys: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    hits, num_evictions = array("q"), 0
    for request, uses in zip(requests, next_uses(requests), strict=True):
        num_hits, is_prefix = 0, True
        for depth, (block, use) in enumerate(zip(request.blocks, uses, strict=True)):
            key = (use << _DEPTH_BITS) + depth
            is_prefix = is_prefix and block in keys
            if is_prefix:
                num_hits += 1
            elif key >= never:
                break
            elif len(keys) >= num_blocks:
                while keys.get(heap[0][1]) != -heap[0][0]:
                    heapq.heappop(heap)
                if -heap[0][0] < key:
                    break
                del keys[heapq.heappop(heap)[1]]
                num_evictions += 1
            keys[block] = key
            heapq.heappush(heap, (-key, block))
        hits.append(num_hits)
        tick()
    return Outcome(hits=hits, num_evictions=num_evictions)

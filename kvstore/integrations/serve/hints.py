"""Which replica was sent which blocks: a router's own memory, for what only the engines' caches have."""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Iterable

from kvstore.blocks.hashing import BlockHashes


class RoutedHints:
    """Remember the blocks that each replica was sent, as its cache does: what was used last goes last. Not thread-safe.

    Chains are kept leaf before root: what falls out first is the oldest, and of one prompt its end. A hint is never
    more than a guess; a wrong one costs time.

    Args:
        max_hints: (block, replica) pairs that are kept.
        ttl_s: after so long a replica is not expected to have a block any more.
    """

    def __init__(self, max_hints: int, ttl_s: float) -> None:
        self._max_hints, self._ttl_s = max_hints, ttl_s
        #: For each replica its blocks with the time of their last use, the oldest first.
        self._blocks: dict[str, OrderedDict[bytes, float]] = {}
        self._num_hints = 0
        #: Blocks that one replica's cache holds; None where that is not known.
        self.limit_blocks: int | None = None

    def __len__(self) -> int:
        return self._num_hints

    def note(self, chain: BlockHashes, replica: str, now_s: float) -> None:
        """Note that a replica was sent the blocks of a chain."""
        times = self._blocks.setdefault(replica, OrderedDict())
        for block in reversed(chain.hashes()):  # The root last, so that it is forgotten last.
            self._num_hints += block not in times
            times[block] = now_s
            times.move_to_end(block)
        while self.limit_blocks is not None and len(times) > self.limit_blocks:
            self._drop_oldest(times)
        while self._num_hints > self._max_hints:
            self._drop_oldest(max(self._blocks.values(), key=len))

    def prefixes(self, chain: BlockHashes, replicas: Iterable[str], now_s: float) -> dict[str, int]:
        """Return how many leading blocks each of some replicas may have; those with none are left out."""
        blocks, found = chain.hashes(), dict[str, int]()
        for replica in replicas:
            times = self._blocks.get(replica)
            if times and (count := self._prefix(blocks, times, now_s - self._ttl_s)):
                found[replica] = count
        return found

    def pressures(self, replicas: Iterable[str], now_s: float) -> dict[str, float]:
        """Return what a new block would push out at each of some replicas, from 0 to 1: of little to of much use.

        Half of it is how many blocks it was sent, beside the replicas that were sent most and least. The other half is
        how lately it used the block that has to go, beside the replica whose block rested longest; 0 with free places.
        """
        wanted = list(replicas)
        sizes, rests = dict[str, int](), dict[str, float]()
        for replica in wanted:
            times = self._blocks.get(replica, OrderedDict())
            self._drop_stale(times, now_s)
            sizes[replica] = len(times)
            is_full = self.limit_blocks is not None and len(times) >= self.limit_blocks
            rests[replica] = now_s - next(iter(times.values())) if is_full and times else math.inf
        most, least = max(sizes.values(), default=0) or 1, min(sizes.values(), default=0)
        longest = max(rests.values(), default=0.0) or 1.0
        return {
            replica: ((sizes[replica] - least) / most + _share_above(rests[replica], longest)) / 2 for replica in wanted
        }

    def forget(self, replica: str) -> None:
        """Forget all hints of a replica that ended."""
        self._num_hints -= len(self._blocks.pop(replica, ()))

    def clear(self) -> None:
        """Forget everything; chains of another namespace follow."""
        self._blocks.clear()
        self._num_hints = 0

    def _prefix(self, blocks: list[bytes], times: OrderedDict[bytes, float], oldest_s: float) -> int:
        # A block was never used later than the block before it, so the known ones are a prefix.
        never = -math.inf
        return bisect.bisect_left(blocks, True, key=lambda block: times.get(block, never) < oldest_s)

    def _drop_stale(self, times: OrderedDict[bytes, float], now_s: float) -> None:
        while times and now_s - next(iter(times.values())) > self._ttl_s:
            self._drop_oldest(times)

    def _drop_oldest(self, times: OrderedDict[bytes, float]) -> None:
        times.popitem(last=False)
        self._num_hints -= 1


def _share_above(rest_s: float, longest_s: float) -> float:
    if math.isinf(rest_s):
        return 0.0
    return 1.0 if math.isinf(longest_s) else 1.0 - rest_s / longest_s

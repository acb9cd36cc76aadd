"""Which replica was sent which blocks: a router's own memory, for what only the engines' caches have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvstore.blocks.hashing import BlockHashes


class RoutedHints:
    """Remember, for each block of a prompt, when each replica was last sent it. Not thread-safe.

    Chains are kept leaf before root: what falls out first is the oldest, and of one prompt its end. A hint is never
    more than a guess; a wrong one costs time.

    Args:
        max_hints: (block, replica) pairs that are kept.
        ttl_s: after so long a replica is not expected to have a block any more.
    """

    def __init__(self, max_hints: int, ttl_s: float) -> None:
        self._max_hints, self._ttl_s = max_hints, ttl_s
        self._blocks: OrderedDict[bytes, dict[str, float]] = OrderedDict()
        self._num_hints = 0

    def __len__(self) -> int:
        return self._num_hints

    def note(self, chain: BlockHashes, replica: str, now_s: float) -> None:
        """Note that a replica was sent the blocks of a chain."""
        for block in reversed(chain.hashes()):  # The root last, so that it is forgotten last.
            times = self._blocks.setdefault(block, {})
            self._num_hints += replica not in times
            times[replica] = now_s
            self._blocks.move_to_end(block)
        while self._num_hints > self._max_hints:
            _, times = self._blocks.popitem(last=False)
            self._num_hints -= len(times)

    def prefixes(self, chain: BlockHashes, replicas: Iterable[str], now_s: float) -> dict[str, int]:
        """Return how many leading blocks each of some replicas may have; those with none are left out."""
        found = dict[str, int]()
        alive = set(replicas)
        for count, block in enumerate(chain.hashes(), 1):
            times = self._blocks.get(block, {})
            alive = {each for each in alive if now_s - times.get(each, float("-inf")) <= self._ttl_s}
            if not alive:
                break
            found |= dict.fromkeys(alive, count)
        return found

    def forget(self, replica: str) -> None:
        """Forget all hints of a replica that ended."""
        for block in [block for block, times in self._blocks.items() if replica in times]:
            times = self._blocks[block]
            del times[replica]
            self._num_hints -= 1
            if not times:
                del self._blocks[block]

    def clear(self) -> None:
        """Forget everything; chains of another namespace follow."""
        self._blocks.clear()
        self._num_hints = 0

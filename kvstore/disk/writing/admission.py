"""Decide which blocks are worth a write, and how many are written.

Each block that is written wears the disk, and most blocks are never asked for again. With `disk_min_uses` a block is
written when it was stored or used for the n-th time (the idea of Marconi's admission, and of RocksDB's and CacheLib's
reuse filters). A budget bounds the bytes of a day in any case. No locking here: callers hold theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

_KEY_BYTES = 8
_DAY_S = 86400.0
#: Of a day's budget: so much may be written at once after a quiet time.
_BURST = 1 / 24


@dataclass(slots=True)
class WriterCounts:
    """Blocks that were written, left out by reason, and the bytes."""

    num_written: int = 0
    num_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class SeenFilter:
    """Counts the uses of the last blocks that were stored or used, by the first bytes of their hashes.

    Args:
        most: number of blocks to remember; up to twice as many are.
        enough: uses of a block above this number are not counted.
    """

    def __init__(self, most: int, enough: int) -> None:
        self._most, self._enough = most, enough
        # Of each block: how often it was used, and when last. Blocks of one call share their pair.
        self._new: dict[bytes, tuple[int, float]] = {}
        self._old: dict[bytes, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def saw(self, hashes: Iterable[bytes], now_s: float, gap_s: float) -> list[tuple[int, bool]]:
        """Note a use of blocks; return how often each was used by now, and whether this was another use.

        Args:
            hashes: of the blocks.
            now_s: the time now.
            gap_s: a block whose last use is less than this ago is still in that use.
        """
        counts, pairs = list[tuple[int, bool]](), dict[int, tuple[int, float]]()
        for block_hash in hashes:
            key = block_hash[:_KEY_BYTES]
            before = self._find(key)
            count, used_s = before
            is_new = not count or now_s - used_s >= gap_s
            if is_new:
                count = min(count + 1, self._enough + 1)
                before = pairs.setdefault(count, (count, now_s))
            self._new[key] = before
            counts.append((count, is_new))
            # Two tables in turns forget the oldest ones without an order for each.
            if len(self._new) >= self._most:
                self._old, self._new = self._new, {}
        return counts

    def num_uses(self, block_hash: bytes) -> int:
        """Return how often a block was used; 0 if it is not remembered."""
        return self._find(block_hash[:_KEY_BYTES])[0]

    def _find(self, key: bytes) -> tuple[int, float]:
        return self._new.get(key) or self._old.get(key) or (0, 0.0)


class WriteBudget:
    """Bytes that may be written to the disk: so many a day, an hour's worth of them at once.

    Args:
        bytes_per_day: the budget; 0 for no bound.
        now_s: the time now.
    """

    def __init__(self, bytes_per_day: int, now_s: float) -> None:
        self._per_day, self._at_s = bytes_per_day, now_s
        self._left = bytes_per_day * _BURST
        #: More is never granted at once; None for no bound.
        self.most_bytes = int(self._left) if bytes_per_day else None

    def take(self, num_bytes: int, now_s: float) -> bool:
        """Take bytes from the budget; return False, and take none, if it has too few."""
        if not self._per_day:
            return True
        earned = (now_s - self._at_s) * self._per_day / _DAY_S
        self._left, self._at_s = min(self._left + earned, self._per_day * _BURST), now_s
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True

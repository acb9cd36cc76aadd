"""Decide which blocks are worth a write to the disk. No locking here: the writer holds its lock.

Each block that is written wears the disk, and most blocks are never asked for again. With `second_use` a block is
written when it is stored or used for the second time (the idea of Marconi's admission, and of RocksDB's and CacheLib's
reuse filters). A budget bounds the bytes of a day in any case.
"""

from __future__ import annotations

_KEY_BYTES = 8
_DAY_S = 86400.0
#: Of a day's budget: so much may be written at once after a quiet time.
_BURST = 1 / 24


class SeenFilter:
    """Remembers the last blocks that were stored, by the first bytes of their hashes.

    Args:
        most: number of blocks to remember.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._new: set[bytes] = set()
        self._old: set[bytes] = set()

    def saw(self, block_hash: bytes) -> bool:
        """Note a block; return whether it was noted before."""
        key = block_hash[:_KEY_BYTES]
        was_seen = key in self._new or key in self._old
        self._new.add(key)
        # Two sets in turns forget the oldest ones without an order for each.
        if len(self._new) >= self._most:
            self._old, self._new = self._new, set()
        return was_seen


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

"""Keep how often and when each block was used last, also of evicted blocks. No locking here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.pool.eviction.ghosts import NONE, GhostTable, Rows, keys_of
from kvstore.pool.slot_lists import SlotList

_NEVER_S = float("-inf")


class BlockUses:
    """One row per block, in its slot or a ghost. A block that is evicted, or comes back, takes its row along.

    `uses` counts the uses, up to the number of classes; `times_s` has the time of the last one, and `number` its
    number, 0 if the block is not known.
    """

    def __init__(self, num_slots: int, num_ghosts: int) -> None:
        self.ghosts = GhostTable(num_ghosts)
        num_rows = num_slots + self.ghosts.num_places
        self._row_of = np.arange(num_slots, dtype=np.int32)
        self.times_s = np.full(num_rows, _NEVER_S)
        # Filled, not just reserved: else later calls would pay for the system to bring the memory.
        self.uses = np.full(num_rows, 1, np.uint8)
        self.number = np.full(num_rows, 1, np.uint32)
        self.uses[:] = 0
        self.number[:] = 0
        self._free = np.arange(num_slots, num_rows, dtype=np.int32)
        self._num_free = len(self._free)

    def rows_of(self, slots: SlotList) -> Rows:
        """Return the rows of slots."""
        # A copy, because callers keep it. A slice alone would be a view of what changes with the next eviction.
        return self._row_of[slots.index].copy()

    def rows_at(self, slots: npt.NDArray[np.intp]) -> Rows:
        """Return the rows of slots that are given as an index."""
        return self._row_of[slots]

    def claimed(self, slots: SlotList, hashes: Sequence[bytes]) -> Rows:
        """Give slots, which have no block, the rows of these blocks; return them. A ghost keeps what is known of it."""
        rows = self.rows_of(slots)
        ghosts = self.ghosts.take(keys_of(hashes))
        is_back = ghosts != NONE
        if is_back.any():
            self._give_back(rows[is_back])
            rows = np.where(is_back, ghosts, rows)
            self._row_of[slots.index] = rows
        return rows

    def evicted(self, slots: SlotList, hashes: Sequence[bytes]) -> None:
        """Make ghosts of the blocks of slots; the slots get rows of unknown blocks."""
        displaced = self.ghosts.put(keys_of(hashes), self.rows_of(slots))
        self._clear(displaced)
        self._give_back(displaced)
        self._num_free -= len(slots)
        self._row_of[slots.index] = self._free[self._num_free : self._num_free + len(slots)]

    def forget(self, slots: SlotList) -> None:
        """Forget the blocks of slots."""
        self._clear(self.rows_of(slots))

    def _clear(self, rows: Rows) -> None:
        self.uses[rows], self.number[rows], self.times_s[rows] = 0, 0, _NEVER_S

    def _give_back(self, rows: Rows) -> None:
        self._free[self._num_free : self._num_free + len(rows)] = rows
        self._num_free += len(rows)

    def check(self) -> None:
        """Assert that each row is of one slot, of one ghost, or free; for tests."""
        free = self._free[: self._num_free]
        rows = np.concatenate([self._row_of, self.ghosts.rows(), free])
        assert len(rows) == len(self.uses), "rows are lost"
        # Counted: `np.unique` takes ten times as long, and tests check after each step.
        assert (np.bincount(rows, minlength=len(rows)) == 1).all(), "a row is of two blocks"
        assert not self.number[free].any(), "a free row is of a block"
        assert ((self.uses > 0) == (self.number > 0)).all(), "uses without a number"

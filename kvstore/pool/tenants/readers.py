"""Count the readers of slots, for all slots of a chain at once. No locking here: the pool holds its lock."""

from __future__ import annotations

from array import array

import numpy as np

from kvstore.blocks.indexes import ints_in
from kvstore.pool.slot_lists import SlotList

_ONE = np.int32(1)


class ReaderCounts:
    """How many readers each slot has, and how many slots have any."""

    def __init__(self, num_slots: int) -> None:
        self.ref_count = array("i", bytes(4 * num_slots))
        # The same memory, for all slots of a chain at once.
        self.ref_counts = np.frombuffer(self.ref_count, np.int32)
        self.num_pinned = 0

    def pin(self, slots: SlotList) -> None:
        """Add a reader to each slot, two if it is named twice; callers must touch the slots, too."""
        num_new = self._num_idle(slots)
        self._add_readers(slots, _ONE)
        self.num_pinned += num_new

    def unpin(self, slots: SlotList) -> None:
        """Remove a reader from each slot, as given to `pin`."""
        self._add_readers(slots, -_ONE)
        self.num_pinned -= self._num_idle(slots)

    def _add_readers(self, slots: SlotList, number: np.int32) -> None:
        if isinstance(slots.index, slice):
            refs = self.ref_counts[slots.index]
            refs += number
        else:
            np.add.at(self.ref_counts, slots.index, number)

    def _num_idle(self, slots: SlotList) -> int:
        refs = self.ref_counts[slots.index]
        if slots.is_distinct:
            return len(refs) - int(np.count_nonzero(refs))
        return len(np.unique(ints_in(slots.packed)[refs == 0]))

"""Evict the least recently touched blocks first. No locking here: the pool holds its lock."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.blocks.indexes import ints_in
from kvstore.pool.eviction.policy import History
from kvstore.pool.eviction.touch_log import TouchLog
from kvstore.pool.slot_lists import SlotList


class LeastRecentlyUsed:
    """The slots of a pool by their last touch; see `EvictionPolicy`."""

    def __init__(self, num_slots: int) -> None:
        #: Last touch of each slot; a slot with 0 is not in the order.
        self.stamp = array("q", bytes(8 * num_slots))
        # The same memory, for all slots of a chain at once.
        self._stamps = np.frombuffer(self.stamp, np.int64)
        self._now = 0
        self.log = TouchLog(self.stamp)

    def claimed(self, slots: SlotList, hashes: Sequence[bytes]) -> None:
        """Do nothing: the touch that follows is enough."""

    def touched(self, slots: SlotList, *, is_use: bool) -> int:
        """Make the slots of a chain the most recent; its root is the last of them to be evicted."""
        self._now = now = self._now + 1
        self._stamps[slots.index] = now
        self.log.add(now, ints_in(slots.packed))
        return now

    def released(self, slots: Iterable[int], stamp: int) -> None:
        """Let slots come up again whose place was passed; a slot with a later touch has another place."""
        if stamp <= self.log.passed:
            for slot in slots:
                self.log.put_back(slot)

    #: Written blocks come up in the same way as released ones.
    stored = released

    def evicted(self, slots: SlotList, hashes: Sequence[bytes]) -> None:
        """Do nothing: `freed` follows."""

    def freed(self, slots: SlotList) -> None:
        """Take slots out of the order."""
        self._stamps[slots.index] = 0

    def victims(self) -> Iterator[int]:
        """Take slots out of the order, oldest touch first; slots that are not yielded stay in it."""
        log = self.log
        while True:
            touched, slot = log.oldest()
            if not touched:
                return
            log.pop()
            yield slot

    def history(self, slots: npt.NDArray[np.intp]) -> History:
        """Return that nothing but the order of touches is known."""
        return np.zeros(len(slots), np.uint8), np.full(len(slots), -np.inf), np.full(len(slots), -np.inf)

    def recall_uses(self, slots: SlotList, uses: npt.NDArray[np.uint8]) -> None:
        """Do nothing: only the order of touches counts."""

    def recall_times(
        self, slots: SlotList, used_s: npt.NDArray[np.float64], touched_s: npt.NDArray[np.float64]
    ) -> None:
        """Do nothing: only the order of touches counts."""

    def check(self, evictable: set[int]) -> None:
        """Assert that every evictable slot has a place, and that the log is consistent."""
        placed = self.log.check()
        assert evictable <= placed, f"slots {sorted(evictable - placed)} could be evicted but never come up"

"""Evict the least recently touched blocks first. No locking here: the pool holds its lock."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from kvstore.blocks.indexes import ints_in
from kvstore.pool.eviction.soft_pins import SoftPins
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
        self._soft = SoftPins()

    @property
    def soft_pins(self) -> Mapping[int, int]:
        """Slots with a soft pin, and the number of soft pins of each."""
        return self._soft.counts

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

    def soft_pinned(self, slots: Iterable[int]) -> None:
        """Add a soft pin to each slot."""
        self._soft.add(slots)

    def soft_unpinned(self, slots: Iterable[int]) -> None:
        """Remove a soft pin from each slot that has one; after its last one, a slot has its old place again."""
        self.released(self._soft.remove(slots), 0)

    def evicted(self, slots: SlotList, hashes: Sequence[bytes]) -> None:
        """Do nothing: `freed` follows."""

    def freed(self, slots: SlotList) -> None:
        """Take slots out of the order."""
        self._stamps[slots.index] = 0
        self._soft.forget(slots)

    def victims(self) -> Iterator[int]:
        """Take slots out of the order, oldest touch first; slots that are not yielded stay in it."""
        log, soft_pins, held_back = self.log, self._soft.counts, self._soft.held_back
        while True:
            touched, slot = log.oldest()
            if touched:
                log.pop()
                if slot in soft_pins:
                    self._soft.hold_back(slot, touched)
                else:
                    yield slot
            elif held_back:
                slot, touched = held_back.popitem(last=False)
                if self.stamp[slot] == touched:
                    yield slot
            else:
                return

    def last_touch(self, slot: int) -> int:
        """Return the stamp of a slot."""
        return self.stamp[slot]

    def check(self, evictable: set[int]) -> None:
        """Assert that every evictable slot has a place, and that the log is consistent."""
        placed = self.log.check() | self._soft.placed(self.stamp)
        self._soft.check()
        assert evictable <= placed, f"slots {sorted(evictable - placed)} could be evicted but never come up"

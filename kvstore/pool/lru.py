"""Evict the least recently touched blocks first. No locking here: the pool holds its lock.

Every lease touches its slots, so a touch is cheap: one stamp per slot, and one entry in a log of touched chains. An
entry counts for a slot only while the slot's stamp is the entry's. Eviction reads the log from its old end, each
chain leaf first.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator

import numpy as np

from kvstore.blocks.indexes import ints_in
from kvstore.pool.slot_lists import SlotList


class LeastRecentlyUsed:
    """The slots of a pool by their last touch; see `EvictionPolicy`."""

    def __init__(self, num_slots: int) -> None:
        #: Last touch of each slot; a slot with 0 is not in the order.
        self.stamp = array("q", bytes(8 * num_slots))
        # The same memory, for all slots of a chain at once.
        self._stamps = np.frombuffer(self.stamp, np.int64)
        self.soft_pins: Counter[int] = Counter()
        # Soft-pinned slots that came up, with their stamp; evicted when no other slot is left.
        self._held_back: OrderedDict[int, int] = OrderedDict()
        #: Entries of the log up to this stamp were read.
        self.passed = 0
        self._now = 0
        self.log: deque[tuple[int, SlotList]] = deque()
        # Entries that a sweep has processed, older than all of `_log`; see `_sweep`.
        self._swept: deque[tuple[int, SlotList]] = deque()
        self.num_logged = 0
        self._current: list[int] = []
        self._late: list[tuple[int, int]] = []

    def touched(self, slots: SlotList) -> int:
        """Make the slots of a chain the most recent; its root is the last of them to be evicted."""
        self._now = now = self._now + 1
        self._stamps[slots.index] = now
        self.log.append((now, slots))
        self.num_logged += len(slots)
        if self.num_logged > 2 * len(self.stamp) + 64:
            self._sweep(2 * len(slots) + 64)
        return now

    def released(self, slots: Iterable[int], stamp: int) -> None:
        """Let slots come up again whose place was passed; a slot with a later touch has another place."""
        passed = self.passed
        if stamp > passed:
            return
        stamps, current = self.stamp, self._current
        for slot in slots:
            # The last of `_current` comes up next anyway, as always while a chain is evicted from leaf to root.
            if 0 < stamps[slot] <= passed and not (current and current[-1] == slot):
                heapq.heappush(self._late, (stamps[slot], slot))

    #: Written blocks come up in the same way as released ones.
    stored = released

    def soft_pinned(self, slots: Iterable[int]) -> None:
        """Add a soft pin to each slot."""
        self.soft_pins.update(slots)

    def soft_unpinned(self, slots: Iterable[int]) -> None:
        """Remove a soft pin from each slot that has one; after its last one, a slot has its old place again."""
        soft_pins = self.soft_pins
        for slot in slots:
            if soft_pins.get(slot, 0) > 1:
                soft_pins[slot] -= 1
            elif soft_pins.pop(slot, 0) and self._held_back.pop(slot, 0):
                self.released((slot,), 0)

    def freed(self, slots: SlotList) -> None:
        """Take slots out of the order."""
        self._stamps[slots.index] = 0
        if self.soft_pins:
            for slot in slots:
                self.soft_pins.pop(slot, 0)
                self._held_back.pop(slot, 0)

    def victims(self) -> Iterator[int]:
        """Take slots out of the order, oldest touch first; slots that are not yielded stay in it."""
        stamp, late, soft_pins, held_back = self.stamp, self._late, self.soft_pins, self._held_back
        current, passed = self._current, self.passed
        while True:
            if late:
                touched, slot = heapq.heappop(late)
            elif current:
                slot, touched = current.pop(), passed
            elif self._swept or self.log:
                self.passed, slots = (self._swept or self.log).popleft()
                self.num_logged -= len(slots)
                self._current = list(slots)
                current, passed = self._current, self.passed
                continue
            elif held_back:
                slot, touched = held_back.popitem(last=False)
                if stamp[slot] == touched:
                    yield slot
                continue
            else:
                return
            if stamp[slot] != touched:
                continue
            if slot in soft_pins:
                held_back[slot] = touched
                held_back.move_to_end(slot)
            else:
                yield slot

    def last_touch(self, slot: int) -> int:
        """Return the stamp of a slot."""
        return self.stamp[slot]

    def _sweep(self, num_entries: int) -> None:
        # A little at each touch, so that no caller pays for all of it: twice as many slots as the touch added.
        while num_entries > 0 and self.log:
            touched, slots = self.log.popleft()
            num_entries -= len(slots)
            is_live = self._stamps[slots.index] == touched
            num_live = int(np.count_nonzero(is_live))
            self.num_logged -= len(slots) - num_live
            if num_live:
                live = slots if num_live == len(slots) else SlotList.of(ints_in(slots.packed)[is_live].tolist())
                self._swept.append((touched, live))
        if not self.log:
            self.log, self._swept = self._swept, self.log

    def check(self, evictable: set[int]) -> None:
        """Assert that every evictable slot has a place, and that the log is consistent."""
        placed = {slot for touched, slot in self._late if self.stamp[slot] == touched}
        placed |= {slot for slot in self._current if self.stamp[slot] == self.passed}
        placed |= {slot for slot, touched in self._held_back.items() if self.stamp[slot] == touched}
        batches = [*self._swept, *self.log]
        for touched, slots in batches:
            placed |= {slot for slot in slots if self.stamp[slot] == touched}
        assert evictable <= placed, f"slots {sorted(evictable - placed)} could be evicted but never come up"
        assert self._held_back.keys() <= self.soft_pins.keys(), "held back without a soft pin"
        assert min(self.soft_pins.values(), default=1) > 0, "soft pins of none"
        stamps = [touched for touched, _ in batches]
        assert stamps == sorted(stamps), "the log is out of order"
        assert all(touched > self.passed for touched in stamps), "the log goes back"
        assert self.num_logged == sum(len(slots) for _, slots in batches), "entries of the log"

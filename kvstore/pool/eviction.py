"""In which order idle blocks leave a pool: least recently touched first. No locking here.

Touching is what every lease does, so it costs one stamp per slot and one entry per chain: a log of touched
chains, in which a slot counts only where its stamp is still that of the entry. Whoever evicts reads the log
from its old end, each chain leaf first.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstore.pool.slot_lists import SlotList


class EvictionOrder:
    """The slots of a pool by their last touch.

    A slot that comes up while it cannot go (it is read, written, or something hangs on it) loses its place;
    who makes it evictable again says so with `offer`.

    Args:
        num_slots: slots are numbered from 0.
    """

    def __init__(self, num_slots: int) -> None:
        #: When each slot was touched last; 0 takes it out of the order.
        self.stamp = array("q", bytes(8 * num_slots))
        # The same memory, for all slots of a chain at once.
        self._stamps = np.frombuffer(self.stamp, np.int64)
        #: Entries of the log up to this stamp were read.
        self.passed = 0
        self._now = 0
        self._log: deque[tuple[int, SlotList]] = deque()
        # What a sweep has been through, older than all of `_log`; see `_sweep`.
        self._swept: deque[tuple[int, SlotList]] = deque()
        self._num_logged = 0
        self._current: list[int] = []
        self._late: list[tuple[int, int]] = []

    def touch(self, slots: SlotList) -> int:
        """Make the slots of a chain the most recent, its root the last of them to go.

        Args:
            slots: in chain order.

        Returns:
            The stamp of this touch. While it is above `passed`, all its slots still have their place.
        """
        self._now = now = self._now + 1
        self._stamps[slots.index] = now
        self._log.append((now, slots))
        self._num_logged += len(slots)
        if self._num_logged > 2 * len(self.stamp) + 64:
            self._sweep(2 * len(slots) + 64)
        return now

    def offer(self, slot: int) -> None:
        """Say that a slot may have become evictable; it comes up again if its place was passed."""
        # The last of `_current` comes up next by itself: so it is while a chain goes from leaf to root.
        stamp, current = self.stamp[slot], self._current
        if 0 < stamp <= self.passed and not (current and current[-1] == slot):
            heapq.heappush(self._late, (stamp, slot))

    def forget(self, slots: npt.NDArray[np.intp]) -> None:
        """Take slots out of the order."""
        self._stamps[slots] = 0

    def oldest(self) -> Iterator[int]:
        """Take slots out of the order, oldest touch first; what is not asked for stays in it."""
        stamp, late = self.stamp, self._late
        while True:
            current, touched = self._current, self.passed
            while current and not late:
                slot = current.pop()
                if stamp[slot] == touched:
                    yield slot
            if late:
                touched, slot = heapq.heappop(late)
                if stamp[slot] == touched:
                    yield slot
            elif self._swept or self._log:
                self.passed, slots = (self._swept or self._log).popleft()
                self._num_logged -= len(slots)
                self._current = slots.tolist()
            else:
                return

    def _sweep(self, num_entries: int) -> None:
        # A little at each touch, so that no caller pays for all: twice as much is looked at as came in.
        while num_entries > 0 and self._log:
            touched, slots = self._log.popleft()
            num_entries -= len(slots)
            is_live = self._stamps[slots.index] == touched
            num_live = int(np.count_nonzero(is_live))
            self._num_logged -= len(slots) - num_live
            if num_live < len(slots):
                slots = SlotList.of(np.array(slots.packed)[is_live].tolist()) if num_live else slots
            if num_live:
                self._swept.append((touched, slots))
        if not self._log:
            self._log, self._swept = self._swept, self._log

    def check(self, evictable: set[int]) -> None:
        """Assert that every slot that could be evicted has a place, and that the log is bounded."""
        placed = {slot for touched, slot in self._late if self.stamp[slot] == touched}
        placed |= {slot for slot in self._current if self.stamp[slot] == self.passed}
        batches = [*self._swept, *self._log]
        for touched, slots in batches:
            placed |= {slot for slot in slots.tolist() if self.stamp[slot] == touched}
        assert evictable <= placed, f"slots {sorted(evictable - placed)} could be evicted but never come up"
        stamps = [touched for touched, _ in batches]
        assert stamps == sorted(stamps), "the log is out of order"
        assert all(touched > self.passed for touched in stamps), "the log goes back"
        assert self._num_logged == sum(len(slots) for _, slots in batches), "entries of the log"

"""Keep slots in the order of their last touch. No locking here: the pool holds its lock.

Every lease touches its slots, so a touch is cheap: one stamp per slot, and one entry in a log of touched chains. An
entry counts for a slot only while the slot's stamp is the entry's. Eviction reads the log from its old end, each
chain leaf first.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque

import numpy as np
import numpy.typing as npt

from kvstore.blocks.indexes import IndexArray

#: From so many slots on, those of an entry that were touched since are left out all at once.
_FEW = 32


class TouchLog:
    """Slots by their last touch. Several logs may share one column of stamps: a slot is in the one that has its stamp.

    Args:
        stamp: last touch of each slot; a slot with 0 is in no log. The caller writes it.
    """

    def __init__(self, stamp: array[int]) -> None:
        self._stamp = stamp
        # The same memory, for all slots of a chain at once.
        self._stamps: npt.NDArray[np.int64] = np.frombuffer(stamp, np.int64)
        self._most_logged = 2 * len(stamp) + 64
        #: Entries of the log up to this stamp were read.
        self.passed = 0
        self._log: deque[tuple[int, IndexArray]] = deque()
        # Entries that a sweep has processed, older than all of `_log`; see `_sweep`.
        self._swept: deque[tuple[int, IndexArray]] = deque()
        self.num_logged = 0
        # What is left of the entry that is being read, the next one last.
        self._current: list[int] = []
        self._late: list[tuple[int, int]] = []

    def add(self, stamp: int, slots: IndexArray) -> None:
        """Make slots of a chain, which have this stamp already, the most recent; the first of them goes last."""
        self._log.append((stamp, slots))
        self.num_logged += len(slots)
        if self.num_logged > self._most_logged:
            self._sweep(2 * len(slots) + 64)

    def put_back(self, slot: int) -> bool:
        """Let a slot come up again if its place was passed; return whether it was."""
        # The last of `_current` comes up next anyway, as always while a chain is evicted from leaf to root.
        if not 0 < self._stamp[slot] <= self.passed or (self._current and self._current[-1] == slot):
            return False
        heapq.heappush(self._late, (self._stamp[slot], slot))
        if len(self._late) > self._most_logged:
            # Those at the top may stay for long, and below them those that have another place by now.
            self._late = [(touched, slot) for touched, slot in set(self._late) if self._stamp[slot] == touched]
            heapq.heapify(self._late)
        return True

    def oldest(self) -> tuple[int, int]:
        """Return (stamp, slot) of the slot that `pop` takes next; (0, -1) when there is none."""
        stamp, late = self._stamp, self._late
        while late and stamp[late[0][1]] != late[0][0]:
            heapq.heappop(late)
        if late:
            return late[0]  # No younger than what is in `_current`, and older than the log.
        while True:
            current, passed = self._current, self.passed
            while current:
                if stamp[current[-1]] == passed:
                    return passed, current[-1]
                current.pop()
            if not (self._swept or self._log):
                return 0, -1
            self.passed, slots = (self._swept or self._log).popleft()
            self.num_logged -= len(slots)
            if len(slots) > _FEW:
                slots = slots[self._stamps[slots] == self.passed]
            self._current = slots.tolist()

    def pop(self) -> None:
        """Take the slot that `oldest` has just returned out of the order."""
        if self._late:
            heapq.heappop(self._late)
        else:
            self._current.pop()

    def _sweep(self, num_entries: int) -> None:
        # A little at each touch, so that no caller pays for all of it: twice as many slots as the touch added.
        while num_entries > 0 and self._log:
            touched, slots = self._log.popleft()
            num_entries -= len(slots)
            is_live = self._stamps[slots] == touched
            num_live = int(np.count_nonzero(is_live))
            self.num_logged -= len(slots) - num_live
            if num_live:
                self._swept.append((touched, slots if num_live == len(slots) else slots[is_live]))
        if not self._log:
            self._log, self._swept = self._swept, self._log

    def check(self) -> set[int]:
        """Assert that the log is consistent; return the slots that have a place. For tests."""
        placed = {slot for touched, slot in self._late if self._stamp[slot] == touched}
        placed |= {slot for slot in self._current if self._stamp[slot] == self.passed}
        batches = [*self._swept, *self._log]
        for touched, slots in batches:
            placed |= {slot for slot in slots.tolist() if self._stamp[slot] == touched}
        stamps = [touched for touched, _ in batches]
        assert stamps == sorted(stamps), "the log is out of order"
        assert all(touched > self.passed for touched in stamps), "the log goes back"
        assert self.num_logged == sum(len(slots) for _, slots in batches), "entries of the log"
        return placed

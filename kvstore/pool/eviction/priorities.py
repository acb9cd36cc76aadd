"""Evict by priority, and within one in the order of another policy; soft pins last. No locking here.

LOW slots have a log of their own beside their place in the policy's order, and come up first, by their last touch. A
HIGH slot that comes up is held back until its time ends, or until nothing else is left; so is one with a soft pin. When
a priority ends the slot has its place in the policy's order again. Without priorities and soft pins the policy decides
alone.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.blocks.indexes import IndexArray, ints_in
from kvstore.blocks.priority import NORMAL, Priority, Retention
from kvstore.pool.eviction.policy import EvictionPolicy
from kvstore.pool.eviction.soft_pins import SoftPins
from kvstore.pool.eviction.touch_log import TouchLog
from kvstore.pool.slot_lists import SlotList

#: The most slots that one call lets come up because their time has ended; the others wait for the next call.
_MOST_AT_ONCE = 4096
# For comparisons with the column: an enumeration's members are looked up much more slowly.
_LOW, _NORMAL, _HIGH = map(int, (Priority.LOW, Priority.NORMAL, Priority.HIGH))


class PriorityOrder:
    """The slots of a pool in the order of eviction. What is not said here is as in `EvictionPolicy`.

    Args:
        policy: decides between slots of one priority; for as many slots, and for no other order.
        num_slots: of the pool.
        now_s: the clock by which priorities end, in seconds.
    """

    def __init__(self, policy: EvictionPolicy, num_slots: int, now_s: Callable[[], float]) -> None:
        self.policy, self.stamp, self._now_s = policy, policy.stamp, now_s
        self._soft = SoftPins()
        #: Slots that are not NORMAL, with those whose time has ended but that have not come up since.
        self.num_low = self.num_high = 0
        #: Priority of each slot; of one that is not NORMAL, when that ends.
        self._priority, self._until_s = array("B", [_NORMAL]) * num_slots, array("d", bytes(8 * num_slots))
        # The same memory, for all slots of a chain at once.
        self._priorities, self._untils_s = np.frombuffer(self._priority, np.uint8), np.frombuffer(self._until_s)
        self._low = TouchLog(self.stamp)
        # HIGH slots that came up, as (end, last touch, minus slot), mostly leaf before root; see `_is_held`.
        self.held: list[tuple[float, int, int]] = []
        self._most_held = 2 * num_slots + 64

    @property
    def soft_pins(self) -> Mapping[int, int]:
        """Slots with a soft pin, and the number of soft pins of each."""
        return self._soft.counts

    def terms_of(self, slots: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
        """Return the priority of slots, and when each ends; for a NORMAL one that time means nothing."""
        return self._priorities[slots], self._untils_s[slots]

    def is_low(self, slot: int) -> bool:
        """Return whether a slot's block is LOW now."""
        return self._priority[slot] == _LOW and self._until_s[slot] > self._now_s()

    def claimed(self, slots: SlotList, hashes: Sequence[bytes], retention: Retention = NORMAL) -> None:
        """Note that blocks are written to free slots, under a priority, which the `touched` that follows has, too."""
        self.policy.claimed(slots, hashes)
        if retention.priority == _LOW:
            self._give(ints_in(slots.packed), _LOW, retention.until_s)

    def touched(self, slots: SlotList, *, is_use: bool, retention: Retention = NORMAL) -> int:
        """Note that a chain was touched, and raise the priority of slots that have a lesser one."""
        stamp = self.policy.touched(slots, is_use=is_use)
        if self.num_low or retention.priority != _NORMAL:
            self._raise(ints_in(slots.packed), retention, stamp)
        return stamp

    def _raise(self, slots: IndexArray, retention: Retention, stamp: int) -> None:
        before, untils_s = self._priorities[slots], self._untils_s[slots]
        if retention.priority == _HIGH:
            # Not the end of what was LOW.
            untils_s[before != _HIGH] = retention.until_s
            self._give(slots, _HIGH, np.maximum(untils_s, retention.until_s))
            return
        is_low = before == _LOW
        if not is_low.any():
            return
        if retention.priority == _NORMAL:
            self._give(np.unique(slots[is_low]), _NORMAL)
            return
        # A LOW slot whose time has ended is NORMAL, and a save never lowers it.
        has_ended = is_low & (untils_s <= self._now_s())
        self._give(np.unique(slots[has_ended]), _NORMAL)
        low = slots[is_low & ~has_ended]
        self._untils_s[low] = np.maximum(self._untils_s[low], retention.until_s)
        self._low.add(stamp, low)

    def _give(self, slots: IndexArray, priority: int, untils_s: npt.NDArray[np.float64] | float = 0.0) -> None:
        """Set the priority of slots, each of which is named once."""
        before = self._priorities[slots]
        self.num_low += len(slots) * (priority == _LOW) - int(np.count_nonzero(before == _LOW))
        self.num_high += len(slots) * (priority == _HIGH) - int(np.count_nonzero(before == _HIGH))
        self._priorities[slots], self._untils_s[slots] = priority, untils_s

    def stored(self, slots: Iterable[int], stamp: int) -> None:
        """Note that blocks were written; `slots` can be gone through more than once."""
        self.policy.stored(slots, stamp)
        self._put_back_low(slots, stamp)

    def released(self, slots: Iterable[int], stamp: int) -> None:
        """Note that blocks lost a reader or their last child; `slots` can be gone through more than once."""
        self.policy.released(slots, stamp)
        if self.num_low:
            self._put_back_low(slots, stamp)

    def _put_back_low(self, slots: Iterable[int], stamp: int) -> None:
        if self.num_low and stamp <= self._low.passed:
            for slot in slots:
                if self._priority[slot] == _LOW:
                    self._low.put_back(slot)

    def soft_pinned(self, slots: Iterable[int]) -> None:
        """Add a soft pin to each slot; these slots are evicted last. `touched` follows in the same step."""
        self._soft.add(slots)

    def soft_unpinned(self, slots: Iterable[int]) -> None:
        """Remove a soft pin from each slot that has one; after its last one, a slot has its old place again."""
        self.released(list(self._soft.remove(slots)), 0)

    def evicted(self, slots: SlotList, hashes: Sequence[bytes]) -> None:
        """Note that blocks with these hashes were evicted; `freed` follows in the same step, with these slots."""
        self.policy.evicted(slots, hashes)

    def freed(self, slots: SlotList) -> None:
        """Forget slots, with their priorities and soft pins."""
        self.policy.freed(slots)
        self._soft.forget(slots)
        if self.num_low or self.num_high:
            self._give(ints_in(slots.packed), _NORMAL)

    def victims(self) -> Iterator[int]:
        """Yield slots in the order of eviction: LOW, NORMAL, HIGH, soft-pinned."""
        if self.num_low or self.num_high or self._soft.counts:
            return self._victims_by_priority()
        return self.policy.victims()

    def _victims_by_priority(self) -> Iterator[int]:
        now_s, soft_pins, priority = self._now_s(), self._soft.counts, self._priority
        self._put_back_ended(now_s)
        victims = self.policy.victims()
        while True:
            # Each time anew: what has just gone may have been the last child of a LOW one.
            slot = self._next_low(now_s) if self.num_low else -1
            if slot < 0:
                slot = next(victims, -1)
                if slot in soft_pins:
                    self._soft.hold_back(slot, self.stamp[slot])
                    continue
                if slot >= 0 and priority[slot] == _HIGH:
                    if self._until_s[slot] > now_s:
                        self._hold_back(slot)
                        continue
                    self._end(slot)
            if slot < 0:
                slot = self._next_held_back()
                if slot < 0:
                    return
                # What goes may let others come up, so the policy is asked again.
                victims = self.policy.victims()
            yield slot

    def _next_low(self, now_s: float) -> int:
        """Take the LOW slot that was touched first out of their log; -1 when there is none."""
        while True:
            touched, slot = self._low.oldest()
            if not touched:
                return -1
            self._low.pop()
            if self._priority[slot] == _LOW:
                if self._until_s[slot] > now_s:
                    return slot
                self._end(slot)

    def _end(self, slot: int) -> None:
        """Make a slot NORMAL whose time has ended."""
        if self._priority[slot] == _LOW:
            self.num_low -= 1
        else:
            self.num_high -= 1
        self._priority[slot] = _NORMAL

    def _hold_back(self, slot: int) -> None:
        heapq.heappush(self.held, (self._until_s[slot], self.stamp[slot], -slot))
        if len(self.held) > self._most_held:
            self.held = list({entry for entry in self.held if self._is_held(entry)})
            heapq.heapify(self.held)

    def _is_held(self, entry: tuple[float, int, int]) -> bool:
        """Return whether a slot is as it was when it was held back: any touch gave it another place."""
        until_s, touched, slot = entry[0], entry[1], -entry[2]
        return self._priority[slot] == _HIGH and self._until_s[slot] == until_s and self.stamp[slot] == touched

    def _put_back_ended(self, now_s: float) -> None:
        """Give slots their old place again whose time has ended since they were held back."""
        held, ended = self.held, list[int]()
        while held and held[0][0] <= now_s and len(ended) < _MOST_AT_ONCE:
            entry = heapq.heappop(held)
            if self._is_held(entry):
                self._end(-entry[2])
                ended.append(-entry[2])
        self.policy.released(ended, 0)

    def _next_held_back(self) -> int:
        """Take the next slot when no other is left: HIGH ones first, by their end; -1 when there is none."""
        while self.held:
            entry = heapq.heappop(self.held)
            if self._is_held(entry):
                return -entry[2]
        held_back = self._soft.held_back
        while held_back:
            slot, touched = held_back.popitem(last=False)
            if self.stamp[slot] == touched:
                return slot
        return -1

    def check(self, evictable: set[int]) -> None:
        """Assert that every evictable slot comes up, LOW ones first, and that counts and logs are right."""
        low = {slot for slot, priority in enumerate(self._priority) if priority == _LOW}
        assert (len(low), self._priority.tolist().count(_HIGH)) == (self.num_low, self.num_high), "priorities"
        assert not low & self._soft.counts.keys(), "a soft pin is a use, and a LOW block that is used is NORMAL"
        self._soft.check()
        missing = (evictable & low) - self._low.check()
        assert not missing, f"LOW slots {sorted(missing)} could be evicted but never come up as such"
        held = {-entry[2] for entry in self.held if self._is_held(entry)}
        self.policy.check(evictable - held - self._soft.placed(self.stamp))

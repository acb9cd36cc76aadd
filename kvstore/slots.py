"""Slot records of a pool, its free list and its order of eviction. No locking here: the pool holds its lock.

Every slot is in exactly one state. Ready slots with a reader are called pinned, those without idle.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import Enum


class SlotState(Enum):
    """Where one slot is in its life."""

    FREE = "free"
    WRITING = "writing"
    READY = "ready"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class Slot:
    """One slot and the block in it.

    `generation` counts lives: it grows each time the slot is claimed. `parent` is the slot of the
    block before this one in its chain, -1 when that is not resident; `children` the reverse, so that
    a prefix is never evicted before what hangs on it. `position` counts blocks from the chain's root.
    `indexed` is False for a block that was cleared while readers still hold it: it can be read on but
    not be found.
    """

    state: SlotState = SlotState.FREE
    block_hash: bytes = b""
    namespace: bytes = b""
    generation: int = 0
    ref_count: int = 0
    parent: int = -1
    position: int = 0
    children: set[int] = field(default_factory=set)
    touched: int = 0
    parts_left: int = 0
    doomed: bool = False
    indexed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Counts of one snapshot, taken under the lock; the five slot counts add up to `num_slots`."""

    num_slots: int
    num_free: int
    num_writing: int
    num_idle: int
    num_pinned: int
    num_quarantined: int
    num_leases: int
    num_writes: int
    num_evicted: int
    num_published: int


class SlotTable:
    """All slots of a pool with their free list and eviction order.

    Free slots are handed out lowest index first and a claim is returned sorted, so that the blocks of
    one request become neighbours and merge into few transfer descriptors. Eviction is least recently
    touched first, leaf before root: a heap of (touch, slot) whose stale entries are skipped lazily.
    """

    def __init__(self, num_slots: int) -> None:
        self.slots = [Slot() for _ in range(num_slots)]
        # Highest index first, so that taking from the end hands out the lowest; sorted again when needed.
        self._free = list(range(num_slots - 1, -1, -1))
        self._free_is_sorted = True
        self._evictable: list[tuple[int, int]] = []
        self._clock = 0
        self.num_pinned = 0
        self.num_quarantined = 0
        self.num_writing = 0
        self.num_evicted = 0

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def offer_for_eviction(self, index: int) -> None:
        """Put a slot into the order of eviction if nothing reads it and nothing hangs on it."""
        slot = self.slots[index]
        if slot.state is SlotState.READY and slot.ref_count == 0 and not slot.children:
            heapq.heappush(self._evictable, (slot.touched, index))
            if len(self._evictable) > 4 * len(self.slots) + 64:
                self._evictable[:] = sorted({entry for entry in self._evictable if self._is_victim(entry)})

    def _is_victim(self, entry: tuple[int, int]) -> bool:
        touched, index = entry
        slot = self.slots[index]
        return slot.state is SlotState.READY and slot.ref_count == 0 and not slot.children and slot.touched == touched

    def claim(self, wanted: int) -> tuple[list[int], list[int]]:
        """Take up to `wanted` slots, free ones first, then by eviction.

        Returns:
            (claimed slots in ascending order, now WRITING with a new generation; the evicted ones among
            them whose `block_hash` is still the old one, for the caller to unindex).
        """
        slots, evictable = self.slots, self._evictable
        num_taken = min(wanted, len(self._free))
        if num_taken and not self._free_is_sorted:
            self._free.sort(reverse=True)
            self._free_is_sorted = True
        claimed = self._free[len(self._free) - num_taken :]
        del self._free[len(self._free) - num_taken :]
        evicted: list[int] = []
        while len(claimed) < wanted and evictable:
            touched, index = heapq.heappop(evictable)
            slot = slots[index]
            if slot.touched != touched or slot.ref_count or slot.children or slot.state is not SlotState.READY:
                continue
            # At once: the heap may hold this very entry twice, and the slot must not be taken twice.
            slot.state = SlotState.WRITING
            parent = slot.parent
            if parent >= 0:
                slot.parent = -1
                siblings = slots[parent].children
                siblings.discard(index)
                if not siblings:
                    self.offer_for_eviction(parent)
            evicted.append(index)
            claimed.append(index)
        for index in claimed:
            slot = slots[index]
            slot.state = SlotState.WRITING
            slot.generation += 1
        self.num_evicted += len(evicted)
        self.num_writing += len(claimed)
        claimed.sort()
        return claimed, evicted

    def unlink(self, index: int) -> None:
        """Cut a slot out of its chain; its parent may become evictable, its children lose their parent."""
        slot = self.slots[index]
        if slot.parent >= 0:
            self.slots[slot.parent].children.discard(index)
            self.offer_for_eviction(slot.parent)
            slot.parent = -1
        for child in slot.children:
            self.slots[child].parent = -1
        slot.children.clear()

    def free(self, index: int) -> None:
        """Return a slot that nothing reads or writes any more to the free list."""
        slot = self.slots[index]
        if slot.state is SlotState.WRITING:
            self.num_writing -= 1
        elif slot.state is SlotState.QUARANTINED:
            self.num_quarantined -= 1
        self.unlink(index)
        slot.state = SlotState.FREE
        slot.block_hash = slot.namespace = b""
        slot.doomed = slot.indexed = False
        self._free.append(index)
        self._free_is_sorted = False

    def quarantine(self, index: int) -> None:
        """Set a slot that was being written aside: a transfer may still write to it."""
        slot = self.slots[index]
        self.unlink(index)
        self.num_writing -= 1
        self.num_quarantined += 1
        slot.state = SlotState.QUARANTINED
        slot.block_hash = slot.namespace = b""
        slot.doomed = slot.indexed = False

    def publish(self, index: int) -> None:
        """Make a fully written slot readable."""
        slot = self.slots[index]
        slot.state = SlotState.READY
        self.num_writing -= 1
        self.offer_for_eviction(index)

    def num_pinnable(self, indexes: list[int], max_pinned: int) -> int:
        """Return how many leading slots may be pinned before more than `max_pinned` are."""
        room = max_pinned - self.num_pinned
        if room >= len(indexes):
            return len(indexes)
        for count, index in enumerate(indexes):
            if self.slots[index].ref_count == 0:
                room -= 1
                if room < 0:
                    return count
        return len(indexes)

    def touch_all(self, indexes: list[int]) -> None:
        """Make the slots of a chain the most recently used, leaf first: a root is newer than its leaves."""
        slots, clock = self.slots, self._clock
        for index in reversed(indexes):
            clock += 1
            slots[index].touched = clock
        self._clock = clock

    def pin_all(self, indexes: list[int]) -> None:
        """Add a reader to each slot of a chain, and touch them leaf first: a root is newer than its leaves."""
        slots, clock = self.slots, self._clock
        for index in reversed(indexes):
            slot = slots[index]
            clock += 1
            slot.touched = clock
            slot.ref_count += 1
            if slot.ref_count == 1:
                self.num_pinned += 1
        self._clock = clock

    def pin(self, index: int) -> None:
        """Add a reader."""
        slot = self.slots[index]
        slot.ref_count += 1
        if slot.ref_count == 1:
            self.num_pinned += 1

    def unpin(self, index: int) -> None:
        """Remove a reader; a slot that was cleared meanwhile becomes free with its last one."""
        slot = self.slots[index]
        slot.ref_count -= 1
        if slot.ref_count == 0:
            self.num_pinned -= 1
            if slot.indexed:
                self.offer_for_eviction(index)
            else:
                self.free(index)

    def check(self) -> None:
        """Assert that counts, links and the free list agree with the slots."""
        counts = dict.fromkeys(SlotState, 0)
        evictable = {entry for entry in self._evictable if self._is_victim(entry)}
        for index, slot in enumerate(self.slots):
            counts[slot.state] += 1
            assert slot.ref_count >= 0, f"slot {index}: ref count {slot.ref_count}"
            assert slot.ref_count == 0 or slot.state is SlotState.READY, f"slot {index}: pinned but {slot.state}"
            assert slot.parent < 0 or index in self.slots[slot.parent].children, f"slot {index}: half a link"
            for child in slot.children:
                assert self.slots[child].parent == index, f"slot {index}: child {child} hangs elsewhere"
            if slot.state is SlotState.READY and slot.ref_count == 0:
                assert slot.indexed, f"slot {index}: ready, idle and not findable"
                if not slot.children:
                    assert (slot.touched, index) in evictable, f"slot {index}: idle leaf that cannot be evicted"
        assert counts[SlotState.FREE] == len(self._free) == len(set(self._free)), "free list"
        assert all(self.slots[i].state is SlotState.FREE for i in self._free), "free list holds a used slot"
        assert counts[SlotState.WRITING] == self.num_writing, "writing count"
        assert counts[SlotState.QUARANTINED] == self.num_quarantined, "quarantine count"
        assert sum(s.ref_count > 0 for s in self.slots) == self.num_pinned, "pinned count"

"""The slots of a pool in columns, its free list and its index. No locking here: the pool holds its lock.

A slot's state is where it is listed: free, being written (its hash in `writing` of its space, or the slot in
`doomed`), ready (its hash in `ready` of its space, or the slot in `unfindable`), or set aside. kvstore.pool.slot_checks
proves that each is in exactly one of them. Ready slots with a reader are called pinned, those without idle.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice

import numpy as np

from kvstore.blocks.chain import HASH_BYTES
from kvstore.memory.clears import group_of
from kvstore.memory.presence import PresenceCounts
from kvstore.pool.eviction import EvictionPolicy
from kvstore.pool.lru import LeastRecentlyUsed
from kvstore.pool.slot_lists import Run, Segment, SlotList, join
from kvstore.pool.spaces import NOTHING, Space

NO_SLOTS = SlotList.of([])
_ONE = np.int32(1)
#: Few, so that in tests many blocks share one.
_OWN_COUNTERS = 16
#: So many hashes of events are kept at least; in larger pools as many as there are slots.
_FEWEST_EVENTS = 1 << 14
#: So many that are empty may be kept, and as many again as were not when it was looked last.
_FEW_SPACES = 64


class SlotTable:
    """All slots of a pool; one column per attribute, so that a chain is handled in a few passes.

    `ref_count` counts readers. `generation` counts lives: it grows each time a slot is claimed. `parent` is the
    hash of the block before this one in its chain, the namespace's digest at a root. `num_children` counts the
    blocks, ready or being written, that hang on a block: it is not evicted before them. For a parent that is not
    here its space counts them, until it comes.
    `space` is the index of the block's namespace, in which it is; those of `cleared` are swept some at a time.
    `run` says with which others a slot was claimed, `place` where it stands among them.
    `doomed` slots are being written and will never be published; `unfindable` ones were cleared while pinned.

    Free slots are handed out lowest index first and a claim is ascending, so that the blocks of one request
    become neighbours and merge into few transfer descriptors.

    Args:
        num_slots: how many there are.
        presence: counts the first blocks of chains that are ready; for this table alone when None.
    """

    def __init__(self, num_slots: int, presence: PresenceCounts | None = None) -> None:
        self.num_slots = num_slots
        self.presence = PresenceCounts(bytearray(_OWN_COUNTERS)) if presence is None else presence
        self.block_hash = [b""] * num_slots
        self.parent = [b""] * num_slots
        self.space: list[Space | None] = [None] * num_slots
        self.spaces: dict[bytes, Space] = {}
        self.cleared: deque[Space] = deque()
        self._num_spaces_kept = 0
        self.run: list[Run | None] = [None] * num_slots
        self.place = [0] * num_slots
        self.generation = array("I", bytes(4 * num_slots))
        self.ref_count = array("i", bytes(4 * num_slots))
        # The same memory, for all slots of a chain at once.
        self._generations = np.frombuffer(self.generation, np.uint32)
        self._ref_counts = np.frombuffer(self.ref_count, np.int32)
        self.num_children = [0] * num_slots
        self.doomed: set[int] = set()
        self.unfindable: set[int] = set()
        self.eviction: EvictionPolicy = LeastRecentlyUsed(num_slots)
        #: What became findable (True) or stopped being so, in order; kept with the change that it tells of. Of more
        #: hashes than `_max_events` that nobody has come for none is kept: then only a snapshot says it.
        self.events: list[tuple[bool, Collection[bytes]]] = []
        self._num_events, self._max_events = 0, max(num_slots, _FEWEST_EVENTS)
        # Highest index first, so that taking from the end hands out the lowest; sorted again when needed.
        self._free = list(range(num_slots - 1, -1, -1))
        self._free_is_sorted = True
        self.num_pinned = self.num_writing = self.num_quarantined = 0
        self.num_evicted = self.num_published = 0

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def space_of(self, namespace: bytes) -> Space:
        """Return the index of a namespace, to read it."""
        return self.spaces.get(namespace, NOTHING)

    def cleared_with(self, namespace: bytes) -> list[bytes]:
        """Return the namespaces that have an index here and are cleared when this one is, itself among them."""
        group = group_of(namespace)
        return [each for each in self.spaces if group_of(each) == group]

    def num_ready(self, namespace: bytes, data: bytes) -> int:
        """Return how many leading blocks are ready, up to the first that is not; `data` has their hashes."""
        count, at, ready = len(data) // HASH_BYTES, 0, self.space_of(namespace).ready
        while at < count and (slot := ready.get(data[at * HASH_BYTES : (at + 1) * HASH_BYTES])) is not None:
            run = self.run[slot]
            assert run is not None, "ready, and never claimed"
            at += run.num_shared(self.place[slot], data, at)
        return at

    def find_prefix(self, namespace: bytes, data: bytes) -> SlotList:
        """Return the slots of the leading blocks that are ready; a block that is named twice is there twice."""
        count, at, pieces, ready = len(data) // HASH_BYTES, 0, [], self.space_of(namespace).ready
        while at < count and (slot := ready.get(data[at * HASH_BYTES : (at + 1) * HASH_BYTES])) is not None:
            run, place = self.run[slot], self.place[slot]
            assert run is not None, "ready, and never claimed"
            length = run.num_shared(place, data, at)
            pieces.append(run.whole.part(place, place + length))
            at += length
        return join(pieces) if pieces else NO_SLOTS

    def listed(self, slots: list[int]) -> SlotList:
        """Return slots as a list of them all, that of their claim if they are one."""
        if slots and (run := self.run[slots[0]]) is not None and run.slots == slots:
            return run.whole
        return SlotList.of(slots)

    def lives(self, slots: SlotList) -> bytes:
        """Return the generation of each slot as little-endian uint32."""
        return self._generations[slots.index].tobytes()

    # Writing.

    def claim(self, hashes: list[bytes], parents: list[bytes], namespace: bytes) -> list[int]:
        """Take a slot for each block that gets one, free slots first, then by eviction.

        Returns:
            Slots in ascending order for the leading blocks, in their new generation and being written.
        """
        claimed = self._take(len(hashes))
        self.num_writing += len(claimed)
        if claimed:
            space = self._open(namespace)
            space.writing.update(zip(hashes, claimed, strict=False))
            self._fill_in(claimed, hashes[: len(claimed)], parents[: len(claimed)], space)
        return claimed

    def _open(self, namespace: bytes) -> Space:
        space = self.spaces.get(namespace)
        if space is None:
            if len(self.spaces) > 2 * self._num_spaces_kept + _FEW_SPACES:
                self.spaces = {name: space for name, space in self.spaces.items() if len(space)}
                self._num_spaces_kept = len(self.spaces)
            space = self.spaces[namespace] = Space(namespace)
        return space

    def _fill_in(self, claimed: list[int], hashes: list[bytes], parents: list[bytes], space: Space) -> None:
        count, first, num_children = len(claimed), claimed[0], self.num_children
        run = Run(b"".join(hashes), claimed, SlotList.of(claimed))
        self._generations[run.whole.index] += 1
        if isinstance(run.whole.index, slice) and parents[1:] == hashes[:-1]:
            # Neighbours, each hanging on the one before: column by column.
            end = first + count
            self.block_hash[first:end], self.parent[first:end] = hashes, parents
            self.space[first:end], self.run[first:end] = [space] * count, [run] * count
            self.place[first:end], num_children[first : end - 1] = range(count), [1] * (count - 1)
            if parents[0] != space.namespace:
                self._hang_on(parents[0], space)
        else:
            last, last_slot = b"", -1
            for place, (slot, own, parent) in enumerate(zip(claimed, hashes, parents, strict=True)):
                self.block_hash[slot], self.parent[slot], self.space[slot] = own, parent, space
                self.run[slot], self.place[slot] = run, place
                if parent is last:
                    num_children[last_slot] += 1
                elif parent != space.namespace:
                    self._hang_on(parent, space)
                last, last_slot = own, slot
        if space.orphans and not space.orphans.keys().isdisjoint(hashes):
            for slot in claimed:
                num_children[slot] += space.orphans.pop(self.block_hash[slot], 0)

    def _take(self, wanted: int) -> list[int]:
        free = self._free
        while len(free) < wanted and self.sweep(wanted - len(free)):
            pass  # Some of it is read. What is evicted afterwards was not cleared.
        if not self._free_is_sorted:
            free.sort(reverse=True)
            self._free_is_sorted = True
        claimed = free[: -wanted - 1 : -1]
        del free[len(free) - len(claimed) :]
        if len(claimed) < wanted and (evicted := self._evict(wanted - len(claimed))):
            claimed = sorted(claimed + evicted)
            self.eviction.freed(SlotList.of(claimed, ascending=True))
        return claimed

    def claim_unnamed(self, wanted: int) -> tuple[list[int], SlotList]:
        """Take slots for blocks that will never be published, so have no names: they are doomed from the start.

        Returns:
            Slots in ascending order, in their new generation, one by one and all at once; fewer when no more can be
            had.
        """
        num_free = len(self._free)
        taken = self._take(wanted)
        listed = SlotList.of(taken, ascending=True)
        self.num_writing += len(taken)
        self.doomed.update(taken)
        self._generations[listed.index] += 1
        if wanted > num_free:  # What was evicted still has the names of the blocks that were there.
            for slot in taken:
                self.block_hash[slot] = self.parent[slot] = b""
                self.space[slot] = None
        return taken, listed

    def _hang_on(self, parent: bytes, space: Space) -> None:
        above = space.ready.get(parent, space.writing.get(parent))
        if above is None:
            space.orphans[parent] += 1
        else:
            self.num_children[above] += 1

    def _leave_parent(self, slot: int, space: Space) -> None:
        parent = self.parent[slot]
        if parent == space.namespace:
            return
        above = space.ready.get(parent)
        if above is not None:
            self.num_children[above] -= 1
            if not self.num_children[above]:
                self.eviction.released((above,), 0)
        elif parent in space.writing:
            self.num_children[space.writing[parent]] -= 1
        elif space.orphans[parent] > 1:
            space.orphans[parent] -= 1
        else:
            del space.orphans[parent]

    def _evict(self, wanted: int) -> list[int]:
        spaces, ref_count, block_hash, num_children = self.space, self.ref_count, self.block_hash, self.num_children
        evicted: list[int] = []
        hashes: list[bytes] = []
        for slot in self.eviction.victims():
            own, space = block_hash[slot], spaces[slot]
            if ref_count[slot] or num_children[slot] or space is None or own not in space.ready:
                continue
            # At once: a slot may come up twice, and nobody must get it twice.
            del space.ready[own]
            self._not_ready(slot, space)
            self._leave_parent(slot, space)
            hashes.append(own)
            evicted.append(slot)
            if len(evicted) == wanted:
                break
        if hashes:
            self._tell(False, hashes)
            self.num_evicted += len(hashes)
        return evicted

    def take_events(self) -> list[tuple[bool, Collection[bytes]]] | None:
        """Return and forget what became findable or stopped being so; None when it was too much to be kept."""
        events, was_too_much = self.events, self._num_events > self._max_events
        self.events, self._num_events = [], 0
        return None if was_too_much else events

    def _tell(self, present: bool, hashes: Collection[bytes]) -> None:
        self._num_events += len(hashes)
        if self._num_events <= self._max_events:
            self.events.append((present, hashes))
        else:
            self.events.clear()

    def _not_ready(self, slot: int, space: Space) -> None:
        if self.parent[slot] == space.namespace:
            self.presence.drop(self.block_hash[slot])
        run = self.run[slot]
        if run is not None:
            run.lost(self.place[slot])

    def publish(self, space: Space, hashes: list[bytes], slots: list[int], stamp: int) -> None:
        """Make fully written blocks readable.

        Args:
            space: of the blocks, not cleared.
            hashes: blocks, all of them being written.
            slots: slot of each.
            stamp: of the touch that came with their claim.
        """
        writing = space.writing
        for own in hashes:
            del writing[own]
        if self.parent[slots[0]] == space.namespace:  # Only what a write begins with can be a chain's first.
            self.presence.add(hashes[0])
        space.ready.update(zip(hashes, slots, strict=True))
        run = self.run[slots[0]]
        if run is not None:
            run.published(slots)
        self._tell(True, hashes)
        self.num_writing -= len(slots)
        self.num_published += len(slots)
        self.eviction.stored(slots, stamp)

    def doom(self, slot: int) -> None:
        """Make sure that a block which is being written is never published; its writers go on holding the slot."""
        space = self.space[slot]
        if space is not None and slot not in self.doomed:
            del space.writing[self.block_hash[slot]]
            if not space.is_cleared:
                self._leave_parent(slot, space)
            self._forget(slot, space)
            self.doomed.add(slot)
            self.eviction.freed(SlotList.of([slot]))

    def end_unnamed(self, slots: list[int], *, aside: bool = False) -> None:
        """Take slots of `claim_unnamed` from their writer: all that `end_writing` does for each."""
        self.doomed.difference_update(slots)
        self.num_writing -= len(slots)
        if aside:
            self.num_quarantined += len(slots)
        else:
            self._free += slots
            self._free_is_sorted = False

    def end_writing(self, slot: int, *, aside: bool = False) -> None:
        """Take a doomed slot from its last writer: to the free list, or aside while a transfer may write to it."""
        self.doomed.remove(slot)
        self.num_writing -= 1
        if aside:
            self.num_quarantined += 1
        else:
            self._free_up(slot)

    def end_quarantine(self, slot: int) -> None:
        """Free a slot that was set aside."""
        self.num_quarantined -= 1
        self._free_up(slot)

    def _forget(self, slot: int, space: Space) -> None:
        if self.num_children[slot]:
            space.orphans[self.block_hash[slot]] = self.num_children[slot]
            self.num_children[slot] = 0
        self.block_hash[slot] = self.parent[slot] = b""
        self.space[slot] = None

    def _free_up(self, slot: int) -> None:
        self._free.append(slot)
        self._free_is_sorted = False

    def segments(self, slots: Sequence[int | None]) -> list[Segment]:
        """Return the stretches of slots that are neighbours in one claim, in order; where there is none, none."""
        found: list[Segment] = []
        at = 0
        while at < len(slots):
            slot = slots[at]
            if slot is None:
                at += 1
                continue
            run, place = self.run[slot], self.place[slot]
            assert run is not None, "a slot that was never claimed"
            count = run.num_same(place, slots, at)
            found.append(Segment(run, place, at, count))
            at += count
        return found

    # Reading.

    def num_pinnable(self, slots: SlotList, max_pinned: int) -> int:
        """Return how many leading slots may be pinned before more than `max_pinned` are."""
        room = max_pinned - self.num_pinned
        if room >= len(slots):
            return len(slots)
        for count, slot in enumerate(slots.tolist()):
            if self.ref_count[slot] == 0:
                room -= 1
                if room < 0:
                    return count
        return len(slots)

    def pin_all(self, slots: SlotList) -> None:
        """Add a reader to each slot, two if it is named twice; who does so also touches them."""
        num_new = self._num_idle(slots)
        self._add_readers(slots, _ONE)
        self.num_pinned += num_new

    def unpin_all(self, slots: SlotList, stamp: int) -> None:
        """Remove a reader from each slot; one that was cleared meanwhile becomes free with its last reader.

        Args:
            slots: as given to `pin_all`.
            stamp: of the touch that came with it, the earliest of several.
        """
        self._add_readers(slots, -_ONE)
        self.num_pinned -= self._num_idle(slots)
        self.eviction.released(slots, stamp)
        if self.unfindable:
            for slot in self.unfindable.intersection(slots):
                if not self.ref_count[slot]:
                    self.unfindable.remove(slot)
                    self._free_up(slot)

    def _add_readers(self, slots: SlotList, number: np.int32) -> None:
        if isinstance(slots.index, slice):
            refs = self._ref_counts[slots.index]
            refs += number
        else:
            np.add.at(self._ref_counts, slots.index, number)

    def _num_idle(self, slots: SlotList) -> int:
        refs = self._ref_counts[slots.index]
        if slots.is_distinct:
            return len(refs) - int(np.count_nonzero(refs))
        return len(np.unique(np.array(slots.packed)[refs == 0]))

    def soft_unpin(self, slots: SlotList, generations: bytes) -> None:
        """Remove a soft pin from each slot that is still in the life in which it got it."""
        given = zip(slots, array("I", generations), strict=True)
        self.eviction.soft_unpinned(slot for slot, generation in given if self.generation[slot] == generation)

    # Clearing.

    def detach(self, namespace: bytes) -> Space:
        """Let nothing of a namespace be found any more, in one step; its slots come back with `sweep`.

        Returns:
            What there was of it. What of that was being written stays so until its writers say so.
        """
        space = self.spaces.pop(namespace, None)
        if space is None:
            return NOTHING
        space.is_cleared, space.unswept = True, iter(space.ready.values())
        if space.ready:
            self._tell(False, space.ready)
        self.cleared.append(space)
        return space

    def sweep(self, num_slots: int) -> int:
        """Free so many slots of what was cleared, or set them aside for their last reader; returns how many."""
        left = num_slots
        for space in self.cleared:
            if space.unswept is not None:
                slots = list(islice(space.unswept, left))
                if len(slots) < left:
                    space.unswept = None
                self._free_cleared(space, slots)
                left -= len(slots)
                if not left:
                    break
        return num_slots - left

    def _free_cleared(self, space: Space, slots: list[int]) -> None:
        block_hash, parent, spaces, num_children = self.block_hash, self.parent, self.space, self.num_children
        for slot in [slot for slot in slots if parent[slot] == space.namespace]:
            self.presence.drop(block_hash[slot])
        for slot in slots:
            block_hash[slot] = parent[slot] = b""
            spaces[slot] = None
            num_children[slot] = 0
        listed = SlotList.of(slots)
        self.eviction.freed(listed)
        is_read = self._ref_counts[listed.index] > 0
        if is_read.any():
            index = np.array(slots, np.intp)
            self.unfindable.update(index[is_read].tolist())
            slots = index[~is_read].tolist()
        self._free += slots
        self._free_is_sorted = False

"""The slots of a pool in columns, its free list and its index. No locking here: the pool holds its lock.

A slot's state is where it is listed: free, being written (its hash in `writing`, or the slot in `doomed`),
ready (its hash in `ready`, or the slot in `unfindable`), or set aside. `check` proves that each is in exactly
one of them. Ready slots with a reader are called pinned, those without idle.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict

import numpy as np

from kvstore.chain import HASH_BYTES, Chain
from kvstore.eviction import EvictionOrder
from kvstore.presence import PresenceCounts
from kvstore.runs import Run, SlotList, join

NO_SLOTS = SlotList.of([])
_ONE = np.int32(1)
#: Few, so that in tests many blocks share one.
_OWN_COUNTERS = 16
#: So many hashes of events are kept at least; in larger pools as many as there are slots.
_FEWEST_EVENTS = 1 << 14


class SlotTable:
    """All slots of a pool; one column per attribute, so that a chain is handled in a few passes.

    `ref_count` counts readers. `generation` counts lives: it grows each time a slot is claimed. `parent` is the
    hash of the block before this one in its chain, the namespace's digest at a root. `num_children` counts the
    blocks, ready or being written, that hang on a block: it is not evicted before them. For a parent that is not
    here `orphans` counts them, until it comes. `soft` counts the soft pins of a slot.
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
        self.namespace = [b""] * num_slots
        self.run: list[Run | None] = [None] * num_slots
        self.place = [0] * num_slots
        self.generation = array("I", bytes(4 * num_slots))
        self.ref_count = array("i", bytes(4 * num_slots))
        # The same memory, for all slots of a chain at once.
        self._generations = np.frombuffer(self.generation, np.uint32)
        self._ref_counts = np.frombuffer(self.ref_count, np.int32)
        self.ready: dict[bytes, int] = {}
        self.writing: dict[bytes, int] = {}
        self.num_children = [0] * num_slots
        self.orphans: Counter[bytes] = Counter()
        self.soft: dict[int, int] = {}
        self.doomed: set[int] = set()
        self.unfindable: set[int] = set()
        self.order = EvictionOrder(num_slots)
        #: What became findable (True) or stopped being so, in order; kept with the change that it tells of. Of more
        #: hashes than `_max_events` that nobody has come for none is kept: then only a snapshot says it.
        self.events: list[tuple[bool, list[bytes]]] = []
        self._num_events, self._max_events = 0, max(num_slots, _FEWEST_EVENTS)
        # Soft-pinned slots whose turn came, with their stamp; they go when nothing else is left.
        self._spared: OrderedDict[int, int] = OrderedDict()
        # Highest index first, so that taking from the end hands out the lowest; sorted again when needed.
        self._free = list(range(num_slots - 1, -1, -1))
        self._free_is_sorted = True
        self.num_pinned = self.num_writing = self.num_quarantined = 0
        self.num_evicted = self.num_published = 0

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def num_ready(self, data: bytes) -> int:
        """Return how many leading blocks are ready, up to the first that is not; `data` has their hashes."""
        count, at = len(data) // HASH_BYTES, 0
        while at < count and (slot := self.ready.get(data[at * HASH_BYTES : (at + 1) * HASH_BYTES])) is not None:
            run = self.run[slot]
            assert run is not None, "ready, and never claimed"
            at += run.num_shared(self.place[slot], data, at)
        return at

    def find_prefix(self, data: bytes) -> SlotList:
        """Return the slots of the leading blocks that are ready; a block that is named twice is there twice."""
        count, at, pieces = len(data) // HASH_BYTES, 0, []
        while at < count and (slot := self.ready.get(data[at * HASH_BYTES : (at + 1) * HASH_BYTES])) is not None:
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
        self.writing.update(zip(hashes, claimed, strict=False))
        self.num_writing += len(claimed)
        if claimed:
            self._fill_in(claimed, hashes[: len(claimed)], parents[: len(claimed)], namespace)
        return claimed

    def _fill_in(self, claimed: list[int], hashes: list[bytes], parents: list[bytes], namespace: bytes) -> None:
        count, first, num_children = len(claimed), claimed[0], self.num_children
        run = Run(b"".join(hashes), claimed, SlotList.of(claimed))
        self._generations[run.whole.index] += 1
        if isinstance(run.whole.index, slice) and parents[1:] == hashes[:-1]:
            # Neighbours, each hanging on the one before: column by column.
            end = first + count
            self.block_hash[first:end], self.parent[first:end] = hashes, parents
            self.namespace[first:end], self.run[first:end] = [namespace] * count, [run] * count
            self.place[first:end], num_children[first : end - 1] = range(count), [1] * (count - 1)
            if parents[0] != namespace:
                self._hang_on(parents[0])
        else:
            last, last_slot = b"", -1
            for place, (slot, own, parent) in enumerate(zip(claimed, hashes, parents, strict=True)):
                self.block_hash[slot], self.parent[slot], self.namespace[slot] = own, parent, namespace
                self.run[slot], self.place[slot] = run, place
                if parent is last:
                    num_children[last_slot] += 1
                elif parent != namespace:
                    self._hang_on(parent)
                last, last_slot = own, slot
        if self.orphans and not self.orphans.keys().isdisjoint(hashes):
            for slot in claimed:
                num_children[slot] += self.orphans.pop(self.block_hash[slot], 0)

    def _take(self, wanted: int) -> list[int]:
        free = self._free
        if not self._free_is_sorted:
            free.sort(reverse=True)
            self._free_is_sorted = True
        claimed = free[: -wanted - 1 : -1]
        del free[len(free) - len(claimed) :]
        if len(claimed) < wanted:
            claimed += self._evict(wanted - len(claimed))
            claimed.sort()
        return claimed

    def claim_unnamed(self, wanted: int) -> tuple[list[int], SlotList]:
        """Take slots for blocks that will never be published, so have no names: they are doomed from the start.

        Returns:
            Slots in ascending order, in their new generation, one by one and all at once; fewer when no more can be
            had.
        """
        num_free = len(self._free)
        taken = self._take(wanted)
        listed = SlotList.of_ascending(taken)
        self.num_writing += len(taken)
        self.doomed.update(taken)
        self._generations[listed.index] += 1
        if wanted > num_free:  # What was evicted still has the names of the blocks that were there.
            for slot in taken:
                self.block_hash[slot] = self.parent[slot] = self.namespace[slot] = b""
        return taken, listed

    def _hang_on(self, parent: bytes) -> None:
        above = self.ready.get(parent, self.writing.get(parent))
        if above is None:
            self.orphans[parent] += 1
        else:
            self.num_children[above] += 1

    def _leave_parent(self, slot: int) -> None:
        parent = self.parent[slot]
        if parent == self.namespace[slot]:
            return
        above = self.ready.get(parent)
        if above is not None:
            self.num_children[above] -= 1
            if not self.num_children[above] and not self.ref_count[above]:
                self.order.offer(above)
        elif parent in self.writing:
            self.num_children[self.writing[parent]] -= 1
        elif self.orphans[parent] > 1:
            self.orphans[parent] -= 1
        else:
            del self.orphans[parent]

    def _evict(self, wanted: int) -> list[int]:
        ready, ref_count, block_hash, num_children = self.ready, self.ref_count, self.block_hash, self.num_children
        stamp, soft = self.order.stamp, self.soft
        evicted: list[int] = []
        hashes: list[bytes] = []
        while len(evicted) < wanted:
            for slot in self.order.oldest():
                own = block_hash[slot]
                if ref_count[slot] or num_children[slot] or own not in ready:
                    continue
                if slot in soft:
                    self._spared[slot] = stamp[slot]
                    self._spared.move_to_end(slot)
                    continue
                # At once: the order may name this slot twice, and nobody must get it twice.
                del ready[own]
                stamp[slot] = 0
                self._not_ready(slot)
                self._leave_parent(slot)
                hashes.append(own)
                evicted.append(slot)
                if len(evicted) == wanted:
                    break
            if len(evicted) < wanted and not self._give_up_soft_pin():
                break
        if hashes:
            self._tell(False, hashes)
            self.num_evicted += len(hashes)
        return evicted

    def take_events(self) -> list[tuple[bool, list[bytes]]] | None:
        """Return and forget what became findable or stopped being so; None when it was too much to be kept."""
        events, was_too_much = self.events, self._num_events > self._max_events
        self.events, self._num_events = [], 0
        return None if was_too_much else events

    def _tell(self, present: bool, hashes: list[bytes]) -> None:
        self._num_events += len(hashes)
        if self._num_events <= self._max_events:
            self.events.append((present, hashes))
        else:
            self.events.clear()

    def _not_ready(self, slot: int) -> None:
        if self.parent[slot] == self.namespace[slot]:
            self.presence.drop(self.block_hash[slot])
        run = self.run[slot]
        if run is not None:
            run.lost(self.place[slot])

    def _give_up_soft_pin(self) -> bool:
        """Take the preference from the soft-pinned slot that has waited longest and could go now."""
        while self._spared:
            slot, stamp = self._spared.popitem(last=False)
            if self.order.stamp[slot] == stamp and self._is_evictable(slot):
                self.soft.pop(slot, None)
                self.order.offer(slot)
                return True
        return False

    def _is_evictable(self, slot: int) -> bool:
        own = self.block_hash[slot]
        return self.ready.get(own) == slot and not self.ref_count[slot] and not self.num_children[slot]

    def publish(self, hashes: list[bytes], slots: list[int], stamp: int) -> None:
        """Make fully written blocks readable.

        Args:
            hashes: blocks, all of them being written.
            slots: slot of each.
            stamp: of the touch that came with their claim.
        """
        writing = self.writing
        for own in hashes:
            del writing[own]
        if self.parent[slots[0]] == self.namespace[slots[0]]:  # Only what a write begins with can be a chain's first.
            self.presence.add(hashes[0])
        self.ready.update(zip(hashes, slots, strict=True))
        run = self.run[slots[0]]
        if run is not None:
            run.published(slots)
        self._tell(True, hashes)
        self.num_writing -= len(slots)
        self.num_published += len(slots)
        if stamp <= self.order.passed:
            for slot in slots:
                self.order.offer(slot)

    def doom(self, slot: int) -> None:
        """Make sure that a block which is being written is never published; its writers go on holding the slot."""
        if slot not in self.doomed:
            del self.writing[self.block_hash[slot]]
            self._leave_parent(slot)
            self._forget(slot)
            self.doomed.add(slot)

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

    def _forget(self, slot: int) -> None:
        if self.num_children[slot]:
            self.orphans[self.block_hash[slot]] = self.num_children[slot]
            self.num_children[slot] = 0
        self.block_hash[slot] = self.parent[slot] = self.namespace[slot] = b""
        self.order.stamp[slot] = 0

    def _free_up(self, slot: int) -> None:
        self._free.append(slot)
        self._free_is_sorted = False

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
        if stamp <= self.order.passed or self.unfindable:
            for slot in slots.tolist():
                if not self.ref_count[slot]:
                    if slot in self.unfindable:
                        self.unfindable.remove(slot)
                        self._free_up(slot)
                    else:
                        self.order.offer(slot)

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

    def prefer(self, slots: list[int]) -> None:
        """Add a soft pin to each slot; who does so also touches them."""
        for slot in slots:
            self.soft[slot] = self.soft.get(slot, 0) + 1

    def end_preference(self, slots: list[int], generations: bytes) -> None:
        """Remove a soft pin from each slot that is still in the life in which it got it."""
        for slot, generation in zip(slots, array("I", generations), strict=True):
            if self.generation[slot] != generation or slot not in self.soft:
                continue
            self.soft[slot] -= 1
            if not self.soft[slot]:
                del self.soft[slot]
                if self._spared.pop(slot, None) is not None:
                    self.order.offer(slot)

    def clear(self, namespace: bytes) -> tuple[int, dict[bytes, int]]:
        """Make every block of a namespace unfindable; its unfinished writes will publish nothing.

        Returns:
            (how many blocks there were, slot of each that was being written).
        """
        mine = [slot for slot, own in enumerate(self.namespace) if own == namespace and self.block_hash[slot]]
        removed: list[bytes] = []
        lost: dict[bytes, int] = {}
        for slot in mine:
            own = self.block_hash[slot]
            if own in self.writing:
                lost[own] = slot
                self.doom(slot)
                continue
            removed.append(own)
            del self.ready[own]
            self._not_ready(slot)
            self._leave_parent(slot)
            self._forget(slot)
            self.soft.pop(slot, None)
            if self.ref_count[slot]:
                self.unfindable.add(slot)
            else:
                self._free_up(slot)
        if removed:
            self._tell(False, removed)
        return len(mine), lost

    def hot_chains(self, max_blocks: int) -> list[Chain]:
        """Return the most recently touched chains, each from its root, up to `max_blocks` blocks in all."""
        leaves = [slot for slot in self.ready.values() if not self.num_children[slot]]
        leaves.sort(key=self.order.stamp.__getitem__, reverse=True)
        chains: list[Chain] = []
        seen: set[int] = set()
        for leaf in leaves:
            path: list[int] = []
            at: int | None = leaf
            while at is not None:
                path.append(at)
                at = self.ready.get(self.parent[at])
            root, namespace = path[-1], self.namespace[leaf]
            if self.parent[root] != namespace or len(seen.union(path)) > max_blocks:
                continue
            seen.update(path)
            chains.append(Chain(namespace, namespace, 0, b"".join(self.block_hash[at] for at in reversed(path))))
        return chains

    def check(self, aside: set[int]) -> None:
        """Assert that each slot is in exactly one state and that counts, links and order agree with that.

        Args:
            aside: the slots that are quarantined.
        """
        states = {
            "free": self._free, "writing": [*self.writing.values(), *self.doomed], "quarantined": list(aside),
            "ready": [*self.ready.values(), *self.unfindable],
        }  # fmt: skip
        listed = Counter(slot for slots in states.values() for slot in slots)
        assert listed == Counter(range(self.num_slots)), f"not in exactly one state: {states}"
        assert len(states["writing"]) == self.num_writing, "writing count"
        assert len(aside) == self.num_quarantined, "quarantine count"
        assert sum(refs > 0 for refs in self.ref_count) == self.num_pinned, "pinned count"
        assert min(self.ref_count) >= 0, "ref count below 0"
        pinned = {slot for slot, refs in enumerate(self.ref_count) if refs}
        assert pinned <= set(states["ready"]), "pinned but not ready"
        assert self.unfindable <= pinned, "ready, idle and not findable"
        findable = self.ready | self.writing
        assert len(findable) == len(self.ready) + len(self.writing), "ready and being written"
        assert {slot: own for slot, own in enumerate(self.block_hash) if own} == {
            slot: own for own, slot in findable.items()
        }, "index names another block"
        children = Counter(self.parent[slot] for slot in findable.values() if self.parent[slot] != self.namespace[slot])
        counted = {own: self.num_children[slot] for own, slot in findable.items() if self.num_children[slot]}
        assert not counted.keys() & self.orphans.keys(), "children counted twice"
        assert children == counted | self.orphans, f"children: {children}, counted {counted}, {self.orphans}"
        assert not any(self.num_children[slot] for slot in {*range(self.num_slots)} - {*findable.values()}), "children"
        for run in {run for own, slot in findable.items() if (run := self.run[slot]) is not None}:
            known = [run.data[at : at + HASH_BYTES] for at in range(0, run.num_ready * HASH_BYTES, HASH_BYTES)]
            assert [self.ready.get(own) for own in known] == run.slots[: run.num_ready], "a run knows too much"
        for own, slot in self.ready.items():
            run = self.run[slot]
            assert run is not None, "ready, and never claimed"
            assert run.slots[self.place[slot]] == slot, "a slot is not where its run has it"
            assert run.data[self.place[slot] * HASH_BYTES :][:HASH_BYTES] == own, "a run has another hash"
        self.presence.check(own for own, slot in self.ready.items() if self.parent[slot] == self.namespace[slot])
        assert set(self.soft) <= set(self.ready.values()), "soft pin of a block that is not there"
        waiting = {slot for slot, stamp in self._spared.items() if stamp == self.order.stamp[slot]}
        self.order.check({slot for slot in self.ready.values() if self._is_evictable(slot)} - waiting)

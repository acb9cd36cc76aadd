"""Which block is in which slot, and which hangs on which. No locking here: the pool holds its lock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from kvstore.blocks.chain import HASH_BYTES, BlockHashes
from kvstore.errors import ChainBroken
from kvstore.memory.clears import group_of
from kvstore.memory.presence import PresenceCounts
from kvstore.pool.eviction import EvictionPolicy
from kvstore.pool.slot_lists import Run, Segment, SlotList, join

NO_SLOTS = SlotList.of([])
#: Of a slot that was never claimed for a block with a name.
_NO_RUN = Run(b"", [], NO_SLOTS)
#: So many hashes of events are kept at least; in larger pools as many as there are slots.
_FEWEST_EVENTS = 1 << 14
#: So many that are empty may be kept, and as many again as were not when it was looked last.
_FEW_SPACES = 64


@dataclass(slots=True, eq=False)
class Space:
    """The index of one namespace from one clearing to the next.

    A clearing takes it out of the index, so that nothing of it is found from then on, and `ready` changes no more.
    Its slots still name it until they are swept, some at a time.

    Args:
        namespace: digest.
        ready: slot of each block that can be found.
        writing: slot of each block that is being written.
        orphans: how many blocks hang on one that is not here.
        unswept: the rest of `ready`, once it was cleared; None when there is no more.
    """

    namespace: bytes
    ready: dict[bytes, int] = field(default_factory=dict)
    writing: dict[bytes, int] = field(default_factory=dict)
    orphans: Counter[bytes] = field(default_factory=Counter)
    is_cleared: bool = False
    unswept: Iterator[int] | None = None

    def __len__(self) -> int:
        return len(self.ready) + len(self.writing)


#: Of a namespace that is not here; nothing is ever put into it.
NOTHING = Space(b"")


@dataclass(slots=True)
class EventLog:
    """What became findable (True) or stopped being so, in order; added with the change that it tells of.

    Of more hashes than `max_hashes` that were not taken none is kept: then only a snapshot says it.
    """

    max_hashes: int
    events: list[tuple[bool, Collection[bytes]]] = field(default_factory=list)
    _num_hashes: int = 0

    def add(self, present: bool, hashes: Collection[bytes]) -> None:
        """Note a change of some blocks."""
        self._num_hashes += len(hashes)
        if self._num_hashes <= self.max_hashes:
            self.events.append((present, hashes))
        else:
            self.events.clear()

    def take(self) -> list[tuple[bool, Collection[bytes]]] | None:
        """Return and forget all events; None when it was too much to be kept."""
        events, was_too_much = self.events, self._num_hashes > self.max_hashes
        self.events, self._num_hashes = [], 0
        return None if was_too_much else events


class BlockIndex:
    """The blocks of a pool by namespace and hash, and one column per attribute for what is in a slot.

    A block that can be found is in `ready` of its space, one that is being written in `writing`; any other slot has no
    block. `parent` is the hash of the block before this one in its chain, the namespace's digest at a root.
    `num_children` counts the blocks, ready or being written, that hang on a block: it is not evicted before them. For a
    parent that is not here its space counts them, until it comes. `run` says with which others a slot was claimed,
    `place` where it stands among them.

    Args:
        num_slots: slots are numbered from 0.
        presence: counts the first blocks of chains that are ready.
        eviction: hears of blocks that lost their last child.
    """

    def __init__(self, num_slots: int, presence: PresenceCounts, eviction: EvictionPolicy) -> None:
        self.presence, self._eviction = presence, eviction
        self.block_hash, self.parent = [b""] * num_slots, [b""] * num_slots
        #: In which index the block of a slot is, one of those in `cleared` too; `NOTHING` where none is.
        self.space = [NOTHING] * num_slots
        self.num_children = [0] * num_slots
        self.run = [_NO_RUN] * num_slots
        self.place = [0] * num_slots
        self.spaces: dict[bytes, Space] = {}
        #: What was cleared and is not swept yet.
        self.cleared: deque[Space] = deque()
        self.events = EventLog(max(num_slots, _FEWEST_EVENTS))
        self._num_spaces_kept = 0

    # Finding.

    def space_of(self, namespace: bytes) -> Space:
        """Return the index of a namespace, to read it."""
        return self.spaces.get(namespace, NOTHING)

    def num_ready(self, namespace: bytes, data: bytes) -> int:
        """Return how many leading blocks are ready, up to the first that is not; `data` has their hashes."""
        count, at, ready = len(data) // HASH_BYTES, 0, self.space_of(namespace).ready
        while at < count and (slot := ready.get(data[at * HASH_BYTES : (at + 1) * HASH_BYTES])) is not None:
            at += self.run[slot].num_shared(self.place[slot], data, at)
        return at

    def find_prefix(self, namespace: bytes, data: bytes) -> SlotList:
        """Return the slots of the leading blocks that are ready; a block that is named twice is there twice."""
        count, at, pieces, ready = len(data) // HASH_BYTES, 0, [], self.space_of(namespace).ready
        while at < count and (slot := ready.get(data[at * HASH_BYTES : (at + 1) * HASH_BYTES])) is not None:
            run, place = self.run[slot], self.place[slot]
            length = run.num_shared(place, data, at)
            pieces.append(run.whole.part(place, place + length))
            at += length
        return join(pieces) if pieces else NO_SLOTS

    def listed(self, slots: list[int]) -> SlotList:
        """Return slots as a list of them all, that of their claim if they are one."""
        run = self.run[slots[0]] if slots else _NO_RUN
        return run.whole if run.slots == slots else SlotList.of(slots)

    def segments(self, slots: Sequence[int | None]) -> list[Segment]:
        """Return the stretches of slots that are neighbours in one claim, in order; where there is none, none."""
        found, at = list[Segment](), 0
        while at < len(slots):
            slot, count = slots[at], 1
            if slot is not None:
                run, place = self.run[slot], self.place[slot]
                count = run.num_same(place, slots, at)
                found.append(Segment(run, place, at, count))
            at += count
        return found

    def hot_chains(self, max_blocks: int) -> list[BlockHashes]:
        """Return the most recently touched chains, each from its root, up to `max_blocks` blocks in all."""
        ready = [slot for space in self.spaces.values() for slot in space.ready.values()]
        leaves = [slot for slot in ready if not self.num_children[slot]]
        leaves.sort(key=self._eviction.last_touch, reverse=True)
        chains, seen = list[BlockHashes](), set[int]()
        for leaf in leaves:
            space, path = self.space[leaf], list[int]()
            at: int | None = leaf
            while at is not None and len(path) < max_blocks:
                path.append(at)
                # Nothing is above a root, whatever name a block has.
                parent = self.parent[at]
                at = space.ready.get(parent) if parent != space.namespace else None
            is_whole = bool(path) and self.parent[path[-1]] == space.namespace
            if is_whole and len(seen) + sum(at not in seen for at in path) <= max_blocks:
                seen.update(path)
                data = b"".join(self.block_hash[at] for at in reversed(path))
                chains.append(BlockHashes(space.namespace, space.namespace, 0, data))
        return chains

    def check_acyclic(self, namespace: bytes, hashes: list[bytes], first_parent: bytes) -> None:
        """Make sure that no block would hang on itself once those of a run are here that are not yet.

        Whose blocks hang on each other in a circle all have children, so none of them would ever be evicted.

        Args:
            namespace: of the run.
            hashes: of the run, none of them twice.
            first_parent: the hash before its first.

        Raises:
            ChainBroken: one would; nothing changed.
        """
        space = self.space_of(namespace)
        # A circle goes on from a block of the run to one that hangs on it and is here.
        if not space.orphans or space.orphans.keys().isdisjoint(hashes):
            return
        ready, writing = space.ready, space.writing
        parents = zip(hashes, [first_parent, *hashes[:-1]], strict=True)
        above = {own: parent for own, parent in parents if own not in ready and own not in writing}
        known = {namespace}
        for own in above:
            at: bytes | None = own
            path = set[bytes]()
            while at is not None and at not in known:
                if at in path:
                    raise ChainBroken(
                        f"wanted a run that hangs on none of its own blocks, got one whose block {at.hex()[:8]} would "
                        "hang on itself; pass the chain from its root, with hashes of one Namespace"
                    )
                path.add(at)
                slot = ready.get(at, writing.get(at))
                at = above.get(at) if slot is None else self.parent[slot]
            known |= path

    # Writing.

    def claim(self, run: Run, hashes: list[bytes], parents: list[bytes], namespace: bytes) -> None:
        """Put the blocks of a new claim, given with the hash before each, into its slots; they are being written."""
        space, claimed, num_children = self._open(namespace), run.slots, self.num_children
        space.writing.update(zip(hashes, claimed, strict=True))
        index, count = run.whole.index, len(claimed)
        if isinstance(index, slice) and parents[1:] == hashes[:-1]:
            # Neighbours, each hanging on the one before: column by column.
            self.block_hash[index], self.parent[index] = hashes, parents
            self.space[index], self.run[index] = [space] * count, [run] * count
            self.place[index], num_children[index.start : index.stop - 1] = range(count), [1] * (count - 1)
            if parents[0] != namespace:
                self._hang_on(parents[0], space)
        else:
            last, last_slot = b"", -1
            for place, (slot, own, parent) in enumerate(zip(claimed, hashes, parents, strict=True)):
                self.block_hash[slot], self.parent[slot], self.space[slot] = own, parent, space
                self.run[slot], self.place[slot] = run, place
                if parent is last:
                    num_children[last_slot] += 1
                elif parent != namespace:
                    self._hang_on(parent, space)
                last, last_slot = own, slot
        if space.orphans and not space.orphans.keys().isdisjoint(hashes):
            for slot in claimed:
                num_children[slot] += space.orphans.pop(self.block_hash[slot], 0)

    def _open(self, namespace: bytes) -> Space:
        space = self.spaces.get(namespace)
        if space is None:
            if len(self.spaces) > 2 * self._num_spaces_kept + _FEW_SPACES:
                self.spaces = {name: space for name, space in self.spaces.items() if len(space)}
                self._num_spaces_kept = len(self.spaces)
            space = self.spaces[namespace] = Space(namespace)
        return space

    def _hang_on(self, parent: bytes, space: Space) -> None:
        above = space.ready.get(parent, space.writing.get(parent))
        if above is None:
            space.orphans[parent] += 1
        else:
            self.num_children[above] += 1

    def publish(self, space: Space, hashes: list[bytes], slots: list[int]) -> None:
        """Let blocks be found that are being written; arguments as for `SlotTable.publish`."""
        writing = space.writing
        for own in hashes:
            del writing[own]
        if self.parent[slots[0]] == space.namespace:  # Only what a write begins with can be a chain's first.
            self.presence.add(hashes[0])
        space.ready.update(zip(hashes, slots, strict=True))
        self.run[slots[0]].published(slots)
        self.events.add(True, hashes)

    # Taking out.

    def num_kept(self, ref_count: Sequence[int]) -> int:
        """Return how many ready blocks that nobody reads cannot go, for one that is read or written hangs on them."""
        kept = set[int]()
        held = np.flatnonzero(np.asarray(ref_count)).tolist()
        for space in self.spaces.values():
            held += space.writing.values()
        for slot in held:
            at: int | None = slot
            while at is not None:
                space, parent = self.space[at], self.parent[at]
                at = space.ready.get(parent) if parent != space.namespace else None
                # Above one that is read it goes on from there by itself.
                if at is None or ref_count[at] or at in kept:
                    break
                kept.add(at)
        return len(kept)

    def evict(self, slot: int) -> bytes:
        """Take a ready block out that has no children.

        Returns:
            Its hash, for an event; nothing, with nothing changed, when there is no such block in the slot.
        """
        own, space = self.block_hash[slot], self.space[slot]
        if self.num_children[slot] or space.ready.pop(own, None) is None:
            return b""
        self.run[slot].lost(self.place[slot])
        if self.parent[slot] == space.namespace:
            self.presence.drop(own)
        else:
            self._leave_parent(slot, space)
        return own

    def abort(self, slots: Sequence[int]) -> tuple[SlotList, list[bytes]]:
        """Take blocks out that are being written; slots that have no block are passed over.

        Returns:
            (the others, the hashes of those that were not cleared).
        """
        aborted, lost = list[int](), list[bytes]()
        for slot in slots:
            own, space = self.block_hash[slot], self.space[slot]
            if space.writing.pop(own, None) is None:
                continue
            aborted.append(slot)
            if not space.is_cleared:
                lost.append(own)
                if self.parent[slot] != space.namespace:
                    self._leave_parent(slot, space)
            if self.num_children[slot]:
                space.orphans[own] = self.num_children[slot]
        listed = SlotList.of(aborted)
        self.forget(listed)
        return listed, lost

    def _leave_parent(self, slot: int, space: Space) -> None:
        parent, num_children = self.parent[slot], self.num_children
        above = space.ready.get(parent)
        if above is not None:
            num_children[above] -= 1
            if not num_children[above]:
                self._eviction.released((above,), 0)
        elif parent in space.writing:
            num_children[space.writing[parent]] -= 1
        elif space.orphans[parent] > 1:
            space.orphans[parent] -= 1
        else:
            del space.orphans[parent]

    def forget(self, slots: SlotList) -> None:
        """Let slots have no block."""
        block_hash, parent, spaces, num_children = self.block_hash, self.parent, self.space, self.num_children
        index, count = slots.index, len(slots)
        if isinstance(index, slice):
            block_hash[index] = parent[index] = [b""] * count
            spaces[index], num_children[index] = [NOTHING] * count, [0] * count
        else:
            for slot in slots:
                block_hash[slot] = parent[slot] = b""
                spaces[slot], num_children[slot] = NOTHING, 0

    def detach(self, namespace: bytes) -> list[Space]:
        """Let nothing of a namespace's group be found any more, in one step; the slots come back with `sweep`.

        Returns:
            What there was. Blocks of it that are being written stay so until their writers end.
        """
        group = group_of(namespace)
        spaces = [self.spaces.pop(each) for each in list(self.spaces) if group_of(each) == group]
        for space in spaces:
            space.is_cleared, space.unswept = True, iter(space.ready.values())
            if space.ready:
                self.events.add(False, space.ready)
        self.cleared += spaces
        return spaces

    def sweep(self, num_slots: int) -> tuple[list[int], SlotList]:
        """Take up to so many blocks out that were ready when they were cleared; returns their slots in both forms."""
        swept, parent = list[int](), self.parent
        for space in self.cleared:
            if space.unswept is not None:
                slots, namespace = list(islice(space.unswept, num_slots - len(swept))), space.namespace
                swept += slots
                for slot in [slot for slot in slots if parent[slot] == namespace]:
                    self.presence.drop(self.block_hash[slot])
                if len(swept) == num_slots:
                    break
                space.unswept = None
        listed = SlotList.of(swept) if swept else NO_SLOTS
        self.forget(listed)
        return swept, listed

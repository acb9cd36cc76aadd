"""Index the blocks of a pool: their slots, parents and children. No locking here: the pool holds its lock."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvstore.blocks.chain import HASH_BYTES, BlockHashes
from kvstore.errors import ChainBroken
from kvstore.memory.clears import group_of
from kvstore.memory.presence import PresenceCounts
from kvstore.pool.events.log import EventLog
from kvstore.pool.events.roots import RootColumn
from kvstore.pool.eviction.priorities import PriorityOrder
from kvstore.pool.runs import NO_RUN, Run, RunColumns
from kvstore.pool.slot_lists import NO_SLOTS, SlotList, join

#: The event log keeps at least this many hashes; in larger pools, as many as there are slots.
_FEWEST_EVENTS = 1 << 14
#: Empty spaces are dropped when there are more spaces than this plus twice the number kept the last time.
_FEW_SPACES = 64


@dataclass(slots=True, eq=False)
class Space:
    """The index of one namespace from one clearing to the next.

    A clearing removes it from the index, and `ready` stays unchanged. Its slots refer to it until they are swept.

    Args:
        namespace: digest.
        ready: slot of each block that can be found.
        writing: slot of each block that is being written.
        orphans: of each block that is not here, how many hang on it, and a depth that none of these is below.
        unswept: the rest of `ready`, once it was cleared; None when there is no more.
    """

    namespace: bytes
    ready: dict[bytes, int] = field(default_factory=dict)
    writing: dict[bytes, int] = field(default_factory=dict)
    orphans: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    is_cleared: bool = False
    unswept: Iterator[int] | None = None

    def __len__(self) -> int:
        return len(self.ready) + len(self.writing)


#: For a namespace that is not here; always empty.
NOTHING = Space(b"")


class BlockIndex:
    """The blocks of a pool by namespace and hash, with one column per attribute.

    A block that can be found is in `ready` of its space, one that is being written in `writing`; any other slot has no
    block. `parent` is the hash of the block before this one in its chain, the namespace's digest at a root.
    `num_children` counts the blocks, ready or being written, that hang on a block: it is not evicted before them. For a
    parent that is not here its space counts them, until it comes. `depth` is the number of a block in its chain, as its
    writer gave it, above that of the block it hangs on. `claims` says with which others a slot was claimed. `presence`
    counts first blocks of chains, also those being written, `eviction` is told of blocks without children.
    """

    def __init__(
        self, num_slots: int, presence: PresenceCounts, eviction: PriorityOrder, *, has_roots: bool = False
    ) -> None:
        self.presence, self._eviction = presence, eviction
        self.block_hash, self.parent = [b""] * num_slots, [b""] * num_slots
        #: The space of each slot's block, perhaps one in `cleared`; `NOTHING` for a slot without a block.
        self.space = [NOTHING] * num_slots
        self.num_children = array("i", bytes(4 * num_slots))
        self.depth = array("q", bytes(8 * num_slots))
        # The same memory, for all slots of a claim at once.
        self.nums_children = np.frombuffer(self.num_children, np.int32)
        self._depths = np.frombuffer(self.depth, np.int64)
        self.roots = RootColumn(num_slots, is_kept=has_roots)
        self.claims = RunColumns(num_slots)
        self.run, self.place = self.claims.run, self.claims.place
        self.spaces: dict[bytes, Space] = {}
        #: Cleared spaces that are not swept yet.
        self.cleared: deque[Space] = deque()
        self.events = EventLog(max(num_slots, _FEWEST_EVENTS))
        self._num_spaces_kept = 0

    # Finding.

    def space_of(self, namespace: bytes) -> Space:
        """Return the space of a namespace, only to read it."""
        return self.spaces.get(namespace, NOTHING)

    def num_ready(self, namespace: bytes, data: bytes, first: int = 0) -> int:
        """Return where the blocks from `first` on that are ready end; `data` has the hashes of the whole run."""
        count, at, ready = len(data) // HASH_BYTES, first, self.space_of(namespace).ready
        while at < count and (slot := ready.get(data[at * HASH_BYTES : (at + 1) * HASH_BYTES])) is not None:
            at += self.run[slot].num_shared(self.place[slot], data, at)
        return at

    def find_prefix(self, namespace: bytes, data: bytes) -> SlotList:
        """Return the slots of the leading ready blocks; a block named twice has its slot there twice."""
        count, at, pieces, ready = len(data) // HASH_BYTES, 0, [], self.space_of(namespace).ready
        while at < count and (slot := ready.get(data[at * HASH_BYTES : (at + 1) * HASH_BYTES])) is not None:
            run, place = self.run[slot], self.place[slot]
            length = run.num_shared(place, data, at)
            pieces.append(run.whole.part(place, place + length))
            at += length
        return join(pieces) if pieces else NO_SLOTS

    def check_parent(self, chain: BlockHashes) -> None:
        """Make sure that a run begins at the root, or after a block that is here or being written; or ChainBroken."""
        space = self.space_of(chain.namespace)
        if chain.start and chain.parent not in space.ready and chain.parent not in space.writing:
            raise ChainBroken(
                f"wanted a run that begins at the root or after a resident block, got one that begins at "
                f"block {chain.start} whose parent is not resident; pass the chain from its root"
            )

    def check_depths(
        self, chain: BlockHashes, hashes: list[bytes], found: list[int | None], under_way: list[int | None]
    ) -> None:
        """Make sure that no new block of a run would hang on a block that is as far from the root, or further.

        Blocks that hang on each other in a circle all have children, so none of them would ever be evicted.
        `hashes` are those of the chain; `found` has the slot of each block that is ready, `under_way` of each that is
        being written, and is empty if there is none.

        Raises:
            ChainBroken: a block would be its own ancestor; nothing changed.
        """
        here = under_way or found
        if under_way and found.count(None) < len(found):
            here = [a if a is not None else b for a, b in zip(found, under_way, strict=True)]
        num_new = here.count(None)
        if not num_new:
            return
        space, start, first = self.space_of(chain.namespace), chain.start, here.index(None)
        begins = [first]
        if num_new < len(here) - first:
            begins = [i for i, slot in enumerate(here) if slot is None and (not i or here[i - 1] is not None)]
        for i in begins:
            above = here[i - 1] if i else space.ready.get(chain.parent, space.writing.get(chain.parent))
            if above is not None and self.depth[above] >= start + i:
                raise _not_below(hashes[i], start + i, self.depth[above])
        if space.orphans and not space.orphans.keys().isdisjoint(hashes):
            for i, own in enumerate(hashes):
                if here[i] is None and own in space.orphans and space.orphans[own][1] <= start + i:
                    raise _not_below(own, start + i, space.orphans[own][1])

    # Writing.

    def claim(
        self,
        run: Run,
        hashes: list[bytes],
        parents: list[bytes],
        namespace: bytes,
        depths: npt.NDArray[np.int64],
        root_key: int = 0,
    ) -> None:
        """Put the blocks of a new claim, given with the hash before each, into its slots; they are being written.

        `root_key` is that of their chain, as their writer says; see `RootColumn.claimed`.
        """
        space, claimed, num_children = self._open(namespace), run.slots, self.num_children
        if parents[0] == namespace:  # Only the first of a claim can be a chain's first. A lookup may wait for it.
            self.presence.add(hashes[0])
        space.writing.update(zip(hashes, claimed, strict=True))
        index, count = run.whole.index, len(claimed)
        self._depths[index] = depths
        self.roots.claimed(index, root_key, parents[0], (space.ready, space.writing))
        if isinstance(index, slice) and parents[1:] == hashes[:-1]:
            # Neighbours, each the child of the one before: set whole columns.
            self.block_hash[index], self.parent[index] = hashes, parents
            self.space[index], self.run[index] = [space] * count, [run] * count
            self.place[index], self.nums_children[index.start : index.stop - 1] = range(count), 1
            if parents[0] != namespace:
                self._hang_on(parents[0], space, int(depths[0]))
        else:
            last, last_slot = b"", -1
            for place, (slot, own, parent) in enumerate(zip(claimed, hashes, parents, strict=True)):
                self.block_hash[slot], self.parent[slot], self.space[slot] = own, parent, space
                self.run[slot], self.place[slot] = run, place
                if parent is last:
                    num_children[last_slot] += 1
                elif parent != namespace:
                    self._hang_on(parent, space, self.depth[slot])
                last, last_slot = own, slot
        if space.orphans and not space.orphans.keys().isdisjoint(hashes):
            for slot in claimed:
                num_children[slot] += space.orphans.pop(self.block_hash[slot], (0, 0))[0]

    def _open(self, namespace: bytes) -> Space:
        space = self.spaces.get(namespace)
        if space is None:
            if len(self.spaces) > 2 * self._num_spaces_kept + _FEW_SPACES:
                self.spaces = {name: space for name, space in self.spaces.items() if len(space)}
                self._num_spaces_kept = len(self.spaces)
            space = self.spaces[namespace] = Space(namespace)
        return space

    def _hang_on(self, parent: bytes, space: Space, depth: int) -> None:
        above = space.ready.get(parent, space.writing.get(parent))
        if above is None:
            count, least = space.orphans.get(parent, (0, depth))
            space.orphans[parent] = count + 1, min(least, depth)
        else:
            self.num_children[above] += 1

    def publish(self, space: Space, hashes: list[bytes], slots: list[int]) -> None:
        """Make blocks findable that are being written, in the order of their claim."""
        writing = space.writing
        for own in hashes:
            del writing[own]
        space.ready.update(zip(hashes, slots, strict=True))
        run = self.run[slots[0]]
        run.published(slots[: self.claims.num_of_claim(run, self.place[slots[0]], slots, 0)])
        self.events.add(True, hashes, slots, roots=self.roots.of(slots))

    # Taking out.

    def evict(self, slot: int) -> bytes:
        """Remove a ready block without children; return its hash, empty when the slot has no such block.

        Cleared ones stay: `sweep` frees them.
        """
        own, space = self.block_hash[slot], self.space[slot]
        if space.is_cleared:
            return b""
        if self.num_children[slot] or space.ready.pop(own, None) is None:
            return b""
        if self.run[slot].lost(self.place[slot]):
            self.claims.thin.add(self.run[slot])
        if self.parent[slot] == space.namespace:
            self.presence.drop(own)
        else:
            self._leave_parent(slot, space)
        return own

    def discard(self, slot: int) -> bytes:
        """Remove a ready block; its children become orphans. Return its hash, empty when the slot has no such block."""
        own, space = self.block_hash[slot], self.space[slot]
        if space.is_cleared or space.ready.get(own) != slot:
            return b""
        if self.num_children[slot]:
            space.orphans[own] = self.num_children[slot], self.depth[slot] + 1
            self.num_children[slot] = 0
        return self.evict(slot)

    def abort(self, slots: Sequence[int]) -> tuple[SlotList, list[bytes]]:
        """Remove blocks that are being written; return (their slots, their hashes). Skips other slots."""
        aborted, lost, block_hash, spaces = list[int](), list[bytes](), self.block_hash, self.space
        # From the end: most blocks have lost their children by then, and are not counted as awaited by them.
        for slot in reversed(slots):
            own, space = block_hash[slot], spaces[slot]
            if space.writing.pop(own, None) is None:
                continue
            aborted.append(slot)
            lost.append(own)
            if self.parent[slot] == space.namespace:
                self.presence.drop(own)
            elif not space.is_cleared:
                self._leave_parent(slot, space)
            if self.num_children[slot]:
                space.orphans[own] = self.num_children[slot], self.depth[slot] + 1
        aborted.reverse()
        for run, count in Counter([self.run[slot] for slot in aborted]).items():
            run.num_lost += count
            self.claims.look_at(run)
        listed = SlotList.of(aborted)
        self.forget(listed)
        self.shorten()
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
        elif (count := space.orphans[parent][0]) > 1:
            space.orphans[parent] = count - 1, space.orphans[parent][1]
        else:
            del space.orphans[parent]

    def forget(self, slots: SlotList) -> None:
        """Remove the blocks of slots from the columns."""
        block_hash, parent, spaces, num_children = self.block_hash, self.parent, self.space, self.num_children
        index, count = slots.index, len(slots)
        if isinstance(index, slice):
            block_hash[index] = parent[index] = [b""] * count
            spaces[index], self.nums_children[index] = [NOTHING] * count, 0
            self.run[index] = [NO_RUN] * count
        else:
            for slot in slots:
                block_hash[slot] = parent[slot] = b""
                spaces[slot], num_children[slot], self.run[slot] = NOTHING, 0, NO_RUN

    def shorten(self) -> None:
        """Shorten the runs of which few blocks are left."""
        self.claims.shorten(self.block_hash, self._is_here)

    def _is_here(self, slot: int) -> bool:
        own, space = self.block_hash[slot], self.space[slot]
        return slot in (space.ready.get(own), space.writing.get(own))

    def detach(self, namespace: bytes) -> list[Space]:
        """Remove and return the spaces of a namespace's group, so that their blocks cannot be found.

        `sweep` frees the slots. Blocks being written stay so until their writers end or `sweep` aborts them.
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
        """Remove up to `num_slots` blocks that were ready when cleared; return their slots in both forms."""
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


def _not_below(own: bytes, depth: int, other: int) -> ChainBroken:
    return ChainBroken(
        f"wanted each block further from the root of its chain than the one it hangs on, got block {own.hex()[:8]} as "
        f"number {depth} next to one that is number {other}; pass runs with the start that they have in their chain"
    )

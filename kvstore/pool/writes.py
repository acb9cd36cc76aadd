"""Keep the unfinished writes of a pool, with their owners and parts. No locking here: the pool holds its lock.

A block of several parts is written by as many ranks: the first rank claims its slot, the others join it by hash.
It is published with its last part. A rank that gives up, dies or does not come in time aborts the block for all
ranks. Its slot becomes free when the write of every rank that had come has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.grants import StoreTicket
from kvstore.blocks.indexes import pack_ints
from kvstore.blocks.priority import NORMAL, Retention
from kvstore.bounds import MAX_HELD_BLOCKS
from kvstore.errors import InvalidRequest, PoolExhausted, StaleTicket
from kvstore.memory.clears import ClearCounts
from kvstore.pool.block_index import NOTHING, Space
from kvstore.pool.owners import OwnedTable
from kvstore.pool.part_runs import PartRuns
from kvstore.pool.runs import Segment
from kvstore.pool.slot_lists import NO_SLOTS, SlotList
from kvstore.pool.slots import SlotTable


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTerms:
    """The terms of a write; see `Pool.prepare_store`."""

    owner: str
    part: int = 0
    num_parts: int = 1
    deadline_s: float = float("inf")
    parts_deadline_s: float = float("inf")
    retention: Retention = NORMAL
    tenant: int = 0


@dataclass(slots=True)
class _Write:
    terms: WriteTerms
    #: Empty for blocks without names, which will never be published.
    hashes: list[bytes]
    slots: list[int]
    generations: bytes
    #: Slots of the chain's blocks that were here: pinned, so that making room cannot evict them.
    pinned: SlotList
    stamp: int
    #: The claims of the slots, if the blocks are written in parts.
    segments: list[Segment]
    space: Space
    #: Pinned ones that count in the quota of pins of the writer's tenant.
    paid: SlotList = NO_SLOTS
    num_done: int = 0

    @property
    def owner(self) -> str:
        return self.terms.owner

    @property
    def num_blocks(self) -> int:
        return len(self.slots) + len(self.pinned)


class WriteTable(OwnedTable[_Write]):
    """The unfinished writes of one pool; `on_settled` is called with hashes of blocks that no longer have a writer."""

    def __init__(
        self,
        table: SlotTable,
        epoch: bytes,
        new_id: Callable[[], int],
        on_settled: Callable[[Collection[bytes]], None],
        clears: ClearCounts,
        on_published: Callable[[bytes, list[int], str], None] | None,
        on_used: Callable[[bytes, list[int], bool], None] | None,
    ) -> None:
        super().__init__()
        self._table, self._epoch, self.new_id, self._on_settled = table, epoch, new_id, on_settled
        self._on_published, self._on_used, self._clears, self._tenants = on_published, on_used, clears, table.tenants
        self._parts = PartRuns(table.columns, table.index.claims.look_at)

    def has_deadlines(self) -> bool:
        """Return whether a deadline may end any write."""
        ends = (min(write.terms.deadline_s, write.terms.parts_deadline_s) for write in self.held.values())
        return len(self._parts) > 0 or min(ends, default=float("inf")) < float("inf")

    def prepare(self, chain: BlockHashes, hashes: list[bytes], terms: WriteTerms, *, needs_parent: bool) -> StoreTicket:
        """Claim a slot for each missing block, or join the ranks that write it; see `Pool.prepare_store`."""
        table, index = self._table, self._table.index
        space = index.space_of(chain.namespace)
        ready, writing = space.ready, space.writing
        if needs_parent:
            index.check_parent(chain)
        self._check_room()
        found = list(map(ready.get, hashes))
        under_way = [] if writing.keys().isdisjoint(hashes) else list(map(writing.get, hashes))
        index.check_depths(chain, hashes, found, under_way)
        above = [ready[chain.parent]] if chain.start and chain.parent in ready else []
        num_wanted, paid = len(hashes), NO_SLOTS
        if self._tenants is not None:
            end, paid = self._tenants.payable(terms.tenant, above, found)
            hashes, found, under_way = hashes[:end], found[:end], under_way[:end]
        # Pinned before anything is evicted to make room.
        here = [slot for slot in found if slot is not None] if found.count(None) < len(found) else []
        here += above
        pinned = index.claims.listed(here)
        if here:
            table.columns.pin(pinned)
            if self._on_used is not None:
                self._on_used(chain.namespace, here, False)
        joined: list[int] = []
        for segment in index.claims.segments(under_way):
            joined += self._parts.joinable(segment, terms.part, terms.num_parts)
            begin, end = segment.at, segment.at + segment.length
            found[begin:end] = under_way[begin:end]
        indexes, end = self._claim(chain, hashes, found, terms)
        if joined:
            indexes = sorted([*indexes, *(i for i in joined if i < end)])
        run: list[int] = found[:end]  # type: ignore[assignment]  # No slot is missing before `end`.
        slots = run if len(indexes) == end else [run[i] for i in indexes]
        # Read again: the claim may have made the namespace's index.
        space = index.space_of(chain.namespace)
        ready, writing = space.ready, space.writing
        listed = index.claims.listed(slots)
        touched = run
        if chain.start and (parent := ready.get(chain.parent, writing.get(chain.parent))) is not None:
            touched = [parent, *run]
        listed_run = listed if slots is touched else index.claims.listed(touched)
        stamp = table.eviction.touched(listed_run, is_use=False, retention=terms.retention)
        if end < len(hashes):
            # Pinned blocks after a refused one are not touched, and eviction may have passed their place.
            stamp = 0
        write_id, generations = 0, b""
        if indexes:
            write_id, generations = self.new_id(), table.columns.lives(listed)
            own = hashes if len(indexes) == len(hashes) else [hashes[i] for i in indexes]
            if terms.num_parts > 1:  # Ranks that write the same blocks keep one copy of their hashes.
                own = [index.block_hash[slot] for slot in slots]
            segments = index.claims.segments(slots) if terms.num_parts > 1 else []
            self._parts.come(segments, terms.part)
            self.add(write_id, _Write(terms, own, slots, generations, pinned, stamp, segments, space, paid))
            if self._tenants is not None:
                self._tenants.pinned(terms.tenant, paid)
        elif here:
            table.unpin(pinned, stamp)
        return StoreTicket(
            write_id=write_id,
            packed_indexes=pack_ints(indexes),
            packed_slots=listed.packed,
            num_resident=end - len(indexes),
            num_refused=num_wanted - end,
            num_awaited=sum(own in writing for own in hashes[:end]) - len(indexes) if len(indexes) < end else 0,
            num_clears=self._clears.get(chain.namespace),
            generations=generations,
            epoch=self._epoch,
        )

    def reserve(self, num_blocks: int, terms: WriteTerms, *, may_evict: bool) -> StoreTicket:
        """Claim slots for blocks that will never be published; see `Pool.reserve`."""
        table = self._table
        self._check_room()
        self._sweep_writing(table.num_short(num_blocks, terms.tenant))
        # Counted before any eviction, so that no block is evicted for a claim that fails.
        table.check_obtainable(num_blocks, may_evict=may_evict, tenant=terms.tenant)
        run = table.claim_anonymous(num_blocks, terms.tenant)
        write_id, generations = self.new_id(), table.columns.lives(run.whole)
        self.add(write_id, _Write(terms, [], run.slots, generations, NO_SLOTS, 0, [], NOTHING))
        return StoreTicket(
            write_id=write_id,
            packed_indexes=pack_ints(range(num_blocks)),
            packed_slots=run.whole.packed,
            generations=generations,
            epoch=self._epoch,
        )

    def adopt(self, slots: list[int], owner: str) -> None:
        """Note that a writer of the pool's last life may still write to slots, which were taken for it."""
        listed, terms = self._table.begin_anonymous(slots), WriteTerms(owner=owner)
        self.add(self.new_id(), _Write(terms, [], slots, self._table.columns.lives(listed), NO_SLOTS, 0, [], NOTHING))

    def _claim(
        self, chain: BlockHashes, hashes: list[bytes], found: list[int | None], terms: WriteTerms
    ) -> tuple[Sequence[int], int]:
        """Claim slots for the blocks that have none in `found`, and enter them there.

        Returns:
            (positions of the blocks that got a slot, number of leading blocks before the first without one).
        """
        num_new, missing = found.count(None), list[int]()
        if not num_new:
            return missing, len(found)
        parents, depths = [chain.parent, *hashes[:-1]], np.arange(chain.start, chain.start + len(hashes))
        is_new = num_new == len(found)
        if not is_new:
            missing = [i for i, slot in enumerate(found) if slot is None]
            hashes, parents, depths = [hashes[i] for i in missing], [parents[i] for i in missing], depths[missing]
        self._sweep_writing(self._table.num_short(len(hashes), terms.tenant))
        run = self._table.claim(hashes, parents, chain.namespace, depths, terms.retention, chain.root_key, terms.tenant)
        count = len(run.slots)
        if count and terms.num_parts > 1:
            self._parts.begin(run, terms.num_parts, terms.parts_deadline_s)
        if is_new:
            found[:count] = run.slots
            return range(count), count
        for i, slot in zip(missing, run.slots, strict=False):
            found[i] = slot
        return missing[:count], missing[count] if count < len(missing) else len(found)

    def find(self, write_id: int, owner: str, epoch: bytes | None, generations: bytes | None) -> _Write | None:
        """Return a write if `owner` holds it.

        Raises:
            StaleTicket: the epoch is another one, or `owner` holds the write with other generations.
        """
        if epoch is not None and epoch != self._epoch:
            raise StaleTicket(f"wanted epoch {self._epoch.hex()}, got {epoch!r}: the store was restarted")
        write = self.of(write_id, owner)
        if write is not None and generations is not None and generations != write.generations:
            raise StaleTicket(f"write {write_id}: wanted the generations of its ticket, got others; prepare again")
        return write

    def complete(self, write_id: int, write: _Write, count: int | None) -> int:
        """Publish the leading `count` blocks of a write, or record its part; return how many became readable."""
        if write.space.is_cleared:
            self._abort_blocks(write.slots[write.num_done :])
        if count is not None and write.terms.num_parts > 1:
            raise InvalidRequest(f"count: wanted None for a write of {write.terms.num_parts} parts, got {count}")
        columns, hashes, slots, begin = self._table.columns, write.hashes, write.slots, write.num_done
        end = len(slots) if count is None else min(count, len(slots))
        if end <= begin:
            return 0
        hashes, slots, write.num_done, whole = hashes[begin:end], slots[begin:end], end, None
        if write.terms.num_parts > 1:
            whole = self._parts.end(write.segments, slots, done=True)
        elif columns.aborted and not columns.aborted.isdisjoint(slots):
            whole = [i for i, slot in enumerate(slots) if slot not in columns.aborted]
            columns.end_aborted(columns.aborted.intersection(slots))
        if whole is not None and len(whole) < len(slots):
            hashes, slots = [hashes[i] for i in whole], [slots[i] for i in whole]
        if slots:
            self._table.publish(write.space, hashes, slots, write.stamp)
            self._on_settled(hashes)
            if self._on_published is not None:
                self._on_published(write.space.namespace, slots, write.terms.owner)
        if end == len(write.slots):
            self._close(write_id)
        return len(slots)

    def abort(self, write_id: int, write: _Write, quarantine: str = "") -> int:
        """Give up the unpublished blocks of a write; see `Pool.abort_store`."""
        if quarantine and write.terms.num_parts > 1:
            raise InvalidRequest("quarantine: wanted a write of whole blocks, got one of several parts")
        pending = write.slots[write.num_done :]
        if write.hashes:
            self._abort_blocks(pending)
        if write.segments:
            self._parts.end(write.segments, write.slots, done=False)
        else:
            self._table.columns.end_aborted(pending, quarantine)
        self._close(write_id)
        return len(pending)

    def free_names(self, write: _Write) -> int:
        """Let others write the unpublished blocks of a write; see `Pool.free_names`."""
        if write.terms.num_parts > 1:
            raise InvalidRequest("free_names: wanted a write of whole blocks, got one of several parts")
        pending = write.slots[write.num_done :]
        self._abort_blocks(pending)
        return len(pending)

    def _abort_blocks(self, slots: list[int]) -> None:
        if lost := self._table.abort(slots):
            self._on_settled(lost)

    def end(self, write_id: int) -> None:
        """Abort a write that is unfinished."""
        self.abort(write_id, self.held[write_id])

    def expire(self, now_s: float) -> int:
        """Give up blocks whose ranks did not all come, and overdue writes; return the number of these writes."""
        for run, place in self._parts.overdue(now_s):
            self._abort_blocks([run.slots[place]])
            self._parts.leave(run, place)
        return self.end_all([i for i, write in self.held.items() if write.terms.deadline_s < now_s])

    def clear(self, namespace: bytes) -> int:
        """Make a namespace's group unfindable; return its number of blocks. `sweep` gives their slots back."""
        spaces = self._table.index.detach(namespace)
        for space in spaces:
            self._on_settled(space.writing)
        return sum(map(len, spaces))

    def sweep(self, num_slots: int) -> None:
        """Sweep up to `num_slots` cleared slots; each becomes free after its last writer or reader."""
        cleared = self._table.index.cleared
        self._sweep_writing(num_slots - self._table.sweep(num_slots))
        while cleared and cleared[0].unswept is None and not cleared[0].writing:
            cleared.popleft()

    def _sweep_writing(self, num_slots: int) -> None:
        index = self._table.index
        for space in index.cleared:
            # From the end, because earlier steps left no gaps there.
            slots = list(islice(reversed(space.writing.values()), max(num_slots, 0)))
            places = [(index.run[slot], index.place[slot]) for slot in slots]  # Before they are aborted.
            if slots:
                self._table.abort(slots)
            for run, place in places:
                self._parts.leave(run, place)
            num_slots -= len(slots)

    def _check_room(self) -> None:
        if self.num_blocks >= MAX_HELD_BLOCKS:
            raise PoolExhausted(
                f"wanted unfinished writes of at most {MAX_HELD_BLOCKS} blocks of a store at once, with those that "
                f"they keep, got {self.num_blocks} and more; let some end first"
            )

    def _close(self, write_id: int) -> None:
        write = self.pop(write_id)
        if self._tenants is not None:
            self._tenants.unpinned(write.terms.tenant, write.paid)
        if len(write.pinned):
            self._table.unpin(write.pinned, write.stamp)

    def check(self, refs: Counter[int], paid: Counter[tuple[int, int]]) -> None:
        """Add the pins of all writes to `refs` and `paid`, as for leases; assert that slots and writers agree."""
        index, columns, writers = self._table.index, self._table.columns, Counter[int]()
        self.check_owners()
        for write in self.held.values():
            refs.update(write.pinned)
            paid.update((write.terms.tenant, slot) for slot in write.paid)
            writers.update(write.slots[write.num_done :])
            lives = columns.lives(index.claims.listed(write.slots))
            assert lives == write.generations or write.num_done, "a claimed slot began a new life"
        in_parts = self._parts.check(writers)
        assert all(n == 1 for slot, n in writers.items() if slot not in in_parts), "a slot is written by two"
        spaces = [*index.spaces.values(), *index.cleared]
        being_written = {slot for space in spaces for slot in space.writing.values()} | columns.aborted
        assert being_written == {*writers, *in_parts}, "writers of unknown slots, or none"

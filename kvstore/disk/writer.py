"""Write blocks of memory to the disk, behind the saves that brought them.

A save never waits for the disk. Blocks that became readable are noted in a bounded queue. A thread of the disk pins
some of them, writes record and bytes with one call, then the records of the index, and only then they can be found on
the disk. What finds no room in the queue, was evicted before its turn, or exceeds the budget is left out, and counted.

A clearing may come at any moment, so the count of clearings of the disk's pool is noted before a block of memory is
pinned, and the claim on the disk is refused if it has changed since (docs/adr/0018-clearing-is-a-version.md).
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from kvstore.blocks.grants import HeldBlock, StoreTicket, chain_of, runs_of_held
from kvstore.blocks.indexes import ints_in
from kvstore.disk.admission import SeenFilter, WriteBudget
from kvstore.disk.places import TierContext
from kvstore.disk.records import PAGE_BYTES, RECORD_BYTES, Record, checksum_of, pack_record
from kvstore.disk.slot_file import MOST_BUFFERS, neighbours
from kvstore.errors import ChainBroken, InvalidRequest, PoolExhausted
from kvstore.pool.eviction.learned import SAVE_GAP_S, USE_GAP_S
from kvstore.quotas import tag_of
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

OWNER = "disk-writer"
#: Blocks and bytes that one turn of a thread writes, so that reads are not kept waiting.
_MOST_BLOCKS, _MOST_BYTES = 256, 16 << 20
#: And at most one of so many blocks of the memory.
_LEAST_SHARE = 32


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks to write: their slots of memory, and what was known of their namespace before they were pinned."""

    namespace: bytes
    slots: list[int]
    num_clears: int
    version: int
    #: Of the first block, those of the others follow; 0 if the write takes the next ones.
    generation: int = 0


@dataclass(slots=True)
class WriterCounts:
    """Blocks that were written, left out by reason, and the bytes."""

    num_written: int = 0
    num_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class Writer:
    """The queue of blocks to write, and their writing. `offer` never waits; `write_some` runs on threads of the disk.

    Args:
        context: of the tier.
        most_queued: blocks that may wait.
        min_uses: write a block only when it was stored or used so many times.
        is_behind_saves: queue blocks when they become readable. Otherwise only their uses are counted then.
        budget: of bytes.
        sync: have the disk keep blocks, also without power, before they can be found.
        before_write: called with a version before blocks stored under it are written; it makes clearings durable.
        wake: has `write_some` called soon.
        is_off: returns whether the disk is off: then nothing is queued.
    """

    def __init__(
        self,
        context: TierContext,
        most_queued: int,
        min_uses: int,
        is_behind_saves: bool,
        budget: WriteBudget,
        sync: bool,
        before_write: Callable[[], None],
        wake: Callable[[], None],
        is_off: Callable[[], bool],
    ) -> None:
        self._context, self.most_queued = context, most_queued
        self._sync, self._before_write, self._wake, self._budget = sync, before_write, wake, budget
        self._is_off, self._min_uses, self._is_behind_saves = is_off, min_uses, is_behind_saves
        #: Under the memory pool's lock; None if each block is written.
        self._seen = SeenFilter(max(4 * context.disk_pool.num_slots, 1 << 16), min_uses) if min_uses > 1 else None
        self._lock = threading.Lock()
        #: Held until the slots are claimed: so blocks that follow each other are neighbours in the file, too.
        self.claiming = threading.Lock()
        self._queue: deque[Offer] = deque()
        #: Blocks that wait, and those of them that are being written now.
        self.num_queued = self.num_writing = 0
        self.counts = WriterCounts()
        #: For the records of runs; one for each thread that wrote at once.
        self._pages = list[mmap.mmap]()

    def offer(self, namespace: bytes, slots: list[int], *, is_on_disk: bool) -> None:
        """Note blocks that became readable; `is_on_disk` if they come from there.

        Under the memory pool's lock, so nothing here waits.
        """
        if self._seen is not None:
            counts = self._saw(slots, USE_GAP_S)
            slots = [slot for slot, (count, _) in zip(slots, counts, strict=True) if count >= self._min_uses]
        if slots and self._is_behind_saves and not is_on_disk:
            self.queue_up(namespace, slots)

    def used(self, namespace: bytes, slots: list[int], is_use: bool) -> None:
        """Note that blocks of memory were touched; those that were used often enough just now are written.

        Under the memory pool's lock. What is a use is the same as for eviction (docs/eviction.md).
        """
        if self._seen is not None:
            counts = self._saw(slots, USE_GAP_S if is_use else SAVE_GAP_S)
            slots = [slot for slot, count in zip(slots, counts, strict=True) if count == (self._min_uses, True)]
            if slots and self._is_behind_saves:
                self.queue_up(namespace, slots)

    def _saw(self, slots: list[int], gap_s: float) -> list[tuple[int, bool]]:
        assert self._seen is not None
        return self._seen.saw(self._context.memory_pool.hashes_of(slots), clock.now_s(), gap_s)

    def is_worthy(self, block_hash: bytes) -> bool:
        """Return whether a block was used often enough to be written."""
        return self._seen is None or self._seen.num_uses(block_hash) >= self._min_uses

    def offer_of(self, namespace: bytes, slots: list[int], generation: int = 0) -> Offer:
        """Note what is known of a namespace now, before blocks of it are pinned for their write: see the module."""
        context = self._context
        num_clears = context.disk_pool.num_clears(namespace)
        return Offer(namespace, slots, num_clears, context.version_of(namespace), generation)

    def queue_up(self, namespace: bytes, slots: list[int], generation: int = 0) -> None:
        """Queue blocks of memory, or count them as dropped; see `Offer` for `generation`. Never waits."""
        offer, is_off = self.offer_of(namespace, slots, generation), self._is_off()
        with self._lock:
            reason = "off" if is_off else "queue_full" if self.num_queued + len(slots) > self.most_queued else ""
            if reason:
                self.counts.dropped[reason] += len(slots)
                return
            self._queue.append(offer)
            self.num_queued += len(slots)
        self._wake()

    def drop_all(self, reason: str) -> None:
        """Leave out all that waits."""
        with self._lock:
            self.counts.dropped[reason] += self.num_queued
            self._queue.clear()
            self.num_queued = 0

    def write_some(self) -> bool:
        """Write some of the blocks that wait; return whether there were any.

        Raises:
            OSError: the disk refused; the blocks of this turn are left out, and none of them can be found.
        """
        with ExitStack() as turn:
            turn.enter_context(self.claiming)
            if (offer := self._take()) is None:
                return False
            try:
                self.write(offer, turn.close)
            finally:
                with self._lock:
                    self.num_writing -= len(offer.slots)
        return True

    def num_unwritten(self) -> int:
        """Return how many blocks wait or are being written; 0 when all that were offered are on disk, or left out."""
        with self._lock:
            return self.num_queued + self.num_writing

    def _take(self) -> Offer | None:
        with self._lock:
            if not self._queue:
                return None
            offer = self._queue.popleft()
            if len(offer.slots) > (most := self.num_in_turn()):
                slots, generation = offer.slots, offer.generation
                self._queue.appendleft(replace(offer, slots=slots[most:], generation=generation and generation + most))
                offer = replace(offer, slots=slots[:most])
            self.num_queued -= len(offer.slots)
            self.num_writing += len(offer.slots)
            return offer

    def num_in_turn(self) -> int:
        """Return how many blocks one turn of a thread may write."""
        # A turn that the budget never has at once would never be written.
        most_bytes = min(_MOST_BYTES, self._budget.most_bytes or _MOST_BYTES)
        most = min(_MOST_BLOCKS, most_bytes // self._context.slots.stride_bytes)
        # Blocks that are being written are pinned: saves must find enough others to evict.
        return max(1, min(most, self._context.memory_pool.num_slots // _LEAST_SHARE))

    def write(self, offer: Offer, claimed: Callable[[], None]) -> None:
        """Pin and write blocks; those that are not there any more, or on the disk already, are left out.

        Args:
            offer: the blocks.
            claimed: called when the first of them have their places, and at most once for each run.

        Raises:
            OSError: the disk refused; the blocks of the run that it refused cannot be found there.
        """
        context, pool = self._context, self._context.memory_pool
        try:
            context.num_bytes_of(offer.namespace)
        except InvalidRequest:  # Peers had blocks brought from the disk, and no client here has opened their namespace.
            self.drop("unknown_size", len(offer.slots))
            return
        self._before_write()
        lease_id, held = pool.hold(offer.slots, offer.namespace, OWNER)
        self.drop("evicted", len(offer.slots) - len(held))
        if not held:
            return
        try:
            wanted = [block for block in held if not block.is_low]
            self.drop("low_priority", len(held) - len(wanted))
            for run in runs_of_held(wanted):
                self._write_run(offer, run, claimed)
        finally:
            pool.release(lease_id, OWNER)
            context.changed()

    def _write_run(self, offer: Offer, run: list[HeldBlock], claimed: Callable[[], None]) -> None:
        """Write one run of a chain; blocks of it that are on the disk already are not written again."""
        context, pool = self._context, self._context.disk_pool
        # What it builds on may be in memory alone: then the nearest that is on the disk stays for it.
        above = [] if pool.present([run[0].parent]) else context.memory_pool.ancestors(run[0])
        try:
            ticket = pool.prepare_store(
                chain_of(run), OWNER, needs_parent=False, num_clears=offer.num_clears, tenant=run[0].tenant,
                ancestors=above,
            )  # fmt: skip
        except (PoolExhausted, ChainBroken) as error:
            logger.debug("blocks are not written to disk: %s", error)
            self.drop("disk_pool", len(run))
            return
        finally:
            claimed()
        self.drop("disk_full", ticket.num_refused)
        if not ticket.write_id:
            if ticket.num_clears != offer.num_clears:
                self.drop("cleared", len(run))
            return
        try:
            blocks = [run[index] for index in ints_in(ticket.packed_indexes).tolist()]
            if not self._take_budget(len(blocks) * context.slots.stride_bytes):
                self.drop("budget", len(blocks))
                pool.abort_store(ticket.write_id, OWNER)
                return
            records = self._records(offer, blocks, ticket)
            packed = [pack_record(context.tier_id, record) for record in records]
            self._write_slots(records, packed, blocks)
            if self._sync:
                context.slots.sync()
            context.index.write_all(records, packed)
            if self._sync:
                context.index.sync()
            num_published = pool.complete_store(ticket.write_id, OWNER)
        except BaseException:
            # The call has returned, so the disk writes no more to these slots. An old record in the index is harmless:
            # it is not the one that stands before the bytes now.
            pool.abort_store(ticket.write_id, OWNER)
            self.drop("error", len(ticket.packed_indexes) // 4)
            raise
        with self._lock:
            self.counts.num_written += num_published
            self.counts.num_bytes += len(blocks) * context.slots.stride_bytes

    def take_generations(self, count: int) -> range:
        """Return the next generations, which no block had before."""
        with self._lock:
            return self._context.places.take_generations(count)

    def _take_budget(self, num_bytes: int) -> bool:
        with self._lock:
            return self._budget.take(num_bytes, clock.now_s())

    def _records(self, offer: Offer, blocks: list[HeldBlock], ticket: StoreTicket) -> list[Record]:
        context, num_bytes = self._context, self._context.num_bytes_of(offer.namespace)
        disk_slots = ints_in(ticket.packed_slots).tolist()
        records = list[Record]()
        if offer.generation:
            numbers = {slot: offer.generation + at for at, slot in enumerate(offer.slots)}
            generations: Iterable[int] = [numbers[block.slot] for block in blocks]
        else:
            generations = self.take_generations(len(blocks))
        for block, disk_slot, generation in zip(blocks, disk_slots, generations, strict=True):
            record = Record(
                place=context.places.place[disk_slot],
                generation=generation,
                depth=block.depth,
                version=offer.version,
                num_bytes=num_bytes,
                block_hash=block.block_hash,
                parent=block.parent,
                namespace=block.namespace,
                checksum=checksum_of(context.bytes_of(block.slot, num_bytes)),
                tenant_tag=tag_of(block.tenant),
            )
            context.places.record[disk_slot] = record
            records.append(record)
        return records

    def _write_slots(self, records: list[Record], packed: list[bytes], blocks: list[HeldBlock]) -> None:
        context = self._context
        order = sorted(range(len(records)), key=lambda at: records[at].place)
        places = [records[at].place for at in order]
        with self._take_pages() as pages:
            for begin, end in neighbours(places, MOST_BUFFERS // 2):
                buffers, views = list[memoryview](), memoryview(pages)
                for number, at in enumerate(order[begin:end], begin):
                    page = views[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
                    page[:RECORD_BYTES] = packed[at]
                    buffers += [page, context.bytes_of(blocks[at].slot, context.slots.slot_bytes)]
                try:
                    context.slots.write(places[begin], buffers)
                finally:
                    while buffers:
                        buffers.pop().release()
                    views.release()

    @contextmanager
    def _take_pages(self) -> Iterator[mmap.mmap]:
        """Lend the pages for the records of one run; the system takes a fault for each page of new ones."""
        try:
            pages = self._pages.pop()
        except IndexError:
            # They need aligned memory, which an anonymous mapping has. After its record each page stays zero.
            pages = mmap.mmap(-1, PAGE_BYTES * _MOST_BLOCKS)
        try:
            yield pages
        finally:
            self._pages.append(pages)

    def drop(self, reason: str, num_blocks: int) -> None:
        """Count blocks that are not written."""
        if num_blocks > 0:
            with self._lock:
                self.counts.dropped[reason] += num_blocks

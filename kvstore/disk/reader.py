"""Read blocks of the disk into slots of memory. A block counts only if its record and its checksum are right.

The slots of memory are claimed as for a save, so nobody finds them before their bytes were checked. A read that the
disk does not answer keeps its slots until it does: the disk may still write to them. What comes after its load has
ended is kept for the next load that asks. But when the disk is turned off meanwhile, others may bring or save these
blocks in other slots, and what still comes does not count.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.grants import Grant, StoreTicket
from kvstore.blocks.indexes import ints_in
from kvstore.disk.places import TierContext
from kvstore.disk.records import PAGE_BYTES, Record, checksum_of, unpack_record
from kvstore.disk.slot_file import MOST_BUFFERS, neighbours
from kvstore.disk.threads import DiskThreads, Read
from kvstore.errors import DiskUnavailable, InvalidRequest, PoolExhausted
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

#: Bytes of one call: enough for the disk's full speed, and the first blocks of a long chain come early.
_MOST_BYTES = 8 << 20
_NEVER_S = float("inf")
#: How often a load that waits looks whether the disk is off: one that hangs may not answer for as long as it lives.
_LOOK_S = 0.1
#: Owners of reads, and of the writes to memory that they make, begin with this.
READER = "disk-read-"


@dataclass(slots=True)
class ReaderCounts:
    """Blocks that were read, that were damaged, and that the disk refused; and the bytes."""

    num_read: int = 0
    num_bytes: int = 0
    num_damaged: int = 0
    num_failed: int = 0
    num_late: int = 0


class Reader:
    """Begins reads of one tier, and counts them. Any thread may call.

    Args:
        context: of the tier.
        threads: of the disk.
    """

    def __init__(self, context: TierContext, threads: DiskThreads) -> None:
        self.context, self.threads = context, threads
        self.counts, self.lock = ReaderCounts(), threading.Lock()
        self._numbers = itertools.count(1)
        #: The reads that have not ended.
        self.under_way = set[DiskRead]()

    def begin(
        self,
        chain: BlockHashes,
        on_ready: Callable[[int, int], object],
        on_claim: Callable[[list[bytes]], object] = lambda hashes: None,
        num_bytes: int = 0,
        tenant: str = "",
    ) -> DiskRead | None:
        """Begin to read the leading blocks of a run that are on the disk.

        Args:
            chain: the run; its first block is not in memory.
            on_ready: called on a thread of the disk, with the number of leading blocks that are in memory now, and how
                many of them this read brought.
            on_claim: called with the hashes that are on their way, before the disk is asked.
            num_bytes: of each block, as the caller knows them; 0 if it does not. If no client of this store has the
                namespace, blocks of another size are misses.
            tenant: whose blocks in memory they will be.

        Returns:
            The read, or None if there is nothing to read.

        Raises:
            DiskUnavailable: the disk is off.
            PoolExhausted: the memory has too many unfinished writes.
        """
        context, owner = self.context, f"{READER}{next(self._numbers)}"
        memory = context.memory_pool
        # Before the blocks of the disk are pinned: a clearing between the two makes the claim fail.
        num_clears = memory.num_clears(chain.namespace)
        grant = context.disk_pool.pin_prefix(chain, owner, _NEVER_S)
        read, num_refused = None, 0
        try:
            if grant.packed_slots and self._has_size(grant, chain.namespace, num_bytes):
                ticket = memory.prepare_store(
                    chain.head(grant.num_blocks), owner, needs_parent=False, num_clears=num_clears, tenant=tenant
                )
                num_refused = ticket.num_refused
                if ticket.write_id:
                    read = DiskRead(self, chain, owner, grant, ticket, on_ready)
        finally:
            if read is None:
                context.disk_pool.release(grant.lease_id, owner)
        if read is None:
            if num_refused:
                raise PoolExhausted("no slot of memory is free for a block of the disk")
            return None
        on_claim(read.hashes)
        # Before the disk is asked: if it is turned off from then on, this read is among those that give up.
        self.under_way.add(read)
        read.begin()
        return read

    def give_up(self) -> None:
        """Let others have the blocks of all reads under way, when the disk is off. These keep their slots."""
        for read in self.under_way.copy():
            read.give_up()

    def _has_size(self, grant: Grant, namespace: bytes, num_bytes: int) -> bool:
        # A namespace that has attached has one size, which `DiskRead` compares. Another node may know it differently.
        try:
            return self.context.num_bytes_of(namespace) > 0
        except InvalidRequest:
            found = [self.context.places.record[slot] for slot in grant.slots]
            return not num_bytes or all(record is None or record.num_bytes == num_bytes for record in found)

    def discard(self, slots: list[int]) -> None:
        """Forget damaged blocks, so that they are stored again; their records in the index are erased."""
        context = self.context
        places = [context.places.place[slot] for slot in slots]
        if context.disk_pool.discard(slots):
            context.changed()
        for place in places:
            try:
                context.index.erase(place)
            except OSError as error:
                logger.debug("the record of a damaged block stays: %s", error)


@dataclass(slots=True, eq=False)
class _Piece:
    """Neighbouring slots of the file that one call reads, by position in the ticket."""

    at: list[int]
    first_place: int
    is_ok: list[bool] = field(default_factory=list)


class DiskRead:
    """One read of a run: the pins on the disk, the claims in memory, the pieces that are under way."""

    def __init__(
        self,
        reader: Reader,
        chain: BlockHashes,
        owner: str,
        grant: Grant,
        ticket: StoreTicket,
        on_ready: Callable[[int, int], object],
    ) -> None:
        self._reader, self._chain, self._owner, self._grant, self._ticket = reader, chain, owner, grant, ticket
        self._context, self._on_ready = reader.context, on_ready
        self._indexes = ints_in(ticket.packed_indexes).tolist()
        self._memory_slots = ints_in(ticket.packed_slots).tolist()
        disk_slots = ints_in(grant.packed_slots).tolist()
        self._disk_slots = [disk_slots[index] for index in self._indexes]
        #: Of the blocks that this read brings, in chain order.
        self.hashes = [chain.hash_at(index) for index in self._indexes]
        self._num_reach = grant.num_blocks - ticket.num_refused
        self._lock = threading.Lock()
        self._state: list[bool | None] = [None] * len(self._indexes)
        self._num_published = 0
        self._num_open = 0
        self._late_after_s = _NEVER_S
        #: Why blocks did not come, or "".
        self.reason = "pool_full" if ticket.num_refused else ""
        self.num_blocks = 0
        self._is_over = threading.Event()

    def begin(self) -> None:
        """Queue all pieces.

        Raises:
            DiskUnavailable: the disk is off; everything was given back.
        """
        pieces = self._pieces()
        self._num_open = len(pieces)
        try:
            self._reader.threads.read([self._read_of(piece) for piece in pieces])
        except DiskUnavailable:
            self._num_open = 0
            self._end()
            raise

    def wait(self, until_s: float) -> bool:
        """Wait until all blocks have come or failed; False when the time has passed, or the disk is off, before."""
        while not self._is_over.wait(min(max(until_s - clock.now_s(), 0.0), _LOOK_S)):
            if self._reader.threads.is_off:
                self.give_up()  # The caller asks other nodes next.
                break
            if clock.now_s() >= until_s:
                break
        else:
            return True
        with self._lock:
            self._late_after_s = clock.now_s()
        return False

    def give_up(self) -> None:
        """Let others have the blocks that did not come. Their slots stay taken: the disk may still write to them."""
        self._context.memory_pool.free_names(self._ticket.write_id, self._owner)

    def _pieces(self) -> list[_Piece]:
        context = self._context
        places = [context.places.place[slot] for slot in self._disk_slots]
        # In chain order, because blocks are handed on from the first: neighbours in the file are mostly that, too.
        most = max(1, min(_MOST_BYTES // context.slots.stride_bytes, MOST_BUFFERS // 2))
        return [_Piece(list(range(begin, end)), places[begin]) for begin, end in neighbours(places, most)]

    def _read_of(self, piece: _Piece) -> Read:
        return Read(lambda: self._read(piece), lambda error: self._ended(piece, error))

    def _read(self, piece: _Piece) -> None:
        context, count = self._context, len(piece.at)
        pages = mmap.mmap(-1, PAGE_BYTES * count)
        views, buffers = memoryview(pages), list[memoryview]()
        num_bytes = self._num_bytes()
        try:
            for number, at in enumerate(piece.at):
                buffers.append(views[number * PAGE_BYTES : (number + 1) * PAGE_BYTES])
                buffers.append(context.bytes_of(self._memory_slots[at], context.slots.slot_bytes))
            context.slots.read(piece.first_place, buffers)
            for number, at in enumerate(piece.at):
                found = unpack_record(context.tier_id, buffers[2 * number])
                wanted = context.places.record[self._disk_slots[at]]
                piece.is_ok.append(_is_right(found, wanted, buffers[2 * number + 1], num_bytes))
        finally:
            while buffers:
                buffers.pop().release()
            views.release()
            pages.close()
        # While this read still pins them: later the slots may have other blocks.
        if damaged := self._damaged(piece):
            self._reader.discard(damaged)

    def _num_bytes(self) -> int:
        # An earlier life may have known the namespace with other blocks. 0 if no client of this life has told.
        try:
            return self._context.num_bytes_of(self._chain.namespace)
        except InvalidRequest:
            return 0

    def _damaged(self, piece: _Piece) -> list[int]:
        return [self._disk_slots[at] for at, ok in zip(piece.at, piece.is_ok, strict=True) if not ok]

    def _ended(self, piece: _Piece, error: Exception | None) -> None:
        """Note the end of a piece, and hand on the blocks that are complete from the first one on."""
        oks = piece.is_ok if error is None else [False] * len(piece.at)
        damaged = self._damaged(piece) if error is None else []
        if error is not None and not self.reason:
            self.reason = f"disk: {error}"
        elif damaged:
            self.reason = "disk: a block is damaged; it is stored again when it is computed"
            logger.warning("%d blocks of the disk are damaged: misses from now on", len(damaged))
        self._count(oks, damaged, error)
        try:
            self._hand_on(piece, oks)
        except Exception:
            logger.exception("blocks of the disk could not be handed on")
        # At the very end: the last one lets the slots go, and whoever waits continues.
        with self._lock:
            self._num_open -= 1
            is_last = self._num_open == 0
        if is_last:
            self._end()

    def _hand_on(self, piece: _Piece, oks: list[bool]) -> None:
        ready = num_read = 0
        with self._lock:
            for at, ok in zip(piece.at, oks, strict=True):
                self._state[at] = ok
            end = self._num_published
            while end < len(self._state) and self._state[end]:
                end += 1
            if end > self._num_published:
                # Under this lock, so that two pieces publish in order.
                self.num_blocks += self._context.memory_pool.complete_store(
                    self._ticket.write_id, self._owner, count=end
                )
                self._num_published = end
                ready = self._indexes[end] if end < len(self._indexes) else self._num_reach
                num_read = self.num_blocks
        if ready:
            self._on_ready(ready, num_read)

    def _count(self, oks: list[bool], damaged: list[int], error: Exception | None) -> None:
        counts = self._reader.counts
        with self._reader.lock:
            counts.num_read += sum(oks)
            counts.num_bytes += sum(oks) * self._context.slots.stride_bytes
            counts.num_damaged += len(damaged)
            counts.num_failed += 0 if error is None else len(oks)
            counts.num_late += sum(oks) if clock.now_s() > self._late_after_s else 0

    def _end(self) -> None:
        """Give back what was not published: nothing of the disk writes to these slots any more."""
        if self._num_published < len(self._indexes):
            self._context.memory_pool.abort_store(self._ticket.write_id, self._owner)
        self._reader.under_way.discard(self)
        self._context.disk_pool.release(self._grant.lease_id, self._owner)
        self._context.changed()
        self._is_over.set()


def _is_right(found: Record | None, wanted: Record | None, data: memoryview, num_bytes: int) -> bool:
    if found is None or found != wanted or found.num_bytes > len(data) or num_bytes not in (0, found.num_bytes):
        return False
    return checksum_of(data[: found.num_bytes]) == found.checksum

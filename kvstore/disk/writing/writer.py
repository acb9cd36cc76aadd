"""Write blocks of memory to the disk, behind the saves that brought them.

A save never waits for the disk. Blocks that became readable are noted in a bounded queue. A thread of the disk pins
some of them, writes record and bytes with one call, then the records of the index, and only then they can be found on
the disk. What finds no room in the queue, was evicted before its turn, or exceeds the budget is left out, and counted.

A clearing may come at any moment, so the count of clearings of the disk's pool is noted before a block of memory is
pinned, and the claim on the disk is refused if it has changed since (docs/adr/0018-clearing-is-a-version.md).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvstore.blocks.grants import HeldBlock, StoreTicket, chain_of
from kvstore.blocks.indexes import ints_in
from kvstore.disk.places import TierContext, records_of, write_blocks
from kvstore.disk.slot_file import RunPages
from kvstore.disk.writing.admission import SeenFilter, WriteBudget, WriterCounts
from kvstore.disk.writing.chains import Lost, Rewrites, Sweep, allowed, holes, mends, put_off, runs_to_write
from kvstore.disk.writing.offers import LEAST_SHARE, MOST_BLOCKS, Offer, OfferKind, OfferQueue
from kvstore.errors import ChainBroken, InvalidRequest, PoolExhausted
from kvstore.pool.eviction.learned import SAVE_GAP_S, USE_GAP_S
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

OWNER = "disk-writer"
#: Bytes that one turn of a thread writes, so that reads are not kept waiting.
_MOST_BYTES = 16 << 20

#: Blocks that follow each other, and the places on the disk for those of them that it lacks.
_Claim = tuple[list[HeldBlock], StoreTicket]


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
        answered: called when the disk has written; a turn may end without that.
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
        answered: Callable[[], object] = lambda: None,
    ) -> None:
        self._context, self.most_queued, self._answered = context, most_queued, answered
        self._sync, self._before_write, self._wake, self._budget = sync, before_write, wake, budget
        self._is_off, self._min_uses, self._is_behind_saves = is_off, min_uses, is_behind_saves
        #: Under the memory pool's lock; None if each block is written.
        self._seen = SeenFilter(max(4 * context.disk_pool.num_slots, 1 << 16), min_uses) if min_uses > 1 else None
        self._lock = threading.Lock()
        #: Held until the slots are claimed: so blocks that follow each other are neighbours in the file, too.
        self.claiming = threading.Lock()
        self._queue = OfferQueue()
        #: Blocks that are being written now.
        self.num_writing = 0
        self.counts = WriterCounts()
        self._pages = RunPages(MOST_BLOCKS)
        self.sweep = Sweep(context.memory_pool, context.disk_pool, context.changed)
        self._rewrites = Rewrites(context.disk_pool.num_slots)
        self._lost = Lost()

    def offer(self, namespace: bytes, slots: list[int], *, is_on_disk: bool) -> None:
        """Note blocks that became readable; `is_on_disk` if they come from there.

        Under the memory pool's lock, so nothing here waits.
        """
        if self._seen is not None:
            counts = self._saw(slots, USE_GAP_S)
            slots = [slot for slot, (count, _) in zip(slots, counts, strict=True) if count >= self._min_uses]
        if slots and self._is_behind_saves and not is_on_disk:
            self.queue_up(namespace, slots, OfferKind.SAVED)

    def used(self, namespace: bytes, slots: list[int], is_use: bool) -> None:
        """Note that blocks of memory were touched; those that were used often enough just now are written.

        Under the memory pool's lock. What is a use is the same as for eviction (docs/eviction.md).
        """
        if self._seen is not None:
            counts = self._saw(slots, USE_GAP_S if is_use else SAVE_GAP_S)
            slots = [slot for slot, count in zip(slots, counts, strict=True) if count == (self._min_uses, True)]
            if slots and self._is_behind_saves:
                self.queue_up(namespace, slots, OfferKind.SAVED)

    def _saw(self, slots: list[int], gap_s: float) -> list[tuple[int, bool]]:
        assert self._seen is not None
        return self._seen.saw(self._context.memory_pool.hashes_of(slots), clock.now_s(), gap_s)

    def is_worthy(self, block_hash: bytes) -> bool:
        """Return whether a block was used often enough to be written."""
        return self._seen is None or self._seen.num_uses(block_hash) >= self._min_uses

    def offer_of(self, namespace: bytes, slots: list[int], kind: OfferKind, generations: Sequence[int] = ()) -> Offer:
        """Note what is known of a namespace now, before blocks of it are pinned for their write: see the module."""
        num_clears, version = self._context.disk_pool.num_clears(namespace), self._context.version_of(namespace)
        hashes = self._context.memory_pool.hashes_of(slots)
        return Offer(namespace, slots, hashes, num_clears, version, kind, generations)

    def queue_up(self, namespace: bytes, slots: list[int], kind: OfferKind, generations: Sequence[int] = ()) -> None:
        """Queue blocks of memory, the leading ones if not all have room, and count the others; never waits.

        See `Offer` for `kind` and `generations`.
        """
        is_off = self._is_off()
        with self._lock:
            room = 0 if is_off else max(self.most_queued - self._queue.num_blocks + self._queue.num_before, 0)
            if num_left := max(len(slots) - room, 0):
                self.counts.dropped["off" if is_off else "queue_full"] += num_left
        if slots := slots[:room]:
            offer = self.offer_of(namespace, slots, kind, generations[:room])
            with self._lock:
                self._queue.put([offer])
            self._wake()

    def drop_all(self, reason: str) -> None:
        """Leave out all that waits, and count those of these blocks that are not on the disk; retries are kept."""
        with self._lock:
            offers = self._queue.take_all()
            self._lost.note(offer for offer in offers if offer.is_again)
        hashes = [own for offer in offers if offer.is_counted for own in offer.hashes]
        self.drop(reason, len(set(hashes)) - len(self._context.disk_pool.present(hashes)))

    def write_some(self) -> bool:
        """Write some of the blocks that wait; return whether there were any.

        Raises:
            OSError: the disk refused; the blocks of this turn are left out, and none of them can be found.
        """
        with ExitStack() as turn:
            turn.enter_context(self.claiming)
            with self._lock:
                if (offer := self._queue.take(self.num_in_turn())) is None:
                    return False
                self.num_writing += len(offer.slots)
                num_written = self.counts.num_written
            try:
                self.write(offer, turn.close)
                # A turn that asked the disk for nothing is no sign that it works.
                if self.counts.num_written > num_written:
                    self._offer_lost()
            finally:
                with self._lock:
                    self.num_writing -= len(offer.slots)
        self.sweep.run_if_due()
        return True

    def _offer_lost(self) -> None:
        with self._lock:
            lost = self._lost.take()
        if lost:
            offers = mends(self._context.memory_pool, self._context.disk_pool, lost, self.offer_of)
            with self._lock:
                self._queue.put(offers, is_first=True)

    @property
    def num_queued(self) -> int:
        """How many blocks wait."""
        return self._queue.num_blocks

    def num_unwritten(self) -> int:
        """Return how many blocks wait or are being written; 0 when all that were offered are on disk, or left out."""
        with self._lock:
            return self._queue.num_blocks + self.num_writing

    def num_in_turn(self) -> int:
        """Return how many blocks one turn of a thread may write."""
        # A turn that the budget never has at once would never be written.
        most_bytes = min(_MOST_BYTES, self._budget.most_bytes or _MOST_BYTES)
        most = min(MOST_BLOCKS, most_bytes // self._context.slots.stride_bytes)
        # Blocks that are being written are pinned: saves must find enough others to evict.
        return max(1, min(most, self._context.memory_pool.num_slots // LEAST_SHARE))

    def write(self, offer: Offer, claimed: Callable[[], None]) -> None:
        """Pin and write blocks; those that are not there any more, or on the disk already, are left out.

        Saved blocks of which the disk lacks what is before them go back into the queue, behind that; so do all after.

        Args:
            offer: the blocks.
            claimed: called when all of them have their places, and what is to be put off is in the queue.

        Raises:
            OSError: the disk refused; blocks that were not written before cannot be found there.
        """
        context, pool = self._context, self._context.memory_pool
        try:
            context.num_bytes_of(offer.namespace)
        except InvalidRequest:  # Peers had blocks brought from the disk, and no client here has opened their namespace.
            self._leave_out(offer, "unknown_size", len(offer.slots))
            return
        self._before_write()
        lease_id, blocks = pool.hold(offer.slots, offer.namespace, OWNER)
        held = offer.held(blocks)
        self._leave_out(offer, "evicted", len(offer.slots) - len(held))
        if not lease_id:
            return
        try:
            wanted = [block for block in held if not block.is_low]
            self._leave_out(offer, "low_priority", len(held) - len(wanted))
            self._write_held(offer, wanted, claimed)
        finally:
            pool.release(lease_id, OWNER)
            context.changed()

    def _write_held(self, offer: Offer, wanted: list[HeldBlock], claimed: Callable[[], None]) -> None:
        """Claim the places of all blocks, then write them: what is behind them may be another thread's turn."""
        memory, disk, claims, num_done = self._context.memory_pool, self._context.disk_pool, list[_Claim](), 0
        try:
            for run in runs_to_write(disk, offer, wanted):
                try:
                    claims += self._claim(offer, run)
                except ChainBroken:
                    offers = put_off(memory, disk, offer, run, wanted[num_done + len(run) :])
                    with self._lock:
                        self._queue.put(offers, is_first=True)
                    wanted = wanted[:num_done]
                    break
                num_done += len(run)
            if claims:
                claimed()
            while claims:
                self._fill(offer, *claims[0])
                del claims[0]
        except BaseException:
            # The call has returned, so the disk writes no more to these slots. An old record in the index is harmless:
            # it is not the one that stands before the bytes now.
            for _, ticket in claims:
                disk.abort_store(ticket.write_id, OWNER)
            num_failed = sum(len(ints_in(ticket.packed_indexes)) for _, ticket in claims)
            self._leave_out(offer, "error", num_failed + len(wanted) - num_done)
            again, is_off = holes(disk, offer, [run for run, _ in claims]), self._is_off()
            with self._lock:
                if is_off or offer.is_again:
                    self._lost.note(again)
                else:
                    self._queue.put(again, is_first=True)
            raise

    def _leave_out(self, offer: Offer, reason: str, num_blocks: int) -> None:
        """Count blocks that are left out, by reason."""
        if num_blocks > 0:
            offer.why.append(reason)
            self.drop(reason, num_blocks if offer.is_counted else 0)

    def _claim(self, offer: Offer, run: list[HeldBlock]) -> list[_Claim]:
        """Claim places on the disk for blocks that follow each other; those that are left out are counted.

        Raises:
            ChainBroken: the disk lacks what is before them; they are to be put off, and nothing changed.
        """
        pool, num_all = self._context.disk_pool, len(run)
        run, num_taken = allowed(pool, self._rewrites, offer, run)
        self._leave_out(offer, "disk_full", num_all - len(run))
        if not run:
            return []
        try:
            ticket = pool.prepare_store(
                chain_of(run), OWNER, needs_parent=offer.needs_parent(run[0]), num_clears=offer.num_clears,
                tenant=run[0].tenant,
            )  # fmt: skip
        except ChainBroken as error:
            logger.debug("blocks are not written to disk: %s", error)
            self._rewrites.give_back(num_taken)
            is_off = self._is_off()
            if offer.kind is OfferKind.SAVED and not is_off:
                self._rewrites.earn(len(run) if offer.is_counted else 0)
                raise
            # Victims need no parent: their place in the chain is taken.
            reason = "disk_pool" if offer.kind is OfferKind.VICTIMS else [*offer.why, "gap"][0]
            if reason == "error" or (offer.is_again and reason == "gap"):
                with self._lock:
                    self._lost.note([offer.part(run, offer.kind)])
            self._leave_out(offer, "off" if is_off else reason, len(run))
            return []
        except PoolExhausted:
            self._rewrites.give_back(num_taken)
            self._leave_out(offer, "disk_pool", len(run))
            return []
        num_new = len(ints_in(ticket.packed_indexes))
        self._rewrites.give_back(max(num_taken - num_new, 0))
        is_cleared = not ticket.write_id and ticket.num_clears != offer.num_clears
        self._leave_out(offer, *(("cleared", len(run)) if is_cleared else ("disk_full", ticket.num_refused)))
        if not ticket.write_id:
            return []
        with self._lock:
            may_write = self._budget.take(num_new * self._context.slots.stride_bytes, clock.now_s())
        if not may_write:
            pool.abort_store(ticket.write_id, OWNER)
            self._leave_out(offer, "budget", num_new)
            return []
        return [(run, ticket)]

    def _fill(self, offer: Offer, run: list[HeldBlock], ticket: StoreTicket) -> None:
        """Write blocks to the places that were claimed for them; then they can be found there."""
        context = self._context
        blocks = [run[index] for index in ints_in(ticket.packed_indexes).tolist()]
        numbers = offer.generation_of()
        new = iter(self.take_generations(sum(block.slot not in numbers for block in blocks)))
        generations = [numbers[block.slot] if block.slot in numbers else next(new) for block in blocks]
        records = records_of(context, blocks, ints_in(ticket.packed_slots).tolist(), generations, offer.version)
        write_blocks(context, self._pages, records, [block.slot for block in blocks], sync=self._sync)
        self._answered()
        num_published = context.disk_pool.complete_store(ticket.write_id, OWNER)
        if offer.kind is OfferKind.SAVED and offer.is_counted:
            self._rewrites.earn(num_published)
        with self._lock:
            self.counts.num_written += num_published
            self.counts.num_bytes += len(blocks) * context.slots.stride_bytes

    def take_generations(self, count: int) -> range:
        """Return the next generations, which no block had before."""
        with self._lock:
            return self._context.places.take_generations(count)

    def drop(self, reason: str, num_blocks: int) -> None:
        """Count blocks that are not written."""
        if num_blocks > 0:
            with self._lock:
                self.counts.dropped[reason] += num_blocks

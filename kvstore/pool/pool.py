"""Manage the pool of one tier: slots, index, leases, writes, quarantine. One lock, every step atomic.

- Selecting and claiming a slot is one step under the lock; so is finding and pinning a block, and dropping a pin and
  freeing its slot.
- A hash can be found only after all its bytes are in place; a failed write is never visible.
- A slot that a reader holds keeps its address and bytes.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count as count_from
from typing import TypeVar

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.grants import Grant, HeldBlock, PinKind, PoolStats, StoreTicket, Victims
from kvstore.blocks.priority import NORMAL, Retention
from kvstore.bounds import MAX_PARTS, check_count
from kvstore.errors import InvalidRequest, PoolExhausted, StaleTicket, StoreUnavailable
from kvstore.memory.clears import ClearCounts
from kvstore.memory.presence import PresenceCounts
from kvstore.pool.events.log import RootedChange
from kvstore.pool.events.roots import RootKeys
from kvstore.pool.eviction.hottest import by_touch, hot_chains
from kvstore.pool.eviction.policy import EvictionPolicy
from kvstore.pool.handover.adoption import adopt
from kvstore.pool.handover.export import export
from kvstore.pool.handover.image import PoolImage
from kvstore.pool.leases import LeaseTable
from kvstore.pool.slot_checks import check_slots
from kvstore.pool.slot_lists import SlotList
from kvstore.pool.slots import SlotTable
from kvstore.pool.tenants.limits import SHARED, TenantStats
from kvstore.pool.tenants.table import TenantTable
from kvstore.pool.watches import WatchTable
from kvstore.pool.writes import WriteTable, WriteTerms
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

__all__ = ["Grant", "PinKind", "Pool", "PoolStats", "StoreTicket"]

T = TypeVar("T")
_NEVER_S = float("inf")
#: The most cleared slots that one sweep step gives back; it takes a millisecond or two.
_SWEPT_AT_ONCE = 2048
#: Pause between two sweep steps, so that waiting threads get the lock.
_PAUSE_S = 1e-4


class Pool:
    """Slots of one size, found by block hash.

    Owners are names; the caller guarantees that they are right. `yield_point` is called with a step's name before
    each critical section; tests use it to interleave threads.

    Args:
        num_slots: number of slots; 0 on a node to which no namespace has attached yet.
        max_pinned: how many slots leases may hold at once; beyond it, granted prefixes are shorter. What `hold` and
            `hold_victims` pin has a 32nd of the slots beside it.
        max_hard_pinned: how many of these slots hard pins may hold; half of `max_pinned` when None.
        epoch: the life of this pool's store; a random one when None.
        presence: updated with the chains that begin here.
        clears: updated with the number of clearings per namespace; private when None.
        on_published: called under the pool's lock, with the namespace, the slots and the writer of blocks
            that became readable.
        on_used: called under the pool's lock with the namespace and slots of blocks that are touched, and whether
            that is a use of them, as for `EvictionPolicy.touched`.
        eviction: chooses what goes when the pool is full, for as many slots, and for no other pool; the least recently
            used when None.
        now_s: the clock by which the priorities of blocks end, and ages of leases are told, in seconds.
        has_roots: keep the root key of each block, for a directory of several shards.
        tenants: what each tenant may have, for as many slots, and for no other pool; None: nobody has a quota. A name
            that it does not know is that of the shared tenant, which has none.
    """

    def __init__(
        self,
        num_slots: int,
        max_pinned: int | None = None,
        yield_point: Callable[[str], None] | None = None,
        *,
        max_hard_pinned: int | None = None,
        epoch: bytes | None = None,
        presence: PresenceCounts | None = None,
        clears: ClearCounts | None = None,
        on_published: Callable[[bytes, list[int], str], None] | None = None,
        on_used: Callable[[bytes, list[int], bool], None] | None = None,
        eviction: EvictionPolicy | None = None,
        now_s: Callable[[], float] = clock.now_s,
        has_roots: bool = False,
        tenants: TenantTable | None = None,
    ) -> None:
        if num_slots < 0:
            raise InvalidRequest(f"num_slots: wanted at least 0, got {num_slots}")
        self.epoch = secrets.token_bytes(8) if epoch is None else epoch
        self._lock = threading.Lock()
        self._yield, self.is_frozen = yield_point, False
        self.table = SlotTable(num_slots, presence, eviction, now_s, has_roots=has_roots, tenants=tenants)
        self._tenants = tenants
        self.watches = WatchTable(self.table.index)
        self.swept_at_once = _SWEPT_AT_ONCE
        new_id = count_from(secrets.randbits(48) + 1).__next__
        most = num_slots if max_pinned is None else max_pinned
        hard = most // 2 if max_hard_pinned is None else max_hard_pinned
        self.leases = LeaseTable(self.table, most, hard, self.epoch, new_id, on_used, now_s)
        self._clears = ClearCounts() if clears is None else clears
        self.writes = WriteTable(
            self.table, self.epoch, new_id, self.watches.settled, self._clears, on_published, on_used
        )
        self.new_id = new_id

    def _step(self, name: str) -> threading.Lock:
        if self._yield is not None:
            self._yield(name)
        return self._lock

    # Reading.

    def lookup(self, chain: BlockHashes) -> int:
        """Return how many leading blocks of the run are readable here. Changes nothing."""
        with self._step("lookup"):
            return self.table.index.num_ready(chain.namespace, chain.data)

    def is_being_written(self, chain: BlockHashes) -> bool:
        """Return whether the first block of the run is being written, so that `watch` would wait."""
        with self._lock:
            return chain.hash_at(0) in self.table.index.space_of(chain.namespace).writing

    def pin_prefix(
        self,
        chain: BlockHashes,
        owner: str,
        deadline_s: float,
        lease_id: int = 0,
        *,
        retention: Retention = NORMAL,
        tenant: str = SHARED,
    ) -> Grant:
        """Find the readable prefix of a run and pin it, in one step.

        Args:
            chain: the requested blocks.
            owner: of the lease; only this owner can release it.
            deadline_s: of kvstore.runtime.clock; before it, the pool never takes the lease back.
            lease_id: adds the blocks to this lease instead of making one.
            retention: what the reader says of the blocks. Those that are LOW become NORMAL, unless it is LOW, too.
            tenant: of the reader; a lease stays that of the tenant for which it was made.

        Returns:
            The part of the prefix that fits in the budget of pins, and in the tenant's quota of them.

        Raises:
            LeaseReleased: `lease_id` is not held by `owner`; nothing changed.
            InvalidRequest: `deadline_s` is not a number; nothing changed.
        """
        _check_deadline(deadline_s)
        with self._step("pin_prefix"):
            self._check_lives()
            if lease_id:
                return self.leases.grow(lease_id, chain, owner, deadline_s, retention)
            return self.leases.pin(chain, owner, deadline_s, PinKind.LEASE, retention, self._number_of(tenant))

    def pin(
        self, chain: BlockHashes, owner: str, kind: PinKind, deadline_s: float = _NEVER_S, *, tenant: str = SHARED
    ) -> Grant:
        """Pin the readable prefix of a run, HARD or SOFT, until it is released.

        Returns:
            The part of the prefix that fits in the budgets; `lease_id` is 0 when no block of the run is here.

        Raises:
            PoolExhausted: blocks are here, but the budget, or the tenant's quota of pins, has no room even for the
                first; nothing changed.
        """
        _check_deadline(deadline_s)
        with self._step("pin"):
            self._check_lives()
            number = self._number_of(tenant)
            grant = self.leases.pin(chain, owner, deadline_s, kind, tenant=number)
            if grant.packed_slots:
                return grant
            self.leases.release(grant.lease_id, owner)
        if grant.num_refused and self._tenants is not None and self._tenants.has_no_pins_left(number):
            raise PoolExhausted(
                f"wanted to pin {grant.num_refused} blocks ({kind.name.lower()}), but tenant {tenant!r} has used up "
                "its quota of pins; release leases or pins, or raise its max_pinned_bytes"
            )
        if grant.num_refused:
            raise PoolExhausted(
                f"wanted to pin {grant.num_refused} blocks ({kind.name.lower()}), but the budget of pins is used up; "
                "release leases or pins, or raise max_pinned_fraction or max_hard_pinned_fraction"
            )
        return Grant(epoch=self.epoch)

    def hold(self, slots: list[int], namespace: bytes, owner: str) -> tuple[int, list[HeldBlock]]:
        """Pin blocks named by their slots, to copy them to another tier. This counts as no use of them.

        Args:
            slots: in any order, each named once; those without a readable block of `namespace` are left out.
            namespace: of the blocks.
            owner: of the lease; only this owner can release it.

        Returns:
            The lease, and the pinned blocks as far as there is room; (0, []) when there is none. A 32nd of the slots
            can be pinned so where clients have used up the budget of pins.
        """
        with self._step("hold"):
            return self.leases.pin_slots(slots, namespace, owner)

    def keep_free(
        self, num_slots: int, on_short: Callable[[], None], on_evicted: Callable[[list[bytes], int], None] | None
    ) -> None:
        """Have callbacks called under the pool's lock, by claims and `evict`; for an eviction loop.

        Args:
            num_slots: `on_short` is called by a claim that leaves fewer slots free.
            on_short: see there.
            on_evicted: called with the hashes of evicted blocks that were not LOW, and the number of those that were;
                not with those of `evict_held`.
        """
        with self._lock:
            self.table.least_free, self.table.on_short, self.table.on_evicted = num_slots, on_short, on_evicted

    def evict(self, num_blocks: int) -> int:
        """Evict up to so many blocks, in the order of eviction, and leave their slots free; return how many."""
        with self._step("evict"):
            return self.table.evict(num_blocks)

    def evict_awaiting(self, namespace: bytes, pairs: list[tuple[bytes, bytes]]) -> int:
        """Evict blocks that are behind ones which are not here, as far as they have no readers and no children.

        Args:
            namespace: of the blocks.
            pairs: hash of each block, in the order of eviction, and of the missing one; see `awaited`.

        Returns:
            How many went.
        """
        with self._step("evict_awaiting"):
            space = self.table.index.space_of(namespace)
            slots = (space.ready[own] for own, above in pairs if own in space.ready and above in space.orphans)
            return self.table.evict_some(len(pairs), slots)

    def touch(self, namespace: bytes, hashes: list[bytes]) -> None:
        """Have these blocks evicted after all others, as far as they are here; in chain order. No use of them."""
        with self._step("touch"):
            ready = self.table.index.space_of(namespace).ready
            if slots := [ready[own] for own in hashes if own in ready]:
                self.table.eviction.touched(SlotList.of(slots), is_use=False, retention=NORMAL)

    def hold_victims(self, num_blocks: int, owner: str) -> Victims:
        """Pin the blocks that are evicted next, to write them to another tier before. This counts as no use of them.

        The owner ends the pin with `evict_held`. With `release` they stay, and have their places in the order again.

        Args:
            num_blocks: pin at most so many; fewer if there is no room, as for `hold`, or fewer can be evicted.
            owner: of the pin.
        """
        with self._step("hold_victims"):
            return self.leases.pin_victims(num_blocks, owner)

    def evict_held(self, victims: Victims, owner: str) -> int:
        """End the pin of victims and evict them; return how many went.

        Blocks that were used meanwhile stay, and so do those with readers or new children.
        """
        with self._step("evict_held"):
            return self.leases.end_victims(victims, owner)

    def discard(self, slots: list[int]) -> int:
        """Take readable blocks out of the pool because their bytes turned out bad; return how many there were.

        Blocks that hang on them stay. Each slot becomes free after its last reader.
        """
        with self._step("discard"):
            return self.table.discard(slots)

    def renew(self, lease_id: int, owner: str, deadline_s: float, *, epoch: bytes | None = None) -> bool:
        """Move a lease's deadline later, never earlier; False when `owner` does not hold it in this epoch."""
        _check_deadline(deadline_s)
        with self._step("renew"):
            self._check_lives()
            return epoch in (None, self.epoch) and self.leases.renew(lease_id, owner, deadline_s)

    def release(self, lease_id: int, owner: str, *, epoch: bytes | None = None) -> bool:
        """Drop a lease; False, and nothing changes, when `owner` does not hold it (any more) in this epoch."""
        with self._step("release"):
            return epoch in (None, self.epoch) and self.leases.release(lease_id, owner)

    def generations(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Return the generation of each slot."""
        with self._lock:
            return tuple(self.table.columns.generation[slot] for slot in slots)

    def hashes_of(self, slots: Sequence[int]) -> list[bytes]:
        """Return the hash of each slot's block; for callbacks of this pool, which hold its lock, and for holders."""
        return [self.table.index.block_hash[slot] for slot in slots]

    # Writing.

    def prepare_store(
        self,
        chain: BlockHashes,
        owner: str,
        *,
        num_parts: int = 1,
        part: int = 0,
        needs_parent: bool = True,
        deadline_s: float = _NEVER_S,
        parts_deadline_s: float = _NEVER_S,
        num_clears: int | None = None,
        retention: Retention = NORMAL,
        tenant: str = SHARED,
    ) -> StoreTicket:
        """Claim a slot for each missing block of a run, or join its writing in parts.

        Blocks that are here are pinned until the write ends, so that making room cannot evict them. Those of others
        count in the tenant's quota of pins, if there is anything to write.
        When the pool is full, or the tenant at a quota, the ticket covers the leading blocks that fit. A tenant at
        its quota of slots takes those of its own blocks only.

        Args:
            chain: the blocks to store.
            owner: the writer; only this owner can complete or abort.
            num_parts: number of parts of a block, each written by another rank.
            part: the part that this owner writes.
            needs_parent: refuse a run whose parent is not here.
            deadline_s: when the pool takes the slots back, even from a live writer, which must stop before.
            parts_deadline_s: when the pool gives up a block for which not all ranks have come.
            num_clears: result of `num_clears` when the caller began to keep the blocks' KV for this; the present
                count when None. After a later clearing nothing is claimed or joined, and the ticket has another count.
            retention: how much the blocks matter, until a time of the pool's clock. It raises that of blocks which are
                here already, and never lowers it; of two ends the later one counts.
            tenant: of the writer; new blocks are its own.

        Raises:
            ChainBroken: the run names a block twice, or does not begin at the root and its parent is not
                here (and `needs_parent`), or a block would be its own ancestor; nothing changed.
            InvalidRequest: `part` is not below `num_parts`, or `num_parts` is too large, or a deadline is not a
                number; nothing changed.
            PoolExhausted: there are too many blocks in unfinished writes; nothing changed.
        """
        chain.check_unique()
        hashes = chain.hashes()
        if not (isinstance(part, int) and isinstance(num_parts, int) and 0 <= part < num_parts):
            raise InvalidRequest(f"part: wanted a number below num_parts, got {part!r} of {num_parts!r}")
        check_count("num_parts", num_parts, 1, MAX_PARTS)
        _check_deadline(deadline_s)
        _check_deadline(parts_deadline_s)
        terms = WriteTerms(
            owner=owner, part=part, num_parts=num_parts, deadline_s=deadline_s, parts_deadline_s=parts_deadline_s,
            retention=retention, tenant=self._number_of(tenant),
        )  # fmt: skip
        with self._step("prepare_store"):
            self._check_lives()
            if num_clears is not None and num_clears != self._clears.get(chain.namespace):
                # The writer's blocks are from before the last clearing.
                return StoreTicket(write_id=0, num_clears=self._clears.get(chain.namespace), epoch=self.epoch)
            return self.writes.prepare(chain, hashes, terms, needs_parent=needs_parent)

    def reserve(
        self,
        num_blocks: int,
        owner: str,
        *,
        deadline_s: float = _NEVER_S,
        may_evict: bool = True,
        tenant: str = SHARED,
    ) -> StoreTicket:
        """Claim slots for blocks without names, which cannot be found; `abort_store` gives them back.

        Args:
            num_blocks: number of slots; all or none are claimed.
            owner: the writer; only this owner can give them back.
            deadline_s: when the pool takes them back, even from a live writer, which must stop before.
            may_evict: besides free slots, take slots of blocks that have no holder.
            tenant: of the writer; the slots are its own.

        Raises:
            PoolExhausted: there are not that many slots, or the tenant may not have them; nothing is claimed or
                evicted.
            InvalidRequest: fewer than one block, or the deadline is not a number; nothing changed.
        """
        if num_blocks < 1:
            raise InvalidRequest(f"num_blocks: wanted at least 1, got {num_blocks}")
        _check_deadline(deadline_s)
        with self._step("reserve"):
            self._check_lives()
            terms = WriteTerms(owner=owner, deadline_s=deadline_s, tenant=self._number_of(tenant))
            return self.writes.reserve(num_blocks, terms, may_evict=may_evict)

    def complete_store(
        self,
        write_id: int,
        owner: str,
        *,
        count: int | None = None,
        generations: bytes | None = None,
        epoch: bytes | None = None,
    ) -> int:
        """Record that a writer's bytes are in place; publish the blocks whose last part that was.

        Args:
            write_id: from `prepare_store`.
            owner: the same as there.
            count: only the first `count` claimed blocks (whole blocks, written front to back); all of them
                when None, which also ends the write.
            generations: of the ticket; a mismatch is refused. Not compared when None.
            epoch: of the ticket; a mismatch is refused. Not compared when None.

        Returns:
            How many blocks this call published. 0 when the write is unknown, was aborted or has ended.

        Raises:
            StaleTicket: the generations or the epoch are not those of the ticket; nothing changed.
            InvalidRequest: `count` was given for a write of several parts; nothing changed.
        """
        with self._step("complete_store"):
            self._check_lives()
            write = self.writes.find(write_id, owner, epoch, generations)
            num_published = 0 if write is None else self.writes.complete(write_id, write, count)
            calls = self.watches.take_calls()
        return _after(calls, num_published)

    def abort_store(
        self,
        write_id: int,
        owner: str,
        *,
        quarantine: str = "",
        generations: bytes | None = None,
        epoch: bytes | None = None,
    ) -> int:
        """Give up the unpublished blocks of a write; return the number of their slots.

        Args:
            write_id: from `prepare_store`.
            owner: the same as there.
            quarantine: set it if a transfer may still write to the slots: they are quarantined under this name until
                `end_quarantine`, instead of becoming free.
            generations: of the ticket; after a mismatch nothing happens. Not compared when None.
            epoch: of the ticket; after a mismatch nothing happens. Not compared when None.
        """
        with self._step("abort_store"):
            try:
                write = self.writes.find(write_id, owner, epoch, generations)
            except StaleTicket:
                return 0
            num_lost = 0 if write is None else self.writes.abort(write_id, write, quarantine)
            calls = self.watches.take_calls()
        return _after(calls, num_lost)

    def free_names(self, write_id: int, owner: str) -> int:
        """Let others write the unpublished blocks of a write; return the number of their slots.

        For a writer that may write to the slots for an unknown time: it keeps them until it completes or aborts the
        write, as after a clearing, and publishes nothing of it. No effect on a write that has ended.

        Raises:
            InvalidRequest: the write is one of several parts; nothing changed.
        """
        with self._step("free_names"):
            write = self.writes.find(write_id, owner, None, None)
            num_slots = 0 if write is None else self.writes.free_names(write)
            calls = self.watches.take_calls()
        return _after(calls, num_slots)

    def watch(self, chain: BlockHashes, then: Callable[[int], None]) -> int:
        """Be told how many leading blocks of a run are here, once that depends on no other writer any more.

        Args:
            chain: blocks that other callers, or several ranks, are writing.
            then: called once, without the pool's lock, on the thread that ends the waiting, which may be this one;
                with the number of leading blocks that are here. It is called when all are, when the first that is
                not here is not being written either, or at once when too many wait already. What it raises is logged.

        Returns:
            A number for `end_watch`.
        """
        with self._step("watch"):
            watch_id = self.new_id()
            self.watches.add(watch_id, chain, then)
            calls = self.watches.take_calls()
        return _after(calls, watch_id)

    def is_watching(self, watch_id: int) -> bool:
        """Return whether a watch has not been called yet."""
        return watch_id in self.watches

    def end_watch(self, watch_id: int) -> None:
        """End a watch now: it is called, and blocks still being written do not count. No effect after its call."""
        with self._step("end_watch"):
            self.watches.drop(watch_id)
            calls = self.watches.take_calls()
        _after(calls, 0)

    def end_quarantine(self, name: str) -> int:
        """Free the slots quarantined under `name`, when no transfer can write to them; return how many."""
        with self._step("end_quarantine"):
            return self.table.columns.end_quarantine(name)

    # Owners, namespaces, time.

    def release_owner(self, owner: str) -> int:
        """Drop all leases and unfinished writes of an owner that has ended; return how many."""
        with self._step("release_owner"):
            num_dropped = self.leases.release_owner(owner) + self.writes.release_owner(owner)
            calls = self.watches.take_calls()
        return _after(calls, num_dropped)

    def release_pins(self, owner: str) -> int:
        """Drop all hard and soft pins of an owner, but not its read leases; return how many."""
        with self._step("release_pins"):
            return self.leases.release_pins(owner)

    def holds(self, owner: str) -> bool:
        """Return whether an owner has a lease or an unfinished write."""
        with self._lock:
            return self.leases.holds(owner) or self.writes.holds(owner)

    def expire(self, now_s: float) -> int:
        """Drop every lease and abort every write whose deadline has passed; return how many."""
        with self._step("expire"):
            num_dropped = self.leases.expire(now_s) + self.writes.expire(now_s)
            calls = self.watches.take_calls()
        return _after(calls, num_dropped)

    def clear(self, namespace: bytes, is_news: Callable[[], bool] = lambda: True) -> int | None:
        """Clear all blocks of a namespace's group by `begin_clear`, then give all slots back by `sweep_all`."""
        num_cleared = self.begin_clear(namespace, is_news)
        if num_cleared:
            self.sweep_all()
        return num_cleared

    def begin_clear(self, namespace: bytes, is_news: Callable[[], bool] = lambda: True) -> int | None:
        """Make all blocks of a namespace's group (`group_of`) unfindable at once; `sweep` gives their slots back.

        Pinned readers finish on the old bytes; unfinished writes will publish nothing.

        Args:
            namespace: of the blocks.
            is_news: called in the same step, before new blocks can be stored; if it is False, or raises, nothing
                changes.

        Returns:
            The number of these blocks; None when `is_news` was False.
        """
        with self._step("clear"):
            self._check_lives()
            if not is_news():
                return None
            self._clears.add(namespace)
            num_cleared = self.writes.clear(namespace)
            calls = self.watches.take_calls()
        return _after(calls, num_cleared)

    def leave(self, change: Callable[[], None]) -> bool:
        """Have another pool take this one's place if no slot was ever claimed here; return whether.

        It is a step of its own: no clearing is under way here meanwhile, and nothing is claimed here from then on.
        """
        with self._step("leave"):
            self._check_lives()
            if any(self.table.columns.generation):
                return False
            self.table.columns.free.clear()
            change()
        return True

    def sweep(self) -> bool:
        """Give some cleared slots back; return whether there are more. A claim that lacks slots sweeps, too."""
        with self._step("sweep"):
            self.writes.sweep(self.swept_at_once)
            return bool(self.table.index.cleared)

    def sweep_all(self) -> None:
        """Give all cleared slots back, but let other threads have the lock in between."""
        while self.sweep():
            time.sleep(_PAUSE_S)

    def has_cleared(self) -> bool:
        """Return whether `sweep` has something to do."""
        with self._lock:
            return bool(self.table.index.cleared)

    def num_clears(self, namespace: bytes) -> int:
        """Return the count of clearings of a namespace, or of one that shares its counter; see `ClearCounts`."""
        with self._lock:
            return self._clears.get(namespace)

    # Another life of the store.

    def freeze(self) -> PoolImage:
        """Give up the slots, for a pool of the store's next life that has the same memory; return what it has to know.

        From this step on nothing is granted, renewed, published or cleared here, and none of that can be undone: such
        calls raise StoreUnavailable. Readers and writers that have slots go on; the image says which.

        Raises:
            StoreUnavailable: it was frozen before.
        """
        with self._step("freeze"):
            self._check_lives()
            self.is_frozen = True
            return export(self.table, self.leases, self.writes)

    def adopt(self, image: PoolImage) -> int:
        """Take over the blocks of the last life's pool, which was frozen; return how many.

        This pool has the same memory and was never used. Slots to which writers of the last life may still write have
        the owners `OLD_WRITER` plus their number in the image: call `release_owner` when they are gone. Blocks that
        readers of it may still read are leased until those leases end, to `OLD_READER` plus their number: call
        `release_owner` if all of these readers are gone before.

        Raises:
            ProtocolError: the image contradicts itself; nothing changed.
            InvalidRequest: this pool was used, or has fewer slots; nothing changed.
        """
        image.check()
        with self._step("adopt"):
            return adopt(self.table, self.leases, self.writes, image)

    def _check_lives(self) -> None:
        if self.is_frozen:
            raise StoreUnavailable("this life of the node store has ended, and the next one begins; make a new client")

    # Inspection.

    def look(self, read: Callable[[SlotTable, LeaseTable], T]) -> T:
        """Return what a function reads, under the pool's lock, so it has to be short; it must change nothing.

        For kvstore.pool.inspection, which goes through a large pool in slices.
        """
        with self._lock:
            return read(self.table, self.leases)

    def drain_events(self) -> list[tuple[bool, bytes]] | None:
        """Return and forget the changes since the last call, in order: (became findable or not, hash).

        None when there were more changes than slots and than 16,384: these were not kept, and `resident_hashes` gives
        the present state.
        """
        events = self.drain_rooted()
        return None if events is None else [(present, own) for present, hashes, _ in events for own in hashes]

    def drain_rooted(self) -> list[RootedChange] | None:
        """Return and forget the changes like `drain_events`, but those of one step together, with their root keys.

        The root keys are None where they are not known: after a clearing, and in a pool that does not keep them.
        """
        with self._lock:
            return self.table.index.events.take()

    def resident_hashes(self) -> list[bytes]:
        """Return a consistent snapshot of all findable hashes, and forget pending events."""
        with self._lock:
            self.table.index.events.take()
            return [own for space in self.table.index.spaces.values() for own in space.ready]

    def resident_rooted(self) -> list[tuple[list[bytes], RootKeys | None]]:
        """Return all findable hashes with their root keys, one pair for each namespace. Pending events stay."""
        with self._lock:
            index = self.table.index
            spaces = [space.ready for space in index.spaces.values() if space.ready]
            return [(list(ready), index.roots.of(ready.values())) for ready in spaces]

    def tell_changes(self, on_change: Callable[[Collection[bytes], list[bytes] | None], None] | None) -> None:
        """Have a callback called under the pool's lock with each change of the findable blocks, in order.

        Args:
            on_change: called with hashes that became findable and the hash before each, b"" at a root; or with hashes
                that are no longer findable, and None. They may be kept, and must not be changed. None: call nothing.
        """

        def changed(hashes: Collection[bytes], slots: list[int] | None) -> None:
            assert on_change is not None, "called only where there is a callback"
            on_change(hashes, None if slots is None else self._parents_of(slots))

        with self._lock:
            self.table.index.events.on_change = None if on_change is None else changed

    def found_blocks(self, then: Callable[[], None]) -> list[tuple[list[bytes], list[bytes]]]:
        """Return all findable hashes, and the hash before each, b"" at a root; one pair of lists for each namespace.

        Args:
            then: called in the same step, under the pool's lock: changes that it forgets are in the result.
        """
        with self._lock:
            then()
            spaces = self.table.index.spaces.values()
            return [(list(space.ready), self._parents_of(space.ready.values())) for space in spaces]

    def _parents_of(self, slots: Collection[int]) -> list[bytes]:
        parent, space = self.table.index.parent, self.table.index.space
        return [b"" if (above := parent[slot]) == space[slot].namespace else above for slot in slots]

    def present(self, hashes: list[bytes]) -> set[bytes]:
        """Return those of these hashes that can be found, in whatever namespace."""
        wanted = set(hashes)
        if not wanted:
            return wanted
        with self._lock:
            # Of each namespace the smaller side is gone through, so that many namespaces do not hold the lock for long.
            return set[bytes]().union(*(space.ready.keys() & wanted for space in self.table.index.spaces.values()))

    def held(self, namespace: bytes, hashes: Iterable[bytes]) -> set[bytes]:
        """Return those of these hashes that are here, or are being written, in one namespace."""
        with self._lock:
            space = self.table.index.space_of(namespace)
            return {own for own in hashes if own in space.ready or own in space.writing}

    def climb(self, namespace: bytes, block_hash: bytes, most: int) -> tuple[list[bytes], list[int], bytes]:
        """Go up a chain from a block, as far as blocks can be found here, and at most so many.

        Returns:
            (hashes, slots, the hash above the last of them), from the block itself on; the namespace is above a root.
        """
        with self._lock:
            index, hashes, slots = self.table.index, list[bytes](), list[int]()
            ready = index.space_of(namespace).ready
            while len(slots) < most and (slot := ready.get(block_hash)) is not None:
                hashes.append(block_hash)
                slots.append(slot)
                block_hash = index.parent[slot]
            return hashes, slots, block_hash

    def awaited(self) -> list[tuple[bytes, list[bytes]]]:
        """Return, by namespace, the hashes of blocks that are not here and that others here hang on."""
        with self._lock:
            return [(name, list(space.orphans)) for name, space in self.table.index.spaces.items() if space.orphans]

    def links(self, namespace: bytes, begin: int, end: int) -> list[tuple[int, bytes, bytes]]:
        """Return the depth and the hash of each block of a namespace in some slots, and of the one that it hangs on."""
        with self._lock:
            index, space = self.table.index, self.table.index.space_of(namespace)
            here = zip(index.space[begin:end], index.depth[begin:end], index.block_hash[begin:end],
                       index.parent[begin:end], strict=True)  # fmt: skip
            return [(depth, own, parent) for its, depth, own, parent in here if its is space]

    def hot_chains(self, max_blocks: int) -> list[BlockHashes]:
        """Return the most recently used chains, each from its root, up to `max_blocks` blocks in all."""
        with self._lock:
            return hot_chains(self.table.index, self.table.eviction.stamp, max_blocks)

    def by_touch(
        self, most: int, is_wanted: Callable[[bytes], bool], most_of: Callable[[str], int]
    ) -> list[tuple[bytes, list[int]]]:
        """Return blocks by their last touch, the last first: the namespace and the slots of those touched together.

        Args:
            most: of the blocks, together with those that they build on, which come before them.
            is_wanted: tells by its hash whether a block is; called under the pool's lock.
            most_of: tells how many of a tenant's own blocks; called there, too.
        """
        names = ("",) if self._tenants is None else self._tenants.names
        with self._lock:
            owners = bytes(self.num_slots) if self._tenants is None else self._tenants.owners.tobytes()
            shares = [min(most_of(name), most) for name in names]
            return by_touch(self.table.index, self.table.eviction.stamp, most, is_wanted, shares, owners)

    def num_leases(self, owner: str = "") -> int:
        """Return how many leases are held, by one owner if it is given."""
        with self._lock:
            return len(self.leases.ids_of(owner)) if owner else len(self.leases)

    def has_deadlines(self) -> bool:
        """Return whether `expire` may ever have something to do."""
        with self._lock:
            return len(self.leases) > 0 or self.writes.has_deadlines()

    @property
    def num_slots(self) -> int:
        """All slots."""
        return self.table.num_slots

    def tenants_of(self, slots: list[int]) -> list[str]:
        """Return whose the blocks of slots are; "" of the shared one."""
        with self._lock:
            return [self.table.tenant_at(slot) for slot in slots]

    def most_slots_of(self, tenant: str) -> int:
        """Return how many slots a tenant may have in all."""
        return self.num_slots if self._tenants is None else self._tenants.most_slots(self._number_of(tenant))

    def note_refused(self, tenant: str, num_blocks: int) -> None:
        """Count blocks that a tenant could not store, though the pool was not asked: it would have refused."""
        with self._lock:
            if self._tenants is not None:
                self._tenants.refused(self._number_of(tenant), num_blocks)

    def room_of(self, tenant: str) -> int:
        """Return how many more slots a tenant may have; those of the shared one are not bounded."""
        return self.num_slots if self._tenants is None else self._tenants.room(self._number_of(tenant))

    @property
    def num_evicted(self) -> int:
        """Blocks that were evicted in this life."""
        return self.table.num_evicted

    @property
    def num_free(self) -> int:
        """Slots that are free."""
        return self.table.columns.num_free

    @property
    def num_quarantined(self) -> int:
        """Slots that a transfer may still write."""
        return self.table.columns.num_quarantined

    def stats(self) -> PoolStats:
        """Return counts of one moment."""
        table, columns = self.table, self.table.columns
        with self._lock:
            num_ready = table.num_slots - columns.num_free - columns.num_writing - columns.num_quarantined
            return PoolStats(
                num_slots=table.num_slots,
                num_free=columns.num_free,
                num_writing=columns.num_writing,
                num_idle=num_ready - columns.num_pinned,
                num_pinned=columns.num_pinned,
                num_quarantined=columns.num_quarantined,
                num_leases=len(self.leases),
                num_writes=len(self.writes),
                num_evicted=table.num_evicted,
                num_published=table.num_published,
                num_hard_pinned=len(self.leases.hard_pins),
                num_soft_pinned=len(table.eviction.soft_pins),
                num_soft_pins=self.leases.num_soft_pins,
                num_low=table.eviction.num_low,
                num_high=table.eviction.num_high,
            )

    def tenants(self) -> dict[str, TenantStats]:
        """Return the counts of each tenant by name, in one moment; of the shared one there are none."""
        if self._tenants is None:
            return {}
        with self._lock:
            return self._tenants.stats()

    def tenant_of(self, chain: BlockHashes) -> str:
        """Return whose the last block of a run is that is here; "" for the shared tenant, and if none is."""
        if self._tenants is None:
            return SHARED
        with self._lock:
            found = list(self.table.index.find_prefix(chain.namespace, chain.data))
            return self.table.tenant_at(found[-1]) if found else SHARED

    def is_quota_of_pins_used(self, tenant: str) -> bool:
        """Return whether the quota of pins of a tenant lets it pin nothing more now."""
        if self._tenants is None:
            return False
        with self._lock:
            return self._tenants.has_no_pins_left(self._number_of(tenant))

    def _number_of(self, tenant: str) -> int:
        return 0 if self._tenants is None else self._tenants.number_of(tenant)

    def pins(self, now_s: float) -> dict[str, dict[str, float]]:
        """Return {"num", "oldest_s"} of leases ("lease"), hard and soft pins ("hard", "soft"); ages in seconds.

        Leases of peers, and those of the store itself while it writes to its disk, are among the leases.
        """
        with self._lock:
            return self.leases.ages(now_s)

    def check_integrity(self) -> None:
        """Assert all invariants between two calls; for tests, and cheap only for small pools."""
        with self._lock:
            refs, paid = Counter[int](), Counter[tuple[int, int]]()
            self.leases.check(refs, paid)
            self.writes.check(refs, paid)
            check_slots(self.table)
            if self._tenants is not None:
                self._tenants.check_pins(paid)
            held = {slot: count for slot, count in enumerate(self.table.columns.ref_count) if count}
            assert refs == held, f"held {refs}, counted {held}"


def _after(calls: list[Callable[[], None]], result: int) -> int:
    """Call the watchers that a step settled, now without the lock; return the step's result.

    The step is done. An error of one watcher is neither its caller's nor that of the other watchers.
    """
    for call in calls:
        try:
            call()
        except Exception:
            logger.exception("a wait for blocks has ended, but its caller could not be told")
    return result


def _check_deadline(deadline_s: float) -> None:
    if not deadline_s > -_NEVER_S:
        raise InvalidRequest(f"deadline_s: wanted a time of kvstore.runtime.clock, got {deadline_s}")

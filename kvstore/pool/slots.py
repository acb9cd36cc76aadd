"""Change the blocks, the holders and the eviction order of a pool's slots together.

No locking here: the pool holds its lock. kvstore.pool.slot_checks asserts that the three agree between two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvstore.blocks.priority import NORMAL, Retention
from kvstore.errors import PoolExhausted
from kvstore.memory.presence import PresenceCounts
from kvstore.pool.block_index import BlockIndex, Space
from kvstore.pool.eviction.lru import LeastRecentlyUsed
from kvstore.pool.eviction.policy import EvictionPolicy
from kvstore.pool.eviction.priorities import PriorityOrder
from kvstore.pool.runs import Run
from kvstore.pool.slot_columns import SlotColumns
from kvstore.pool.slot_lists import SlotList
from kvstore.pool.tenants.order import TenantOrder
from kvstore.pool.tenants.table import TenantTable
from kvstore.runtime import clock

#: Few counters, so that in tests many blocks share one.
_OWN_COUNTERS = 16
#: The most cleared slots that a claim of a tenant at its quota sweeps: its own may be behind those of others.
_SWEPT_AT_QUOTA = 4096


class SlotTable:
    """Operations on more than one of `index`, `columns` and `eviction`; callers use these for all others."""

    def __init__(
        self,
        num_slots: int,
        presence: PresenceCounts | None = None,
        eviction: EvictionPolicy | None = None,
        now_s: Callable[[], float] = clock.now_s,
        *,
        has_roots: bool = False,
        tenants: TenantTable | None = None,
    ) -> None:
        self.num_slots, self.tenants = num_slots, tenants
        self.columns = SlotColumns(num_slots, tenants)
        policy = LeastRecentlyUsed(num_slots) if eviction is None else eviction
        self.eviction = PriorityOrder(policy, num_slots, now_s)
        if tenants is not None:
            self.eviction = TenantOrder(policy, num_slots, now_s, tenants)
        presence = PresenceCounts(bytearray(_OWN_COUNTERS)) if presence is None else presence
        self.index = BlockIndex(num_slots, presence, self.eviction, has_roots=has_roots)
        self.num_evicted = self.num_published = 0
        #: `on_short` is called by a claim that leaves fewer free slots, `on_evicted` with what a claim has evicted.
        self.least_free, self.on_short = 0, _nothing
        self.on_evicted: Callable[[list[bytes], int], None] | None = None

    def claim(
        self,
        hashes: list[bytes],
        parents: list[bytes],
        namespace: bytes,
        depths: npt.NDArray[np.int64],
        retention: Retention = NORMAL,
        root_key: int = 0,
        tenant: int = 0,
    ) -> Run:
        """Take slots for the leading blocks that get one, free slots first, then by eviction.

        They are ascending, in a new generation, and being written. What a tenant wants beyond its quota takes the slots
        of its own blocks.
        """
        run = self._take(len(hashes), tenant)
        if run.slots:
            hashes = hashes[: len(run.slots)]
            run.data = b"".join(hashes)
            self.index.claim(run, hashes, parents[: len(hashes)], namespace, depths[: len(hashes)], root_key)
            self.eviction.claimed(run.whole, hashes, retention)
        return run

    def claim_anonymous(self, wanted: int, tenant: int = 0) -> Run:
        """Take up to `wanted` slots for blocks without names, as `claim` does; they count as aborted at once."""
        num_evicted = self.num_evicted
        run = self._take(wanted, tenant)
        self.columns.aborted.update(run.slots)
        if self.num_evicted > num_evicted:  # Evicted slots still have the hashes of their old blocks.
            self.index.forget(run.whole)
        return run

    def tenant_at(self, slot: int) -> str:
        """Return the name of the tenant that has a slot; "" for the shared one."""
        return "" if self.tenants is None else self.tenants.names[self.tenants.owners[slot]]

    def begin_anonymous(self, slots: list[int]) -> SlotList:
        """Have taken slots count as being written, for blocks without names, as `claim_anonymous` does."""
        listed = SlotList.of(slots)
        self.columns.begin_writing(listed)
        self.columns.aborted.update(slots)
        return listed

    def num_obtainable(self, wanted: int, *, may_evict: bool, tenant: int = 0) -> int:
        """Return how many slots, at most `wanted`, a claim would get. Evicts nothing, but may sweep."""
        columns, most = self.columns, min(wanted, self.num_slots)
        self._sweep_for(most, tenant)
        num_own = 0
        if tenant and (num_over := most - self._room(tenant)) > 0:
            num_own = self._num_evictable(num_over, tenant) if may_evict else 0
            most = max(most - num_over + num_own, 0)
        num_short = most - num_own - columns.num_free
        if num_short <= 0:
            return most
        # Whatever goes, so many others can go: the own ones are among them.
        num_others = self._num_evictable(num_own + num_short) - num_own if may_evict else 0
        return columns.num_free + num_own + num_others

    def check_obtainable(self, wanted: int, *, may_evict: bool, tenant: int = 0) -> None:
        """Make sure that a claim would get so many slots. Evicts nothing, but may sweep.

        Raises:
            PoolExhausted: it would get fewer.
        """
        if (num_there := self.num_obtainable(wanted, may_evict=may_evict, tenant=tenant)) >= wanted:
            return
        why = "the others are pinned or being written; release leases or add capacity"
        if tenant and self._room(tenant) < wanted and self.num_obtainable(wanted, may_evict=may_evict) >= wanted:
            assert self.tenants is not None, "a number of a tenant comes from there"
            self.tenants.refused(tenant, wanted if may_evict else 0)
            why = self.tenants.why_full(tenant)
        raise PoolExhausted(f"wanted {wanted} slots, got {num_there}: {why}")

    def num_short(self, wanted: int, tenant: int) -> int:
        """Return how many slots have to become free before a claim of so many evicts nothing."""
        num_short = wanted - self.columns.num_free
        return max(num_short, wanted - self._room(tenant)) if tenant else num_short

    def _room(self, tenant: int) -> int:
        assert self.tenants is not None, "a number of a tenant comes from there"
        return self.tenants.room(tenant)

    def _num_evictable(self, most: int, tenant: int = 0) -> int:
        """Return how many blocks could be evicted one after the other, without looking for more than `most`.

        Of a tenant, if it is given, only its own.
        """
        index, unread = self.index, self.columns.ref_counts == 0
        if tenant and self.tenants is not None:
            unread &= self.tenants.owners == tenant
        parent, num_children = index.parent, index.num_children
        leaves = np.flatnonzero(unread & (index.nums_children == 0))
        is_unread, num_found, num_left = unread.tobytes(), 0, dict[int, int]()
        for leaf in map(int, leaves):
            ready = index.space[leaf].ready
            at = ready.get(index.block_hash[leaf])
            if at != leaf or index.space[leaf].is_cleared:
                continue  # No block, or one that is being written.
            while at is not None:
                num_found += 1
                if num_found == most:
                    return most
                at = ready.get(parent[at])
                if at is not None:
                    if num_children[at] > 1:
                        num_left[at] = num_left.get(at, num_children[at]) - 1
                    if num_left.get(at) or not is_unread[at]:
                        break
        return num_found

    def _sweep_for(self, wanted: int, tenant: int = 0) -> None:
        columns, cleared = self.columns, self.index.cleared
        while cleared and columns.num_free < wanted and self.sweep(wanted - columns.num_free):
            pass  # A step may free too few: some cleared slots have readers. Later victims are not cleared blocks.
        if cleared and tenant and self._room(tenant) < wanted:
            self.sweep(_SWEPT_AT_QUOTA)

    def _take(self, wanted: int, tenant: int = 0) -> Run:
        columns = self.columns
        self._sweep_for(wanted, tenant)
        claimed = list[int]()
        if tenant and (room := self._room(tenant)) < wanted:
            claimed, wanted = self._take_own(wanted, room, tenant)
        was_short = bool(claimed)
        claimed += columns.take_free(wanted - len(claimed))
        if len(claimed) < wanted:
            was_short = True
            claimed += self._evict(wanted - len(claimed), self.eviction.victims())
        if was_short:
            claimed.sort()
        self.index.shorten()
        listed = SlotList.of(claimed, ascending=True)
        if was_short:
            self.eviction.freed(listed)
        if self.tenants is not None:
            self.tenants.taken(listed, tenant)
        columns.begin_writing(listed)
        if columns.num_free < self.least_free:
            self.on_short()
        return Run(b"", claimed, listed)

    def _take_own(self, wanted: int, room: int, tenant: int) -> tuple[list[int], int]:
        """Evict blocks of a tenant that wants more slots than it has room for.

        Returns:
            (slots of these blocks for new ones, how many slots the tenant may have with them).
        """
        tenants, order = self.tenants, self.eviction
        assert tenants is not None, "a number of a tenant comes from there"
        assert isinstance(order, TenantOrder), "with tenants there is no other"
        own = self._evict(wanted - room, order.victims_of(tenant))
        most = max(min(wanted, len(own) + room), 0)
        tenants.gave_up(tenant, len(own))
        tenants.refused(tenant, wanted - most)
        if own[most:]:  # It had more than its quota, which was larger in another life.
            self._free(own[most:])
        return own[:most], most

    def trim(self) -> int:
        """Evict blocks of each tenant that has more than its quota, as far as they can go; return how many."""
        tenants, num_evicted = self.tenants, self.num_evicted
        for tenant in range(1, 0 if tenants is None else len(tenants.names)):
            if (room := self._room(tenant)) < 0:
                self._take_own(0, room, tenant)
        return self.num_evicted - num_evicted

    def _evict(self, wanted: int, victims: Iterator[int]) -> list[int]:
        ref_count, evict = self.columns.ref_count, self.index.evict
        evicted, hashes = list[int](), list[bytes]()
        for slot in victims:
            # Evicted at once, because a slot may come up twice and must be taken only once.
            if not ref_count[slot] and (own := evict(slot)):
                hashes.append(own)
                evicted.append(slot)
                if len(evicted) == wanted:
                    break
        self._went(evicted, hashes)
        if hashes and self.on_evicted is not None:
            is_low = self.eviction.is_low
            others = [own for slot, own in zip(evicted, hashes, strict=True) if not is_low(slot)]
            self.on_evicted(others, len(hashes) - len(others))
        return evicted

    def _went(self, slots: list[int], hashes: list[bytes]) -> None:
        if hashes:
            self.index.events.add(False, hashes, roots=self.index.roots.of(slots))
            self.num_evicted += len(hashes)
            self.eviction.evicted(SlotList.of(slots), hashes)
            if self.tenants is not None:
                self.tenants.evicted(slots)

    def evict(self, wanted: int) -> int:
        """Evict up to `wanted` blocks, and leave their slots free; sweeps before. Return how many were evicted."""
        most = min(self.num_slots, self.columns.num_free + wanted)
        self._sweep_for(most)
        num_short = most - self.columns.num_free
        return self.evict_some(num_short, self.eviction.victims()) if num_short > 0 else 0

    def evict_some(self, most: int, victims: Iterator[int]) -> int:
        """Evict up to `most` of these blocks, and leave their slots free; return how many went."""
        self._free(evicted := self._evict(most, victims))
        return len(evicted)

    def _free(self, evicted: list[int]) -> None:
        listed = SlotList.of(evicted)
        self.index.forget(listed)
        self.index.shorten()
        self.eviction.freed(listed)
        self.columns.clear(evicted, listed)

    def choose_victims(self, most: int) -> list[int]:
        """Pin the blocks that are evicted next, and return their slots in that order.

        They leave the order; `end_victims`, or `unpin` without a stamp, gives the others their places back.
        """
        index, ref_count, num_left = self.index, self.columns.ref_count, dict[int, int]()
        chosen, taken = list[int](), set[int]()
        for slot in self.eviction.victims() if most > 0 else ():
            space = index.space[slot]
            is_here = not space.is_cleared and space.ready.get(index.block_hash[slot]) == slot
            if not is_here or ref_count[slot] or slot in taken or num_left.get(slot, index.num_children[slot]):
                continue
            chosen.append(slot)
            taken.add(slot)
            above = space.ready.get(index.parent[slot])
            if above is not None:
                num_left[above] = num_left.get(above, index.num_children[above]) - 1
                if not num_left[above]:  # As if its children had gone.
                    self.eviction.released((above,), 0)
            if len(chosen) == most:
                break
        self.columns.pin(SlotList.of(chosen))
        return chosen

    def end_victims(self, slots: list[int], listed: SlotList, touches: list[int]) -> int:
        """Evict chosen victims, except those that were touched meanwhile or have readers; return how many."""
        index, columns, eviction = self.index, self.columns, self.eviction
        columns.unpin(listed)
        evicted, hashes, kept = list[int](), list[bytes](), list[int]()
        for slot, touched in zip(slots, touches, strict=True):
            is_unused = not columns.ref_count[slot] and eviction.stamp[slot] == touched
            if is_unused and not index.space[slot].is_cleared and (own := index.evict(slot)):
                evicted.append(slot)
                hashes.append(own)
            else:
                kept.append(slot)
        self._went(evicted, hashes)
        self._free(evicted)
        eviction.released(kept, 0)
        return len(evicted)

    def publish(self, space: Space, hashes: list[bytes], slots: list[int], stamp: int) -> None:
        """Make blocks readable that were being written, in the order of their claim; `stamp` is of its touch."""
        self.index.publish(space, hashes, slots)
        self.columns.num_writing -= len(slots)
        self.num_published += len(slots)
        self.eviction.stored(slots, stamp)

    def abort(self, slots: list[int]) -> list[bytes]:
        """Abort blocks being written; their writers keep the slots. Return the hashes of those not aborted before."""
        aborted, lost = self.index.abort(slots)
        self.columns.aborted.update(aborted)
        self.eviction.freed(aborted)
        return lost

    def discard(self, slots: list[int]) -> int:
        """Take blocks out whose bytes are bad; each slot becomes free after its last reader. Return how many."""
        found = [(own, slot) for slot in slots if (own := self.index.discard(slot))]
        if found:
            gone = [slot for _, slot in found]
            self.index.events.add(False, [own for own, _ in found], roots=self.index.roots.of(gone))
            self._free(gone)
        return len(found)

    def unpin(self, slots: SlotList, stamp: int) -> None:
        """Remove a reader from each slot; `stamp` is of the first touch since that reader came."""
        self.columns.unpin(slots)
        self.eviction.released(slots, stamp)

    def sweep(self, num_slots: int) -> int:
        """Free up to `num_slots` cleared slots, each at its last reader's end; return how many were swept."""
        slots, listed = self.index.sweep(num_slots)
        if slots:
            self.eviction.freed(listed)
            self.columns.clear(slots, listed)
        return len(slots)


def _nothing() -> None:
    """Do nothing: nobody has to be told."""

"""Keep the leases and pins of a pool: owner, deadline, kind. No locking here: the pool holds its lock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.grants import Grant, HeldBlock, PinKind, Victims
from kvstore.blocks.priority import NORMAL, Retention
from kvstore.bounds import MAX_HELD_BLOCKS, MAX_LEASES
from kvstore.errors import LeaseReleased, PoolExhausted
from kvstore.pool.owners import OwnedTable
from kvstore.pool.slot_lists import SlotList, join
from kvstore.pool.slots import SlotTable

#: One of so many slots is lent to another tier beside the budget of pins. It must be able to copy blocks that are about
#: to be evicted, however much its clients pin.
_LENT_SHARE = 32


@dataclass(slots=True)
class _Lease:
    owner: str
    deadline_s: float
    kind: PinKind
    slots: SlotList
    generations: bytes
    #: Stamp of the lease's first touch; later touches have larger stamps.
    stamp: int
    #: Whether it is another tier's, and how many slots had no reader when that pinned them.
    is_lent: bool = False
    num_lent: int = 0
    #: Number of the tenant whose pins these are.
    tenant: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.slots)


class LeaseTable(OwnedTable[_Lease]):
    """The leases of one pool, with the budgets for them: see `Pool`."""

    def __init__(
        self,
        table: SlotTable,
        max_pinned: int,
        max_hard_pinned: int,
        epoch: bytes,
        new_id: Callable[[], int],
        on_used: Callable[[bytes, list[int], bool], None] | None,
        now_s: Callable[[], float],
    ) -> None:
        super().__init__()
        self._on_used, self.now_s = on_used, now_s
        self._table, self._epoch, self.new_id = table, epoch, new_id
        self._max_pinned, self._max_hard_pinned = max_pinned, max_hard_pinned
        #: Slots with a hard pin, and the number of hard pins of each.
        self.hard_pins: Counter[int] = Counter()
        #: How many leases are soft pins.
        self.num_soft_pins = 0
        #: Slots that other tiers have pinned, and how many of them the budget does not count.
        self._num_lent, self._most_lent = 0, max(1, table.num_slots // _LENT_SHARE)
        #: All slots that other tiers have pinned, and the number of these pins of each.
        self._lent: Counter[int] = Counter()
        #: When each lease and pin began, by kind and id, the oldest first.
        self.began_s: dict[PinKind, dict[int, float]] = {kind: {} for kind in PinKind}

    def add(self, number: int, entry: _Lease) -> None:
        """Add a lease or pin under a new id."""
        super().add(number, entry)
        self.began_s[entry.kind][number] = self.now_s()

    def pop(self, number: int) -> _Lease:
        """Remove a lease or pin and return it."""
        entry = super().pop(number)
        del self.began_s[entry.kind][number]
        return entry

    def ages(self, now_s: float) -> dict[str, dict[str, float]]:
        """Return number and age of the oldest of each kind; see `Pool.pins`."""
        return {
            kind.name.lower(): {"num": len(began_s), "oldest_s": max(0.0, now_s - next(iter(began_s.values()), now_s))}
            for kind, began_s in self.began_s.items()
        }

    def pin(
        self,
        chain: BlockHashes,
        owner: str,
        deadline_s: float,
        kind: PinKind,
        retention: Retention = NORMAL,
        tenant: int = 0,
    ) -> Grant:
        """Pin the readable prefix of a chain under a new lease, as far as the budgets and the tenant's quota allow.

        Raises:
            PoolExhausted: there are too many leases, or too many blocks under them; nothing changed.
        """
        self._check_room()
        if len(self) >= MAX_LEASES:
            raise PoolExhausted(
                f"wanted at most {MAX_LEASES} leases and pins of a store at once, got one more; release those that are "
                "not needed, and pin the blocks of a prompt once"
            )
        lease_id = self.new_id()
        lease, num_refused = self._take(chain, owner, deadline_s, kind, retention, tenant)
        self.add(lease_id, lease)
        self.num_soft_pins += kind is PinKind.SOFT
        return Grant(lease_id, lease.slots.packed, lease.generations, num_refused, self._epoch)

    def pin_slots(self, slots: list[int], namespace: bytes, owner: str) -> tuple[int, list[HeldBlock]]:
        """Pin the slots that have readable blocks of a namespace, until they are released; see `Pool.hold`."""
        table, index, is_low = self._table, self._table.index, self._table.eviction.is_low
        space = index.space_of(namespace)
        blocks, parents, depths, root_at = index.block_hash, index.parent, index.depth, index.roots.at
        tenant_at = table.tenant_at
        found = [
            HeldBlock(
                slot, namespace, parents[slot], depths[slot], blocks[slot], is_low(slot), root_at(slot), tenant_at(slot)
            )
            for slot in slots
            if space.ready.get(blocks[slot]) == slot
        ]
        columns, held = table.columns, [block.slot for block in found]
        # A block that is pinned already takes nothing from the budget.
        found = found[: _num_within(self._room_of_tiers(), held, columns.ref_count.__getitem__)]
        if not found or len(self) >= MAX_LEASES:
            return 0, []
        listed, num_before = index.claims.listed([block.slot for block in found]), columns.num_pinned
        columns.pin(listed)
        return self._lend(owner, listed, columns.num_pinned - num_before), found

    def pin_victims(self, most: int, owner: str) -> Victims:
        """Pin the blocks that are evicted next, as far as there is room for pins; see `Pool.hold_victims`."""
        table, index = self._table, self._table.index
        room = self._room_of_tiers() if len(self) < MAX_LEASES else 0
        slots = table.choose_victims(min(most, room))
        if not slots:
            return Victims(0, [], [], [])
        lease_id = self._lend(owner, SlotList.of(slots), len(slots))
        touches = [table.eviction.stamp[slot] for slot in slots]
        return Victims(lease_id, slots, [index.space[slot].namespace for slot in slots], touches)

    def end_victims(self, victims: Victims, owner: str) -> int:
        """Drop the pin of victims and evict them; see `Pool.evict_held`."""
        if self.of(victims.lease_id, owner) is None:
            return 0
        lease = self.pop(victims.lease_id)
        self._no_longer_lent(lease)
        return self._table.end_victims(victims.slots, lease.slots, victims.touches)

    def _room_of_tiers(self) -> int:
        """Return how many idle slots other tiers may pin: what is left of the budget, or of their own share."""
        return max(self._max_pinned - self._table.columns.num_pinned, self._most_lent - self._num_lent)

    def _lend(self, owner: str, listed: SlotList, num_idle: int) -> int:
        """Note that another tier has pinned slots, of which so many had no reader; return the id of its lease."""
        lease_id, lives = self.new_id(), self._table.columns.lives(listed)
        # No touch: to be copied to another tier is no use. So the time of the last one is not known here.
        lease = _Lease(owner, math.inf, PinKind.LEASE, listed, lives, 0, is_lent=True, num_lent=num_idle)
        self.add(lease_id, lease)
        self._num_lent += num_idle
        self._lent.update(listed)
        return lease_id

    def _no_longer_lent(self, lease: _Lease) -> None:
        if lease.is_lent:
            self._num_lent -= lease.num_lent
            self._lent -= Counter(lease.slots)

    def grow(
        self, lease_id: int, chain: BlockHashes, owner: str, deadline_s: float, retention: Retention = NORMAL
    ) -> Grant:
        """Pin the readable prefix of a chain under an existing lease, and renew that.

        Raises:
            LeaseReleased: `owner` does not hold that lease; nothing changed.
            PoolExhausted: there are too many blocks under leases; nothing changed.
        """
        if (lease := self.of(lease_id, owner)) is None:
            raise LeaseReleased(f"wanted a lease held by {owner!r}, got id {lease_id}, which it does not hold")
        self._check_room()
        # A load from peers brought these blocks, and their claim was their use.
        more, num_refused = self._take(chain, owner, deadline_s, lease.kind, retention, lease.tenant, is_use=False)
        self.num_blocks += len(more.slots)
        lease.slots = join([lease.slots, more.slots])
        lease.generations += more.generations
        lease.deadline_s = max(lease.deadline_s, deadline_s)
        return Grant(lease_id, more.slots.packed, more.generations, num_refused, self._epoch)

    def adopt(self, slots: list[int], owner: str, deadline_s: float) -> None:
        """Lease readable blocks to a reader of the pool's last life; this is no touch, and beyond all budgets."""
        listed = SlotList.of(slots)
        self._table.columns.pin(listed)
        lives = self._table.columns.lives(listed)
        self.add(self.new_id(), _Lease(owner, deadline_s, PinKind.LEASE, listed, lives, 0))

    def renew(self, lease_id: int, owner: str, deadline_s: float) -> bool:
        """Move a lease's deadline later, never earlier; False when `owner` does not hold it."""
        if (lease := self.of(lease_id, owner)) is None:
            return False
        lease.deadline_s = max(lease.deadline_s, deadline_s)
        return True

    def release(self, lease_id: int, owner: str) -> bool:
        """Drop a lease; False, and nothing changes, when `owner` does not hold it."""
        if self.of(lease_id, owner) is None:
            return False
        self.end(lease_id)
        return True

    def release_pins(self, owner: str) -> int:
        """Drop the hard and soft pins of an owner; return how many."""
        return self.end_all([i for i in self.ids_of(owner) if self.held[i].kind is not PinKind.LEASE])

    def expire(self, now_s: float) -> int:
        """Drop every lease whose deadline has passed; return how many. Renewals would break any order by deadline."""
        return self.end_all([i for i, lease in self.held.items() if lease.deadline_s < now_s])

    def _check_room(self) -> None:
        if self.num_blocks >= MAX_HELD_BLOCKS:
            raise PoolExhausted(
                f"wanted leases and pins of at most {MAX_HELD_BLOCKS} blocks of a store at once, got "
                f"{self.num_blocks} and more; release those that are not needed, and pin the blocks of a prompt once"
            )

    def _take(
        self,
        chain: BlockHashes,
        owner: str,
        deadline_s: float,
        kind: PinKind,
        retention: Retention,
        tenant: int,
        *,
        is_use: bool = True,
    ) -> tuple[_Lease, int]:
        table, found = self._table, self._table.index.find_prefix(chain.namespace, chain.data)
        columns, count = table.columns, len(found)
        if kind is not PinKind.SOFT:
            # A client may pin what is lent, too, and have it afterwards: so much can the budget be exceeded. Where it
            # is exceeded already, what only other tiers hold is no longer given; else clients could get all slots so.
            room = self._max_pinned - columns.num_pinned + min(self._num_lent, self._most_lent)
            held, lent = columns.ref_count.__getitem__, self._lent
            is_exceeded = room < 0 and bool(lent)
            count = _num_within(room, found, (lambda slot: held(slot) - lent[slot]) if is_exceeded else held)
        if kind is PinKind.HARD:
            count = _num_within(self._max_hard_pinned - len(self.hard_pins), found.part(0, count), self.hard_pins.get)
        if kind is not PinKind.SOFT and table.tenants is not None:
            count = table.tenants.pinnable(tenant, found.part(0, count))
        slots = found.part(0, count)
        if kind is PinKind.SOFT:
            table.eviction.soft_pinned(slots)
        else:
            columns.pin(slots)
            if table.tenants is not None:
                table.tenants.pinned(tenant, slots)
        if kind is PinKind.HARD:
            self.hard_pins.update(slots)
        stamp = table.eviction.touched(slots, is_use=is_use, retention=retention)
        if self._on_used is not None and count:
            self._on_used(chain.namespace, list(slots), is_use)
        lease = _Lease(owner, deadline_s, kind, slots, columns.lives(slots), stamp, tenant=tenant)
        return lease, len(found) - len(slots)

    def end(self, lease_id: int) -> None:
        """Drop a lease that is held."""
        lease = self.pop(lease_id)
        self._no_longer_lent(lease)
        if lease.kind is PinKind.SOFT:
            self.num_soft_pins -= 1
            living = self._table.columns.still_living(lease.slots, lease.generations)
            self._table.eviction.soft_unpinned(living)
            return
        if lease.kind is PinKind.HARD:
            self.hard_pins -= Counter(lease.slots)
        if self._table.tenants is not None:
            self._table.tenants.unpinned(lease.tenant, lease.slots)
        self._table.unpin(lease.slots, lease.stamp)

    def check(self, refs: Counter[int], paid: Counter[tuple[int, int]]) -> None:
        """Add the pins of all leases to `refs`, and to `paid` by tenant; assert that all counts are right."""
        hard, soft = Counter[int](), Counter[int]()
        self.check_owners()
        for lease in self.held.values():
            if lease.kind is PinKind.SOFT:
                soft.update(self._table.columns.still_living(lease.slots, lease.generations))
                continue
            assert self._table.columns.lives(lease.slots) == lease.generations, "a pinned slot began a new life"
            refs.update(lease.slots)
            paid.update((lease.tenant, slot) for slot in lease.slots)
            if lease.kind is PinKind.HARD:
                hard.update(lease.slots)
        assert hard == self.hard_pins, "hard pins"
        lent = Counter(slot for lease in self.held.values() if lease.is_lent for slot in lease.slots)
        assert lent == self._lent, "slots pinned by other tiers"
        assert self._num_lent == sum(lease.num_lent for lease in self.held.values()), "slots lent to other tiers"
        began = {number: kind for kind, ids in self.began_s.items() for number in ids}
        assert began == {number: lease.kind for number, lease in self.held.items()}, "begins of leases"
        assert self.num_soft_pins == sum(lease.kind is PinKind.SOFT for lease in self.held.values()), "soft pins"
        assert len(hard) <= self._max_hard_pinned, "more hard pins than the quota allows"
        counted = self._table.eviction.soft_pins.items()
        assert all(soft[slot] >= count for slot, count in counted), "soft pins without a holder"


def _num_within(room: int, slots: SlotList | list[int], num_held: Callable[[int], int | None]) -> int:
    """Return the longest prefix of slots in which at most `room` slots are not held yet."""
    if room >= len(slots):
        return len(slots)
    for index, slot in enumerate(slots):
        if not num_held(slot) and (room := room - 1) < 0:
            return index
    return len(slots)

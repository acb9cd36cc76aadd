"""Keep which tenant has which slot of a pool, and what each may still have. No locking: the pool holds its lock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from kvstore.pool.eviction.lru import LeastRecentlyUsed
from kvstore.pool.eviction.policy import EvictionPolicy
from kvstore.pool.slot_lists import NO_SLOTS, SlotList
from kvstore.pool.tenants.limits import MOST_TENANTS, TenantLimits, TenantStats
from kvstore.pool.tenants.readers import ReaderCounts

#: More slots than any pool has.
_ALL = 1 << 62


class NewPolicy(Protocol):
    """Makes an eviction policy for the slots of a pool, of which at most so many have blocks that it orders."""

    def __call__(self, *, most_blocks: int) -> EvictionPolicy:
        """Make one."""


class TenantTable:
    """The tenants of one pool by number: 1 for the first name in their order, 0 for all others, which nothing bounds.

    A slot belongs to the tenant that claimed it, from then until it is free again: while it is written, while others
    read it, while its writer gives it up, in quarantine.

    Args:
        num_slots: of the pool.
        limits: of each tenant, by name.
        new_policy: makes the order in which a tenant at its quota loses its own blocks. Least recently used first when
            None.
    """

    def __init__(
        self,
        num_slots: int,
        limits: Mapping[str, TenantLimits],
        new_policy: NewPolicy | None = None,
    ) -> None:
        assert len(limits) <= MOST_TENANTS, "checked by the settings"
        self.names = ("", *limits)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._new_policy, self._num_slots = new_policy, num_slots
        all_limits = (TenantLimits(), *limits.values())
        # The pool itself bounds those that may have all of it: they take the slots of the blocks that go first.
        wanted = [num_slots if each.max_slots is None else each.max_slots for each in all_limits]
        self._max_slots = [most if most < num_slots else _ALL for most in wanted]
        self._max_pinned = [num_slots if each.max_pinned is None else each.max_pinned for each in all_limits]
        #: Tenant of each slot; 0 for a free one, too.
        self.owners = np.zeros(num_slots, np.uint8)
        self.num_held = [0] * len(self.names)
        #: What each pins; None for the shared one.
        self._readers = [ReaderCounts(num_slots) if number else None for number in range(len(self.names))]
        self._num_evicted, self._num_by_quota = Counter[int](), Counter[int]()
        self._num_refused_bytes, self._num_refused_pins = Counter[int](), Counter[int]()

    def number_of(self, name: str) -> int:
        """Return the number of a tenant; 0 for a name that has no limits here."""
        return self._numbers.get(name, 0)

    def policies(self) -> list[EvictionPolicy | None]:
        """Return a new policy for each tenant that may have a part of the slots only; None for the others."""
        make = self._new_policy or (lambda *, most_blocks: LeastRecentlyUsed(self._num_slots))
        return [make(most_blocks=most) if most < _ALL else None for most in self._max_slots]

    # Slots.

    def most_slots(self, tenant: int) -> int:
        """Return how many slots a tenant may have in all."""
        return min(self._max_slots[tenant], self._num_slots)

    def room(self, tenant: int) -> int:
        """Return how many more slots a tenant may have; below 0 where it has too many, after a change of its quota."""
        return self._max_slots[tenant] - self.num_held[tenant]

    def taken(self, slots: SlotList, tenant: int) -> None:
        """Note that a tenant has claimed slots: free ones, or those of blocks that were evicted."""
        self._leave(self.owners[slots.index])
        if tenant:
            self.owners[slots.index] = tenant
            self.num_held[tenant] += len(slots)
        else:
            self.owners[slots.index] = 0

    def freed(self, slots: Collection[int]) -> None:
        """Note that slots are free."""
        index = np.fromiter(slots, np.intp, len(slots))
        self._leave(self.owners[index])
        self.owners[index] = 0

    def adopt(self, names: Sequence[str], owners: np.ndarray[Any, np.dtype[np.uint8]], taken: list[int]) -> None:
        """Take over whose the slots are that another life had taken; those of tenants that are no more are shared.

        `owners` has the number of the tenant of every slot there: 1 for the first of the names.
        """
        numbers = np.array([0, *(self.number_of(name) for name in names)], np.uint8)
        index = np.array(taken, np.intp)
        self.owners[index] = numbers[owners[index]]
        for tenant, count in enumerate(np.bincount(self.owners[index], minlength=len(self.names)).tolist()):
            if tenant:
                self.num_held[tenant] += count

    def _leave(self, owners: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        if owners.any():
            for tenant, count in enumerate(np.bincount(owners).tolist()):
                if tenant and count:
                    self.num_held[tenant] -= count

    def evicted(self, slots: Collection[int]) -> None:
        """Count blocks that are evicted; their slots are still their tenants'."""
        owners = self.owners[np.fromiter(slots, np.intp, len(slots))]
        self._num_evicted.update(owners[owners > 0].tolist())

    def gave_up(self, tenant: int, num_blocks: int) -> None:
        """Count blocks that went for new ones of their own tenant."""
        self._num_by_quota[tenant] += num_blocks

    def refused(self, tenant: int, num_blocks: int) -> None:
        """Count blocks that were not stored because of the quota of bytes."""
        self._num_refused_bytes[tenant] += num_blocks

    def why_full(self, tenant: int) -> str:
        """Return the end of an error: why a tenant gets no more slots, and what to do."""
        most, held = self._max_slots[tenant], self.num_held[tenant]
        return (
            f"tenant {self.names[tenant]!r} has {held} of the {most} slots that it may have, and too few of them can "
            "go; end leases, saves and hand-offs, or raise its max_bytes"
        )

    # Pins.

    def pinnable(self, tenant: int, slots: SlotList) -> int:
        """Return how many leading slots a tenant may pin; counts the others as refused."""
        readers, count = self._readers[tenant], len(slots)
        if readers is None:
            return count
        room = self._max_pinned[tenant] - readers.num_pinned
        if room >= count:
            return count
        seen = set[int]()
        for at, slot in enumerate(slots):
            if not readers.ref_count[slot] and slot not in seen:
                if len(seen) >= room:
                    self._num_refused_pins[tenant] += count - at
                    return at
                seen.add(slot)
        return count

    def payable(self, tenant: int, above: list[int], found: list[int | None]) -> tuple[int, SlotList]:
        """Return how far a tenant may save a run, and which slots of others count as its pins meanwhile.

        Until it ends, a save keeps the blocks that it finds. Those of others would be locked by a tenant that pays
        for none; what it has itself is bounded by its other quota.

        Args:
            tenant: of the writer.
            above: the slot of the block above the run, if that is here.
            found: the slot of each block of the run that is here, None for the others.
        """
        if self._readers[tenant] is None or None not in found:
            return len(found), NO_SLOTS
        places = [(at, slot) for at, slot in enumerate([*above, *found], -len(above)) if slot is not None]
        owners = self.owners[[slot for _, slot in places]] if places else ()
        others = [place for place, owner in zip(places, owners, strict=True) if owner != tenant]
        slots = SlotList.of([slot for _, slot in others])
        count = self.pinnable(tenant, slots)
        end = max(others[count][0], 0) if count < len(others) else len(found)
        return end, slots.part(0, count)

    def has_no_pins_left(self, tenant: int) -> bool:
        """Return whether a tenant may pin nothing that it does not hold already."""
        readers = self._readers[tenant]
        return readers is not None and readers.num_pinned >= self._max_pinned[tenant]

    def pinned(self, tenant: int, slots: SlotList) -> None:
        """Note that a lease, a hard pin or a save of a tenant holds slots."""
        if (readers := self._readers[tenant]) is not None:
            readers.pin(slots)

    def unpinned(self, tenant: int, slots: SlotList) -> None:
        """Note that it holds them no more."""
        if (readers := self._readers[tenant]) is not None:
            readers.unpin(slots)

    def check_pins(self, paid: Counter[tuple[int, int]]) -> None:
        """Assert that the pins of (tenant, slot) are those that are held; for tests."""
        for tenant, readers in enumerate(self._readers):
            if readers is not None:
                held = {slot: count for (number, slot), count in paid.items() if number == tenant}
                counted = {slot: count for slot, count in enumerate(readers.ref_count) if count}
                assert held == counted, f"pins of tenant {tenant}: held {held}, counted {counted}"

    def stats(self) -> dict[str, TenantStats]:
        """Return the counts of each tenant by name, without the shared one."""
        return {
            name: TenantStats(
                num_slots=self.num_held[number],
                num_pinned=0 if (readers := self._readers[number]) is None else readers.num_pinned,
                num_evicted=self._num_evicted[number],
                num_evicted_by_quota=self._num_by_quota[number],
                num_refused_bytes=self._num_refused_bytes[number],
                num_refused_pins=self._num_refused_pins[number],
            )
            for number, name in enumerate(self.names)
            if number
        }

    def check(self, free: Collection[int]) -> None:
        """Assert that counts and owners agree; for tests."""
        assert not self.owners[list(free)].any(), "free, and a tenant's"
        held = np.bincount(self.owners, minlength=len(self.names)).tolist()[1:]
        assert held == self.num_held[1:], f"slots of tenants: {held}, counted {self.num_held[1:]}"
        for tenant, readers in enumerate(self._readers):
            if readers is not None:
                num_pinned = sum(count > 0 for count in readers.ref_count)
                assert num_pinned == readers.num_pinned <= self._num_slots, f"pinned by tenant {tenant}"

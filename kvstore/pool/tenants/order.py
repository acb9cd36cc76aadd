"""Order the blocks of all tenants together, and those of each tenant with a quota by themselves. No locking here.

A tenant below its quota takes the slots of the blocks that go first of all, as without tenants. One that is at its
quota takes those of its own blocks, in the order of a policy that sees these alone. So each such tenant has an order
of its own beside the common one: both are told of what happens to its blocks, and each passes over a block for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from kvstore.blocks.indexes import ints_in
from kvstore.blocks.priority import NORMAL, Retention
from kvstore.pool.eviction.policy import EvictionPolicy
from kvstore.pool.eviction.priorities import PriorityOrder
from kvstore.pool.slot_lists import SlotList
from kvstore.pool.tenants.table import TenantTable

#: For a stamp of the common order, which means nothing to another one. Every touch is from then or later; an order that
#: has passed no slot need not look.
_EARLIEST = 1


class TenantOrder(PriorityOrder):
    """The slots of a pool with tenants in the order of eviction.

    Args:
        policy: of all blocks.
        num_slots: of the pool.
        now_s: the clock by which priorities end, in seconds.
        tenants: says whose each slot is, from before `claimed` until after `freed`.
    """

    def __init__(
        self, policy: EvictionPolicy, num_slots: int, now_s: Callable[[], float], tenants: TenantTable
    ) -> None:
        super().__init__(policy, num_slots, now_s)
        self._tenants = tenants
        #: By the number of their tenant.
        self._own = [None if each is None else PriorityOrder(each, num_slots, now_s) for each in tenants.policies()]

    def victims_of(self, tenant: int) -> Iterator[int]:
        """Yield the slots of a tenant in the order in which it gives them up for its own blocks."""
        order = self._own[tenant]
        return iter(()) if order is None else order.victims()

    def _split(self, slots: Iterable[int]) -> Iterator[tuple[PriorityOrder, SlotList]]:
        """Yield each order of a tenant that has some of these slots, with those, in their order."""
        listed = slots if isinstance(slots, SlotList) else SlotList.of(list(slots))
        owners = self._tenants.owners[listed.index]
        if not len(owners) or not owners.any():
            return
        if (owners == owners[0]).all():
            if (order := self._own[owners[0]]) is not None:
                yield order, listed
            return
        numbers = ints_in(listed.packed)
        for tenant in np.unique(owners).tolist():
            if (order := self._own[tenant]) is not None:
                yield order, SlotList.of(numbers[owners == tenant].tolist())

    def _split_named(
        self, slots: SlotList, hashes: Sequence[bytes]
    ) -> Iterator[tuple[PriorityOrder, SlotList, Sequence[bytes]]]:
        names: dict[int, bytes] = {}
        for order, mine in self._split(slots):
            if len(mine) == len(slots):
                yield order, mine, hashes
            else:
                names = names or dict(zip(slots, hashes, strict=True))
                yield order, mine, [names[slot] for slot in mine]

    def claimed(self, slots: SlotList, hashes: Sequence[bytes], retention: Retention = NORMAL) -> None:
        """Note that blocks are written to free slots, which are their tenant's already."""
        super().claimed(slots, hashes, retention)
        for order, mine, own in self._split_named(slots, hashes):
            order.claimed(mine, own, retention)

    def touched(self, slots: SlotList, *, is_use: bool, retention: Retention = NORMAL) -> int:
        """Note that a chain was touched."""
        stamp = super().touched(slots, is_use=is_use, retention=retention)
        for order, mine in self._split(slots):
            order.touched(mine, is_use=is_use, retention=retention)
        return stamp

    def stored(self, slots: Iterable[int], stamp: int) -> None:
        """Note that blocks were written."""
        super().stored(slots, stamp)
        for order, mine in self._split(slots):
            order.stored(mine, _EARLIEST)

    def released(self, slots: Iterable[int], stamp: int) -> None:
        """Note that blocks lost a reader or their last child."""
        super().released(slots, stamp)
        for order, mine in self._split(slots):
            order.released(mine, _EARLIEST)

    def soft_pinned(self, slots: Iterable[int]) -> None:
        """Add a soft pin to each slot."""
        super().soft_pinned(slots)
        for order, mine in self._split(slots):
            order.soft_pinned(mine)

    def soft_unpinned(self, slots: Iterable[int]) -> None:
        """Remove a soft pin from each slot that has one."""
        living = list(slots)
        super().soft_unpinned(living)
        for order, mine in self._split(living):
            order.soft_unpinned(mine)

    def evicted(self, slots: SlotList, hashes: Sequence[bytes]) -> None:
        """Note that blocks with these hashes were evicted."""
        super().evicted(slots, hashes)
        for order, mine, own in self._split_named(slots, hashes):
            order.evicted(mine, own)

    def freed(self, slots: SlotList) -> None:
        """Forget slots; they are still those of their blocks' tenants."""
        super().freed(slots)
        for order, mine in self._split(slots):
            order.freed(mine)

    def check(self, evictable: set[int]) -> None:
        """Assert that every evictable slot comes up, and in the order of its own tenant, too."""
        super().check(evictable)
        owners = self._tenants.owners
        for tenant, order in enumerate(self._own):
            if order is not None:
                order.check({slot for slot in evictable if owners[slot] == tenant})
                strangers = [slot for slot, touched in enumerate(order.stamp) if touched and owners[slot] != tenant]
                assert not strangers, f"slots {strangers} are in the order of tenant {tenant}, and not its"

"""Count what the namespaces of a pool have. Each slice is of one moment, and all together are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvstore.blocks.priority import Priority
from kvstore.pool.block_index import NOTHING
from kvstore.pool.inspection.slices import SLOTS_AT_ONCE, names_of, slices
from kvstore.pool.leases import LeaseTable
from kvstore.pool.pool import Pool
from kvstore.pool.slots import SlotTable


@dataclass(slots=True, kw_only=True)
class NamespaceCounts:
    """What one namespace has in one pool.

    Args:
        num_blocks: that can be found.
        num_writing: that are being written.
        num_pinned: of the first, with a reader or a hard pin.
    """

    num_blocks: int = 0
    num_writing: int = 0
    num_pinned: int = 0


@dataclass(slots=True, kw_only=True)
class NamespaceDetails:
    """What more can be said of one namespace in one pool, at the price of a look at each of its blocks.

    Args:
        num_chains: first blocks of chains.
        num_low: blocks of low priority.
        num_high: blocks of high priority.
        last_use_s: when a block was used last, by the pool's clock; None where its policy does not know.
    """

    num_chains: int = 0
    num_low: int = 0
    num_high: int = 0
    last_use_s: float | None = None


def count_namespaces(pool: Pool) -> dict[bytes, NamespaceCounts]:
    """Return the counts of each namespace that has blocks."""
    found: dict[bytes, NamespaceCounts] = {}
    for names in slices(names_of(pool)):
        found |= pool.look(partial(_sizes, names))
    pinned = Counter[bytes]()
    for slots in slices(range(pool.num_slots), SLOTS_AT_ONCE):
        pinned += pool.look(partial(_pinned, slots))
    for name, num_pinned in pinned.items():
        found.setdefault(name, NamespaceCounts()).num_pinned = num_pinned
    return {name: counts for name, counts in found.items() if counts != NamespaceCounts()}


def _sizes(names: Sequence[bytes], table: SlotTable, leases: LeaseTable) -> dict[bytes, NamespaceCounts]:
    spaces = [(name, table.index.space_of(name)) for name in names]
    return {name: NamespaceCounts(num_blocks=len(each.ready), num_writing=len(each.writing)) for name, each in spaces}


def _pinned(slots: Sequence[int], table: SlotTable, leases: LeaseTable) -> Counter[bytes]:
    held = slots[0] + np.flatnonzero(table.columns.ref_counts[slots[0] : slots[-1] + 1])
    spaces = [table.index.space[slot] for slot in held.tolist()]
    # What was cleared has no name any more; `num_cleared` counts it.
    return Counter(space.namespace for space in spaces if space is not NOTHING and not space.is_cleared)


def num_cleared(pool: Pool) -> int:
    """Return how many blocks of cleared namespaces are still in slots, because they are read or not swept yet."""

    def count(table: SlotTable, leases: LeaseTable) -> int:
        return len(table.columns.cleared) + sum(len(space.ready) for space in table.index.cleared if space.unswept)

    return pool.look(count)


def details_of(pool: Pool, names: Collection[bytes]) -> dict[bytes, NamespaceDetails]:
    """Return more of these namespaces; looks at each slot of the pool."""
    found = {name: NamespaceDetails() for name in names}
    for slots in slices(range(pool.num_slots)):
        pool.look(partial(_add_details, found, slots))
    return found


def _add_details(
    found: dict[bytes, NamespaceDetails], slots: Sequence[int], table: SlotTable, leases: LeaseTable
) -> None:
    index, by_name = table.index, dict[bytes, list[int]]()
    for slot in slots:
        space = index.space[slot]
        if space.namespace in found and space.ready.get(index.block_hash[slot]) == slot and not space.is_cleared:
            by_name.setdefault(space.namespace, []).append(slot)
    for name, mine in by_name.items():
        at, details = np.array(mine, np.intp), found[name]
        priorities = table.eviction.terms_of(at)[0]
        details.num_chains += sum(index.parent[slot] == name for slot in mine)
        details.num_low += int(np.count_nonzero(priorities == Priority.LOW))
        details.num_high += int(np.count_nonzero(priorities == Priority.HIGH))
        latest_s = float(table.eviction.policy.history(at)[1].max())
        if latest_s > -np.inf:
            details.last_use_s = max(latest_s, details.last_use_s or latest_s)

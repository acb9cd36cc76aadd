"""Say which leases and pins a pool has, and what each holds. Each slice is of one moment."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvstore.blocks.indexes import ints_in
from kvstore.blocks.priority import Priority
from kvstore.pool.inspection.slices import slices
from kvstore.pool.leases import LeaseTable
from kvstore.pool.pool import Pool
from kvstore.pool.slots import SlotTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One lease or pin.

    Args:
        lease_id: of the lease or pin.
        kind: "lease", "hard" or "soft".
        owner: of it, by the name that the store gave it.
        num_blocks: that it holds; a soft pin names blocks that may have been evicted.
        namespace: of its first block; None if that is not here any more, or it has none.
        age_s: since it began.
        left_s: until its deadline; None without one.
        is_of_tier: whether another tier of this store has it, while it copies.
        tenant: whose pins these are; "" for the shared one.
    """

    lease_id: int
    kind: str
    owner: str
    num_blocks: int
    namespace: bytes | None
    age_s: float
    left_s: float | None
    is_of_tier: bool
    tenant: str


@dataclass(slots=True, kw_only=True)
class HeldRun:
    """Neighbours in a chain that a lease or pin holds; without a namespace, blocks that were evicted or cleared."""

    namespace: bytes | None
    start: int
    num_blocks: int
    priority: str


def holders_of(pool: Pool, most: int, lease_id: int | None = None) -> list[Holder]:
    """Return the leases and pins of a pool, the oldest first.

    Args:
        pool: to look into.
        most: return so many.
        lease_id: only this one, if it is held.
    """
    ids = [lease_id] if lease_id is not None else pool.look(partial(_oldest, most))
    return [holder for part in slices(ids) for holder in pool.look(partial(_described, part))]


def _oldest(most: int, table: SlotTable, leases: LeaseTable) -> list[int]:
    kinds = [[(began_s, number) for number, began_s in islice(ids.items(), most)] for ids in leases.began_s.values()]
    return [number for _, number in islice(heapq.merge(*kinds), most)]


def _described(ids: Sequence[int], table: SlotTable, leases: LeaseTable) -> list[Holder]:
    index, now_s, found = table.index, leases.now_s(), list[Holder]()
    for number in ids:
        if (lease := leases.held.get(number)) is None:
            continue
        living = next(iter(table.columns.still_living(lease.slots.part(0, 1), lease.generations[:4])), -1)
        namespace = index.space[living].namespace if living >= 0 else b""
        found.append(
            Holder(
                lease_id=number,
                kind=lease.kind.name.lower(),
                owner=lease.owner,
                num_blocks=lease.num_blocks,
                namespace=namespace or None,
                age_s=max(0.0, now_s - leases.began_s[lease.kind][number]),
                left_s=None if math.isinf(lease.deadline_s) else max(0.0, lease.deadline_s - now_s),
                is_of_tier=lease.is_lent,
                tenant="" if table.tenants is None else table.tenants.names[lease.tenant],
            )
        )
    return found


def held_runs(pool: Pool, lease_id: int) -> list[HeldRun]:
    """Return the runs of blocks that a lease or pin holds, in its order; none if it is not held any more."""

    def slots_of(table: SlotTable, leases: LeaseTable) -> tuple[bytes, bytes]:
        lease = leases.held.get(lease_id)
        return (b"", b"") if lease is None else (lease.slots.packed, lease.generations)

    packed, generations = pool.look(slots_of)
    slots, lives = ints_in(packed), np.frombuffer(generations, np.uint32)
    found: list[HeldRun] = []
    for places in slices(range(len(slots))):
        part = slice(places[0], places[-1] + 1)
        for each in pool.look(partial(_blocks, slots[part], lives[part])):
            last = found[-1] if found else None
            same = last is not None and (last.namespace, last.priority) == (each.namespace, each.priority)
            if last is not None and same and (each.namespace is None or last.start + last.num_blocks == each.start):
                last.num_blocks += 1
            else:
                found.append(each)
    return found


def _blocks(
    slots: npt.NDArray[np.int32], lives: npt.NDArray[np.uint32], table: SlotTable, leases: LeaseTable
) -> list[HeldRun]:
    index, generation, found = table.index, table.columns.generation, list[HeldRun]()
    priorities = table.eviction.terms_of(slots.astype(np.intp))[0].tolist()
    for slot, life, priority in zip(slots.tolist(), lives.tolist(), priorities, strict=True):
        if generation[slot] != life or not (namespace := index.space[slot].namespace):
            found.append(HeldRun(namespace=None, start=0, num_blocks=1, priority="-"))
        else:
            name = Priority(priority).name.lower()
            found.append(HeldRun(namespace=namespace, start=index.depth[slot], num_blocks=1, priority=name))
    return found

"""Say which runs of a chain a pool has, and in what state. Each slice is of one moment, and all together are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.priority import Priority
from kvstore.bounds import MAX_CHAIN_BYTES
from kvstore.pool.inspection.slices import AT_ONCE, names_of, slices
from kvstore.pool.leases import LeaseTable
from kvstore.pool.pool import Pool
from kvstore.pool.slots import SlotTable

#: The longest path that is followed to the root.
_MOST_BLOCKS = MAX_CHAIN_BYTES // 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockState:
    """What holds a block, and how much it matters: blocks next to each other with the same state are one run.

    Args:
        is_written: whether it can be found; else it is being written.
        num_readers: leases and hard pins that hold it.
        num_hard: of these, hard pins.
        num_soft: soft pins.
        priority: "low", "normal" or "high".
    """

    is_written: bool
    num_readers: int
    num_hard: int
    num_soft: int
    priority: str


@dataclass(slots=True, kw_only=True)
class BlockRun:
    """Neighbours in a chain, of one state.

    Args:
        start: number in the chain of the first block.
        num_blocks: in the run.
        state: of each.
        last_use_s, first_use_s: of the last uses of its blocks the latest and the earliest, by the pool's clock; None
            where the pool's policy does not know.
    """

    start: int
    num_blocks: int
    state: BlockState
    last_use_s: float | None
    first_use_s: float | None


def runs_of(pool: Pool, chain: BlockHashes) -> list[BlockRun]:
    """Return what a pool has of a chain, in the order of the chain; blocks that it does not have are in no run."""
    found: list[BlockRun] = []
    hashes = chain.hashes()
    for places in slices(range(len(hashes))):
        part = [hashes[place] for place in places]
        for number, state, used_s in pool.look(partial(_states, chain.namespace, part)):
            _add(found, chain.start + places[0] + number, state, used_s)
    return found


def _states(
    namespace: bytes, hashes: Sequence[bytes], table: SlotTable, leases: LeaseTable
) -> list[tuple[int, BlockState, float | None]]:
    """Return (place, state, time of the last use) of the blocks that are here."""
    space, columns, eviction = table.index.space_of(namespace), table.columns, table.eviction
    places, slots = list[int](), list[int]()
    for place, own in enumerate(hashes):
        if (slot := space.ready.get(own, space.writing.get(own, -1))) >= 0:
            places.append(place)
            slots.append(slot)
    if not slots:
        return []
    at = np.array(slots, np.intp)
    priorities, until_s = eviction.terms_of(at)
    used_s = eviction.policy.history(at)[1]
    now_s = leases.now_s()
    found = []
    for number, (place, slot) in enumerate(zip(places, slots, strict=True)):
        # A priority whose time has ended is noted as such only when the slot comes up.
        is_over = until_s[number] <= now_s
        state = BlockState(
            is_written=hashes[place] in space.ready,
            num_readers=columns.ref_count[slot],
            num_hard=leases.hard_pins.get(slot, 0),
            num_soft=eviction.soft_pins.get(slot, 0),
            priority=(Priority.NORMAL if is_over else Priority(int(priorities[number]))).name.lower(),
        )
        last_s = float(used_s[number])
        found.append((place, state, last_s if last_s > -np.inf else None))
    return found


def _add(runs: list[BlockRun], number: int, state: BlockState, used_s: float | None) -> None:
    last = runs[-1] if runs else None
    if last is None or last.start + last.num_blocks != number or last.state != state:
        runs.append(BlockRun(start=number, num_blocks=1, state=state, last_use_s=used_s, first_use_s=used_s))
        return
    last.num_blocks += 1
    if used_s is not None:
        last.last_use_s = used_s if last.last_use_s is None else max(last.last_use_s, used_s)
        last.first_use_s = used_s if last.first_use_s is None else min(last.first_use_s, used_s)


def path_to(pool: Pool, block_hash: bytes) -> BlockHashes | None:
    """Return the run of a chain that ends in a block, from the root on, or from the first block that is here.

    None if no namespace has such a block, also none that is being written.
    """
    for names in slices(names_of(pool)):
        if (found := pool.look(partial(_find, names, block_hash))) is not None:
            return _path(pool, *found)
    return None


def _find(names: Sequence[bytes], own: bytes, table: SlotTable, leases: LeaseTable) -> tuple[bytes, bytes, int] | None:
    for name in names:
        space = table.index.space_of(name)
        if (slot := space.ready.get(own, space.writing.get(own, -1))) >= 0:
            return name, own, table.index.depth[slot]
    return None


def _path(pool: Pool, namespace: bytes, block_hash: bytes, depth: int) -> BlockHashes:
    found, above, has_more = [block_hash], b"", True
    while has_more and len(found) < _MOST_BLOCKS:
        more, above = pool.look(partial(_up, namespace, found[-1]))
        found += more
        has_more = len(more) == AT_ONCE
    data = b"".join(reversed(found))
    if above == namespace:
        return BlockHashes(namespace, namespace, 0, data)
    # The block above is not here, or this one has gone since it was found.
    return BlockHashes(namespace, above or bytes(len(namespace)), max(1, depth + 1 - len(found)), data)


def _up(namespace: bytes, own: bytes, table: SlotTable, leases: LeaseTable) -> tuple[list[bytes], bytes]:
    """Return blocks above one that are here, the nearest first, and the hash above the last of these; b"" if none."""
    index, space, found = table.index, table.index.space_of(namespace), list[bytes]()
    slot = space.ready.get(own, space.writing.get(own, -1))
    if slot < 0:
        return found, b""
    while True:
        above = index.parent[slot]
        slot = space.ready.get(above, space.writing.get(above, -1))
        if slot < 0 or len(found) == AT_ONCE:
            return found, above
        found.append(above)

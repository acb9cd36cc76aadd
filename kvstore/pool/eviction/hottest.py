"""Find what was touched last in a pool: its chains, and its blocks. No locking here: the pool holds its lock."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvstore.blocks.chain import BlockHashes
from kvstore.pool.block_index import BlockIndex

#: So many more blocks of each tenant are looked at than it may have, beside as many again.
_SPARE = 1024

Slots = npt.NDArray[np.int64]


def by_touch(
    index: BlockIndex,
    stamp: array[int],
    most: int,
    is_wanted: Callable[[bytes], bool],
    shares: list[int],
    owners: bytes,
) -> list[tuple[bytes, list[int]]]:
    """Return the blocks that were touched last, the last first, and before each what it builds on; see `Pool.by_touch`.

    `stamp` is the last touch of each slot, as `EvictionPolicy.stamp`. `owners` has the number of each slot's tenant,
    `shares` how many blocks of each tenant may be returned.
    """
    ready = [slot for space in index.spaces.values() for slot in space.ready.values()]
    slots = np.array([slot for slot in ready if is_wanted(index.block_hash[slot])], np.int64)
    stamps, numbers = np.frombuffer(stamp, np.int64), np.frombuffer(owners, np.uint8)
    # With several tenants some may be refused, and older ones come in their place. Few are looked at: a lock is held.
    spare = (lambda count: count + _SPARE) if len(shares) > 1 else lambda count: 0
    for number, share in enumerate(shares):
        is_own = numbers[slots] == number
        slots = np.concatenate([slots[~is_own], _last(slots[is_own], stamps, share + spare(share))])
    slots = _last(slots, stamps, most + spare(most))
    keys = [(-stamp[slot], index.space[slot].namespace, index.depth[slot], slot) for slot in slots.tolist()]
    found, left = list[tuple[bytes, list[int]]](), list(shares)
    #: `refused` has blocks for which a tenant has no room, and what builds on them.
    chosen, refused = set[int](), set[int]()
    for (_, namespace), group in groupby(sorted(keys), key=lambda key: key[:2]):
        together = list[int]()
        for *_, slot in group:
            path, at = list[int](), slot if len(chosen) < most else None
            while at is not None and at not in chosen and at not in refused:
                path.append(at)
                at = index.spaces[namespace].ready.get(index.parent[at])
            num_taken = 0
            for below in reversed(path if at not in refused else []):
                if len(chosen) >= most or left[owners[below]] <= 0:
                    break
                left[owners[below]] -= 1
                num_taken += 1
                chosen.add(below)
                together.append(below)
            refused.update(path[: len(path) - num_taken])
        if together:
            found.append((namespace, together))
        if len(chosen) >= most:
            break
    return found


def _last(slots: Slots, stamps: Slots, most: int) -> Slots:
    """Return those of some slots that were touched last, at most so many."""
    if most >= len(slots):
        return slots
    begin = len(slots) - max(most, 0)
    return slots[np.argpartition(stamps[slots], min(begin, len(slots) - 1))[begin:]]


def hot_chains(index: BlockIndex, stamp: array[int], max_blocks: int) -> list[BlockHashes]:
    """Return the most recently touched chains, each from its root, up to `max_blocks` blocks in all."""
    ready = (slot for space in index.spaces.values() for slot in space.ready.values())
    leaves = [slot for slot in ready if not index.num_children[slot]]
    leaves.sort(key=stamp.__getitem__, reverse=True)
    chains, seen = list[BlockHashes](), set[int]()
    for leaf in leaves:
        space, path = index.space[leaf], list[int]()
        at: int | None = leaf
        while at is not None and len(path) < max_blocks:
            path.append(at)
            at = space.ready.get(index.parent[at])  # None above a root: no block is named as its namespace.
        is_whole = bool(path) and index.parent[path[-1]] == space.namespace
        if is_whole and len(seen) + sum(at not in seen for at in path) <= max_blocks:
            seen.update(path)
            data = b"".join(index.block_hash[at] for at in reversed(path))
            chains.append(BlockHashes(space.namespace, space.namespace, 0, data))
    return chains

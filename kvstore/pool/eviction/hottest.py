"""Find what was touched last in a pool: its chains, and its blocks. No locking here: the pool holds its lock."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import groupby

import numpy as np

from kvstore.blocks.chain import BlockHashes
from kvstore.pool.block_index import BlockIndex


def by_touch(
    index: BlockIndex, stamp: array[int], most: int, is_wanted: Callable[[bytes], bool]
) -> list[tuple[bytes, list[int]]]:
    """Return the blocks that were touched last, the last first, and before each what it builds on; see `Pool.by_touch`.

    `stamp` is the last touch of each slot, as `EvictionPolicy.stamp`.
    """
    ready = [slot for space in index.spaces.values() for slot in space.ready.values()]
    slots = np.array([slot for slot in ready if is_wanted(index.block_hash[slot])], np.int64)
    if 0 < most < len(slots):
        stamps = np.frombuffer(stamp, np.int64)[slots]
        slots = slots[np.argpartition(stamps, len(slots) - most)[len(slots) - most :]]
    keys = [(-stamp[slot], index.space[slot].namespace, index.depth[slot], slot) for slot in slots.tolist()]
    found, chosen = list[tuple[bytes, list[int]]](), set[int]()
    for (_, namespace), group in groupby(sorted(keys), key=lambda key: key[:2]):
        together = list[int]()
        for *_, slot in group:
            path, at = list[int](), slot if len(chosen) < most else None
            while at is not None and at not in chosen:
                path.append(at)
                at = index.spaces[namespace].ready.get(index.parent[at])
            from_root = path[::-1][: most - len(chosen)]
            chosen.update(from_root)
            together += from_root
        if together:
            found.append((namespace, together))
        if len(chosen) >= most:
            break
    return found


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

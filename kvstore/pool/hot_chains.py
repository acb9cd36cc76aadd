"""Which chains a pool would keep longest. No locking here: the pool holds its lock."""

from __future__ import annotations

from kvstore.blocks.chain import Chain
from kvstore.pool.block_index import BlockIndex
from kvstore.pool.eviction import EvictionPolicy


def hot_chains(index: BlockIndex, eviction: EvictionPolicy, max_blocks: int) -> list[Chain]:
    """Return the most recently touched chains, each from its root, up to `max_blocks` blocks in all."""
    ready = [slot for space in index.spaces.values() for slot in space.ready.values()]
    leaves = [slot for slot in ready if not index.num_children[slot]]
    leaves.sort(key=eviction.last_touch, reverse=True)
    chains: list[Chain] = []
    seen: set[int] = set()
    for leaf in leaves:
        space, path = index.space[leaf], list[int]()
        assert space is not None, "ready, and of no namespace"
        at: int | None = leaf
        while at is not None:
            path.append(at)
            at = space.ready.get(index.parent[at])
        root, namespace = path[-1], space.namespace
        if index.parent[root] != namespace or len(seen.union(path)) > max_blocks:
            continue
        seen.update(path)
        chains.append(Chain(namespace, namespace, 0, b"".join(index.block_hash[at] for at in reversed(path))))
    return chains

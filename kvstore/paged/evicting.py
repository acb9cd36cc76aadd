"""Take pages back from a prefix tree: the least recently used first, and a leaf before its root."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.errors import PoolExhausted
from kvstore.paged.node import nodes_below
from kvstore.paged.tree import PrefixTree


def evict(tree: PrefixTree, group: int, num_pages: int) -> int:
    """Free pages of a group that no request needs. Returns how many became free, at most a few more than asked.

    Pages of other groups may become free with them. Fewer are freed if requests need the rest.
    """
    allocator = tree.allocators[group]
    before = allocator.num_free
    step = _evict_window if tree.groups[group].window_tokens is not None else _evict_leaf
    while (wanted := num_pages - (allocator.num_free - before)) > 0 and step(tree, group, wanted):
        pass
    return allocator.num_free - before


def make_room(tree: PrefixTree, num_pages: Sequence[int]) -> None:
    """Let each group have so many free pages; what is missing is evicted.

    Raises:
        PoolExhausted: requests need too many pages of a group; nothing was evicted.
    """
    missing = [wanted - allocator.num_free for wanted, allocator in zip(num_pages, tree.allocators, strict=True)]
    if max(missing) <= 0:
        return
    for group, wanted in enumerate(num_pages):
        evictable = tree.num_cached[group] - tree.num_locked[group]
        if missing[group] > evictable:
            raise PoolExhausted(
                f"wanted {wanted} pages of group {group}, {wanted - missing[group]} are free and {evictable} can be "
                f"evicted of {tree.allocators[group].num_pages}; release requests or take a larger cache"
            )
    for group, wanted in enumerate(num_pages):
        evict(tree, group, wanted - tree.allocators[group].num_free)
        if wanted > tree.allocators[group].num_free:  # Somebody else has references to pages of the tree.
            raise PoolExhausted(f"wanted {wanted} pages of group {group}, evicted ones are still shared; free them")


def clear(tree: PrefixTree, namespace: bytes | None) -> int:
    """Hide all pages of a namespace, or of all, from new requests. Returns how many became free, of all groups.

    Pages that requests need stay until the last of these releases them.
    """
    before = sum(allocator.num_free for allocator in tree.allocators)
    tree.clear(namespace)
    nodes = [node for root in tree.roots.values() for node in nodes_below(root) if tree.is_cleared(node)]
    for node in nodes:
        for group in tree.windows:
            tree.give_up(node, group, np.flatnonzero(tree.is_loose(node, group)))
        tree.settle(node)
    return sum(allocator.num_free for allocator in tree.allocators) - before


def _evict_leaf(tree: PrefixTree, group: int, wanted: int) -> bool:
    node = tree.leaves.pop()
    if node is None:
        return False
    # The end of a leaf that lacks window pages is the only place where a match can end, so it goes whole.
    if node.num_pages > wanted and all(int(node.pages[each].min()) >= 0 for each in tree.windows):
        tree.trim_leaf(node, wanted)
        tree.leaves.push(node)
    else:
        tree.settle(tree.remove_leaf(node))
    return True


def _evict_window(tree: PrefixTree, group: int, wanted: int) -> bool:
    node = tree.window_order[group].pop()
    if node is None:
        return False
    # From the front: a match at the end of the edge needs the last pages.
    loose = np.flatnonzero(tree.is_loose(node, group))
    gone = loose[:wanted]
    tree.give_up(node, group, gone)
    if len(loose) > len(gone):
        tree.window_order[group].push(node)
    elif tree.is_dead(node):
        tree.settle(node)
    return True

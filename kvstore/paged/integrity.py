"""Check a prefix tree, its locks and its pages against each other. For tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from kvstore.paged.node import Node, nodes_below
from kvstore.paged.request import PagedRequest
from kvstore.paged.tree import PrefixTree


def all_nodes(tree: PrefixTree) -> Iterator[Node]:
    """Yield every node that can be reached from a root, roots not included."""
    for root in tree.roots.values():
        yield from nodes_below(root)


def buffer_bytes(node: Node) -> tuple[int, int]:
    """Return the bytes that a node keeps in memory for its tokens, pages and locks, and those that it needs."""
    parts = [*node.pages, *(locks for locks in node.window_locks if locks is not None)]
    whole = node.data.obj if isinstance(node.data, memoryview) else node.data
    assert isinstance(whole, bytes | bytearray)
    kept = sum(part.base.nbytes if isinstance(part.base, np.ndarray) else part.nbytes for part in parts)
    return len(whole) + kept, len(node.data) + sum(part.nbytes for part in parts)


def check_tree(tree: PrefixTree, requests: Iterable[PagedRequest]) -> None:
    """Raise AssertionError if anything does not add up."""
    nodes = list(all_nodes(tree))
    assert len(nodes) == tree.num_nodes, (len(nodes), tree.num_nodes)
    assert all(root.children for root in tree.roots.values()), "an empty root stays"
    for node in nodes:
        _check_node(tree, node)
    leaves = tree.leaves.listed()
    assert all(id(node) in leaves for node in nodes if not node.children and node.lock_count == 0), "a leaf stays"
    for group in tree.windows:
        listed = tree.window_order[group].listed()
        assert all(id(node) in listed for node in nodes if tree.has_loose(group, node)), "a window stays"
    for group, allocator in enumerate(tree.allocators):
        allocator.check_integrity()
        _check_pages(tree, group, nodes, requests)


def _check_node(tree: PrefixTree, node: Node) -> None:
    parent, num_pages = node.parent, node.num_pages
    assert parent is not None
    assert num_pages >= 1, "an edge without pages"
    assert len(node.data) == num_pages * tree.page_bytes, "an edge has other tokens than pages"
    kept, needed = buffer_bytes(node)
    assert kept <= 2 * needed, "a node keeps a much larger buffer"
    assert parent.children[node.first_key(tree.page_size)] is node, "a node has another key"
    assert node.end_page == parent.end_page + num_pages, "a node lies elsewhere"
    assert node.lock_count >= max((child.lock_count for child in node.children.values()), default=0)
    assert node.order == (sorted(node.children) if tree.page_size > 1 else []), "the order of children is another"
    for group in tree.full:
        assert int(node.pages[group].min()) >= 0, "a page is missing"
        assert node.window_locks[group] is None
    for group in tree.windows:
        locks = node.window_locks[group]
        assert locks is not None
        assert len(locks) == len(node.pages[group]) == num_pages
        assert int(locks.min()) >= 0
        assert not locks[node.pages[group] < 0].any(), "a missing page is locked"
    if node.room is not None:
        assert isinstance(node.data, memoryview)
        assert node.data.obj is node.room.data, "an edge grows elsewhere"
        assert all(pages.base is room for pages, room in zip(node.pages, node.room.pages, strict=True))
        assert all(int(node.pages[group].min()) >= 0 for group in tree.windows), "an edge with gaps can grow"
    if not node.children and node.lock_count == 0:
        assert not tree.is_dead(node), "a leaf where no match can end"
        assert not tree.is_cleared(node), "pages that no request needs outlast a clear"


def _check_pages(tree: PrefixTree, group: int, nodes: list[Node], requests: Iterable[PagedRequest]) -> None:
    held = [node.pages[group][node.pages[group] >= 0] for node in nodes]
    pages = np.concatenate([*held, np.empty(0, np.int32)])
    assert len(np.unique(pages)) == len(pages), "a page is in the tree twice"
    assert all(tree.allocators[group].num_refs(int(page)) >= 1 for page in pages), "the tree has a free page"
    assert len(pages) == tree.num_cached[group], (len(pages), tree.num_cached)
    if tree.groups[group].window_tokens is None:
        num_locked = sum(node.num_pages for node in nodes if node.lock_count)
    else:
        num_locked = sum(int((locks > 0).sum()) for node in nodes if (locks := node.window_locks[group]) is not None)
    assert num_locked == tree.num_locked[group], (num_locked, tree.num_locked)
    own = [request.private_pages(group) for request in requests]
    private = np.concatenate([*own, np.empty(0, np.int32)])
    assert len(np.unique(np.concatenate((pages, private)))) == len(pages) + len(private), "two owners of a page"
    for request in requests:
        table = request.pages(group)
        shared = set(table[table >= 0].tolist()) - set(private.tolist())
        assert shared <= set(pages.tolist()), "a request has pages that nobody keeps for it"

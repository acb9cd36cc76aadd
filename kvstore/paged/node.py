"""A node of the prefix tree: an edge of whole pages, and those who use it."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.paged.tokens import TOKEN_BYTES
from kvstore.paged.units import Pages


class RootKey(NamedTuple):
    """What tells apart the trees of one cache. `PrefixTree.key` makes it.

    Args:
        namespace: as of `PagedPrefixCache.acquire`.
        salt: as of `PagedPrefixCache.acquire`.
        num_clearings: how often the cache was cleared when this namespace was cleared last. So pages from before a
            clearing are in another tree, also those that a running request inserts later.
    """

    namespace: bytes
    salt: bytes
    num_clearings: int = 0


Locks = npt.NDArray[np.int32]
"""Requests that need each page of a window group."""


@dataclass(frozen=True, slots=True)
class EdgeRoom:
    """Buffers of an edge that grows. They begin with its contents, and no other node has a part of them.

    Args:
        data: tokens.
        pages: per group; all have equally many entries.
        window_locks: per group, None for a group without window.
    """

    data: bytearray
    pages: list[Pages]
    window_locks: list[Locks | None]


@dataclass(slots=True, eq=False)
class Node:
    """An edge of one or more whole pages, and the node at its end. The root of a tree has no edge.

    The tree owns the pages. A locked node keeps its end: a split makes a new node for the upper part, so a lock
    that names this node goes on meaning all pages up to its end.

    Args:
        key: of the tree.
        parent: None for the root.
        data: tokens of the edge.
        pages: int32 per group, one entry per page of the edge; -1 where a window group's page was given up.
        end_page: pages from the root to the end of the edge.
        window_locks: per group, int32 like its pages: requests that need each page. None for a group without window.
        last_use: count of the last call that used the node.
        lock_count: requests that need the edge.
        children: by the tokens of their first page, all of them, so two children never have one key.
        order: keys of `children`, sorted; neighbours in it have the longest common beginnings.
        room: where the edge can grow, if it did so before. None after a split or a trim, and after a page of the edge
            was given up: an edge with gaps goes whole, so it must not become longer.
    """

    key: RootKey
    parent: Node | None
    data: bytes | memoryview
    pages: list[Pages]
    end_page: int
    window_locks: list[Locks | None]
    last_use: int
    lock_count: int
    children: dict[bytes, Node]
    order: list[bytes]
    room: EdgeRoom | None = None

    @property
    def num_pages(self) -> int:
        """Return the pages of the edge."""
        return len(self.pages[0])

    @property
    def start_page(self) -> int:
        """Return the pages from the root to the begin of the edge."""
        return self.end_page - len(self.pages[0])

    def first_key(self, page_size: int) -> bytes:
        """Return the tokens of the first page."""
        return bytes(self.data[: page_size * TOKEN_BYTES])

    def grow(self, data: bytes, pages: list[Pages], window_locks: list[Locks | None]) -> None:
        """Copy more pages to the end of the edge. Its room is doubled when it is full, so this takes amortised O(1)."""
        num_old, num_new, num_bytes = self.num_pages, self.num_pages + len(pages[0]), len(self.data)
        if self.room is None or num_new > len(self.room.pages[0]):
            self.room = self._larger_room(max(num_new, 2 * num_old))
        room = self.room
        room.data[num_bytes : num_bytes + len(data)] = data
        for whole, part in zip([*room.pages, *room.window_locks], [*pages, *window_locks], strict=True):
            if whole is not None and part is not None:
                whole[num_old:num_new] = part
        self.data = memoryview(room.data)[: num_bytes + len(data)]
        self.pages = [whole[:num_new] for whole in room.pages]
        self.window_locks = [None if whole is None else whole[:num_new] for whole in room.window_locks]
        self.end_page += num_new - num_old

    def shrink(self) -> None:
        """Copy what is a view of less than half of a buffer, so that it does not keep all of it in memory."""
        self.room = None
        whole = self.data.obj if isinstance(self.data, memoryview) else self.data
        if isinstance(whole, bytes | bytearray) and 2 * len(self.data) < len(whole):
            self.data = bytes(self.data)
        self.pages = [_shrunk(pages) for pages in self.pages]
        self.window_locks = [None if locks is None else _shrunk(locks) for locks in self.window_locks]

    def clear(self) -> None:
        """Let go of the contents of a removed node, which old entries of an order may still name."""
        self.data, self.room = b"", None
        self.pages = [pages[:0].copy() for pages in self.pages]
        self.window_locks = [None if locks is None else locks[:0].copy() for locks in self.window_locks]

    def _larger_room(self, num_pages: int) -> EdgeRoom:
        """Return buffers of so many pages that begin with the contents of the edge."""
        data = bytearray(len(self.data) // self.num_pages * num_pages)
        data[: len(self.data)] = self.data
        return EdgeRoom(
            data,
            [_with_room(pages, num_pages) for pages in self.pages],
            [None if locks is None else _with_room(locks, num_pages) for locks in self.window_locks],
        )

    def add_child(self, key: bytes, child: Node, *, sorts: bool) -> None:
        """Link a child; `sorts` is False where no page can match in part."""
        self.children[key] = child
        if sorts:
            bisect.insort(self.order, key)

    def remove_child(self, key: bytes, *, sorts: bool) -> None:
        """Unlink a child."""
        del self.children[key]
        if sorts:
            del self.order[bisect.bisect_left(self.order, key)]


def make_root(key: RootKey, num_groups: int) -> Node:
    """Return the root of a new tree."""
    empty = [np.empty(0, np.int32) for _ in range(num_groups)]
    return Node(key, None, b"", empty, 0, [None] * num_groups, 0, 0, {}, [])


def nodes_below(root: Node) -> Iterator[Node]:
    """Yield every node of a tree without its root, each one before its children."""
    todo = list(root.children.values())
    while todo:
        node = todo.pop()
        todo.extend(node.children.values())
        yield node


def split(node: Node, num_pages: int, page_size: int) -> Node:
    """Cut an edge after its first pages. Returns the new node of the upper part; `node` keeps the lower part."""
    assert node.parent is not None
    assert 0 < num_pages < node.num_pages
    parent, page_bytes, sorts = node.parent, page_size * TOKEN_BYTES, page_size > 1
    whole = memoryview(node.data)
    key = node.first_key(page_size)
    upper = Node(
        key=node.key,
        parent=parent,
        data=whole[: num_pages * page_bytes],
        pages=[pages[:num_pages] for pages in node.pages],
        end_page=node.start_page + num_pages,
        window_locks=[None if locks is None else locks[:num_pages] for locks in node.window_locks],
        last_use=node.last_use,
        lock_count=node.lock_count,
        children={},
        order=[],
    )
    node.data = whole[num_pages * page_bytes :]
    node.pages = [pages[num_pages:] for pages in node.pages]
    node.window_locks = [None if locks is None else locks[num_pages:] for locks in node.window_locks]
    node.parent = upper
    parent.children[key] = upper  # The same key: the order of the parent stays.
    upper.add_child(node.first_key(page_size), node, sorts=sorts)
    upper.shrink()
    node.shrink()
    return upper


def _with_room(array: npt.NDArray[np.int32], num_pages: int) -> npt.NDArray[np.int32]:
    whole = np.empty(num_pages, np.int32)
    whole[: len(array)] = array
    return whole


def _shrunk(array: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    whole = array.base
    return array.copy() if isinstance(whole, np.ndarray) and 2 * len(array) < len(whole) else array

"""The prefix trees of a cache: find, insert, lock and unlock along a path.

Invariants: a locked node's ancestors are locked. So an unlocked node has no locked descendant, and all its pages can
be evicted, leaf before root. `num_cached` and `num_locked` count pages per group, and a locked page is cached, too.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.paged.allocator import PageAllocator
from kvstore.paged.groups import PageGroup
from kvstore.paged.node import Node, RootKey, make_root, split
from kvstore.paged.order import UseOrder
from kvstore.paged.sequence import SequencePages
from kvstore.paged.tokens import TOKEN_BYTES, num_common_tokens, page_key
from kvstore.paged.units import Pages


@dataclass(frozen=True, slots=True)
class Found:
    """How far whole pages of a prompt are in a tree.

    Args:
        node: the last one whose edge is there whole; the root if none is.
        inside: a child of it whose edge begins like the rest of the prompt, or None.
        num_inside: pages of that edge that are equal, at least 1 with `inside`.
    """

    node: Node
    inside: Node | None
    num_inside: int

    @property
    def num_pages(self) -> int:
        """Return the pages from the root on."""
        return self.node.end_page + self.num_inside

    @property
    def deepest(self) -> Node:
        """Return the node that has the last page."""
        return self.node if self.inside is None else self.inside


class PrefixTree:
    """Hold the nodes of all namespaces, and their counts. Calls must come from one thread at a time.

    Args:
        groups: groups of layers.
        allocators: one per group; the tree has one reference to each of its pages.
        page_size: tokens of a page.
    """

    def __init__(self, groups: tuple[PageGroup, ...], allocators: tuple[PageAllocator, ...], page_size: int) -> None:
        self.groups, self.allocators, self.page_size = groups, allocators, page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.full = [index for index, group in enumerate(groups) if group.window_tokens is None]
        self.windows = [index for index, group in enumerate(groups) if group.window_tokens is not None]
        self.roots: dict[RootKey, Node] = {}
        self.num_nodes = 0
        self.num_cached = [0] * len(groups)
        self.num_locked = [0] * len(groups)
        self.leaves = UseOrder(lambda node: node.parent is not None and not node.children and node.lock_count == 0)
        self.window_order = {group: UseOrder(partial(self.has_loose, group)) for group in self.windows}
        self._clock = 0
        self._num_clearings = self._all_cleared = 0  # Calls of `clear`, and the last one of them that was for all.
        self._cleared: dict[bytes, int] = {}  # The last one for each namespace, of those after `_all_cleared`.

    def now(self) -> int:
        """Return the number of this call, for last uses."""
        self._clock += 1
        return self._clock

    def key(self, namespace: bytes, salt: bytes) -> RootKey:
        """Return the key of the tree that new requests use."""
        return RootKey(namespace, salt, self._cleared.get(namespace, self._all_cleared))

    def clear(self, namespace: bytes | None) -> None:
        """Let new requests use other trees of a namespace, or of all, than those that are there."""
        self._num_clearings += 1
        if namespace is not None:
            self._cleared[namespace] = self._num_clearings
        else:
            self._all_cleared = self._num_clearings
            self._cleared.clear()

    def is_cleared(self, node: Node) -> bool:
        """Return whether no new request uses the tree of this node."""
        return node.key != self.key(node.key.namespace, node.key.salt)

    def root(self, key: RootKey) -> Node:
        """Return the root of a tree, a new one if need be."""
        found = self.roots.get(key)
        if found is None:
            found = self.roots[key] = make_root(key, len(self.groups))
        return found

    def find(self, node: Node, data: bytes, num_tokens: int) -> Found:
        """Follow `data` down from the end of `node`, whole pages only, through at most `num_tokens` tokens of it."""
        page_bytes = self.page_bytes
        at = node.end_page * page_bytes
        end = num_tokens * TOKEN_BYTES // page_bytes * page_bytes
        while at < end:
            child = node.children.get(page_key(data, at, page_bytes))
            if child is None:
                break
            after = at + len(child.data)
            if after <= end and data.startswith(child.data, at):
                node, at = child, after
                continue
            most = min(len(child.data), end - at) // TOKEN_BYTES
            return Found(node, child, num_common_tokens(child.data, data, at, most) // self.page_size)
        return Found(node, None, 0)

    def path(self, found: Found) -> list[tuple[Node, int]]:
        """Return (node, pages of its edge that count), from the root down, without the root."""
        steps = [] if found.inside is None else [(found.inside, found.num_inside)]
        node = found.node
        while node.parent is not None:
            steps.append((node, node.num_pages))
            node = node.parent
        steps.reverse()
        return steps

    def pages(self, found: Found, group: int) -> Pages:
        """Return the pages of a group from the root on; -1 for those that a window group gave up."""
        parts = [node.pages[group][:count] for node, count in self.path(found)]
        return np.concatenate(parts) if len(parts) != 1 and parts else parts[0] if parts else np.empty(0, np.int32)

    def cut(self, found: Found) -> Node:
        """Return the node that ends where `found` does, for the caller to lock; an edge is split for it if need be."""
        if found.inside is None:
            return found.node
        upper = split(found.inside, found.num_inside, self.page_size)
        self.num_nodes += 1
        for group in self.windows:
            self.window_order[group].push(upper)
        lower = found.inside
        if self.is_dead(lower) and not lower.children and lower.lock_count == 0:
            self.remove_leaf(lower)
        return upper

    def shorten(self, found: Found, num_pages: int) -> Found:
        """Return the first pages of `found`."""
        node, inside, num_inside = found.node, found.inside, found.num_inside
        while node.end_page > num_pages:
            assert node.parent is not None
            inside, node = node, node.parent
        num_inside = num_pages - node.end_page
        return Found(node, inside if num_inside else None, num_inside)

    def lock(self, node: Node, stop: Node | None = None) -> None:
        """Count one more lock on the node and all above it, up to but without `stop`."""
        now = self.now()
        while node is not stop and node.parent is not None:
            if node.lock_count == 0:
                for group in self.full:
                    self.num_locked[group] += node.num_pages
            node.lock_count += 1
            node.last_use = now
            for group in self.windows:
                self.window_order[group].push(node)
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Count one lock less on the node and all above it; this is a use of them."""
        now = self.now()
        deepest = node
        while node.parent is not None:
            assert node.lock_count > 0
            node.lock_count -= 1
            node.last_use = now
            if node.lock_count == 0:
                for group in self.full:
                    self.num_locked[group] -= node.num_pages
            for group in self.windows:
                self.window_order[group].push(node)
            node = node.parent
        self.settle(deepest)

    def lock_window(self, node: Node, group: int, start: int, held: npt.NDArray[np.bool_], change: int) -> None:
        """Change the locks of those pages from `start` on that `held` marks, on the path that ends with `node`."""
        stop = start + len(held)
        while node.parent is not None and node.end_page > start:
            first, last = max(start, node.start_page), min(stop, node.end_page)
            if first < last:
                locks = node.window_locks[group]
                assert locks is not None
                part = locks[first - node.start_page : last - node.start_page]
                marked = held[first - start : last - start]
                before = int((part[marked] > 0).sum())
                part[marked] += change
                self.num_locked[group] += int((part[marked] > 0).sum()) - before
                if change < 0:
                    self.window_order[group].push(node)
            node = node.parent

    def append(self, node: Node, data: bytes, pages: list[Pages]) -> Node:
        """Put pages that the caller hands over behind a node that it locks, and lock them for it.

        A leaf that only the caller needs grows: a decode that inserts page by page makes one edge, and not one edge for
        each page. Its last use stays that of the edge, so that pages that a window has passed go early.

        Returns:
            The node that ends with them; the caller's lock on `node` counts for it, too.
        """
        windowed = set(self.windows)
        locks = [(held >= 0).astype(np.int32) if group in windowed else None for group, held in enumerate(pages)]
        for group in range(len(pages)):
            num_present = len(pages[group]) if group not in windowed else int((pages[group] >= 0).sum())
            self.num_cached[group] += num_present
            self.num_locked[group] += num_present
        if self._may_grow(node, pages):
            node.grow(data, pages, locks)
            return node
        child = Node(
            key=node.key, parent=node, data=data, pages=pages, end_page=node.end_page + len(pages[0]),
            window_locks=locks, last_use=self.now(), lock_count=1, children={}, order=[],
        )  # fmt: skip
        node.add_child(page_key(data, 0, self.page_bytes), child, sorts=self.page_size > 1)
        self.num_nodes += 1
        return child

    def _may_grow(self, node: Node, pages: list[Pages]) -> bool:
        """Return whether the caller, which locks the node, may append such pages to its edge.

        A second lock is of a request that needs the edge to end where it ends. An edge with gaps goes whole, and one
        without a page of a window is removed early, so neither is joined with what can go page by page.
        """
        if node.parent is None or node.children or node.lock_count != 1:
            return False
        if any(int(pages[group].min()) < 0 for group in self.windows):
            return False
        return node.room is not None or all(int(node.pages[group].min()) >= 0 for group in self.windows)

    def fill_gaps(self, node: Node, above: Node, sequences: Sequence[SequencePages]) -> None:
        """Let nodes below `above`, down to `node`, take pages of sequences where window groups gave up theirs."""
        for group in self.windows:
            at = node
            while at is not above:
                assert at.parent is not None
                self._fill_window(at, group, sequences[group])
                at = at.parent

    def _fill_window(self, node: Node, group: int, sequence: SequencePages) -> None:
        start, stop = node.start_page, node.end_page
        pages, locks = node.pages[group], node.window_locks[group]
        assert locks is not None
        gaps = (pages < 0) & sequence.is_own(start, stop)
        num_gaps = int(gaps.sum())
        if num_gaps:
            pages[gaps] = sequence.hand_over(start, stop, gaps)[gaps]
            locks[gaps] = 1
            self.num_cached[group] += num_gaps
            self.num_locked[group] += num_gaps

    def best_partial(self, found: Found, data: bytes, num_tokens: int) -> tuple[Node, int, int] | None:
        """Return (node, page of its edge, tokens) of the page that shares most tokens with what comes after `found`.

        At most `num_tokens` tokens of `data` count, and one page of them (all of it, if it came after the request).
        None if no token is shared.
        """
        at = found.num_pages * self.page_bytes
        most = min(num_tokens - found.num_pages * self.page_size, self.page_size)
        if most <= 0 or self.page_size == 1:
            return None
        if found.inside is not None:
            edge = memoryview(found.inside.data)[found.num_inside * self.page_bytes :]
            shared = num_common_tokens(edge, data, at, most)
            return (found.inside, found.num_inside, shared) if shared else None
        order = found.node.order
        place = bisect.bisect_left(order, page_key(data, at, self.page_bytes))
        best: tuple[Node, int, int] | None = None
        for key in order[max(0, place - 1) : place + 1]:
            shared = num_common_tokens(key, data, at, most)
            if shared and (best is None or shared > best[2]):
                best = (found.node.children[key], 0, shared)
        return best

    def give_up(self, node: Node, group: int, gone: npt.NDArray[np.intp]) -> None:
        """Give back pages of a window group that no request needs, and leave gaps in the edge."""
        self.allocators[group].give_back(node.pages[group][gone])
        node.pages[group][gone] = -1
        node.room = None
        self.num_cached[group] -= len(gone)

    def is_loose(self, node: Node, group: int) -> npt.NDArray[np.bool_]:
        """Return which pages of a window group can be given up."""
        locks = node.window_locks[group]
        if locks is None or node.parent is None:
            return np.zeros(0, np.bool_)
        loose: npt.NDArray[np.bool_] = (locks == 0) & (node.pages[group] >= 0)
        return loose

    def has_loose(self, group: int, node: Node) -> bool:
        """Return whether a window group can give up a page of this edge."""
        return bool(self.is_loose(node, group).any())

    def is_dead(self, node: Node) -> bool:
        """Return whether no match can end in this edge: its tree was cleared, or a window group has no page of it."""
        return self.is_cleared(node) or any(int(node.pages[group].max()) < 0 for group in self.windows)

    def settle(self, node: Node) -> None:
        """Give a node without children and locks its place among the leaves; a dead one goes, and so on upwards."""
        while node.parent is not None and not node.children and node.lock_count == 0:
            if not self.is_dead(node):
                self.leaves.push(node)
                return
            node = self.remove_leaf(node)

    def remove_leaf(self, node: Node) -> Node:
        """Remove an unlocked node without children, give back its pages, and return its parent."""
        parent = node.parent
        assert parent is not None
        assert not node.children
        assert node.lock_count == 0
        parent.remove_child(node.first_key(self.page_size), sorts=self.page_size > 1)
        node.parent = None
        self.num_nodes -= 1
        for group, pages in enumerate(node.pages):
            present = pages[pages >= 0] if node.window_locks[group] is not None else pages
            self.num_cached[group] -= len(present)
            self.allocators[group].give_back(present)
        node.clear()
        if parent.parent is None and not parent.children:
            del self.roots[parent.key]
        return parent

    def trim_leaf(self, node: Node, num_pages: int) -> None:
        """Give back the last pages of an unlocked leaf that has all its pages, but not all of them."""
        kept = node.num_pages - num_pages
        for group, pages in enumerate(node.pages):
            self.num_cached[group] -= num_pages
            self.allocators[group].give_back(pages[kept:])
        node.pages = [pages[:kept] for pages in node.pages]
        node.window_locks = [None if locks is None else locks[:kept] for locks in node.window_locks]
        node.data = memoryview(node.data)[: kept * self.page_bytes]
        node.end_page -= num_pages
        node.shrink()

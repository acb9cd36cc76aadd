"""Nodes in the order of their last use; the oldest first."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvstore.paged.node import Node

_SLACK = 1024


class UseOrder:
    """A heap of nodes that may be evicted. Entries of nodes that were used again are skipped, and thrown away later.

    Args:
        may_go: whether a node may be evicted now.
    """

    def __init__(self, may_go: Callable[[Node], bool]) -> None:
        self._may_go = may_go
        self._heap: list[tuple[int, int, Node]] = []
        self._num_pushed = 0
        self._most = _SLACK

    def push(self, node: Node) -> None:
        """Note a node that may be evicted from now on, as of its last use."""
        self._num_pushed += 1
        heapq.heappush(self._heap, (node.last_use, self._num_pushed, node))
        if len(self._heap) > self._most:
            self._compact()

    def pop(self) -> Node | None:
        """Remove and return the node that was not used for longest; None if no node may go."""
        while self._heap:
            last_use, _, node = heapq.heappop(self._heap)
            if node.last_use == last_use and self._may_go(node):
                return node
        return None

    def listed(self) -> set[int]:
        """Return the `id` of every node that has an entry as of its last use. For tests."""
        return {id(node) for last_use, _, node in self._heap if node.last_use == last_use}

    def _compact(self) -> None:
        newest = {
            id(node): (last_use, number, node)
            for last_use, number, node in self._heap
            if self._is_valid(last_use, node)
        }
        self._heap = list(newest.values())
        heapq.heapify(self._heap)
        self._most = 2 * len(self._heap) + _SLACK

    def _is_valid(self, last_use: int, node: Node) -> bool:
        return node.last_use == last_use and self._may_go(node)

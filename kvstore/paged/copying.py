"""Reuse of a page that begins like a prompt: the source is locked while the caller copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.paged.node import Node
from kvstore.paged.tree import PrefixTree
from kvstore.paged.units import Pages


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """A copy that the caller makes: the first tokens of one page into another of the same group."""

    group: int
    source_page: int
    target_page: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CopySource:
    """A page of the tree, and how many of its first tokens are wanted.

    Args:
        node: has the page.
        index: of the page in the node.
        num_tokens: at least one.
    """

    node: Node
    index: int
    num_tokens: int

    @property
    def pages(self) -> list[int]:
        """Return the page of each group."""
        return [int(pages[self.index]) for pages in self.node.pages]


@dataclass(slots=True)
class PendingCopy:
    """A prepared copy.

    Args:
        source: locked until the copy ends.
        page: place of the page in the request.
        targets: for each group the page that is written; the request owns it.
    """

    source: CopySource
    page: int
    targets: list[Pages]


def find_source(tree: PrefixTree, start: Node, data: bytes, num_tokens: int, limit_tokens: int) -> CopySource | None:
    """Return the page that shares most tokens with those of a prompt from `num_tokens` on; None if none does."""
    best = tree.best_partial(tree.find(start, data, num_tokens), data, limit_tokens)
    if best is None:
        return None
    source = CopySource(*best)
    return source if min(source.pages) >= 0 else None


def lock_source(tree: PrefixTree, source: CopySource, page: int, change: int) -> None:
    """Keep the source in the tree (1), or let it go again (-1)."""
    one = np.ones(1, np.bool_)
    for group in tree.windows:
        tree.lock_window(source.node, group, page, one, change)
    if change > 0:
        tree.lock(source.node)
    else:
        tree.unlock(source.node)

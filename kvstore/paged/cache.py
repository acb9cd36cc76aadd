"""A prefix cache of pages for one engine: which pages hold which tokens, for all its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.errors import ConfigError, InvalidRequest
from kvstore.paged.allocator import PageAllocator
from kvstore.paged.evicting import clear, evict
from kvstore.paged.groups import PageGroup, longest_usable
from kvstore.paged.integrity import check_tree
from kvstore.paged.node import RootKey, make_root
from kvstore.paged.request import PagedRequest
from kvstore.paged.sequence import SequencePages
from kvstore.paged.tokens import EncodedTokens, TokenIds, encode_tokens
from kvstore.paged.tree import Found, PrefixTree
from kvstore.paged.units import Pages, check_count, check_page_size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixMatch:
    """How much of a prompt a cache has now. Nothing is locked: it may be gone at the next call.

    Args:
        num_tokens: tokens in whole pages.
        num_partial_tokens: further tokens that a page shares, for `PagedRequest.prepare_copy`.
        pages: int32 per group, the whole pages; -1 for those before a window. New arrays.
    """

    num_tokens: int
    num_partial_tokens: int
    pages: tuple[Pages, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """Pages of one group; `num_free + num_cached + num_locked + num_private` is `num_pages`.

    Args:
        num_pages: all pages.
        num_free: free.
        num_cached: in the tree, and no request needs them: they can be evicted.
        num_locked: in the tree, for at least one request.
        num_private: of one request, whole or partial.
    """

    num_pages: int
    num_free: int
    num_cached: int
    num_locked: int
    num_private: int


class PagedPrefixCache:
    """Find, share and reuse the pages of an engine's cache by the tokens in them. No bytes are touched.

    A request acquires the longest prefix that is there, extends it token by token, inserts what it computed, and
    releases all. Pages of released requests stay until they are needed: the least recently used goes first, and a
    leaf before its root. Calls must come from one thread at a time, for example the engine's scheduler.

    Args:
        page_size: tokens of a page, 1 .. 256.
        num_pages: pages of the engine's cache, in each group that does not say otherwise.
        groups: groups of layers; the index in this list is the `group` of other calls.

    Raises:
        ConfigError: a size is out of range, or there is no group.
    """

    def __init__(self, page_size: int, num_pages: int, groups: Sequence[PageGroup] = (PageGroup(),)) -> None:
        self.page_size = check_page_size(page_size)
        self.groups = tuple(groups) if isinstance(groups, Sequence) else ()
        if not self.groups or not all(isinstance(group, PageGroup) for group in self.groups):
            raise ConfigError(f"PagedPrefixCache: wanted at least one PageGroup, got {groups!r}")
        self.allocators = tuple(
            PageAllocator(num_pages if group.num_pages is None else group.num_pages, self.page_size)
            for group in self.groups
        )
        """One per group. An engine may take pages from them that the cache does not know."""
        self._tree = PrefixTree(self.groups, self.allocators, self.page_size)
        self._requests: set[PagedRequest] = set()

    def match(
        self, token_ids: TokenIds, namespace: bytes = b"", salt: bytes = b"", *, reserve_last_token: bool = True
    ) -> PrefixMatch:
        """Return how much of a prompt is here. This changes nothing, not even the order of eviction.

        Args:
            token_ids: the prompt.
            namespace: all that decides KV besides tokens; equal tokens of two namespaces share nothing.
            salt: the same, for tenants.
            reserve_last_token: leave the last token out, because computing it gives the first new token.

        Raises:
            InvalidRequest: no token ids, or namespace or salt are not bytes.
        """
        tokens = encode_tokens(token_ids)
        limit = max(0, tokens.num_tokens - bool(reserve_last_token))
        found = self._find(self._key(namespace, salt), tokens, limit)
        best = self._tree.best_partial(found, tokens.data, limit)
        if best is not None and any(int(pages[best[1]]) < 0 for pages in best[0].pages):
            best = None
        return PrefixMatch(
            num_tokens=found.num_pages * self.page_size,
            num_partial_tokens=best[2] if best is not None else 0,
            pages=tuple(self._table(found, group).copy() for group in range(len(self.groups))),
        )

    def acquire(
        self, token_ids: TokenIds, namespace: bytes = b"", salt: bytes = b"", *, reserve_last_token: bool = True
    ) -> PagedRequest:
        """Begin a request: find the longest prefix in whole pages, and lock it, in one step.

        Args:
            token_ids: the prompt.
            namespace: as for `match`.
            salt: as for `match`.
            reserve_last_token: as for `match`.

        Returns:
            The request. It holds the pages until the caller releases it.

        Raises:
            InvalidRequest: as for `match`; nothing was changed.
        """
        tokens = encode_tokens(token_ids)
        limit = max(0, tokens.num_tokens - bool(reserve_last_token))
        key, tree = self._key(namespace, salt), self._tree
        found = self._find(key, tokens, limit)
        tables = [self._table(found, group) for group in range(len(self.groups))]
        node = tree.cut(found)
        tree.lock(node)
        for group in tree.windows:
            first = self.groups[group].first_page(node.end_page * self.page_size, self.page_size)
            # Of what it keeps, a match needs a token less than `first_page` says: that one's page may be gone.
            tree.lock_window(node, group, first, tables[group][first:] >= 0, 1)
        sequences = tuple(
            SequencePages(allocator, table) for allocator, table in zip(self.allocators, tables, strict=True)
        )
        request = PagedRequest(tree, key, tokens, limit, node, sequences, self._requests.discard)
        self._requests.add(request)
        return request

    def evict(self, num_pages: int, group: int = 0) -> int:
        """Free pages of a group that no request needs. `extend` does so by itself.

        Returns:
            How many became free: fewer if requests need the rest, more if a node had to go whole.

        Raises:
            InvalidRequest: num_pages is no count, or there is no such group; nothing was changed.
        """
        wanted = check_count("evict", "num_pages", num_pages)
        return evict(self._tree, check_count("evict", "group", group, len(self.groups) - 1), wanted)

    def clear(self, namespace: bytes | None = None) -> int:
        """Let no new request find what is here now: the weights of the model changed, for example.

        Pages that no request needs are free at once, the others when the last request that needs them is released.
        Running requests go on with the pages that they have, and find only each other's. What they insert after the
        clear was computed with pages from before, so no new request finds it either.

        Args:
            namespace: to clear, with all its salts; None for all.

        Returns:
            How many pages became free, of all groups.

        Raises:
            InvalidRequest: namespace is neither bytes nor None; nothing was changed.
        """
        if namespace is not None and not isinstance(namespace, bytes):
            raise InvalidRequest(
                f"clear: wanted namespace as bytes, or None for all, got {type(namespace).__name__}; nothing changed"
            )
        return clear(self._tree, namespace)

    @property
    def num_requests(self) -> int:
        """Return how many requests are not released."""
        return len(self._requests)

    @property
    def num_nodes(self) -> int:
        """Return the nodes of all trees, roots not counted."""
        return self._tree.num_nodes

    def stats(self) -> tuple[GroupStats, ...]:
        """Return the pages of each group by their state."""
        return tuple(
            GroupStats(
                num_pages=allocator.num_pages,
                num_free=allocator.num_free,
                num_cached=self._tree.num_cached[group] - self._tree.num_locked[group],
                num_locked=self._tree.num_locked[group],
                num_private=sum(len(request.private_pages(group)) for request in self._requests),
            )
            for group, allocator in enumerate(self.allocators)
        )

    def check_integrity(self) -> None:
        """Check every node, lock and page against each other. For tests: it reads all of them.

        Raises:
            AssertionError: they do not agree, which is an error of this package.
        """
        check_tree(self._tree, self._requests)

    def _key(self, namespace: bytes, salt: bytes) -> RootKey:
        if not isinstance(namespace, bytes) or not isinstance(salt, bytes):
            raise InvalidRequest(
                f"wanted namespace and salt as bytes, got {type(namespace).__name__} and {type(salt).__name__}; "
                "pass Namespace.digest, or encode a text"
            )
        return self._tree.key(namespace, salt)

    def _find(self, key: RootKey, tokens: EncodedTokens, limit: int) -> Found:
        """Return the longest usable prefix."""
        tree = self._tree
        root = tree.roots.get(key)
        found = tree.find(root or make_root(key, len(self.groups)), tokens.data, limit)
        if not tree.windows or not found.num_pages:
            return found
        usable = np.ones(found.num_pages + 1, np.bool_)
        for group in tree.windows:
            usable &= longest_usable(tree.pages(found, group) >= 0, self.groups[group], self.page_size)
        num_pages = int(np.flatnonzero(usable)[-1])
        return found if num_pages == found.num_pages else tree.shorten(found, num_pages)

    def _table(self, found: Found, group: int) -> Pages:
        pages = self._tree.pages(found, group)
        first = self.groups[group].first_page(len(pages) * self.page_size, self.page_size)
        if self.groups[group].window_tokens is None:
            return pages
        return np.concatenate((np.full(first, -1, np.int32), pages[first:]))

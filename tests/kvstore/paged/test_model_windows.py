"""Random calls go to a cache with a sliding window and to a naive model of it: a set of pages that a window had.

What is evicted first depends on the edges of the tree, which the model does not know. So it is exact until the first
eviction; from then on a match must end where the model once had the whole window.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, precondition
from hypothesis.stateful import rule as call

from kvstore.errors import PoolExhausted
from kvstore.paged.cache import PagedPrefixCache
from kvstore.paged.groups import PageGroup

PAGES = (24, 16)
UNITS = st.lists(st.integers(0, 1), max_size=14)


@dataclass
class Live:
    """A request: its tokens, its pages in the tree, and those of its own that have the KV of the window's layers."""

    tokens: bytes
    old: int
    num_locked: int
    own: set[int] = field(default_factory=set)


class WindowModel(RuleBasedStateMachine):
    """A page is named by the clearings before it, and all tokens up to its end. Tokens come in halves of a page."""

    requests = Bundle("requests")

    @initialize(
        page_size=st.sampled_from((1, 2, 3, 16, 256)),
        window=st.integers(0, 5),
    )
    def begin(self, page_size, window):
        self.page_size, self.unit = page_size, max(1, page_size // 2)
        self.window_tokens = (2, page_size + 1, 2 * page_size, 2 * page_size + 2, 3 * page_size + 1, 5 * page_size)[
            window
        ]
        groups = [PageGroup(num_pages=PAGES[0]), PageGroup(window_tokens=self.window_tokens, num_pages=PAGES[1])]
        self.cache = PagedPrefixCache(page_size, 1, groups)
        self.present: set[tuple[int, bytes]] = set()
        self.live: dict[object, Live] = {}
        self.num_clearings, self.num_calls, self.is_exact = 0, 0, True

    def name(self, tokens, page, old=None):
        return (self.num_clearings if old is None else old, tokens[: (page + 1) * self.page_size])

    def first_needed(self, num_tokens):
        return max(0, num_tokens // self.page_size * self.page_size - self.window_tokens + 1) // self.page_size

    def first_kept(self, num_tokens):
        """A request has what its last token sees: that token may be computed again for its logits."""
        return max(0, num_tokens // self.page_size * self.page_size - self.window_tokens) // self.page_size

    def is_usable(self, tokens, num_pages):
        needed = range(self.first_needed(num_pages * self.page_size), num_pages)
        return all(self.name(tokens, page) in self.present for page in needed)

    def check_found(self, tokens, num_tokens):
        assert num_tokens % self.page_size == 0
        num_pages, most = num_tokens // self.page_size, len(tokens) // self.page_size
        assert self.is_usable(tokens, num_pages)
        if self.is_exact:
            assert not any(self.is_usable(tokens, more) for more in range(num_pages + 1, most + 1))

    def in_tokens(self, units, rest=0):
        return b"".join(bytes([unit]) * self.unit for unit in units) + bytes(rest % self.unit)

    def num_pages(self, num_tokens):
        return -(-num_tokens // self.page_size)

    @call(target=requests, units=UNITS, rest=st.integers(0, 255), copies=st.integers(0, 4))
    def acquire(self, units, rest, copies):
        if len(self.live) >= 4:
            return multiple()
        self.num_calls += 1
        tokens = self.in_tokens(units, rest)
        request = self.cache.acquire(np.frombuffer(tokens, np.uint8), reserve_last_token=False)
        self.check_found(tokens, request.num_tokens)
        self.live[request] = Live(tokens, self.num_clearings, request.num_tokens // self.page_size)
        if copies:
            self.copy_for(request, completes=copies > 1)
        return request

    def room(self, *wanted):
        """Return whether so many pages can be had, and note whether something is evicted for them."""
        stats = self.cache.stats()
        can = all(want <= each.num_free + each.num_cached for want, each in zip(wanted, stats, strict=True))
        if can and any(want > each.num_free for want, each in zip(wanted, stats, strict=True)):
            self.is_exact = False
        return can

    @call(request=requests, num_units=st.integers(0, 7), rest=st.integers(0, 255), brings=st.booleans())
    def extend(self, request, num_units, rest, brings):
        self.extend_by(request, num_units * self.unit + rest % self.unit, brings=brings)

    def extend_by(self, request, num_tokens, *, brings=False):
        start, end = self.num_pages(request.num_tokens), self.num_pages(request.num_tokens + num_tokens)
        kept, is_part = self.first_kept(request.num_tokens + num_tokens), request.num_tokens % self.page_size > 0
        first = max(start, kept) if brings else start
        can = self.room(end - start, max(0, end - first))
        try:
            if brings:
                request.prepare_step(num_tokens, only_windows=True)
                request.complete_step(num_tokens)
            else:
                request.extend(num_tokens)
        except PoolExhausted:
            assert not can
            return
        assert can
        own = self.live[request].own
        own |= set(range(first, end))
        if brings and num_tokens and is_part and start - 1 < kept:
            own.discard(start - 1)  # Nobody brings what is missing of it.

    @call(request=requests, data=st.data())
    def insert(self, request, data):
        self.insert_up_to(request, data.draw(st.integers(0, request.num_tokens)))

    def insert_up_to(self, request, num_tokens):
        live = self.live[request]
        live.tokens += bytes(max(0, request.num_tokens - len(live.tokens)))
        request.insert(np.frombuffer(live.tokens, np.uint8), num_tokens)
        end = num_tokens // self.page_size
        self.present |= {
            self.name(live.tokens, page, live.old) for page in range(live.num_locked, end) if page in live.own
        }
        live.num_locked = max(live.num_locked, end)

    @call(request=requests, num_pages=st.integers(1, 4), trims=st.booleans())
    def decode(self, request, num_pages, trims):
        """Each page is inserted as soon as it is whole."""
        for _ in range(num_pages):
            self.extend_by(request, self.page_size)
            self.insert_up_to(request, request.num_tokens)
            if trims:
                self.trim_up_to(request, request.num_tokens)

    @call(request=requests, data=st.data())
    def trim(self, request, data):
        self.trim_up_to(request, data.draw(st.integers(0, request.num_tokens)))

    def trim_up_to(self, request, num_tokens):
        request.trim_windows(num_tokens)
        live, first = self.live[request], self.first_kept(num_tokens)
        live.own = {page for page in live.own if page >= first}

    @call(request=requests, completes=st.booleans())
    def copy(self, request, completes):
        self.copy_for(request, completes=completes)

    def copy_for(self, request, *, completes):
        live = self.live[request]
        if request.num_tokens != live.num_locked * self.page_size:
            return
        if any(stats.num_free < 1 for stats in self.cache.stats()):
            self.is_exact = False
        if request.prepare_copy():
            self.cache.check_integrity()
            if completes:
                assert 1 <= request.complete_copy() <= self.page_size
                live.own.add(live.num_locked)
            else:
                request.abort_copy()

    @call(request=consumes(requests))
    def release(self, request):
        del self.live[request]
        assert request.release()

    @call(num_pages=st.integers(0, 8), group=st.integers(0, 1))
    def evict(self, num_pages, group):
        can = self.cache.stats()[group].num_cached
        num_freed = self.cache.evict(num_pages, group)
        assert min(num_pages, can) <= num_freed <= can
        self.is_exact &= num_pages == 0 or num_freed == 0

    @precondition(lambda self: self.num_calls >= 6 * (self.num_clearings + 1))
    @call()
    def clear(self):
        self.cache.clear()
        self.num_clearings += 1
        assert all(stats.num_cached == 0 for stats in self.cache.stats()[:1])

    @invariant()
    def pages_are_counted_and_found(self):
        self.cache.check_integrity()
        for stats in self.cache.stats():
            assert stats.num_free + stats.num_cached + stats.num_locked + stats.num_private == stats.num_pages
        for old, tokens in self.present:
            if old == self.num_clearings:
                match = self.cache.match(np.frombuffer(tokens, np.uint8), reserve_last_token=False)
                self.check_found(tokens, match.num_tokens)

    @invariant()
    def requests_have_what_they_need(self):
        for request, live in self.live.items():
            whole = request.num_tokens // self.page_size
            table, window = request.pages(0), request.pages(1)
            assert (table >= 0).all()
            needed = range(max(self.first_needed(request.num_tokens), live.num_locked), whole)
            assert all((window[page] >= 0) == (page in live.own) for page in needed)

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for request in self.live:
            request.release()
        for group in (0, 1, 0):
            self.cache.evict(max(PAGES), group)
        assert self.cache.num_nodes == 0
        assert [stats.num_free for stats in self.cache.stats()] == list(PAGES)


WindowModel.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True)
TestWindowModel = WindowModel.TestCase

"""Random calls go to the cache and to a naive model of it: a dict of token tuples, one for each page."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvstore.errors import PoolExhausted
from kvstore.paged.cache import PagedPrefixCache

NUM_PAGES = 12
UNITS = st.lists(st.integers(0, 1), max_size=12)


class Model(RuleBasedStateMachine):
    """A page is named by the clearings before it, and all tokens up to its end. It has a last use and its locks.

    Tokens come in units: half a page, or one token.
    """

    requests = Bundle("requests")

    @initialize(page_size=st.sampled_from((1, 2, 3, 4, 16, 256)))
    def begin(self, page_size):
        self.page_size, self.unit = page_size, max(1, page_size // 2)
        self.cache = PagedPrefixCache(page_size, NUM_PAGES)
        self.pages: dict[tuple[int, ...], list[int]] = {}
        self.live: dict[object, tuple[list[int], int, int, int]] = {}
        self.now = self.num_clearings = 0

    def in_tokens(self, units, rest=0):
        return [unit for unit in units for _ in range(self.unit)] + [0] * (rest % self.unit)

    def prefixes(self, tokens, num_pages, num_clearings=None):
        old = self.num_clearings if num_clearings is None else num_clearings
        return [(old, *tokens[: (page + 1) * self.page_size]) for page in range(num_pages)]

    def num_found(self, tokens):
        names = self.prefixes(tokens, len(tokens) // self.page_size)
        return next((at for at, name in enumerate(names) if name not in self.pages), len(names))

    def use(self, names, change):
        self.now += 1
        for name in names:
            self.pages[name][0] = self.now
            self.pages[name][1] += change
        self.forget()

    def forget(self):
        """Pages from before a clearing stay for the requests that need them."""
        self.pages = {name: page for name, page in self.pages.items() if page[1] or name[0] == self.num_clearings}

    def evictable(self):
        return sum(locks == 0 for _, locks in self.pages.values())

    def evict(self, num_pages):
        for _ in range(num_pages):
            leaves = [
                (last_use, name)
                for name, (last_use, locks) in self.pages.items()
                if not locks and not any(other[: len(name)] == name and other != name for other in self.pages)
            ]
            if leaves:
                del self.pages[min(leaves)[1]]

    def num_free(self):
        return NUM_PAGES - len(self.pages) - sum(private for _, _, private, _ in self.live.values())

    @rule(target=requests, units=UNITS, rest=st.integers(0, 255))
    def acquire(self, units, rest):
        if len(self.live) >= 4:
            return multiple()
        tokens = self.in_tokens(units, rest)
        request = self.cache.acquire(tokens, reserve_last_token=False)
        num_pages = self.num_found(tokens)
        assert request.num_tokens == num_pages * self.page_size
        self.use(self.prefixes(tokens, num_pages), 1)
        self.live[request] = (tokens, num_pages, 0, self.num_clearings)
        return request

    @rule(request=requests, num_units=st.integers(0, 7), rest=st.integers(0, 255))
    def extend(self, request, num_units, rest):
        self.extend_by(request, num_units * self.unit + rest % self.unit)

    @rule(request=requests, num_pages=st.integers(1, 4))
    def decode(self, request, num_pages):
        """Each page is inserted as soon as it is whole."""
        for _ in range(num_pages):
            self.extend_by(request, self.page_size)
            self.insert_up_to(request, request.num_tokens)

    def extend_by(self, request, num_tokens):
        tokens, locked, private, old = self.live[request]
        start = request.num_tokens
        wanted = -(-(start + num_tokens) // self.page_size) - -(-start // self.page_size)
        try:
            request.extend(num_tokens)
        except PoolExhausted:
            assert wanted > self.num_free() + self.evictable()
            return
        self.evict(wanted - self.num_free())
        self.live[request] = (tokens, locked, private + wanted, old)

    @rule(request=requests, data=st.data())
    def insert(self, request, data):
        self.insert_up_to(request, data.draw(st.integers(0, request.num_tokens)))

    def insert_up_to(self, request, num_tokens):
        tokens, locked, private, old = self.live[request]
        tokens = [*tokens, *[0] * max(0, request.num_tokens - len(tokens))]
        end = num_tokens // self.page_size
        names = self.prefixes(tokens, end, old)
        new = [name for name in names[locked:] if name not in self.pages]
        assert request.insert(tokens, end * self.page_size) == len(new)
        # New pages are always the last of the prompt, because a page is never here without those before it.
        for name in new:
            self.pages[name] = [0, 0]
        self.use(names[locked:], 1)
        self.live[request] = (tokens, max(locked, end), private - len(new), old)

    @rule(request=consumes(requests))
    def release(self, request):
        tokens, locked, _, old = self.live.pop(request)
        request.release()
        self.use(self.prefixes(tokens, locked, old), -1)

    @rule(num_pages=st.integers(0, NUM_PAGES))
    def evict_some(self, num_pages):
        wanted = min(num_pages, self.evictable())
        assert self.cache.evict(num_pages) == wanted
        self.evict(wanted)

    @precondition(lambda self: self.now >= 6 * (self.num_clearings + 1))
    @rule()
    def clear(self):
        before = self.num_free()
        self.num_clearings += 1
        self.forget()
        assert self.cache.clear() == self.num_free() - before

    @rule(units=UNITS)
    def match(self, units):
        tokens = self.in_tokens(units)
        assert self.cache.match(tokens, reserve_last_token=False).num_tokens == self.num_found(tokens) * self.page_size

    @invariant()
    def the_same_pages_are_there(self):
        self.cache.check_integrity()
        (stats,) = self.cache.stats()
        assert stats.num_free == self.num_free()
        assert stats.num_cached == self.evictable()
        assert stats.num_locked == len(self.pages) - self.evictable()
        for num_clearings, *name in self.pages:
            if num_clearings == self.num_clearings:
                assert self.cache.match(name, reserve_last_token=False).num_tokens == len(name)

    def teardown(self):
        for request in self.live:
            request.release()
        self.cache.evict(NUM_PAGES)
        assert (self.cache.num_nodes, self.cache.stats()[0].num_free) == (0, NUM_PAGES)


Model.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
TestModel = Model.TestCase

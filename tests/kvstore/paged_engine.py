"""An engine with a paged cache whose KV can be checked, and random work for it.

The KV of a token is a number made from all tokens before it, so a page with another prefix, or one that was given
away too early, shows itself. `python -m paged_engine [steps] [seed]` runs long.
"""

from __future__ import annotations

import random
import sys

import numpy as np

from kvstore.errors import InvalidRequest, PoolExhausted
from kvstore.paged.cache import PagedPrefixCache
from kvstore.paged.groups import PageGroup

_MANY = (1 << 61) - 1


def fingerprints(seed: int, tokens: list[int]) -> np.ndarray:
    """The KV of every token."""
    found, last = [], seed
    for token in tokens:
        last = (last * 1_000_003 + token + 7) % _MANY
        found.append(last)
    return np.array(found, np.int64)


class Live:
    """A request at work: its tokens, and how many have their KV in place."""

    def __init__(self, request, tokens, seed):
        self.request, self.tokens, self.seed = request, tokens, seed
        self.num_computed = request.num_tokens
        self.kv = fingerprints(seed, tokens)


class Engine:
    """Caches of all groups, and the requests that use them."""

    def __init__(self, cache: PagedPrefixCache, rng: random.Random) -> None:
        self.cache, self.rng = cache, rng
        self.kv = [np.full(each.num_pages * cache.page_size, -1, np.int64) for each in cache.allocators]
        self.live: list[Live] = []
        self.prompts: list[list[int]] = []
        self.weights = dict.fromkeys((b"", b"lora"), 0)  # By namespace; others than before after each clearing.
        self.counts = dict.fromkeys(
            (
                "begun",
                "found",
                "copied",
                "exhausted",
                "inserted",
                "grown",
                "evicted",
                "cleared",
                "rolled_back",
                "brought",
            ),
            0,
        )

    def check(self, live: Live) -> None:
        """All KV that the next token of a request needs is there, and its own."""
        page_size = self.cache.page_size
        for index, group in enumerate(self.cache.groups):
            window = group.window_tokens
            first = 0 if window is None else max(0, live.num_computed - window + 1)
            slots = live.request.slots(0, live.num_computed, index)
            assert (slots[first:] >= 0).all()
            held = np.flatnonzero(slots >= 0)
            assert (slots[held] % page_size == held % page_size).all(), "B15"
            assert (self.kv[index][slots[first:]] == live.kv[first : live.num_computed]).all()

    def conserved(self) -> None:
        """Every page is counted once."""
        for stats in self.cache.stats():
            total = stats.num_free + stats.num_cached + stats.num_locked + stats.num_private
            assert total == stats.num_pages, stats

    def begin(self, tokens: list[int], spaces: tuple[bytes, bytes] = (b"", b"")) -> Live:
        match = self.cache.match(tokens, *spaces)
        request = self.cache.acquire(tokens, *spaces)
        assert match.num_tokens == request.num_tokens
        live = Live(request, tokens, hash((spaces, self.weights[spaces[0]])) % _MANY)
        self.live.append(live)
        self.counts["begun"] += 1
        self.counts["found"] += request.num_tokens
        self.check(live)
        return live

    def copy(self, live: Live, *, completes: bool) -> None:
        copies = live.request.prepare_copy()
        page_size = self.cache.page_size
        for copy in copies:
            count = copy.num_tokens if completes else self.rng.randint(0, copy.num_tokens)
            source, target = copy.source_page * page_size, copy.target_page * page_size
            kv = self.kv[copy.group]
            kv[target : target + count] = kv[source : source + count]
        if copies and completes:
            self.counts["copied"] += live.request.complete_copy()
            live.num_computed = live.request.num_tokens
            self.check(live)
        elif copies:
            live.request.abort_copy()

    def write(self, live: Live, slots, values) -> None:
        private = [set(live.request.private_pages(index).tolist()) for index in range(len(self.kv))]
        for index, each in enumerate(slots):
            assert {int(slot) // self.cache.page_size for slot in each} <= private[index], "a shared page is written"
            self.kv[index][each] = values

    def compute(self, live: Live, num_tokens: int) -> None:
        """A chunk of prefill, or a decode step; new tokens come by themselves."""
        missing = live.request.num_tokens + num_tokens - len(live.tokens)
        if missing > 0:
            live.tokens = [*live.tokens, *(self.rng.randrange(3) for _ in range(missing))]
            live.kv = fingerprints(live.seed, live.tokens)
        start = live.request.num_tokens
        slots = live.request.extend(num_tokens)
        self.write(live, slots, live.kv[start : start + num_tokens])
        live.num_computed = live.request.num_tokens

    def clear(self) -> None:
        """Other weights give other KV; running requests go on with that of before, and insert it."""
        namespace = self.rng.choice((None, *self.weights))
        for each in self.weights if namespace is None else [namespace]:
            self.weights[each] += 1
        self.counts["cleared"] += self.cache.clear(namespace)
        for prompt in self.prompts:
            assert namespace is not None or self.cache.match(prompt).num_tokens == 0

    def speculate(self, live: Live, num_drafts: int, num_accepted: int) -> None:
        start = live.request.num_tokens
        slots = live.request.prepare_step(num_drafts)
        kept = [*live.tokens[:start], *(self.rng.randrange(3) for _ in range(num_accepted))]
        if len(kept) > len(live.tokens):
            live.tokens = kept
            live.kv = fingerprints(live.seed, kept)
        values = np.full(num_drafts, -5, np.int64)
        values[:num_accepted] = live.kv[start : start + num_accepted]
        self.write(live, slots, values)
        live.request.complete_step(num_accepted)
        live.num_computed = live.request.num_tokens
        self.counts["rolled_back"] += num_drafts - num_accepted

    def bring(self, live: Live, num_tokens: int, *, comes: bool) -> None:
        """KV that comes from elsewhere at once, as a load or a hand-off: windows get the pages of their end only."""
        start, stop = live.num_computed, live.num_computed + num_tokens
        slots = live.request.prepare_step(num_tokens, only_windows=True)
        for index, each in enumerate(slots):
            has_page = each >= 0
            assert has_page.all() or self.cache.groups[index].window_tokens is not None
            self.kv[index][each[has_page]] = live.kv[start:stop][has_page] if comes else -5
        if len(self.cache.groups) > 1 and num_tokens > 1:
            try:
                live.request.complete_step(num_tokens - 1)
            except InvalidRequest:
                pass
            else:
                raise AssertionError("a part of the tokens was accepted, without the pages of their window")
        live.request.complete_step(num_tokens if comes else 0)
        live.num_computed = live.request.num_tokens
        self.counts["brought"] += num_tokens if comes else 0

    def insert(self, live: Live, num_tokens: int) -> None:
        before = self.cache.num_nodes
        num_new = live.request.insert(live.tokens, num_tokens)
        self.counts["inserted"] += num_new
        self.counts["grown"] += bool(num_new and self.cache.num_nodes == before)

    def decode(self, live: Live, num_steps: int) -> None:
        """Tokens one by one, each page inserted as soon as it is whole."""
        for _ in range(num_steps):
            self.compute(live, 1)
            self.insert(live, live.num_computed)
            if self.rng.random() < 0.3:
                live.request.trim_windows(live.num_computed)

    def end(self, live: Live, *, inserts: bool) -> None:
        if inserts:
            self.insert(live, live.num_computed)
            self.prompts = [*self.prompts[-20:], live.tokens[: 12 * self.cache.page_size]]
        assert live.request.release()
        self.live.remove(live)

    def make_prompt(self) -> list[int]:
        rng, page_size = self.rng, self.cache.page_size
        begin: list[int] = []
        if self.prompts and rng.random() < 0.8:
            begin = rng.choice(self.prompts)
            begin = begin if rng.random() < 0.5 else begin[: rng.randint(0, len(begin))]
        end = [
            rng.randrange(3) for _ in range(rng.choice((0, 1, page_size - 1, page_size, rng.randint(0, 4 * page_size))))
        ]
        prompt = [*begin, *end][: 12 * page_size]
        self.prompts = [*self.prompts[-20:], prompt]
        return prompt

    def step(self) -> None:
        """One random call, or a few that belong together."""
        rng = self.rng
        act = rng.random()
        live = rng.choice(self.live) if self.live else None
        try:
            if live is None or (act < 0.25 and len(self.live) < 6):
                live = self.begin(
                    list(self.make_prompt()), rng.choice(((b"", b""), (b"", b""), (b"lora", b""), (b"", b"lora")))
                )
                if rng.random() < 0.7:
                    self.copy(live, completes=rng.random() < 0.7)
            elif act < 0.50:
                rest = max(0, len(live.tokens) - live.num_computed)
                if rest and rng.random() < 0.3:
                    self.bring(live, rng.choice((rest, rng.randint(1, rest))), comes=rng.random() < 0.7)
                else:
                    self.compute(live, rng.choice((rest, rest, 0, 1, rng.randint(1, 3 * self.cache.page_size))))
            elif act < 0.60:
                drafts = rng.randint(1, 2 * self.cache.page_size)
                if live.request.num_tokens >= len(live.tokens):
                    self.speculate(live, drafts, rng.randint(0, drafts))
            elif act < 0.70:
                if rng.random() < 0.6:
                    self.insert(live, rng.randint(0, live.num_computed))
                else:
                    self.decode(live, rng.randint(1, 2 * self.cache.page_size))
            elif act < 0.76:
                live.request.trim_windows(live.num_computed)
            elif act < 0.92:
                self.end(live, inserts=rng.random() < 0.7)
            elif act < 0.93:
                self.clear()
            elif act < 0.96:
                self.counts["evicted"] += self.cache.evict(rng.randint(0, 6), rng.randrange(len(self.kv)))
            else:
                self.refused(live)
        except PoolExhausted:
            self.counts["exhausted"] += 1
            self.end(rng.choice(self.live), inserts=rng.random() < 0.5)
        if self.live:
            self.check(rng.choice(self.live))

    def refused(self, live: Live) -> None:
        """Bad input changes nothing."""
        before = self.cache.stats()
        request, allocator = live.request, self.cache.allocators[0]
        calls = (
            lambda: request.extend(-1), lambda: request.complete_copy(), lambda: request.complete_step(1),
            lambda: request.insert(live.tokens, request.num_tokens + 1), lambda: request.pages(len(self.kv)),
            lambda: allocator.free([allocator.num_pages]), lambda: allocator.free([0, 0]),
            lambda: allocator.free_slots([1]) if self.cache.page_size > 1 else allocator.free([-1]),
            lambda: self.cache.evict(-1), lambda: self.cache.acquire([-1]),
        )  # fmt: skip
        for call in calls:
            try:
                call()
            except InvalidRequest:
                continue
            raise AssertionError("a bad call was not refused")
        assert self.cache.stats() == before

    def finish(self) -> None:
        """Everything comes back."""
        for live in list(self.live):
            self.end(live, inserts=self.rng.random() < 0.5)
        self.cache.check_integrity()
        for index, allocator in enumerate(self.cache.allocators):
            self.cache.evict(allocator.num_pages, index)
        self.cache.check_integrity()
        assert self.cache.num_nodes == 0
        assert [each.num_free for each in self.cache.allocators] == [each.num_pages for each in self.cache.allocators]


def make_groups(name: str, page_size: int) -> tuple[PageGroup, ...]:
    """Groups by name: full, window, both, or both with windows that begin at blocks of a store."""
    window = PageGroup(window_tokens=2 * page_size + 3, num_pages=15)
    aligned = PageGroup(window_tokens=page_size + 2, num_pages=17, align_tokens=2 * page_size)
    groups = {"full": (PageGroup(),), "window": (window,), "both": (PageGroup(), window)}
    return {**groups, "aligned": (PageGroup(), aligned)}[name]


def work(groups: str, page_size: int, num_steps: int, seed: int, check_every: int) -> dict[str, int]:
    """Random work; pages are counted after every step. Returns what happened."""
    engine = Engine(PagedPrefixCache(page_size, 18, make_groups(groups, page_size)), random.Random(seed))
    for step in range(num_steps):
        engine.step()
        engine.conserved()
        if step % check_every == 0:
            engine.cache.check_integrity()
    engine.finish()
    return engine.counts


def main() -> None:
    num_steps, seed = (int(each) for each in [*sys.argv[1:], "50000", "0"][:2])
    for page_size in (1, 3, 4, 16, 64, 256):
        for groups in ("full", "window", "both", "aligned"):
            print(page_size, groups, work(groups, page_size, num_steps, seed, 100), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

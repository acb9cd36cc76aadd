"""A pool keeps its rules under any policy that keeps the protocol: here the simplest one, first in, first out."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from kvstore.errors import PoolExhausted
from kvstore.pool.pool import PinKind, Pool
from poolcheck.chains import LATER_S, NAMESPACES, chain_of, store


class FirstInFirstOut:
    """Has every block that was stored, until it is freed; so it may name blocks that cannot go, and leaves none out."""

    def __init__(self):
        self.soft_pins, self.order, self.again, self.now = Counter(), {}, deque(), 0

    def claimed(self, slots, hashes):
        pass

    def touched(self, slots, *, is_use):
        self.now += 1
        return self.now

    def stored(self, slots, stamp):
        self.order.update(dict.fromkeys(slots))

    def released(self, slots, stamp):
        self.again.extend(slot for slot in slots if slot in self.order and slot not in self.soft_pins)

    def soft_pinned(self, slots):
        self.soft_pins.update(slots)

    def soft_unpinned(self, slots):
        self.soft_pins -= Counter(slot for slot in slots if slot in self.soft_pins)

    def evicted(self, slots, hashes):
        assert len(slots) == len(hashes) > 0

    def freed(self, slots):
        for slot in slots:
            self.order.pop(slot, None)
            self.soft_pins.pop(slot, None)

    def victims(self):
        for is_soft in (False, True):
            self.again = deque(slot for slot in self.order if (slot in self.soft_pins) is is_soft)
            while self.again:
                yield self.again.popleft()

    def last_touch(self, slot):
        return 0

    def check(self, evictable):
        assert evictable <= self.order.keys()


def test_the_policy_decides_what_goes_and_soft_pins_go_last():
    pool = Pool(6, eviction=FirstInFirstOut())
    for tokens in ("ab", "cd", "ef"):
        store(pool, tokens)
    pool.pin(chain_of("ab"), "p", PinKind.SOFT)
    assert pool.pin_prefix(chain_of("cd"), "r", LATER_S).slots, "a touch does not help it"
    pool.release_owner("r")
    store(pool, "xyz")
    assert [pool.lookup(chain_of(tokens)) for tokens in ("ab", "cd", "ef", "xyz")] == [2, 0, 1, 3]
    store(pool, "uvwkl")
    assert [pool.lookup(chain_of(tokens)) for tokens in ("ab", "uvwkl")] == [1, 5]


@pytest.mark.parametrize("seed", range(12))
def test_a_pool_stays_whole_under_another_policy(seed):
    rng, pool = random.Random(seed), Pool(12, eviction=FirstInFirstOut())
    for _ in range(120):
        chain = chain_of("".join(rng.choice("abc") for _ in range(rng.randrange(1, 6))))
        what = rng.randrange(6)
        if what < 3:
            ticket = pool.prepare_store(chain, "w")
            end = pool.complete_store if rng.random() < 0.8 else pool.abort_store
            end(ticket.write_id, "w")
        elif what < 5:
            kind = rng.choice(list(PinKind))
            try:
                pool.pin(chain, rng.choice("pqr"), kind, LATER_S)
            except PoolExhausted:
                pool.release_owner("p")
        elif rng.random() < 0.2:
            pool.clear(NAMESPACES[0])
        else:
            pool.release_owner(rng.choice("pqr"))
        pool.check_integrity()
    for owner in "pqr":
        pool.release_owner(owner)
    assert len(pool.reserve(12, "w").slots) == 12, "nothing is left that never comes up"
    pool.check_integrity()

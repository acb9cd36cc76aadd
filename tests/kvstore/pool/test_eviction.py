"""A pool keeps its rules under any policy that keeps the protocol: here the simplest one, first in, first out."""

from __future__ import annotations

import random
from array import array
from collections import deque

import pytest

from kvstore.errors import PoolExhausted
from kvstore.pool.pool import PinKind, Pool
from poolcheck.chains import LATER_S, NAMESPACES, chain_of, store


class FirstInFirstOut:
    """Offers what was stored once, and again when it was released; so it may name blocks that cannot go."""

    def __init__(self, num_slots):
        self.stamp = array("q", bytes(8 * num_slots))
        self.order, self.again, self.now = {}, deque(), 0

    def claimed(self, slots, hashes):
        pass

    def touched(self, slots, *, is_use):
        self.now += 1
        for slot in slots:
            self.stamp[slot] = self.now
        self.again.extend(slot for slot in slots if slot in self.order and slot not in self.again)
        return self.now

    def stored(self, slots, stamp):
        self.order.update(dict.fromkeys(slots))
        self.again.extend(slots)

    def released(self, slots, stamp):
        self.again.extend(slot for slot in slots if slot in self.order)

    def evicted(self, slots, hashes):
        assert len(slots) == len(hashes) > 0

    def freed(self, slots):
        for slot in slots:
            self.order.pop(slot, None)
            self.stamp[slot] = 0

    def victims(self):
        while self.again:
            slot = self.again.popleft()
            if slot in self.order:
                yield slot

    def check(self, evictable):
        assert evictable <= self.order.keys() & set(self.again)


def test_the_policy_decides_what_goes_and_soft_pins_go_last():
    pool = Pool(6, eviction=FirstInFirstOut(6))
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
    rng, pool = random.Random(seed), Pool(12, eviction=FirstInFirstOut(12))
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

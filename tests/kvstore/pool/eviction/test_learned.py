"""What counts as a use, when anything is learned, and that a pool under learned reuse keeps its rules."""

from __future__ import annotations

import random
from itertools import count

import numpy as np
import pytest

from kvstore.errors import ConfigError, PoolExhausted
from kvstore.pool.eviction.learned import SAVE_GAP_S, USE_GAP_S, LearnedReuse
from kvstore.pool.eviction.lru import LeastRecentlyUsed
from kvstore.pool.eviction.make import make_policy
from kvstore.pool.eviction.reuse import EDGES_S, NUM_BUCKETS, WIDTHS_S, bucket_of
from kvstore.pool.pool import PinKind, Pool
from kvstore.pool.slot_lists import SlotList
from poolcheck.chains import LATER_S, NAMESPACES, chain_of, resident, store

#: From the first class to the last: what was used more often is kept, at any age.
MORE_IS_BETTER = [[float(kind)] * NUM_BUCKETS for kind in range(1, 5)]


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def pool_of(num_slots, hazards=None, **more):
    clock = Clock()
    policy = LearnedReuse(num_slots, clock, num_ghosts=200, **more)
    policy.hazards = hazards
    return Pool(num_slots, eviction=policy), policy, clock


def load(pool, tokens):
    grant = pool.pin_prefix(chain_of(tokens), "r", LATER_S)
    pool.release(grant.lease_id, "r")
    return grant.num_blocks


def uses(pool, policy, tokens):
    grant = pool.pin_prefix(chain_of(tokens), "look", LATER_S)
    found = policy.blocks.uses[policy.blocks.rows_of(SlotList.of(list(grant.slots)))].tolist()
    pool.release(grant.lease_id, "look")
    return found


def run_trace(pool, clock, rows):
    """Load and save each prompt of (time, tokens); return the number of blocks found."""
    num_hits = 0
    for clock.now_s, tokens in rows:
        num_hits += load(pool, tokens)
        ticket = pool.prepare_store(chain_of(tokens), "w")
        if ticket.write_id:
            pool.complete_store(ticket.write_id, "w")
    return num_hits


# What is a use.


def test_all_that_one_prompt_does_within_a_second_is_one_use():
    pool, policy, clock = pool_of(8)
    store(pool, "ab")
    load(pool, "ab")
    pool.release(pool.pin(chain_of("ab"), "p", PinKind.HARD).lease_id, "p")
    store(pool, "abc")
    clock.now_s += 0.9 * USE_GAP_S
    assert uses(pool, policy, "abc") == [1, 1, 1]
    assert policy.num_reuses == 0
    clock.now_s += 0.1 * USE_GAP_S
    assert uses(pool, policy, "abc") == [2, 2, 2]


def test_a_save_that_finds_what_its_prompt_has_loaded_is_no_use():
    pool, policy, clock = pool_of(8)
    store(pool, "ab")
    clock.now_s += 0.9 * SAVE_GAP_S
    store(pool, "abc")
    assert policy.blocks.uses[:3].tolist() == [1, 1, 1]
    clock.now_s += 0.1 * SAVE_GAP_S
    store(pool, "abc")
    assert policy.blocks.uses[:3].tolist() == [2, 2, 1], "c was saved only now"


def test_blocks_that_a_load_brought_from_peers_are_used_once():
    pool, policy, clock = pool_of(8)
    store(pool, "a")
    lease_id = pool.pin_prefix(chain_of("a"), "r", LATER_S).lease_id
    pool.complete_store(pool.prepare_store(chain_of("abc", start=1), "peer").write_id, "peer")
    clock.now_s += 5.0  # The READ took as long.
    pool.pin_prefix(chain_of("abc", start=1), "r", LATER_S, lease_id)
    assert policy.blocks.uses[:3].tolist() == [1, 1, 1]


def test_an_evicted_block_that_comes_back_was_reused():
    pool, policy, clock = pool_of(2)
    store(pool, "ab")
    before = policy.counts.reuses.copy()
    clock.now_s += 10.0
    store(pool, "xy")
    assert resident(pool, "ab") == 0
    assert (policy.counts.reuses == before).all()
    clock.now_s += 10.0
    store(pool, "ab")
    assert policy.num_reuses == 1
    assert (policy.counts.reuses - before).sum() == 2
    assert policy.blocks.uses[policy.blocks.rows_of(SlotList.of([0, 1]))].tolist() == [2, 2]
    pool.check_integrity()


def test_the_age_of_an_evicted_block_goes_on():
    pool, policy, clock = pool_of(2)
    store(pool, "ab")
    clock.now_s += 3.0
    store(pool, "xy")
    before_s = policy.counts.at_risk_s.copy()
    clock.now_s += 100.0
    for _ in range(10):
        policy.ages.advance(clock.now_s)
    counted_s = (policy.counts.at_risk_s - before_s)[0]
    bucket = int(bucket_of(np.array([50.0]))[0])
    assert counted_s[bucket] == pytest.approx(4 * WIDTHS_S[bucket])


def test_an_evicted_block_that_comes_back_within_a_second_was_not():
    pool, policy, clock = pool_of(2)
    store(pool, "ab")
    store(pool, "xy")
    clock.now_s += 0.5 * USE_GAP_S
    store(pool, "ab")
    assert policy.num_reuses == 0
    assert policy.blocks.uses[policy.blocks.rows_of(SlotList.of([0, 1]))].tolist() == [1, 1]


def test_cleared_and_aborted_blocks_are_unknown_to_what_comes_into_their_slots():
    pool, policy, clock = pool_of(2)
    store(pool, "ab")
    clock.now_s += 10.0
    assert uses(pool, policy, "ab") == [2, 2]
    pool.clear(NAMESPACES[0])
    pool.abort_store(pool.prepare_store(chain_of("xy"), "w").write_id, "w")
    clock.now_s += 10.0
    store(pool, "uv")
    assert policy.blocks.uses[:2].tolist() == [1, 1]
    assert policy.num_reuses == 1
    pool.check_integrity()


# When anything is learned.


def test_the_blocks_of_one_prompt_are_one_observation():
    pool, policy, clock = pool_of(8)
    store(pool, "abcdefgh")
    for _ in range(5):
        clock.now_s += 3.0
        load(pool, "abcdefgh")
    assert policy.num_reuses == 5


def test_until_enough_was_used_again_lru_decides():
    pool, policy, clock = pool_of(8, fewest_reuses=300)
    store(pool, "ab")
    for reuses in range(1, 500):
        clock.now_s += 3.0
        load(pool, "ab")
        assert (policy.hazards is None) == (reuses < 399), "estimated every 200 uses, the save among them"
    assert policy.hazards[1] == policy.counts.hazards()[1]


def prompts(seed, num_rows):
    """Prompts of which a few come again and again, between many that do not."""
    rng, new, now_s = random.Random(seed), count(0x4E00), 0.0
    popular = ["".join(chr(next(new)) for _ in range(4)) for _ in range(12)]
    for _ in range(num_rows):
        now_s += rng.expovariate(2.0)
        if rng.random() < 0.4:
            yield now_s, rng.choice(popular)
        else:
            yield now_s, "".join(chr(next(new)) for _ in range(6))


def test_what_comes_again_is_kept_when_much_passes_through():
    rows, num_hits = list(prompts(1, 4000)), {}
    for name in ("lru", "learned"):
        clock = Clock()
        num_hits[name] = run_trace(Pool(64, eviction=make_policy(name, 64, clock)), clock, rows)
    assert num_hits["learned"] > 1.5 * num_hits["lru"] > 0


@pytest.mark.parametrize("at_s", [0.0, 1e9])
def test_without_times_it_is_lru(at_s):
    rows = [(at_s, tokens) for _, tokens in prompts(2, 2000)]
    clock, other = Clock(), Clock()
    learned, lru = Pool(64, eviction=make_policy("learned", 64, clock)), Pool(64)
    for row in rows:
        assert run_trace(learned, clock, [row]) == run_trace(lru, other, [row])
    assert set(learned.resident_hashes()) == set(lru.resident_hashes())


def test_a_clock_that_goes_back_harms_nothing():
    pool, _, clock = pool_of(8, MORE_IS_BETTER)
    rng = random.Random(4)
    for _ in range(200):
        clock.now_s = rng.uniform(-1e3, 1e3)
        load(pool, rng.choice(["ab", "abc", "xyz"]))
        store(pool, "".join(rng.choice("abxy") for _ in range(4)))


# What goes.


def test_the_least_likely_goes_first_and_of_equals_the_least_recently_touched():
    pool, _, clock = pool_of(4, MORE_IS_BETTER)
    store(pool, "ab")
    clock.now_s += 5.0
    load(pool, "ab")
    store(pool, "xy")
    store(pool, "z")
    assert (resident(pool, "ab"), resident(pool, "xy")) == (2, 1), "older, but used twice"
    store(pool, "v")
    assert (resident(pool, "xy"), resident(pool, "z"), resident(pool, "v")) == (0, 1, 1)


def test_with_age_a_class_can_become_the_least_likely():
    hazards = [[2.0] * NUM_BUCKETS, [3.0] * 10 + [1.0] * (NUM_BUCKETS - 10), *MORE_IS_BETTER[2:]]
    for wait_s, left in ((3.0, 2), (100.0, 1)):
        pool, _, clock = pool_of(4, hazards)
        store(pool, "ab")
        clock.now_s += 5.0
        load(pool, "ab")
        clock.now_s += wait_s
        store(pool, "xy")
        store(pool, "z")
        assert resident(pool, "ab") == left


def test_blocks_of_ages_of_which_nothing_is_known_go_first_in_the_order_of_touches():
    pool, _, clock = pool_of(3, MORE_IS_BETTER)
    store(pool, "x")
    clock.now_s += 5.0
    store(pool, "a")
    clock.now_s += 5.0
    load(pool, "x")
    clock.now_s += 2 * EDGES_S[-1]
    store(pool, "y")
    store(pool, "z")
    assert [resident(pool, tokens) for tokens in "axy"] == [0, 1, 1]
    store(pool, "v")
    assert [resident(pool, tokens) for tokens in "xyz"] == [0, 1, 1], "its class is the better one, but it is too old"


def test_each_time_the_least_likely_of_all_classes_goes():
    pool, _, clock = pool_of(3, [[5.0] * 10 + [1.0] * (NUM_BUCKETS - 10), [3.0] * NUM_BUCKETS, *MORE_IS_BETTER[2:]])
    store(pool, "a")
    clock.now_s += 5.0
    load(pool, "a")
    store(pool, "z")
    clock.now_s += 100.0
    store(pool, "y")
    store(pool, "uv")
    assert [resident(pool, tokens) for tokens in "zay"] == [0, 0, 1], "one of the first class, then one of the second"


def test_a_class_that_was_empty_is_looked_at_again():
    pool, _, clock = pool_of(3, MORE_IS_BETTER)
    store(pool, "a")
    clock.now_s += 5.0
    load(pool, "a")
    assert len(pool.reserve(2, "w").slots) == 2
    pool.release_owner("w")
    for tokens in ("x", "y", "z", "u", "v"):
        store(pool, tokens)
        assert resident(pool, "a") == 1, "the class of what was used once has blocks again"


def test_a_parent_that_came_up_before_its_child_goes_in_the_same_call():
    """The soft-pinned child goes last, and then its parent of another class."""
    pool, _, clock = pool_of(4, MORE_IS_BETTER)
    store(pool, "ab")
    clock.now_s += 5.0
    store(pool, "abc")
    clock.now_s += 100.0
    pool.pin(chain_of("abc"), "p", PinKind.SOFT)
    pool.release_owner("p")
    lease_id = pool.pin(chain_of("abcd"), "p", PinKind.SOFT).lease_id
    store(pool, "abcd")
    assert len(pool.reserve(4, "w").slots) == 4
    pool.check_integrity()
    pool.release(lease_id, "p")


@pytest.mark.parametrize("seed", range(40))
def test_a_reservation_gets_all_that_is_obtainable(seed):
    rng = random.Random(seed)
    hazards = [sorted((rng.random() for _ in range(NUM_BUCKETS)), reverse=True) for _ in range(4)]
    pool, policy, clock = pool_of(12, hazards)
    for _ in range(150):
        clock.now_s += rng.choice([0.0, 0.5, 2.0, 30.0])
        chain = chain_of("".join(rng.choice("abc") for _ in range(rng.randrange(1, 6))))
        what = rng.randrange(8)
        if what < 3:
            ticket = pool.prepare_store(chain, "w")
            end = pool.complete_store if rng.random() < 0.8 else pool.abort_store
            end(ticket.write_id, "w")
        elif what < 5:
            try:
                pool.pin(chain, rng.choice("pqr"), rng.choice(list(PinKind)), LATER_S)
            except PoolExhausted:
                pool.release_owner("p")
        elif what < 6 and rng.random() < 0.2:
            pool.clear(NAMESPACES[0])
        elif what < 7:
            obtainable = pool.table.num_obtainable(12, may_evict=True)
            if obtainable:
                assert len(pool.reserve(obtainable, "w").slots) == obtainable
                pool.check_integrity()
                pool.release_owner("w")
        else:
            pool.release_owner(rng.choice("pqr"))
        pool.check_integrity()
    for owner in "pqr":
        pool.release_owner(owner)
    assert len(pool.reserve(12, "w").slots) == 12, "nothing is left that never comes up"
    policy.check(set())


@pytest.mark.parametrize("seed", range(6))
def test_unlearned_it_evicts_in_the_order_of_lru(seed):
    rng, clock = random.Random(seed), Clock()
    pools = [Pool(10, eviction=LearnedReuse(10, clock, num_ghosts=40)), Pool(10, eviction=LeastRecentlyUsed(10))]
    for _ in range(300):
        clock.now_s += rng.choice([0.0, 0.5, 5.0])
        tokens, does_load = "".join(rng.choice("abc") for _ in range(rng.randrange(1, 7))), rng.random() < 0.5
        for pool in pools:
            if does_load:
                load(pool, tokens)
            else:
                store(pool, tokens)
        assert set(pools[0].resident_hashes()) == set(pools[1].resident_hashes())


# By name.


def test_policies_have_names():
    assert isinstance(make_policy("learned", 4), LearnedReuse)
    assert isinstance(make_policy("lru", 4), LeastRecentlyUsed)
    with pytest.raises(ConfigError, match=r"eviction: wanted 'learned' or 'lru', got 'fifo'"):
        make_policy("fifo", 4)


def test_a_pool_without_slots_remembers_nothing():
    assert LearnedReuse(0).blocks.ghosts.num_places == 8
    assert LearnedReuse(10).blocks.ghosts.num_places >= 65536
    assert LearnedReuse(20_000).blocks.ghosts.num_places >= 80_000

"""What goes first and what last: priorities, their ends, and soft pins; under both policies."""

from __future__ import annotations

import random

import pytest

from kvstore.blocks.chain import HASH_BYTES, BlockHashes
from kvstore.blocks.priority import OF_LOW_READER, Priority, Retention
from kvstore.pool.eviction.learned import LearnedReuse
from kvstore.pool.eviction.lru import LeastRecentlyUsed
from kvstore.pool.eviction.priorities import PriorityOrder
from kvstore.pool.pool import PinKind, Pool
from kvstore.pool.slot_lists import SlotList
from poolcheck.chains import LATER_S, NAMESPACES, chain_of, resident

LOW, NORMAL, HIGH = Priority
OF_NORMAL_READER = Retention()


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture(params=["lru", "learned"])
def make_pool(request):
    def make(num_slots):
        clock = Clock()
        is_lru = request.param == "lru"
        policy = LeastRecentlyUsed(num_slots) if is_lru else LearnedReuse(num_slots, clock, num_ghosts=40)
        return Pool(num_slots, eviction=policy, now_s=clock), clock

    return make


def prepare(pool, tokens, priority=NORMAL, until_s=LATER_S, owner="w", **more):
    ticket = pool.prepare_store(chain_of(tokens), owner, retention=Retention(priority, until_s), **more)
    pool.check_integrity()
    return ticket


def save(pool, tokens, priority=NORMAL, until_s=LATER_S):
    ticket = prepare(pool, tokens, priority, until_s)
    if ticket.write_id:
        pool.complete_store(ticket.write_id, "w")
        pool.check_integrity()


def load(pool, tokens, retention=OF_NORMAL_READER):
    pool.release(pool.pin_prefix(chain_of(tokens), "r", LATER_S, retention=retention).lease_id, "r")
    pool.check_integrity()


def order_of(pool, *all_tokens):
    """Return the chains in the order in which their last blocks go, one new block after the other."""
    order = []
    for number in range(len(all_tokens)):
        prepare(pool, str(number), owner="room")
        order += [tokens for tokens in all_tokens if resident(pool, tokens) < len(tokens) and tokens not in order]
    return order


def test_low_ones_go_first_and_high_ones_last_whenever_they_were_touched(make_pool):
    pool, _ = make_pool(4)
    save(pool, "h", HIGH)
    save(pool, "n")
    save(pool, "m")
    save(pool, "l", LOW)
    assert (pool.stats().num_low, pool.stats().num_high) == (1, 1)
    assert order_of(pool, "h", "n", "m", "l") == ["l", "n", "m", "h"]
    assert (pool.stats().num_low, pool.stats().num_high) == (0, 0)


def test_soft_pins_go_after_high_ones(make_pool):
    pool, _ = make_pool(3)
    save(pool, "s")
    save(pool, "h", HIGH)
    save(pool, "n")
    pool.pin(chain_of("s"), "p", PinKind.SOFT)
    assert order_of(pool, "s", "h", "n") == ["n", "h", "s"]


def test_several_of_one_priority_go_in_the_order_of_touches_and_high_ones_by_their_end(make_pool):
    pool, _ = make_pool(5)
    for tokens, priority, until_s in (("a", LOW, 9), ("h", HIGH, 9), ("b", LOW, 5), ("i", HIGH, 8), ("a", LOW, 7)):
        save(pool, tokens, priority, until_s)
    save(pool, "n")
    assert order_of(pool, "a", "b", "h", "i", "n") == ["b", "a", "n", "i", "h"]


def test_a_root_is_as_safe_as_its_leaf(make_pool):
    pool, _ = make_pool(3)
    save(pool, "a", LOW)
    save(pool, "ab", HIGH)
    save(pool, "n")
    assert pool.stats().num_high == 2
    assert order_of(pool, "a", "ab", "n") == ["n", "ab", "a"]


@pytest.mark.parametrize("how", ["save", "load", "pin", "part"])
def test_a_use_by_others_makes_a_low_one_normal(make_pool, how):
    pool, _ = make_pool(3)
    save(pool, "n")
    if how == "part":
        tickets = [prepare(pool, "l", each, num_parts=2, part=part) for part, each in enumerate((LOW, NORMAL))]
        for ticket in tickets:
            pool.complete_store(ticket.write_id, "w")
    else:
        save(pool, "l", LOW)
    if how == "save":
        save(pool, "l")
    elif how == "load":
        load(pool, "l")
    elif how == "pin":
        pool.pin(chain_of("l"), "p", PinKind.SOFT)
        pool.release_pins("p")
    save(pool, "l", LOW)
    save(pool, "x", LOW)
    assert pool.stats().num_low == 1, "a later save lowers nothing"
    assert order_of(pool, "n", "l", "x") == ["x", "n", "l"]


def test_a_save_of_low_ones_by_the_same_job_leaves_them_low(make_pool):
    pool, _ = make_pool(3)
    save(pool, "l", LOW)
    save(pool, "n")
    save(pool, "lm", LOW)
    assert order_of(pool, "l", "lm", "n") == ["lm", "l", "n"]


def test_a_load_by_a_low_job_leaves_low_ones_low_and_lowers_none(make_pool):
    pool, _ = make_pool(4)
    save(pool, "l", LOW)
    save(pool, "n")
    save(pool, "m", LOW)
    save(pool, "h", HIGH)
    for tokens in "lnh":
        load(pool, tokens, OF_LOW_READER)
    assert (pool.stats().num_low, pool.stats().num_high) == (2, 1)
    assert order_of(pool, "l", "n", "m", "h") == ["m", "l", "n", "h"], "and it is a use among the low ones"


def test_a_load_by_a_low_job_moves_no_end(make_pool):
    pool, clock = make_pool(3)
    save(pool, "l", LOW, 10.0)
    load(pool, "l", OF_LOW_READER)
    save(pool, "n")
    save(pool, "m")
    clock.now_s = 10.0
    load(pool, "l", OF_LOW_READER)
    assert pool.stats().num_low == 0
    assert order_of(pool, "l", "n", "m") == ["n", "m", "l"]


@pytest.mark.parametrize("now_s", [0.0, 10.0])
@pytest.mark.parametrize("retention", [OF_NORMAL_READER, OF_LOW_READER])
def test_a_run_that_names_a_block_twice_counts_it_once(make_pool, retention, now_s):
    pool, clock = make_pool(3)
    save(pool, "lm", LOW, 10.0)
    clock.now_s, chain = now_s, chain_of("lm")
    twice = BlockHashes(chain.namespace, chain.parent, chain.start, chain.data[:HASH_BYTES] + chain.data)
    pool.release(pool.pin_prefix(twice, "r", LATER_S, retention=retention).lease_id, "r")
    pool.check_integrity()
    assert pool.stats().num_low == (2 if retention is OF_LOW_READER and now_s < 10.0 else 0)


def test_a_lease_of_a_low_job_that_grows_leaves_low_ones_low(make_pool):
    pool, _ = make_pool(4)
    save(pool, "lm", LOW)
    for retention, num_low in ((OF_LOW_READER, 2), (OF_NORMAL_READER, 0)):
        lease_id = pool.pin_prefix(chain_of("l"), "r", LATER_S, retention=retention).lease_id
        pool.pin_prefix(chain_of("lm").tail(1), "r", LATER_S, lease_id, retention=retention)
        assert pool.stats().num_low == num_low
        assert pool.release(lease_id, "r")
        pool.check_integrity()


def test_to_copy_a_block_to_another_tier_is_no_use_of_it(make_pool):
    pool, _ = make_pool(2)
    save(pool, "n")
    save(pool, "l", LOW)
    lease_id, held = pool.hold([0, 1], NAMESPACES[0], "disk")
    assert [block.is_low for block in held] == [False, True]
    pool.release(lease_id, "disk")
    assert order_of(pool, "n", "l") == ["l", "n"]


@pytest.mark.parametrize("was_held_back", [False, True])
def test_a_high_one_whose_time_is_over_goes_in_its_turn(make_pool, was_held_back):
    pool, clock = make_pool(4)
    save(pool, "h", HIGH, 10.0)
    save(pool, "m")
    save(pool, "n")
    save(pool, "o")
    if was_held_back:
        prepare(pool, "x", owner="room")
        assert resident(pool, "h") == 1
    clock.now_s = 10.0
    prepare(pool, "y", owner="room")
    assert [resident(pool, tokens) for tokens in "hmno"] == [0, 1 - was_held_back, 1, 1]


def test_a_low_one_whose_time_is_over_goes_in_its_turn_and_is_not_lowered_again(make_pool):
    pool, clock = make_pool(3)
    save(pool, "n")
    save(pool, "l", LOW, 10.0)
    save(pool, "m")
    clock.now_s = 10.0
    save(pool, "l", LOW, 20.0)
    assert order_of(pool, "n", "l", "m") == ["n", "m", "l"]


def test_the_later_end_counts_of_one_priority_and_never_that_of_another(make_pool):
    pool, clock = make_pool(4)
    save(pool, "a", HIGH, 20.0)
    save(pool, "a", HIGH, 10.0)
    save(pool, "b", LOW, 30.0)
    save(pool, "b", HIGH, 10.0)
    save(pool, "c", LOW, 10.0)
    save(pool, "c", LOW, 20.0)
    save(pool, "n")
    clock.now_s = 15.0
    assert order_of(pool, "a", "b", "c", "n") == ["c", "b", "n", "a"]


def test_a_slot_has_nothing_of_the_block_before(make_pool):
    pool, _ = make_pool(2)
    save(pool, "l", LOW)
    save(pool, "h", HIGH)
    pool.clear(NAMESPACES[0])
    assert (pool.stats().num_low, pool.stats().num_high) == (0, 0)
    ticket = prepare(pool, "lh", HIGH)
    pool.abort_store(ticket.write_id, "w")
    pool.check_integrity()
    save(pool, "a")
    save(pool, "b")
    assert order_of(pool, "a", "b") == ["a", "b"]


def test_a_low_one_that_came_up_while_it_was_written_comes_up_again(make_pool):
    pool, _ = make_pool(3)
    save(pool, "n")
    ticket = prepare(pool, "l", LOW)
    save(pool, "m")
    save(pool, "o")  # Passes the one that is being written.
    pool.complete_store(ticket.write_id, "w")
    pool.check_integrity()
    assert order_of(pool, "m", "o", "l") == ["l", "m", "o"]


def test_a_high_one_that_was_held_back_has_its_place_when_it_was_used(make_pool):
    pool, _ = make_pool(4)
    save(pool, "h", HIGH)
    save(pool, "i", HIGH)
    save(pool, "n")
    save(pool, "m")
    prepare(pool, "x", owner="room")
    load(pool, "h")
    assert order_of(pool, "h", "i", "m") == ["m", "i", "h"]


def test_soft_pins_lose_their_place_when_they_end():
    order = PriorityOrder(LeastRecentlyUsed(4), 4, Clock())
    order.touched(SlotList.of([0, 1, 2, 3]), is_use=True)
    order.soft_pinned([3, 2, 3])
    taken = order.victims()
    assert [next(taken) for _ in range(2)] == [1, 0]
    order.soft_unpinned([2, 3, 0])
    assert (next(taken), order.soft_pins) == (2, {3: 1})
    assert list(taken) == [3]


def test_a_soft_pin_ends_with_its_block():
    order = PriorityOrder(LeastRecentlyUsed(2), 2, Clock())
    order.touched(SlotList.of([0, 1]), is_use=True)
    order.soft_pinned([0, 1])
    order.freed(SlotList.of([1]))
    order.touched(SlotList.of([1]), is_use=True)
    assert (order.soft_pins, list(order.victims())) == ({0: 1}, [1, 0])


def test_many_ends_at_once_are_seen_little_by_little_and_none_is_lost():
    clock, most = Clock(), 10_000
    order = PriorityOrder(LeastRecentlyUsed(most), most, clock)
    slots = SlotList.of(list(range(most)))
    order.touched(slots, is_use=True, retention=Retention(HIGH, 5.0))
    next(order.victims())
    clock.now_s = 5.0
    seen = {next(order.victims()) for _ in range(3)}
    assert 0 < order.num_high < most
    assert len(seen | set(order.victims())) == most - 1
    order.freed(slots)
    assert order.num_high == 0


def test_what_is_held_back_again_and_again_takes_no_more_memory():
    order = PriorityOrder(LeastRecentlyUsed(8), 8, Clock())
    slots = SlotList.of(list(range(8)))
    for until_s in range(1, 200):
        order.touched(slots, is_use=True, retention=Retention(HIGH, float(until_s)))
        next(order.victims())
        order.check(set(range(8)) - {7})
    assert len(order.held) <= 2 * 8 + 64 + 1


@pytest.mark.parametrize("seed", range(10))
def test_a_reservation_gets_all_slots_whatever_was_stored_how(make_pool, seed):
    rng, (pool, clock) = random.Random(seed), make_pool(12)
    for _ in range(100):
        clock.now_s += rng.choice((0.0, 1.0, 3.0))
        tokens = "".join(rng.choice("abc") for _ in range(rng.randrange(1, 6)))
        what = rng.randrange(8)
        if what < 5:
            save(pool, tokens, rng.choice(list(Priority)), clock.now_s + rng.choice((2.0, 5.0, LATER_S)))
        elif what < 6:
            load(pool, tokens)
        elif what < 7:
            pool.pin(chain_of(tokens), "p", PinKind.SOFT)
        else:
            pool.release_owner("p")
    assert len(pool.reserve(12, "w").slots) == 12, "nothing is left that never comes up"
    pool.check_integrity()
    assert (pool.stats().num_low, pool.stats().num_high) == (0, 0)

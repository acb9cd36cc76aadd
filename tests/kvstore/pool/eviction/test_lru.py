"""The log of touches against a plain sorted list."""

import random

from kvstore.pool.eviction.lru import LeastRecentlyUsed
from kvstore.pool.slot_lists import SlotList


def test_oldest_touch_first_and_each_chain_from_its_end():
    order = LeastRecentlyUsed(6)
    order.touched(SlotList.of([0, 1, 2]), is_use=True)
    order.touched(SlotList.of([3, 4]), is_use=True)
    order.touched(SlotList.of([0, 1]), is_use=True)
    assert list(order.victims()) == [2, 4, 3, 1, 0]


def test_a_slot_that_was_passed_comes_up_again_when_offered():
    order = LeastRecentlyUsed(4)
    first = order.touched(SlotList.of([0, 1]), is_use=True)
    second = order.touched(SlotList.of([2, 3]), is_use=True)
    taken = order.victims()
    assert [next(taken), next(taken)] == [1, 0]
    assert order.log.passed == first < second
    order.released([1, 2], 0)
    assert list(order.victims()) == [1, 3, 2], "2 had its place all the time"


def test_what_left_the_order_does_not_come_back():
    order = LeastRecentlyUsed(2)
    order.touched(SlotList.of([0, 1]), is_use=True)
    order.freed(SlotList.of([1]))
    order.released([1], 0)
    assert list(order.victims()) == [0]


def test_many_touches_are_forgotten_little_by_little():
    """Neither memory nor the work of one touch grows, and the order is that of a sorted list."""
    order, rng = LeastRecentlyUsed(40), random.Random(3)
    last: dict[int, tuple[int, int]] = {}
    for now in range(2000):
        begin = rng.randrange(40)
        chain = list(range(begin, min(40, begin + rng.randrange(1, 9))))
        order.touched(SlotList.of(chain), is_use=True)
        last |= {slot: (now, -i) for i, slot in enumerate(chain)}
        assert order.log.num_logged <= 2 * 40 + 64 + 8
        order.check(set(last))
        if now % 50 == 49:
            expected = sorted(last, key=last.__getitem__)
            got = order.victims()
            for slot in expected[:7]:
                assert next(got) == slot
                order.freed(SlotList.of([slot]))
                del last[slot]


def test_a_slot_that_was_touched_since_is_not_let_come_up_twice():
    order = LeastRecentlyUsed(2)
    first = order.touched(SlotList.of([0, 1]), is_use=True)
    assert next(order.victims()) == 1
    second = order.touched(SlotList.of([1]), is_use=True)
    order.released([0, 1], first)
    order.stored([1], second)
    assert list(order.victims()) == [0, 1]

"""The log of touches against a plain sorted list."""

import random

from kvstore.pool.eviction import EvictionOrder
from kvstore.pool.slot_lists import SlotList


def test_oldest_touch_first_and_each_chain_from_its_end():
    order = EvictionOrder(6)
    order.touch(SlotList.of([0, 1, 2]))
    order.touch(SlotList.of([3, 4]))
    order.touch(SlotList.of([0, 1]))
    assert list(order.oldest()) == [2, 4, 3, 1, 0]


def test_a_slot_that_was_passed_comes_up_again_when_offered():
    order = EvictionOrder(4)
    first = order.touch(SlotList.of([0, 1]))
    second = order.touch(SlotList.of([2, 3]))
    taken = order.oldest()
    assert [next(taken), next(taken)] == [1, 0]
    assert order.passed == first < second
    order.offer(1)
    order.offer(2)
    assert list(order.oldest()) == [1, 3, 2], "2 had its place all the time"


def test_what_left_the_order_does_not_come_back():
    order = EvictionOrder(2)
    order.touch(SlotList.of([0, 1]))
    order.stamp[1] = 0
    order.offer(1)
    assert list(order.oldest()) == [0]


def test_many_touches_are_forgotten_little_by_little():
    """Neither memory nor the work of one touch grows, and the order is that of a sorted list."""
    order, rng = EvictionOrder(40), random.Random(3)
    last: dict[int, tuple[int, int]] = {}
    for now in range(2000):
        begin = rng.randrange(40)
        chain = list(range(begin, min(40, begin + rng.randrange(1, 9))))
        order.touch(SlotList.of(chain))
        last |= {slot: (now, -i) for i, slot in enumerate(chain)}
        assert order._num_logged <= 2 * 40 + 64 + 8
        order.check(set(last))
        if now % 50 == 49:
            expected = sorted(last, key=last.__getitem__)
            got = order.oldest()
            for slot in expected[:7]:
                assert next(got) == slot
                order.stamp[slot] = 0
                del last[slot]

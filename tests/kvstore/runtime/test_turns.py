"""Turns: one at a time, in order, and none is lost to an interrupt."""

from __future__ import annotations

import random
import threading
import time

import pytest
from interrupts import Interrupter

from kvstore.runtime.turns import Turns


def nothing(now):
    pass


def in_turn(turns, timeout_s=5.0):
    """Take a turn as callers do; returns it, or None when it was not to be had in time."""
    turn = [threading.get_ident()]
    if turns.take(turn) or turns.wait(turn, timeout_s, nothing):
        return turn
    turns.end(turn)
    return None


def test_a_turn_is_taken_at_once_when_there_is_none():
    turns = Turns()
    first = in_turn(turns)
    assert turns.now is first
    assert not turns.take([1])
    turns.end([1])
    assert turns.now is first, "the end of another one ends nothing"
    turns.end(first)
    turns.end(first)
    assert turns.now is None
    assert in_turn(turns) is not None


def test_turns_come_in_the_order_in_which_they_were_asked_for(wait_until):
    turns, order = Turns(), []
    first = in_turn(turns)

    def wait(name):
        turn = in_turn(turns)
        order.append(name)
        turns.end(turn)

    threads = [threading.Thread(target=wait, args=(name,)) for name in range(5)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        wait_until(lambda number=number: len(turns.waiting) == number)
    turns.end(first)
    assert not turns.take([0]), "those that wait come first"
    for thread in threads:
        thread.join(5)
    assert order == list(range(5))
    assert (turns.now, turns.first, turns.waiting) == (None, None, [])


def test_a_wait_ends_with_its_time_or_by_what_it_checks():
    turns = Turns()
    first = in_turn(turns)
    assert in_turn(turns, 0.02) is None

    def check(now):
        assert now is first
        raise KeyError

    with pytest.raises(KeyError):
        turns.wait([0], 5.0, check)
    assert (turns.now, turns.first, turns.waiting) == (first, None, [])


@pytest.mark.parametrize("ends_s", [0.0, 0.03])
def test_an_interrupt_before_any_line_of_a_wait_keeps_no_other_from_its_turn(ends_s):
    places = set()
    for at in range(1, 60):
        turns, where = Turns(), []
        first = in_turn(turns)

        def wait(turns=turns, where=where, at=at):
            turn = [threading.get_ident()]
            try:
                with Interrupter(at, func="wait") as interrupter:
                    try:
                        turns.wait(turn, 0.1, nothing)
                    finally:
                        where.append(interrupter.where)
            except KeyboardInterrupt:
                pass
            finally:
                turns.end(turn)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(ends_s)
        turns.end(first)
        thread.join(5)
        assert in_turn(turns, 5.0) is not None, where
        assert not turns.waiting, where
        if not where[0]:
            break
        places.add(where[0])
    assert len(places) > 5


def test_one_at_a_time_and_none_is_lost_where_waits_end_all_the_time():
    turns, inside, most, taken = Turns(), [0], [0], [0]
    until_s = time.monotonic() + 1.0

    def ask(seed):
        chance = random.Random(seed)
        while time.monotonic() < until_s:
            if (turn := in_turn(turns, chance.choice([0.0, 1e-5, 1e-3, 1.0]))) is None:
                continue
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            taken[0] += 1
            if chance.random() < 0.1:
                time.sleep(1e-4)
            inside[0] -= 1
            turns.end(turn)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (most[0], inside[0], turns.now, turns.waiting) == (1, 0, None, [])
    assert taken[0] > 100
    assert in_turn(turns, 1.0) is not None

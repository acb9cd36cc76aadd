from functools import partial
from types import SimpleNamespace

import pytest

from kvstore.handoff.waiting import WaitingClaims
from kvstore.runtime import clock


class Blocks:
    """Those of one ticket; `asked` has what each question was told."""

    def __init__(self):
        self.asked, self.there = [], False

    def serve(self, is_last):
        self.asked.append(is_last)
        return self.there or is_last


@pytest.fixture
def blocks():
    return Blocks()


@pytest.fixture
def reader():
    return SimpleNamespace(closed=False)


def test_blocks_that_are_there_are_claimed_at_once(blocks, reader):
    waiting, blocks.there = WaitingClaims(), True
    waiting.serve(b"key", reader, 1.0, blocks.serve)
    assert (blocks.asked, len(waiting)) == ([False], 0)


def test_who_does_not_wait_is_answered_at_once(blocks, reader):
    waiting = WaitingClaims()
    waiting.serve(b"key", reader, 0.0, blocks.serve)
    assert (blocks.asked, len(waiting)) == ([True], 0)


def test_a_claim_is_answered_when_its_blocks_come(blocks, reader):
    waiting = WaitingClaims()
    waiting.serve(b"key", reader, 60.0, blocks.serve)
    waiting.look_again(b"another")
    assert (blocks.asked, len(waiting)) == ([False], 1)
    blocks.there = True
    waiting.look_again(b"key")
    assert (blocks.asked, len(waiting)) == ([False, False], 0)


def test_a_claim_that_waited_long_enough_is_told_so(blocks, reader):
    waiting, now_s = WaitingClaims(), clock.now_s()
    waiting.serve(b"key", reader, 60.0, blocks.serve)
    waiting.tick(now_s + 59.0)
    assert len(waiting) == 1
    waiting.tick(now_s + 62.0)
    assert (blocks.asked, len(waiting)) == ([False, False, True], 0)


def test_nothing_is_claimed_for_a_reader_that_is_gone(blocks, reader):
    waiting = WaitingClaims()
    waiting.serve(b"key", reader, 60.0, blocks.serve)
    blocks.there, reader.closed = True, True
    waiting.look_again(b"key")
    assert (blocks.asked, len(waiting)) == ([False], 0)


def test_several_wait_for_one_ticket(reader):
    waiting, one, other = WaitingClaims(), Blocks(), Blocks()
    for each in (one, other):
        waiting.serve(b"key", reader, 60.0, each.serve)
    one.there = True
    waiting.look_again(b"key")
    assert (one.asked, other.asked, len(waiting)) == ([False, False], [False, False], 1)


def test_who_waits_for_a_ticket_hears_that_its_blocks_are_near_and_nobody_else(reader, blocks):
    waiting, heard = WaitingClaims(), []
    for key, name in ((b"key", "one"), (b"key", "two"), (b"another", "three")):
        waiting.serve(key, reader, 60.0, blocks.serve, lambda name=name: heard.append(name))
    waiting.are_soon(b"key")
    waiting.are_soon(b"unknown")
    assert heard == ["one", "two"]
    assert len(waiting) == 2, "an answer is what they wait for"
    blocks.there = True
    waiting.look_again(b"key")
    waiting.are_soon(b"key")
    assert heard == ["one", "two"]


def test_of_too_many_claims_the_next_ones_do_not_wait(reader, monkeypatch):
    monkeypatch.setattr("kvstore.handoff.waiting._MOST_WAITING", 3)
    waiting, told = WaitingClaims(), []

    def serve(number, is_last):
        if is_last:
            told.append(number)
        return is_last

    for number in range(5):
        waiting.serve(b"%d" % (number % 2), reader, 60.0, partial(serve, number))
    assert told == [3, 4]
    assert len(waiting) == 2, "three claims of two tickets"
    waiting.tick(clock.now_s() + 61.0)
    assert len(waiting) == 0
    assert sorted(told) == [0, 1, 2, 3, 4]


def test_a_claim_that_cannot_be_answered_keeps_no_other_from_its_answer(blocks, reader):
    waiting, failures = WaitingClaims(), []

    def fail(is_last):
        if not failures:
            failures.append(False)
            return False
        failures.append(is_last)
        raise MemoryError

    waiting.serve(b"key", reader, 5.0, fail)
    waiting.serve(b"key", reader, 60.0, blocks.serve)
    blocks.there = True
    waiting.look_again(b"key")
    assert (blocks.asked, len(waiting)) == ([False, False], 1)
    waiting.tick(clock.now_s() + 6.0)
    assert (failures, len(waiting)) == ([False, False, True], 0)


def test_the_claims_of_a_connection_whose_reader_gave_up_are_dropped_and_no_others(blocks, reader):
    waiting, others = WaitingClaims(), Blocks()
    for key in (b"one", b"two"):
        waiting.serve(key, reader, 60.0, blocks.serve)
    waiting.serve(b"two", SimpleNamespace(closed=False), 60.0, others.serve)
    waiting.forget(reader)
    blocks.there = others.there = True
    waiting.look_again(b"one")
    waiting.look_again(b"two")
    assert (blocks.asked, others.asked, len(waiting)) == ([False, False], [False, False], 0)

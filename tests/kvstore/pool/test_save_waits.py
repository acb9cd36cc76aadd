"""Waits for blocks that are being written: until they are there, or given up, or the time is over."""

import threading
import time

import pytest

from kvstore.pool.pool import Pool
from kvstore.pool.save_waits import SaveWaits
from kvstore.runtime import clock
from poolcheck.chains import chain_of

SOON_S = 10.0


@pytest.fixture
def waits():
    made = SaveWaits()
    yield made
    made.close()


class Told:
    """What a wait says, once."""

    def __init__(self):
        self.counts, self.event = [], threading.Event()

    def __call__(self, count):
        self.counts.append(count)
        self.event.set()

    def get(self):
        assert self.event.wait(SOON_S)
        return self.counts


def wait(waits, pool, tokens, within_s):
    told = Told()
    waits.wait(pool, chain_of(tokens), clock.now_s() + within_s, told)
    return told


def test_it_ends_when_the_blocks_are_there(waits):
    pool = Pool(8)
    ticket = pool.prepare_store(chain_of("abc"), "w")
    told = wait(waits, pool, "abc", 6 * SOON_S)
    assert told.counts == []
    pool.complete_store(ticket.write_id, "w")
    assert told.counts == [3], "at once, on the thread that stored them"


def test_it_ends_when_the_writer_gives_up(waits):
    pool = Pool(8)
    ticket = pool.prepare_store(chain_of("abc"), "w")
    told = wait(waits, pool, "abc", 6 * SOON_S)
    pool.abort_store(ticket.write_id, "w")
    assert told.counts == [0]


def test_it_ends_with_its_time_and_not_before(waits):
    pool = Pool(8)
    ticket = pool.prepare_store(chain_of("abc"), "w")
    began_s = time.monotonic()
    late, early = wait(waits, pool, "abc", 0.3), wait(waits, pool, "ab", 0.1)
    assert early.get() == [0]
    assert time.monotonic() - began_s >= 0.1
    assert late.get() == [0]
    assert time.monotonic() - began_s >= 0.3
    pool.complete_store(ticket.write_id, "w")
    assert (late.counts, early.counts) == ([0], [0]), "told once"


def test_nothing_is_waited_for_where_nothing_is_written(waits):
    before = threading.active_count()
    assert wait(waits, Pool(8), "abc", 6 * SOON_S).counts == [0]
    assert threading.active_count() == before, "nor is there a thread for it"


def test_all_waits_end_when_the_store_does(waits):
    pool = Pool(8)
    pool.prepare_store(chain_of("abc"), "w")
    told = [wait(waits, pool, "abc", 6 * SOON_S) for _ in range(3)]
    waits.close()
    assert [each.get() for each in told] == [[0]] * 3
    assert wait(waits, pool, "abc", 6 * SOON_S).counts == [0]
    waits.close()


def test_one_thread_watches_many(waits):
    pool = Pool(8)
    ticket, before = pool.prepare_store(chain_of("abc"), "w"), threading.active_count()
    told = [wait(waits, pool, "abc", 6 * SOON_S) for _ in range(100)]
    assert threading.active_count() == before + 1
    pool.complete_store(ticket.write_id, "w")
    assert [each.counts for each in told] == [[3]] * 100


def test_an_error_of_one_wait_ends_no_other(waits):
    pool = Pool(8)
    pool.prepare_store(chain_of("abc"), "w")

    def broken(count):
        raise ValueError("a bug")

    waits.wait(pool, chain_of("abc"), clock.now_s() + 0.05, broken)
    assert wait(waits, pool, "abc", 0.1).get() == [0]


def test_without_a_thread_nobody_waits(waits, monkeypatch):
    def no_thread(*args, **more):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    pool = Pool(8)
    pool.prepare_store(chain_of("abc"), "w")
    assert wait(waits, pool, "abc", 6 * SOON_S).counts == [0]


def test_waits_that_have_ended_are_forgotten_long_before_their_time(waits):
    pool = Pool(8)
    for _ in range(5000):
        ticket = pool.prepare_store(chain_of("abc"), "w")
        told = wait(waits, pool, "abc", 3600.0)
        pool.abort_store(ticket.write_id, "w")
        assert told.counts == [0]
    assert len(waits.ends) < 2000

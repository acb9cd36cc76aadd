"""The eviction loop: between the watermarks, in short steps, alive after errors, and gone after `stop`."""

import threading
import time

import pytest
from disk_store import wait_until

from kvstore.blocks.chain import BlockHashes
from kvstore.pool.pool import Pool
from kvstore.pool.reclaim import Reclaimer

SPACE, NEVER_S = b"n" * 32, float("inf")


def chain(*numbers):
    return BlockHashes(SPACE, SPACE, 0, b"".join(number.to_bytes(4, "little") * 8 for number in numbers))


def store(pool, first, count):
    hashes = chain(*range(first, first + count))
    ticket = pool.prepare_store(hashes, "writer")
    assert pool.complete_store(ticket.write_id, "writer") == count
    return hashes


@pytest.fixture
def begin():
    loops = []

    def begin(num_slots, low, high, disk=None):
        pool = Pool(num_slots)
        loops.append(Reclaimer(pool, low, high, disk))
        return pool, loops[-1]

    yield begin
    for loop in loops:
        assert loop.stop(10.0)


def test_it_evicts_from_the_low_watermark_to_the_high_one(begin):
    pool, loop = begin(100, 0.1, 0.25)
    old, new = store(pool, 0, 60), store(pool, 100, 30)
    assert (pool.num_free, loop.stats()["num_evicted"]) == (10, 0), "not below yet"
    store(pool, 200, 1)
    wait_until(lambda: pool.num_free == 25)
    pool.check_integrity()
    assert loop.stats() == {"is_alive": True, "num_evicted": 16, "num_failures": 0}
    assert (pool.lookup(old), pool.lookup(new)) == (60 - 16, 30), "by the pool's own order"


def test_a_claim_finds_free_slots(begin):
    pool, _ = begin(1000, 0.2, 0.4)
    for first in range(0, 20_000, 100):
        before = pool.num_free
        store(pool, first, 100)
        assert before >= 100 or pool.num_free == 0
        wait_until(lambda: pool.num_free >= 200)
    pool.check_integrity()


def test_it_leaves_what_is_in_use_until_it_is_not(begin):
    pool, loop = begin(20, 0.2, 0.5)
    grant = pool.pin_prefix(store(pool, 0, 16), "reader", NEVER_S)
    ticket = pool.prepare_store(chain(100, 101), "writer")
    time.sleep(0.05)
    assert (pool.num_free, loop.stats()["num_evicted"]) == (2, 0)
    pool.complete_store(ticket.write_id, "writer")
    wait_until(lambda: pool.num_free == 4)
    pool.release(grant.lease_id, "reader")
    # Not below the low watermark: only a claim wakes it.
    store(pool, 200, 1)
    wait_until(lambda: pool.num_free == 10)
    assert loop.stats()["is_alive"]


def test_it_goes_on_after_errors(begin, monkeypatch, caplog):
    pool, loop = begin(20, 0.2, 0.5)
    calls, evict = [], pool.evict

    def fail_often(num_blocks):
        calls.append(num_blocks)
        if len(calls) <= 3:
            raise RuntimeError("broken")
        return evict(num_blocks)

    monkeypatch.setattr(pool, "evict", fail_often)
    store(pool, 0, 18)
    wait_until(lambda: pool.num_free == 10)
    wait_until(lambda: loop.stats() == {"is_alive": True, "num_evicted": 8, "num_failures": 3})
    assert caplog.text.count("the eviction loop failed") == 1, "logged once"


def test_others_have_the_lock_between_its_steps(begin, monkeypatch):
    monkeypatch.setattr("kvstore.pool.reclaim._AT_ONCE", 2)
    pool, _ = begin(100, 0.3, 0.5)
    steps, evict = [], pool.evict
    monkeypatch.setattr(pool, "evict", lambda num_blocks: steps.append(num_blocks) or evict(num_blocks))
    store(pool, 0, 100)
    wait_until(lambda: pool.num_free == 50)
    assert len(steps) >= 25
    assert set(steps) == {2}


class Disk:
    """A tier that takes blocks as it is told."""

    def __init__(self, pool=None):
        self.pool, self.can_write_back, self.asked, self.gone = pool, True, [], []
        self.lets = threading.Event()

    def write_back(self, num_blocks, timeout_s):
        self.asked.append(num_blocks)
        return self.pool.evict(min(num_blocks, 3)) or None if self.lets.wait(timeout_s) else 0

    def evicted(self, hashes, num_low):
        self.gone += hashes


def test_a_disk_takes_blocks_first(begin):
    disk = Disk()
    disk.pool, loop = begin(20, 0.2, 0.5, disk)
    disk.lets.set()
    store(disk.pool, 0, 18)
    wait_until(lambda: disk.pool.num_free == 10)
    wait_until(lambda: loop.stats()["num_evicted"] == 8)
    assert disk.asked[-3:] == [8, 5, 2]


def test_a_disk_that_goes_off_while_it_is_waited_for(begin):
    disk = Disk()
    disk.pool, loop = begin(20, 0.2, 0.5, disk)
    store(disk.pool, 0, 18)
    wait_until(lambda: disk.asked)
    assert disk.pool.num_free == 2
    disk.can_write_back = False
    wait_until(lambda: disk.pool.num_free == 10)
    wait_until(lambda: loop.stats()["num_evicted"] == 8)
    assert len(disk.gone) == 8


def test_it_can_be_stopped_while_the_disk_is_slow(begin):
    disk = Disk()
    disk.pool, loop = begin(20, 0.2, 0.5, disk)
    store(disk.pool, 0, 18)
    wait_until(lambda: disk.asked)
    assert loop.stop(10.0)
    assert not loop.stats()["is_alive"]
    assert loop.stop(10.0)

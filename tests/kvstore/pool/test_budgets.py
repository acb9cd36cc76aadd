"""What callers may have of a pool's memory and time: blocks are counted, however few leases or writes they are in."""

from __future__ import annotations

import random
import time

import pytest

from kvstore.blocks.chain import HASH_BYTES, BlockHashes
from kvstore.bounds import MAX_PARTS
from kvstore.errors import InvalidRequest, PoolExhausted
from kvstore.pool import leases, writes
from kvstore.pool.pool import PinKind, Pool
from poolcheck.chains import LATER_S, NAMESPACES, chain_of, store


@pytest.fixture
def room(monkeypatch):
    """A budget of ten blocks."""
    monkeypatch.setattr(leases, "MAX_HELD_BLOCKS", 10)
    monkeypatch.setattr(writes, "MAX_HELD_BLOCKS", 10)


@pytest.mark.parametrize("kind", PinKind)
def test_leases_are_weighed_by_their_blocks(room, kind):
    pool = Pool(8, max_pinned=8, max_hard_pinned=8)
    store(pool, "abcd")
    held = [pool.pin(chain_of("abcd"), "r", kind).lease_id for _ in range(3)]
    before = pool.stats()
    with pytest.raises(PoolExhausted, match=r"wanted leases and pins of at most 10 blocks .* got 12"):
        pool.pin(chain_of("abcd"), "r", kind)
    assert pool.stats() == before
    pool.check_integrity()
    assert pool.release(held[0], "r")
    grown = pool.pin_prefix(chain_of("ab"), "r", LATER_S, lease_id=held[1])
    assert len(grown.slots) == 2
    with pytest.raises(PoolExhausted, match="got 10"):
        pool.pin_prefix(chain_of("ab"), "r", LATER_S, lease_id=held[1])
    pool.check_integrity()
    assert pool.release_owner("r") == 2
    assert len(pool.pin(chain_of("abcd"), "r", kind).slots) == 4
    pool.check_integrity()


def test_writes_are_weighed_by_their_blocks_and_by_those_that_they_keep(room):
    pool = Pool(40, max_pinned=8)
    store(pool, "abcd")
    first = pool.prepare_store(chain_of("abcdef"), "w")
    ranks = [pool.prepare_store(chain_of("xy"), "w", num_parts=4, part=part) for part in range(2)]
    before = pool.stats()
    with pytest.raises(PoolExhausted, match=r"wanted unfinished writes of at most 10 blocks .* got 10"):
        pool.prepare_store(chain_of("xy"), "w", num_parts=4, part=2)
    with pytest.raises(PoolExhausted, match="got 10"):
        pool.prepare_store(chain_of("q"), "w")
    assert pool.stats() == before
    pool.check_integrity()
    assert pool.complete_store(first.write_id, "w") == 2
    assert pool.prepare_store(chain_of("xy"), "w", num_parts=4, part=2).write_id
    pool.abort_store(ranks[0].write_id, "w")
    assert pool.release_owner("w") == 2
    pool.check_integrity()
    assert pool.prepare_store(chain_of("q"), "w").write_id


def test_reservations_are_weighed_too(room):
    pool = Pool(40)
    pool.reserve(12, "f")
    with pytest.raises(PoolExhausted, match="got 12"):
        pool.reserve(1, "f")


@pytest.mark.parametrize("num_parts", [MAX_PARTS + 1, 65535, 1 << 40])
def test_more_parts_than_there_are_ranks_are_refused(num_parts):
    pool = Pool(8)
    with pytest.raises(InvalidRequest, match=f"num_parts: wanted an integer from 1 to {MAX_PARTS}, got {num_parts}"):
        pool.prepare_store(chain_of("ab"), "w", num_parts=num_parts)
    assert pool.prepare_store(chain_of("ab"), "w", num_parts=MAX_PARTS, part=MAX_PARTS - 1).write_id


def test_many_watches_of_the_same_blocks_end_as_fast_one_by_one():
    pool, chain = Pool(200), BlockHashes(NAMESPACES[0], NAMESPACES[0], 0, random.Random(1).randbytes(200 * HASH_BYTES))
    pool.prepare_store(chain, "w")
    told = list[int]()
    numbers = [pool.watch(chain, told.append) for _ in range(3000)]
    begin_s = time.thread_time()
    for number in reversed(numbers):
        pool.end_watch(number)
    # Far from either: a fifth of a second, and half a minute for searching lists.
    assert time.thread_time() - begin_s < 3.0
    assert told == [0] * 3000


@pytest.mark.parametrize("is_published", [True, False])
def test_many_watches_of_the_same_blocks_end_at_once_with_their_writer(is_published):
    pool, chain = (
        Pool(1000),
        BlockHashes(NAMESPACES[0], NAMESPACES[0], 0, random.Random(1).randbytes(1000 * HASH_BYTES)),
    )
    ticket = pool.prepare_store(chain, "w")
    told = list[int]()
    for _ in range(4000):
        pool.watch(chain, told.append)
    begin_s = time.thread_time()
    end = pool.complete_store if is_published else pool.abort_store
    assert end(ticket.write_id, "w") == 1000
    # Far from either: some hundredths of a second, and four for block by block.
    assert time.thread_time() - begin_s < 1.0
    assert told == [1000 if is_published else 0] * 4000


@pytest.mark.parametrize("what", ["leases", "writes"])
def test_whether_an_owner_holds_something_is_not_looked_for_among_all_that_is_held(what):
    count = 20000
    pool = Pool(count + 1)
    store(pool, "a")
    for _ in range(count):
        if what == "leases":
            pool.pin_prefix(chain_of("a"), "other", LATER_S)
        else:
            pool.reserve(1, "other")
    begin_s = time.thread_time()
    for _ in range(2000):
        assert not pool.holds("me")
        assert pool.release_owner("me") == 0
    # Far from either: some milliseconds, and seconds for looking at each.
    assert time.thread_time() - begin_s < 1.0
    assert pool.holds("other")
    assert pool.release_owner("other") == count
    assert not pool.holds("other")
    pool.check_integrity()


def test_ranks_of_a_write_keep_one_copy_of_its_hashes():
    pool = Pool(8)
    run = BlockHashes(NAMESPACES[0], NAMESPACES[0], 0, b"".join(chain_of("abcd").hashes()))
    for part in range(2):
        pool.prepare_store(run, "w", num_parts=2, part=part)
    first, second = pool.writes.held.values()
    assert all(ours is theirs for ours, theirs in zip(first.hashes, second.hashes, strict=True))

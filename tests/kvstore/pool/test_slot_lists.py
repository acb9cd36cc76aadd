"""A run of blocks finds what one look-up for each block would find."""

import random
import time

import numpy as np
import pytest

from kvstore.blocks.chain import HASH_BYTES, BlockHashes
from kvstore.blocks.indexes import ints_in
from kvstore.pool.pool import Pool
from kvstore.pool.runs import Run
from kvstore.pool.slot_lists import SlotList, join

SPACE = bytes(32)


def names(count: int, seed: int = 0) -> list[bytes]:
    return [bytes([seed, i % 256]) * 16 for i in range(count)]


def run_of(count: int, num_ready: int, seed: int = 0) -> Run:
    slots = list(range(10, 10 + count))
    return Run(b"".join(names(count, seed)), slots, SlotList.of(slots), num_ready)


@pytest.mark.parametrize("num_ready", [1, 3, 8])
@pytest.mark.parametrize("place", [0, 2, 7])
@pytest.mark.parametrize("at", [0, 5])
def test_as_many_are_shared_as_are_the_same_and_ready(num_ready, place, at):
    run = run_of(8, num_ready)
    for same in range(1, 9 - place):
        theirs = [*names(at, 1), *names(8)[place : place + same], *names(3, 2)]
        wanted = max(1, min(same, num_ready - place))
        assert run.num_shared(place, b"".join(theirs), at) == wanted


def test_blocks_that_were_published_out_of_order_are_not_known():
    run = run_of(6, 0)
    run.published(run.slots[2:4])
    assert run.num_ready == 0
    run.published(run.slots[:2])
    assert run.num_ready == 2
    run.published([12, 14])
    assert run.num_ready == 2
    run.published(run.slots[2:])
    assert run.num_ready == 6
    run.lost(4)
    run.lost(5)
    assert run.num_ready == 4


@pytest.mark.parametrize(
    "slots", [[], [5], [3, 4, 5], [3, 5, 4], [5, 4, 3], [2, 9, 11], [4, 4], [4, 5, 5, 6], [3, 3, 5]]
)
def test_a_list_of_slots_takes_the_same_items_in_every_form(slots):
    column, listed = np.arange(20), SlotList.of(slots)
    assert column[listed.index].tolist() == list(listed) == slots
    assert listed.is_distinct == (len(set(slots)) == len(slots))
    for begin in range(len(slots) + 1):
        for end in range(begin, len(slots) + 1):
            part = listed.part(begin, end)
            assert column[part.index].tolist() == list(part) == ints_in(part.packed).tolist() == slots[begin:end]
            both = join([listed, part])
            assert column[both.index].tolist() == list(both) == [*slots, *slots[begin:end]]
            assert both.is_distinct == (len(set(list(both))) == len(both))


@pytest.mark.parametrize("seed", range(30))
def test_a_prefix_is_that_of_block_by_block(seed):
    """Conversations that share turns, in a pool too small for them."""
    rng, pool = random.Random(seed), Pool(24)
    chains = [[b""]]
    for turn in range(60):
        begin = rng.choice(chains)[1:]
        wanted = [*begin[: rng.randrange(len(begin) + 1)], *(rng.randbytes(32) for _ in range(rng.randrange(1, 6)))]
        chain = BlockHashes(SPACE, SPACE, 0, b"".join(wanted))
        ticket = pool.prepare_store(chain, "w")
        if rng.random() < 0.8:
            pool.complete_store(ticket.write_id, "w", count=rng.choice([None, 1]))
        pool.abort_store(ticket.write_id, "w")
        chains.append([b"", *wanted])
        asked = [*rng.choice(chains)[1:], *rng.choice(chains)[1:]] if turn % 3 == 0 else rng.choice(chains)[1:]
        found = [pool.table.index.space_of(SPACE).ready.get(own) for own in asked]
        count = found.index(None) if None in found else len(found)
        question = BlockHashes(SPACE, SPACE, 0, b"".join(asked))
        assert pool.lookup(question) == count
        grant = pool.pin_prefix(question, "r", 1e9)
        assert grant.slots == tuple(found[:count])
        pool.check_integrity()
        if rng.random() < 0.7:
            assert pool.release(grant.lease_id, "r")
        pool.check_integrity()
        if turn % 20 == 19:
            pool.release_owner("r")


@pytest.mark.parametrize("same", [1, 2, 15, 16, 17, 18, 130, 1024, 5000])
def test_long_runs_are_shared_up_to_the_first_difference(same):
    rng = random.Random(same)
    count = 5000
    data, other = rng.randbytes(HASH_BYTES * count), rng.randbytes(HASH_BYTES * count)
    slots = list(range(count))
    run = Run(data, slots, SlotList.of(slots), count)
    cut = HASH_BYTES * same
    assert run.num_shared(0, data[:cut] + other[cut:], 0) == same
    # In the last bytes of a block as well as in the first.
    if same < count:
        changed = bytearray(data)
        changed[cut + HASH_BYTES - 1] ^= 1
        assert run.num_shared(0, bytes(changed), 0) == same


@pytest.mark.parametrize("order", ["repeated", "shuffled"])
def test_what_is_asked_for_in_another_order_costs_no_more_than_a_few_look_ups_each(order):
    """In one message of 4 MiB: were the rest of the run compared for each block, the store would stand for seconds."""
    count = 131072
    rng = random.Random(3)
    data = rng.randbytes(HASH_BYTES * count)
    pool = Pool(count)
    ticket = pool.prepare_store(BlockHashes(SPACE, SPACE, 0, data), "w")
    pool.complete_store(ticket.write_id, "w")
    places = [0] * count if order == "repeated" else rng.sample(range(count), count)
    asked = BlockHashes(SPACE, SPACE, 0, b"".join(data[HASH_BYTES * i : HASH_BYTES * (i + 1)] for i in places))
    # The time of this thread alone, and far from what either way takes: a tenth of a second, and minutes.
    begin_s = time.thread_time()
    assert pool.lookup(asked) == count
    assert time.thread_time() - begin_s < 5.0

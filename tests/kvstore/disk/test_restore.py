"""A pool filled from the records of an earlier life."""

import pytest
from disk_made import SPACE, chain, digest, record

from kvstore.blocks.chain import BlockHashes
from kvstore.disk.places import Places
from kvstore.disk.restore import restore, usable
from kvstore.pool.pool import Pool

NUM_SLOTS = 16


def run_of(records):
    first = records[0]
    return BlockHashes(first.namespace, first.parent, first.depth, b"".join(each.block_hash for each in records))


@pytest.fixture
def pool():
    made = Pool(NUM_SLOTS)
    yield made
    made.check_integrity()


def fill(pool, records, num_clears=0):
    places = Places(NUM_SLOTS)
    count = restore(pool, places, records, {each.namespace: num_clears for each in records})
    pool.check_integrity()
    return count, places


def test_what_was_there_is_found_at_its_place(pool):
    blocks = chain(9, 3, 7, 5)
    count, places = fill(pool, blocks)
    assert (count, pool.lookup(run_of(blocks))) == (4, 4)
    grant = pool.pin_prefix(run_of(blocks), "test", 1e12)
    assert [places.place[slot] for slot in grant.slots] == [9, 3, 7, 5]
    assert [places.record[slot] for slot in grant.slots] == blocks
    pool.release(grant.lease_id, "test")


def test_forks_gaps_and_other_namespaces(pool):
    trunk, branch = chain(1, 2, 3), chain(4, 5, depth=2, parent=2)
    lost_parent = chain(6, 7, depth=4, parent=99)
    other = chain(8, 9, parent=digest(555), namespace=digest(555))
    count, _ = fill(pool, [*lost_parent, *branch, *trunk, *other])
    assert count == 9
    assert pool.lookup(run_of([*trunk[:2], *branch])) == 4
    assert pool.lookup(run_of(trunk)) == 3
    assert pool.lookup(run_of(other)) == 2


def test_records_that_make_no_chain_are_left_out(pool):
    blocks = [record(1, own=1, depth=3), record(2, own=2, parent=2, depth=1), *chain(3, 4)]
    blocks.append(record(5, own=5, parent=77, depth=0))
    count, _ = fill(pool, blocks)
    assert count >= 2
    assert pool.lookup(run_of(chain(3, 4))) == 2


def test_the_newest_of_two_copies_counts():
    old, new = record(1, own=1, generation=4), record(2, own=1, generation=9)
    for both in ([old, new], [new, old]):
        assert usable(both, NUM_SLOTS, 4096, lambda space: 3) == [new]


def test_what_is_not_usable():
    one = record(3)
    assert usable([one], 4, 1024, lambda space: 3) == [one]
    assert usable([one], 3, 1024, lambda space: 3) == [], "beyond the end of the file"
    assert usable([one], 4, 1023, lambda space: 3) == [], "larger than a slot"
    assert usable([one], 4, 1024, lambda space: 4) == [], "cleared since"
    assert usable([one], 4, 1024, lambda space: 2) == [], "of a clearing that nobody knows"


def test_what_is_cleared_while_it_is_restored_is_not_found(pool):
    """The clearing comes after the versions were read."""
    blocks = chain(1, 2, 3)
    noted = pool.num_clears(SPACE)
    pool.clear(SPACE)
    count, _ = fill(pool, blocks, noted)
    assert (count, pool.lookup(run_of(blocks))) == (0, 0)


def test_the_runs_that_were_written_last_are_evicted_last(pool):
    old, new = chain(1, 2, generation=5), chain(3, 4, generation=50)
    fill(pool, [*new, *old])
    more = chain(*range(100, 100 + NUM_SLOTS - 2))
    pool.abort_store(pool.prepare_store(run_of(more), "test").write_id, "test")
    assert (pool.lookup(run_of(old)), pool.lookup(run_of(new))) == (0, 2)


def test_the_pool_is_full_of_restored_blocks(pool):
    blocks = chain(*range(NUM_SLOTS))
    assert fill(pool, blocks)[0] == NUM_SLOTS
    assert pool.stats().num_evicted == 0


def test_blocks_of_the_disk_know_their_roots_also_those_that_come_before_them_and_no_others():
    pool, places = Pool(NUM_SLOTS, has_roots=True), Places(NUM_SLOTS)
    trunk, branch, lost = chain(1, 2, 3), chain(4, 5, depth=2, parent=2), chain(6, 7, depth=4, parent=99)
    newest_first = [each for run in (trunk, branch, lost) for each in run]
    assert restore(pool, places, newest_first, {SPACE: 0}) == 7
    [(hashes, roots)] = pool.resident_rooted()
    root_key = int.from_bytes(trunk[0].block_hash[:4], "little")
    known = {each.block_hash for each in [*trunk, *branch]}
    assert dict(zip(hashes, roots.tolist(), strict=True)) == {
        own: root_key if own in known else 0 for own in hashes
    }  # fmt: skip
    pool.check_integrity()

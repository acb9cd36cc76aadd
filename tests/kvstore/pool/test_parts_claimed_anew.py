"""Ranks, and slots that were given back and claimed anew: what another rank wrote there before does not count."""

import hashlib

from kvstore.blocks.chain import HASH_BYTES, BlockHashes
from kvstore.pool.pool import Pool

NAMESPACE, OTHER = (hashlib.sha256(name).digest() for name in (b"n", b"m"))


def name(letter):
    return hashlib.sha256(letter.encode()).digest()[:HASH_BYTES]


def run(letters, namespace=NAMESPACE, parent=None, start=0):
    return BlockHashes(namespace, parent or namespace, start, b"".join(map(name, letters)))


def used_in_between():
    """A pool where one rank wrote its part of A to D, and B and C were given up and their slots used by others."""
    pool = Pool(4)
    first = pool.prepare_store(run("ABCD"), "rank1", num_parts=2, part=1)
    assert list(first.slots) == [0, 1, 2, 3]
    pool.complete_store(first.write_id, "rank1")
    failed = pool.prepare_store(run("BC", parent=name("A"), start=1), "rank0", num_parts=2, part=0)
    pool.abort_store(failed.write_id, "rank0")
    other = pool.prepare_store(run("YZ", OTHER), "other")
    assert list(other.slots) == [1, 2]
    pool.complete_store(other.write_id, "other")
    pool.clear(OTHER)
    return pool


def test_a_part_that_was_written_before_a_slot_was_claimed_anew_does_not_count():
    pool = used_in_between()
    again = pool.prepare_store(run("ABC"), "rank0", num_parts=2, part=0)
    assert list(again.slots) == [0, 1, 2]
    pool.check_integrity()
    assert pool.complete_store(again.write_id, "rank0") == 1, "rank 1 has not written B and C again"
    assert pool.lookup(run("ABC")) == 1
    pool.check_integrity()


def test_blocks_are_not_found_under_the_names_that_their_slots_had_in_an_earlier_claim():
    pool = used_in_between()
    tickets = [pool.prepare_store(run("AXW"), f"rank{part}", num_parts=2, part=part) for part in (0, 1)]
    assert list(tickets[0].slots) == [0, 1, 2]
    assert pool.complete_store(tickets[1].write_id, "rank1") == 0
    assert pool.complete_store(tickets[0].write_id, "rank0") == 3, "blocks of two claims at once"
    pool.check_integrity()
    assert pool.lookup(run("AXW")) == 3
    assert pool.lookup(run("ABC")) == 1
    pool.check_integrity()


def test_the_cost_of_a_message_is_bounded_by_its_length_in_whatever_pieces_its_slots_were_claimed():
    class Counted(list):
        num_read = 0

        def __getitem__(self, key):
            Counted.num_read += 1
            return super().__getitem__(key)

    num_blocks = 2048
    letters = [str(number) for number in range(num_blocks)]
    pool = Pool(num_blocks)
    first = pool.prepare_store(run(letters), "rank1", num_parts=3, part=1)
    pool.complete_store(first.write_id, "rank1")
    for number in range(1, num_blocks, 2):  # Every other block is claimed anew, in the slot that it had.
        block = run([letters[number]], parent=name(letters[number - 1]), start=number)
        failed = pool.prepare_store(block, "rank0", num_parts=3, part=0)
        pool.abort_store(failed.write_id, "rank0")
        assert list(pool.prepare_store(block, "rank0", num_parts=3, part=0).slots) == [number]
    pool.table.index.claims.run = Counted(pool.table.index.run)
    joined = pool.prepare_store(run(letters), "rank2", num_parts=3, part=2)
    assert len(joined.slots) == num_blocks
    assert Counted.num_read < 100 * num_blocks


def test_blocks_that_all_ranks_write_are_given_up_by_no_deadline():
    pool = Pool(2)
    tickets = [
        pool.prepare_store(run(letters), f"rank{part}", num_parts=2, part=part, parts_deadline_s=10.0)
        for part, letters in enumerate(["AB", "A"])
    ]
    pool.expire(11.0)
    pool.check_integrity()
    assert pool.complete_store(tickets[1].write_id, "rank1") == 0
    assert pool.complete_store(tickets[0].write_id, "rank0") == 1
    assert pool.lookup(run("AB")) == 1, "the ranks of B did not all come in time"


def test_what_is_left_of_a_claim_in_parts_can_be_joined():
    """Most of it was given up, so that its run could be shortened, whose places the parts count by."""
    pool = Pool(4)
    first = pool.prepare_store(run("ABCD"), "rank1", num_parts=2, part=1)
    tail = pool.prepare_store(run("BCD", parent=name("A"), start=1), "rank0", num_parts=2, part=0)
    pool.abort_store(tail.write_id, "rank0")
    pool.check_integrity()
    head = pool.prepare_store(run("A"), "rank0", num_parts=2, part=0)
    assert list(head.indexes) == [0]
    assert pool.complete_store(head.write_id, "rank0") == 0
    assert pool.complete_store(first.write_id, "rank1") == 1
    pool.check_integrity()
    assert pool.lookup(run("ABCD")) == 1
    assert pool.stats().num_free == 3

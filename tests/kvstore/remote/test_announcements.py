"""What a store announces, batch by batch: a directory that takes them in knows what the pool holds."""

from __future__ import annotations

import os
import string

import pytest
from directory_client import Reader
from hypothesis import given
from hypothesis import strategies as st

from kvstore.blocks.chain import hashes_in
from kvstore.blocks.codec import encode
from kvstore.pool.pool import Pool
from kvstore.remote.announcements import PIECE_BLOCKS, Announcements, Batch, decode_batch
from poolcheck.chains import NAMESPACES, chain_of, store

TOKENS = string.ascii_letters


def following(pool, piece_blocks):
    made = Announcements(piece_blocks)
    made.follow(pool)
    return made


@pytest.mark.parametrize("num_versions", [0, 3])
def test_a_batch_survives_the_wire(num_versions):
    hashes = [os.urandom(32) for _ in range(5)]
    versions = {os.urandom(32): i for i in range(num_versions)}
    for begins, ends in ((False, False), (True, False), (False, True), (True, True)):
        added, removed = b"".join(hashes[:2]), b"".join(hashes[2:])
        made = Batch(sequence=2**40, begins=begins, ends=ends, added=added, removed=removed, versions=versions)
        assert decode_batch(encode(made)) == made


def test_the_largest_batch_is_well_below_any_limit():
    made = Batch(sequence=1, begins=True, ends=False, added=bytes(32 * PIECE_BLOCKS), removed=b"", versions={})
    assert len(encode(made)) < 2 << 20


def test_the_first_batch_of_a_store_without_a_pool_is_a_full_announcement_of_nothing():
    announcements = Announcements()
    first, second = announcements.next({}), announcements.next({})
    assert (first.sequence, first.begins, first.ends, first.added) == (1, True, True, b"")
    assert (second.sequence, second.begins, second.ends) == (2, False, False)
    announcements.begin_connection()
    assert announcements.next({}) == first


def test_a_full_announcement_comes_in_pieces():
    pool, reader = Pool(64), Reader()
    store(pool, TOKENS[:50])
    pool.drain_events()
    reader.take_all(following(pool, 8))
    assert reader.known == set(pool.resident_hashes())
    assert reader.sizes == [8] * 6 + [2]


def test_changes_come_before_the_rest_of_a_full_announcement():
    pool, reader = Pool(64), Reader()
    store(pool, TOKENS[:50])
    pool.drain_events()
    announcements = following(pool, 8)
    reader.take(announcements.next({}))
    store(pool, "XYZ")
    batch = announcements.next({})
    assert set(chain_of("XYZ").hashes()) <= set(hashes_in(batch.added))
    assert announcements.are_changes_told
    assert not announcements.is_all_told
    reader.take(batch)
    pool.clear(NAMESPACES[0])
    reader.take_all(announcements)
    assert reader.known == set(pool.resident_hashes()) == set()


def test_many_changes_come_in_pieces_and_are_told_with_the_last_one():
    pool, reader = Pool(64), Reader()
    announcements = following(pool, 8)
    reader.take_all(announcements)
    store(pool, TOKENS[:20])
    told = []
    for _ in range(3):
        reader.take(announcements.next({}))
        told.append(announcements.are_changes_told)
    assert told == [False, False, True]
    assert reader.sizes[1:] == [8, 8, 4]
    assert reader.known == set(pool.resident_hashes())


def test_changes_that_the_pool_did_not_keep_make_a_full_announcement():
    pool, reader = Pool(8), Reader()
    announcements = following(pool, 4)
    reader.take_all(announcements)
    store(pool, "abc")
    pool.table.index.events.max_hashes = 2
    store(pool, "uvw")
    batch = announcements.next({})
    assert batch.begins
    assert not announcements.are_changes_told, "nobody knows whether they were in it"
    reader.take(batch)
    reader.take_all(announcements)
    assert reader.known == set(pool.resident_hashes())
    assert announcements.are_changes_told


@given(
    st.lists(st.sampled_from(["save", "clear", "tell", "connect", "follow", "lose"]), max_size=40), st.integers(2, 9)
)
def test_whatever_happens_in_between_the_reader_ends_with_what_the_pool_holds(steps, piece_blocks):
    pool, number = Pool(12), 0
    pool.table.index.events.max_hashes = 8  # More than one save has, and fewer than two that evict.
    announcements, reader = following(pool, piece_blocks), Reader()
    for step in steps:
        if step == "save":
            number += 1
            store(pool, chr(number + 0x100) + "uvwx")
        elif step == "clear":
            pool.clear(NAMESPACES[0])
        elif step == "tell":
            reader.take(announcements.next({}))
        elif step == "connect":
            announcements.begin_connection()
            reader = Reader()
        else:
            pool = Pool(12)
            pool.table.index.events.max_hashes = 8
            announcements.follow(pool)
    reader.take_all(announcements)
    reader.take_all(announcements)
    assert reader.known == set(pool.resident_hashes())
    assert reader.coming is None
    assert max(reader.sizes) <= piece_blocks


def test_a_full_announcement_that_was_looked_for_twice_still_begins():
    pool = Pool(64)
    store(pool, TOKENS[:5])
    announcements = following(pool, 8)
    assert announcements.has_news()
    assert announcements.has_news()
    assert announcements.next({}).begins

"""Changes of a node's blocks, divided by the roots of their chains: each shard ends with its own blocks."""

from __future__ import annotations

import random

import numpy as np
import pytest
from directory_client import Reader

from kvstore.blocks.chain import BlockHashes
from kvstore.node.residents import Residents
from kvstore.pool.pool import Pool
from kvstore.remote.announcements import Announcements
from kvstore.remote.shards.placing import merged, shard_of
from kvstore.remote.shards.split import Split

SPACE = b"n" * 32
NUM_SHARDS = 3


def chain_of(number: int, length: int = 6) -> BlockHashes:
    return BlockHashes(SPACE, SPACE, 0, random.Random(number).randbytes(32 * length))


def put(pool: Pool, chain: BlockHashes, **more) -> None:
    ticket = pool.prepare_store(chain, "writer", **more)
    if ticket.write_id:
        pool.complete_store(ticket.write_id, "writer")


def expected(pools, chains) -> list[set[bytes]]:
    """Return the blocks of each shard that are here, by the chains that they were made from."""
    here = set[bytes]().union(*(pool.present([own for chain in chains for own in chain]) for pool in pools))
    found = [set[bytes]() for _ in range(NUM_SHARDS)]
    for chain in chains:
        found[chain.root_key % NUM_SHARDS].update(here.intersection(chain.hashes()))
    return found


def test_a_root_names_one_shard_and_an_unknown_root_none():
    assert [shard_of(key, 4) for key in (1, 4, 7)] == [1, 0, 3]
    assert shard_of(0, 4) is None
    assert shard_of(0, 1) == shard_of(9, 1) == 0


def test_answers_of_several_shards_are_one_with_the_longest_prefix_of_each_node():
    assert merged([[("b", 3), ("a", 1)], [], [("a", 2), ("c", 2)]]) == [("b", 3), ("a", 2), ("c", 2)]
    assert merged([[("a", 3)], [("a", 1)]]) == [("a", 3)]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_and_goes_each_shard_ends_with_the_blocks_of_its_roots(seed):
    """Saves, evictions, clearings and lost changes of two tiers; links that take their part at any time."""
    rng, tiers = random.Random(seed), [Pool(40, has_roots=True), Pool(60, has_roots=True)]
    chains, split = [chain_of(number) for number in range(30)], Split(NUM_SHARDS, most_kept=50)
    announcing, readers = [Announcements(8) for _ in range(NUM_SHARDS)], [Reader() for _ in range(NUM_SHARDS)]
    split.follow(Residents(*tiers))
    for each, part in zip(announcing, split.parts, strict=True):
        each.follow(part)
    for _ in range(400):
        act, number = rng.random(), rng.randrange(NUM_SHARDS)
        if act < 0.5:
            put(rng.choice(tiers), rng.choice(chains).head(rng.randint(1, 6)))
        elif act < 0.55:
            tiers[0].clear(SPACE)
        elif act < 0.6:
            tiers[1].discard([rng.randrange(60)])
        elif act < 0.62:
            announcing[number].begin_connection()
            readers[number] = Reader()
        else:
            readers[number].take(announcing[number].next({}))
        for tier in tiers:
            tier.table.index.events.max_hashes = rng.choice((60, 1000))
    for reader, each in zip(readers, announcing, strict=True):
        reader.take_all(each)
    for reader, each in zip(readers, announcing, strict=True):
        reader.take_all(each)
    assert [reader.known for reader in readers] == expected(tiers, chains)


def test_a_tail_whose_root_nobody_knows_is_told_to_each_shard_and_so_is_its_end():
    pool, split = Pool(8, has_roots=True), Split(NUM_SHARDS)
    split.follow(pool)
    tail = BlockHashes(SPACE, b"p" * 32, 4, b"h" * 32)
    put(pool, tail, needs_parent=False)
    assert [part.drain_events() for part in split.parts] == [[(True, b"h" * 32)]] * NUM_SHARDS
    assert [part.resident_hashes() for part in split.parts] == [[b"h" * 32]] * NUM_SHARDS
    pool.evict(8)
    assert [part.drain_events() for part in split.parts] == [[(False, b"h" * 32)]] * NUM_SHARDS


def test_what_was_told_to_all_is_taken_back_from_all_by_a_tier_that_knows_its_root():
    tiers, split, chain = [Pool(8, has_roots=True), Pool(8, has_roots=True)], Split(NUM_SHARDS), chain_of(1, 2)
    split.follow(Residents(*tiers))
    put(tiers[0], BlockHashes(SPACE, chain[0], 1, chain.data[32:]), needs_parent=False)
    put(tiers[1], chain)
    for part in split.parts:
        part.drain_events()
    tiers[0].evict(8)
    assert not any(part.drain_events() for part in split.parts), "the other tier has it"
    tiers[1].evict(8)
    assert all((False, chain[1]) in part.drain_events() for part in split.parts)


def test_what_a_full_announcement_told_to_all_is_taken_back_from_all_too():
    tiers, split, chain = [Pool(8, has_roots=True), Pool(8, has_roots=True)], Split(NUM_SHARDS), chain_of(1, 2)
    put(tiers[0], BlockHashes(SPACE, chain[0], 1, chain.data[32:]), needs_parent=False)
    put(tiers[1], chain)
    for tier in tiers:
        tier.drain_events()
    split.follow(Residents(*tiers))
    assert all(chain[1] in part.resident_hashes() for part in split.parts)
    tiers[0].evict(8)
    assert not any(part.drain_events() for part in split.parts), "the other tier has it"
    tiers[1].evict(8)
    assert all((False, chain[1]) in part.drain_events() for part in split.parts)


def test_changes_before_a_full_announcement_are_in_it_and_not_told_again():
    pool, split, chain = Pool(8, has_roots=True), Split(NUM_SHARDS), chain_of(1, 2)
    split.follow(pool)
    put(pool, chain)
    [mine] = [part for part in split.parts if part.resident_hashes()]
    assert mine.drain_events() == []
    put(pool, chain_of(1, 3))
    split.parts[0].drain_events()
    assert mine.resident_hashes() == chain_of(1, 3).hashes(), "what another part took over is in it"
    assert mine.drain_events() == []


def test_changes_that_a_link_does_not_take_are_kept_up_to_a_number_and_then_a_snapshot_is_wanted():
    pool, split = Pool(40, has_roots=True), Split(NUM_SHARDS, most_kept=10)
    split.follow(pool)
    chain = chain_of(1, 40)
    mine, other = chain.root_key % NUM_SHARDS, (chain.root_key + 1) % NUM_SHARDS
    put(pool, chain)
    assert split.parts[other].drain_events() == []
    assert split.parts[mine].drain_events() is None
    assert split.parts[mine].resident_hashes() == chain.hashes(), "in order: each after those that it builds on"
    assert split.parts[mine].drain_events() == []
    assert split.parts[other].resident_hashes() == []


def test_after_a_snapshot_of_one_part_the_others_still_have_their_changes():
    pool, split = Pool(40, has_roots=True), Split(NUM_SHARDS)
    split.follow(pool)
    chain = chain_of(1)
    put(pool, chain)
    mine = chain.root_key % NUM_SHARDS
    for number in range(NUM_SHARDS):
        if number != mine:
            assert split.parts[number].resident_hashes() == []
    assert [own for _, own in split.parts[mine].drain_events()] == chain.hashes()


def test_after_lost_changes_a_block_that_was_told_to_all_is_told_to_its_shard_alone_when_its_root_is_known():
    pool, split, chain = Pool(8, has_roots=True), Split(NUM_SHARDS), chain_of(1, 2)
    split.follow(pool)
    put(pool, BlockHashes(SPACE, chain[0], 1, chain.data[32:]), needs_parent=False)
    assert all(part.drain_events() for part in split.parts)
    pool.table.index.events.max_hashes = 0
    pool.evict(8)
    assert [part.drain_events() for part in split.parts] == [None] * NUM_SHARDS
    assert [part.resident_hashes() for part in split.parts] == [[]] * NUM_SHARDS
    pool.table.index.events.max_hashes = 100
    put(pool, chain)
    told = [part.drain_events() for part in split.parts]
    assert [len(each) for each in told] == [2 * (number == chain.root_key % NUM_SHARDS) for number in range(NUM_SHARDS)]


def test_other_blocks_are_divided_by_their_own_roots_also_those_that_were_told_to_all_before():
    pool, other, split, chain = Pool(8, has_roots=True), Pool(8, has_roots=True), Split(NUM_SHARDS), chain_of(1, 2)
    split.follow(pool)
    put(pool, BlockHashes(SPACE, chain[0], 1, chain.data[32:]), needs_parent=False)
    assert all(part.drain_events() for part in split.parts)
    split.follow(other)
    put(other, chain)
    told = [part.drain_events() for part in split.parts]
    assert [len(each) for each in told] == [2 * (number == chain.root_key % NUM_SHARDS) for number in range(NUM_SHARDS)]


def test_without_blocks_no_part_has_any():
    split = Split(NUM_SHARDS)
    assert split.parts[0].drain_events() == split.parts[0].resident_hashes() == []
    split.follow(Pool(4, has_roots=True))
    split.follow(None)
    assert split.parts[1].drain_events() == []


class TestRootKeys:
    """What a pool knows of roots."""

    def test_a_block_has_the_key_of_its_chains_first_block_whichever_piece_brought_it(self):
        pool, chain = Pool(16, has_roots=True), chain_of(3, 9)
        put(pool, chain.head(3))
        put(pool, chain.tail(3).head(3))
        by_hand = BlockHashes(SPACE, chain[5], 6, chain.data[6 * 32 :])
        assert by_hand.root_key == 0
        put(pool, by_hand)
        [(hashes, roots)] = pool.resident_rooted()
        assert (hashes, roots.tolist()) == (chain.hashes(), [chain.root_key] * 9)

    def test_a_block_behind_others_has_their_key_whatever_its_writer_says(self):
        pool, chain = Pool(16, has_roots=True), chain_of(3, 9)
        put(pool, chain.head(3))
        put(pool, BlockHashes(SPACE, chain[2], 3, chain.data[3 * 32 :], chain.root_key ^ 1))
        [(hashes, roots)] = pool.resident_rooted()
        assert (hashes, roots.tolist()) == (chain.hashes(), [chain.root_key] * 9)

    def test_what_goes_says_the_key_that_it_came_with(self):
        pool, chain = Pool(4, has_roots=True), chain_of(3, 4)
        put(pool, chain)
        put(pool, chain_of(4, 4))
        came, went, came_too = pool.drain_rooted()
        assert (went[0], list(went[1]), went[2].tolist()) == (False, chain.hashes()[::-1], [chain.root_key] * 4)
        assert [came[2][0], came_too[2][0]] == [chain.root_key, chain_of(4, 4).root_key]

    def test_after_a_clearing_the_keys_of_what_went_are_not_known(self):
        pool = Pool(4, has_roots=True)
        put(pool, chain_of(3, 4))
        pool.drain_rooted()
        pool.clear(SPACE)
        [(is_here, hashes, roots)] = pool.drain_rooted()
        assert (is_here, len(hashes), roots) == (False, 4, None)

    def test_a_pool_for_a_directory_of_one_shard_keeps_none(self):
        pool = Pool(4)
        put(pool, chain_of(3, 4))
        assert pool.resident_rooted()[0][1] is None
        assert [roots for *_, roots in pool.drain_rooted()] == [None]

    def test_a_key_takes_four_bytes(self):
        kept = Pool(1000, has_roots=True).table.index.roots.of(range(1000))
        assert kept is not None
        assert (kept.nbytes, kept.dtype) == (4000, np.uint32)

    def test_blocks_that_another_tier_holds_bring_their_key(self):
        pool, chain = Pool(8, has_roots=True), chain_of(5, 6)
        put(pool, chain)
        _, held = pool.hold(list(range(2, 6)), SPACE, "disk")
        assert {block.root_key for block in held} == {chain.root_key}

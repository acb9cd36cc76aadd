"""What another tier needs of a pool: blocks held by their slots, bad blocks taken out, and who has published what."""

import random
import time

import pytest

from kvstore.blocks.chain import BlockHashes
from kvstore.memory.presence import PresenceCounts
from kvstore.pool.pool import Pool
from tests.kvstore.pool.pool_steps import NEVER_S, NUM_SLOTS, SPACE, chain, read, store


@pytest.fixture
def pool():
    made = Pool(NUM_SLOTS)
    yield made
    made.check_integrity()
    assert made.num_leases() == 0


@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_bad_block_is_taken_out_wherever_it_is(pool, at):
    """A3: removing the head, the middle or the tail ends, and what hangs on it stays."""
    hashes = chain(1, 2, 3, 4, 5)
    store(pool, hashes)
    slots = read(pool, hashes)
    assert pool.discard([slots[at]]) == 1
    pool.check_integrity()
    assert pool.lookup(hashes) == at
    assert pool.lookup(hashes.tail(at + 1)) == 4 - at
    assert pool.discard([slots[at]]) == 0, "it is not there any more"
    assert pool.stats().num_free == NUM_SLOTS - 4
    store(pool, hashes)
    assert pool.lookup(hashes) == 5


def test_a_chain_is_climbed_as_far_as_it_can_be_found(pool):
    hashes, names = chain(*range(1, 7)), list(chain(*range(1, 7)))
    store(pool, hashes.head(5))
    slots = read(pool, hashes.head(5))
    assert pool.climb(SPACE, names[4], 9) == (names[4::-1], slots[::-1], SPACE)
    assert pool.climb(SPACE, names[4], 2) == (names[4:2:-1], slots[4:2:-1], names[2])
    assert pool.climb(SPACE, names[5], 9) == ([], [], names[5])
    ticket = pool.prepare_store(hashes, "writer")
    assert pool.climb(SPACE, names[5], 9) == ([], [], names[5]), "it is being written"
    pool.abort_store(ticket.write_id, "writer")
    pool.discard([slots[1]])
    assert pool.climb(SPACE, names[4], 9) == (names[4:1:-1], slots[4:1:-1], names[1])
    assert pool.climb(bytes(32), names[4], 9) == ([], [], names[4])


def test_blocks_behind_a_missing_one_are_evicted_as_far_as_nothing_keeps_them(pool):
    hashes, names = chain(*range(1, 7)), list(chain(*range(1, 7)))
    store(pool, hashes)
    slots = read(pool, hashes)
    behind = [(own, names[1]) for own in names[:1:-1]]
    assert pool.evict_awaiting(SPACE, behind) == 0, "nothing is missing"
    pool.discard(slots[1:2])
    lease_id, _ = pool.hold([slots[5]], SPACE, "reader")
    assert pool.evict_awaiting(SPACE, behind) == 0, "the last has a reader, the others have children"
    pool.release(lease_id, "reader")
    assert pool.evict_awaiting(SPACE, [behind[2], behind[0], (bytes(32), names[1]), behind[1]]) == 2
    assert pool.evict_awaiting(bytes(32), behind) == 0
    assert (pool.lookup(hashes), pool.num_evicted) == (1, 2)
    pool.check_integrity()


def test_what_blocks_hang_on_that_is_not_here(pool):
    hashes, names = chain(*range(1, 7)), list(chain(*range(1, 7)))
    store(pool, hashes)

    def links():
        return sorted(pool.links(SPACE, 0, 5) + pool.links(SPACE, 5, 99))

    assert (pool.awaited(), links()) == ([], list(zip(range(6), names, [SPACE, *names], strict=False)))
    pool.discard(read(pool, hashes)[1:2])
    assert pool.awaited() == [(SPACE, [names[1]])]
    assert [own for _, own, _ in links()] == [names[0], *names[2:]]
    assert not set(names) & {own for _, own, _ in pool.links(bytes(32), 0, 99)}
    store(pool, hashes)
    assert pool.awaited() == []


def test_touched_blocks_are_evicted_after_all_others(pool):
    one, two = chain(1, 2), chain(11, 12)
    for hashes in (one, two):
        store(pool, hashes)
    pool.touch(SPACE, [*list(one), bytes(32)])
    pool.touch(bytes(32), list(two))
    assert pool.evict(2) == 2
    assert (pool.lookup(one), pool.lookup(two)) == (2, 0)
    pool.check_integrity()


def test_absent_blocks_are_no_blocks(pool):
    """A3: an absent one, a slot named twice, one being written, none at all."""
    hashes = chain(1, 2, 3)
    ticket = pool.prepare_store(hashes, "writer")
    assert pool.discard(list(range(NUM_SLOTS))) == 0
    assert pool.discard([]) == 0
    pool.complete_store(ticket.write_id, "writer")
    slot = read(pool, hashes)[1]
    assert pool.discard([slot, slot, slot]) == 1


def test_a_reader_of_a_bad_block_finishes(pool):
    hashes = chain(1, 2, 3)
    store(pool, hashes)
    grant = pool.pin_prefix(hashes, "reader", NEVER_S)
    assert pool.discard(list(grant.slots)) == 3
    pool.check_integrity()
    assert pool.lookup(hashes) == 0
    store(pool, hashes)
    assert not set(read(pool, hashes)) & set(grant.slots), "new blocks, in other slots"
    pool.release(grant.lease_id, "reader")
    assert pool.stats().num_free == NUM_SLOTS - 3


def test_bad_blocks_are_told_as_gone(pool):
    hashes = chain(1, 2)
    store(pool, hashes)
    pool.drain_events()
    pool.discard(read(pool, hashes)[1:])
    assert pool.drain_events() == [(False, hashes[1])]
    assert pool.present(hashes.hashes()) == {hashes[0]}
    assert pool.present([]) == set()


def test_blocks_are_held_by_their_slots(pool):
    hashes = chain(1, 2, 3)
    store(pool, hashes)
    slots = read(pool, hashes)
    lease_id, held = pool.hold([*reversed(slots), 12], SPACE, "tier")
    assert [(block.slot, block.block_hash) for block in held] == list(
        zip(reversed(slots), reversed(hashes.hashes()), strict=True)
    )
    assert [block.depth for block in held] == [2, 1, 0]
    pool.check_integrity()
    more = chain(*range(10, 10 + NUM_SLOTS))
    ticket = pool.prepare_store(more, "writer")
    assert ticket.num_refused == 3, "held blocks are not evicted"
    pool.abort_store(ticket.write_id, "writer")
    assert pool.release(lease_id, "tier")
    assert pool.hold(slots, b"o" * 32, "tier") == (0, [])


def test_a_hold_is_within_the_budget_of_pins():
    pool = Pool(NUM_SLOTS, max_pinned=2)
    hashes = chain(1, 2, 3, 4)
    store(pool, hashes)
    slots = [*read(pool, hashes[:2]), 2, 3]
    lease_id, held = pool.hold(slots, SPACE, "tier")
    assert len(held) == 2
    assert pool.hold([2, 3], SPACE, "tier") == (0, [])
    again_id, again = pool.hold(slots, SPACE, "other")
    assert again == held, "blocks that are pinned already take nothing from the budget"
    pool.check_integrity()
    pool.release(lease_id, "tier")
    pool.release(again_id, "other")
    pool.check_integrity()


def test_cleared_blocks_are_neither_held_nor_taken_out(pool):
    hashes = chain(1, 2)
    store(pool, hashes)
    slots = read(pool, hashes)
    pool.begin_clear(SPACE)
    assert pool.hold(slots, SPACE, "tier") == (0, [])
    assert pool.discard(slots) == 0
    pool.sweep_all()


@pytest.mark.parametrize("seed", range(8))
def test_at_random_beside_another_pool_with_the_same_counters(seed):
    """Two pools count the first blocks of chains into the same counters; each takes away only its own."""
    rng, counters = random.Random(seed), bytearray(8)
    counts = PresenceCounts(counters)
    pools = [Pool(6, presence=counts), Pool(6, presence=counts.beside())]
    for _ in range(150):
        pool = rng.choice(pools)
        first = rng.randrange(12) * 10
        hashes = chain(*range(first, first + rng.randint(1, 4)))
        match rng.randrange(4):
            case 0:
                pool.discard([rng.randrange(6)])
            case 1:
                lease_id, _ = pool.hold([rng.randrange(6)], SPACE, "tier")
                if lease_id:
                    pool.discard(list(range(6)))
                    pool.release(lease_id, "tier")
            case 2 if rng.random() < 0.2:
                pool.clear(SPACE)
            case _:
                store(pool, hashes)
        for each in pools:
            each.check_integrity()
    for pool in pools:
        pool.clear(SPACE)
    assert not any(counters)


def test_many_namespaces_do_not_hold_the_lock_for_long():
    """What is gone from one tier is looked for in the other, in whatever namespace it was."""
    num_spaces, pool, here = 2000, Pool(4096), list[bytes]()
    for number in range(num_spaces):
        namespace, own = (b"n%d" % number).ljust(32), (b"h%d" % number).ljust(32)
        ticket = pool.prepare_store(BlockHashes(namespace, namespace, 0, own), "writer")
        pool.complete_store(ticket.write_id, "writer")
        here.append(own)
    gone = [(b"g%d" % number).ljust(32) for number in range(1 << 14)]
    began_s = time.perf_counter()
    assert pool.present([*gone, *here]) == set(here)
    # With a look at each namespace for each block it would be some seconds.
    assert time.perf_counter() - began_s < 0.5


def test_uses_are_told_as_eviction_hears_of_them():
    told = []
    pool = Pool(NUM_SLOTS, on_used=lambda space, slots, is_use: told.append((space, slots, is_use)))
    hashes = chain(1, 2, 3)
    store(pool, hashes)
    assert told == [], "what is new is published"
    slots = read(pool, hashes)
    assert told == [(SPACE, slots, True)]
    pool.lookup(hashes)
    store(pool, chain(1, 2, 3, 4))
    assert told[1:] == [(SPACE, slots, False)], "a save of blocks that are here"
    lease_id = pool.pin_prefix(chain(1), "look", NEVER_S).lease_id
    pool.pin_prefix(hashes.tail(1), "look", NEVER_S, lease_id)
    assert [is_use for _, _, is_use in told[2:]] == [True, False], "blocks that a load brought were used then"
    pool.release(lease_id, "look")

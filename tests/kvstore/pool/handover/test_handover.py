"""A pool that gives its blocks to the pool of the next life: nothing is lost, and nothing is reused too early."""

from __future__ import annotations

import random

import pytest

from kvstore.blocks.grants import PinKind
from kvstore.blocks.priority import Priority, Retention
from kvstore.errors import InvalidRequest, PoolExhausted, StoreUnavailable
from kvstore.memory.presence import PresenceCounts
from kvstore.pool.eviction.learned import LearnedReuse
from kvstore.pool.eviction.make import make_policy
from kvstore.pool.handover.adoption import OLD_READER, OLD_WRITER
from kvstore.pool.handover.export import _writers
from kvstore.pool.handover.image import split
from kvstore.pool.pool import Pool
from kvstore.runtime import clock
from tests.kvstore.pool.pool_steps import NEVER_S, NUM_SLOTS, SPACE, chain, read, store

OTHER = b"o" * 32


def policy_of(name, num_slots):
    """Return a policy that remembers few evicted blocks, which is made sooner."""
    return LearnedReuse(num_slots, num_ghosts=64) if name == "learned" else make_policy(name, num_slots)


def next_life(pool, *, num_slots=None, eviction="lru", image=None):
    """Return the pool of the next life, and the image that it was made of."""
    image = pool.freeze() if image is None else image
    count = pool.num_slots if num_slots is None else num_slots
    made = Pool(count, presence=PresenceCounts(bytearray(16)), eviction=policy_of(eviction, count))
    made.adopt(image)
    made.check_integrity()
    return made, image


def chains_of(image):
    """Return all that an image says of each slot's block; a priority that has ended is none."""
    blocks, now_s = image.blocks, clock.now_s()
    told = zip(blocks.priority.tolist(), blocks.until_s.tolist(), strict=True)
    terms = [(priority, until_s) if priority != 1 and until_s > now_s else None for priority, until_s in told]
    names = [image.namespaces[at] for at in blocks.space.tolist()]
    rows = zip(names, split(blocks.hashes), split(blocks.parents), blocks.depth.tolist(), terms, strict=True)
    return dict(zip(blocks.slot.tolist(), rows, strict=True))


def fill(pool, count=NUM_SLOTS):
    """Store chains of one block; a full pool evicts the first of them first."""
    for number in range(count):
        store(pool, chain(100 + number))


def went_first(pool, count):
    """Return which of the blocks of `fill` go when so many slots are wanted."""
    pool.reserve(count, "wants")
    pool.check_integrity()
    return [number for number in range(NUM_SLOTS) if not pool.lookup(chain(100 + number))]


def test_blocks_keep_their_slots_and_their_order_of_eviction():
    pool = Pool(NUM_SLOTS)
    fill(pool)
    read(pool, chain(103))
    places = {number: read(pool, chain(100 + number)) for number in (7, 3)}
    after, _ = next_life(pool)
    assert {number: list(after.pin_prefix(chain(100 + number), "r", NEVER_S).slots) for number in (7, 3)} == places
    assert went_first(after, 6) == [0, 1, 2, 4, 5, 6]


def test_a_chain_goes_from_its_end_in_the_next_life_too():
    pool = Pool(8)
    store(pool, chain(1, 2, 3, 4))
    store(pool, chain(1, 2, 5))
    after, _ = next_life(pool)
    after.reserve(3 + 2, "wants")
    assert (after.lookup(chain(1, 2, 3, 4)), after.lookup(chain(1, 2, 5))) == (2, 3)
    after.check_integrity()


def test_a_child_whose_parent_is_not_here_is_taken_over():
    pool = Pool(8)
    store(pool, chain(1, 2, 3))
    pool.discard(read(pool, chain(1, 2, 3))[1:2])
    after, _ = next_life(pool)
    assert after.lookup(chain(1, 2, 3)) == 1
    store(after, chain(1, 2))
    assert after.lookup(chain(1, 2, 3)) == 3


@pytest.mark.parametrize("eviction", ["learned", "lru"])
def test_priorities_and_their_ends_are_taken_over(eviction):
    pool, now_s = Pool(4, eviction=make_policy(eviction, 4)), clock.now_s()
    terms = {1: Retention(Priority.HIGH, now_s + 100), 2: Retention(Priority.LOW), 3: Retention(Priority.HIGH, now_s)}
    for number in (1, 2, 3):
        ticket = pool.prepare_store(chain(number), "w", retention=terms[number])
        pool.complete_store(ticket.write_id, "w")
    store(pool, chain(4))
    after, _ = next_life(pool, eviction=eviction)
    assert (after.stats().num_low, after.stats().num_high) == (1, 2)
    for gone in (2, 3, 4, 1):
        assert after.lookup(chain(gone)) == 1
        after.reserve(1, "wants")
        assert after.lookup(chain(gone)) == 0
        after.check_integrity()


def test_uses_and_times_are_taken_over_by_the_policy_that_learns():
    times = iter(range(0, 10_000, 100))
    now = [0.0]
    pool = Pool(4, eviction=make_policy("learned", 4, lambda: now[0]))
    store(pool, chain(1, 2))
    for _ in range(2):
        now[0] = float(next(times)) + 100
        read(pool, chain(1))
    image = pool.freeze()
    known = dict(zip(image.blocks.slot.tolist(), image.blocks.uses.tolist(), strict=True))
    assert sorted(known.values()) == [1, 3]
    now[0] += 50
    after = Pool(4, eviction=make_policy("learned", 4, lambda: now[0]))
    after.adopt(image)
    after.check_integrity()
    again = after.freeze().blocks
    assert again.slot.tolist() == image.blocks.slot.tolist()
    for column in ("uses", "used_s", "touched_s"):
        assert getattr(again, column).tolist() == getattr(image.blocks, column).tolist()


@pytest.mark.parametrize(("had", "has"), [(True, True), (True, False), (False, True)])
def test_root_keys_are_taken_over_where_both_lives_keep_them(had, has):
    pool = Pool(NUM_SLOTS, presence=PresenceCounts(bytearray(16)), has_roots=had)
    for number in (1, 2):
        store(pool, chain(number, number + 10))
    wanted = {own: 0 for own in pool.resident_hashes()} | (_root_keys(pool) if had and has else {})
    made = Pool(NUM_SLOTS, presence=PresenceCounts(bytearray(16)), has_roots=has)
    made.adopt(pool.freeze())
    assert _root_keys(made) == (wanted if has else {})
    assert len(set(wanted.values())) == (2 if had and has else 1)


def _root_keys(pool):
    """Return the root key of each block; none where they are not kept."""
    rows = [(own, keys) for own, keys in pool.resident_rooted() if keys is not None]
    return {block: int(key) for own, keys in rows for block, key in zip(own, keys, strict=True)}


def test_a_frozen_pool_grants_publishes_and_clears_nothing():
    pool = Pool(NUM_SLOTS)
    store(pool, chain(1, 2))
    lease, ticket = pool.pin_prefix(chain(1), "reader", 1e9), pool.prepare_store(chain(3), "writer")
    pool.freeze()
    for refused in (
        lambda: pool.pin_prefix(chain(1), "reader", 1e9),
        lambda: pool.pin_prefix(chain(1), "reader", 1e9, lease.lease_id),
        lambda: pool.pin(chain(1), "reader", PinKind.HARD),
        lambda: pool.renew(lease.lease_id, "reader", 2e9),
        lambda: pool.prepare_store(chain(4), "writer"),
        lambda: pool.reserve(1, "writer"),
        lambda: pool.complete_store(ticket.write_id, "writer"),
        lambda: pool.begin_clear(SPACE),
        pool.freeze,
    ):
        with pytest.raises(StoreUnavailable, match="new client"):
            refused()
    assert pool.lookup(chain(3)) == 0
    assert pool.release(lease.lease_id, "reader")


def test_a_slot_that_an_old_writer_has_is_not_used_before_it_is_gone():
    pool = Pool(4)
    store(pool, chain(1))
    slots = set(pool.prepare_store(chain(2, 3), "old").slots)
    after, image = next_life(pool)
    assert [(held.owners, set(held.slots.tolist())) for held in image.writers] == [(("old",), slots)]
    assert set(after.reserve(2, "new").slots).isdisjoint(slots)
    with pytest.raises(PoolExhausted):
        after.reserve(1, "new")
    assert after.lookup(chain(2)) == 0
    assert after.release_owner(f"{OLD_WRITER}0") == 1
    assert set(after.reserve(2, "new").slots) == slots
    after.check_integrity()


def test_of_a_write_that_is_published_in_pieces_only_the_rest_is_held():
    pool = Pool(4)
    ticket = pool.prepare_store(chain(1, 2, 3), "old")
    pool.complete_store(ticket.write_id, "old", count=2)
    after, image = next_life(pool)
    assert [held.slots.tolist() for held in image.writers] == [list(ticket.slots[2:])]
    assert after.lookup(chain(1, 2, 3)) == 2


def test_what_ranks_write_is_held_for_all_of_them_and_free_once_they_have_written():
    pool = Pool(4)
    first = pool.prepare_store(chain(1, 2), "rank-0", num_parts=2, part=0)
    second = pool.prepare_store(chain(1), "rank-1", num_parts=2, part=1)
    _, image = next_life(pool)
    held = {held.owners: held.slots.tolist() for held in image.writers}
    assert held == {("rank-0", "rank-1"): list(second.slots), ("rank-0",): list(first.slots[1:])}
    pool = Pool(4)
    first = pool.prepare_store(chain(1, 2), "rank-0", num_parts=2, part=0)
    pool.complete_store(first.write_id, "rank-0")
    after, image = next_life(pool)
    assert image.writers == ()
    assert after.num_free == 4


def test_a_slot_of_a_read_that_was_given_up_and_of_a_cleared_block_that_is_read_are_held():
    pool = Pool(4)
    abandoned = pool.prepare_store(chain(1), "fetch")
    pool.abort_store(abandoned.write_id, "fetch", quarantine="read-1")
    store(pool, chain(2))
    lease = pool.pin_prefix(chain(2), "reader", 77.0)
    pool.clear(SPACE)
    after, image = next_life(pool)
    held = {held.slots.tolist()[0]: (held.owners, held.until_s) for held in image.writers}
    assert held == {abandoned.slots[0]: (("!mover",), 0.0), lease.slots[0]: ((), 77.0)}
    assert (len(image.blocks), after.num_free) == (0, 2)


def test_a_block_that_is_read_is_found_but_not_evicted_before_its_last_lease_ends():
    pool = Pool(4)
    store(pool, chain(1))
    pool.pin_prefix(chain(1), "reader", 50.0)
    pool.pin_prefix(chain(1), "other", 60.0)
    pool.pin(chain(1), "pinner", PinKind.HARD)
    after, image = next_life(pool)
    assert [(read.until_s, len(read.slots)) for read in image.readers] == [(60.0, 1)]
    assert after.lookup(chain(1)) == 1
    after.reserve(3, "new")
    with pytest.raises(PoolExhausted):
        after.reserve(1, "new")
    assert after.has_deadlines()
    assert after.expire(55.0) == 0
    assert after.expire(61.0) == 1
    after.reserve(1, "new")
    after.check_integrity()


def test_all_readers_of_a_block_are_named_with_the_end_of_the_last_and_pins_are_no_readers():
    pool = Pool(4)
    store(pool, chain(1, 2))
    first, second = pool.pin_prefix(chain(1, 2), "one", 60.0).slots
    for owner, until_s in (("two", 50.0), ("three", 40.0), ("two", 30.0), ("one", 20.0)):
        pool.pin_prefix(chain(1), owner, until_s)
    pool.pin(chain(1, 2), "pinner", PinKind.HARD)
    pool.hold([first], SPACE, "disk")
    found = {read.owners: (read.until_s, read.slots.tolist()) for read in pool.freeze().readers}
    assert found == {("one", "three", "two"): (60.0, [first]), ("one",): (60.0, [second])}


def test_a_cleared_block_that_is_read_names_its_readers_and_no_writer():
    pool = Pool(4)
    store(pool, chain(1))
    for owner, until_s in (("one", 50.0), ("two", 60.0)):
        pool.pin_prefix(chain(1), owner, until_s)
    pool.clear(SPACE)
    (held,) = pool.freeze().writers
    assert (held.owners, held.readers, held.until_s) == ((), ("one", "two"), 60.0)


def test_a_slot_that_is_written_and_read_has_the_rule_of_writers_and_the_last_time():
    pool = Pool(4)
    (slot,) = pool.prepare_store(chain(1), "writer", deadline_s=50.0).slots
    (held,) = _writers(pool.table, pool.writes, {slot: (60.0, frozenset(["reader"]))})
    assert (held.owners, held.readers, held.until_s) == (("writer",), (), 60.0)


def test_a_block_that_an_old_reader_had_is_evicted_like_others_once_that_is_released():
    pool = Pool(4)
    store(pool, chain(1))
    pool.pin_prefix(chain(1), "reader", 1e9)
    after, _ = next_life(pool)
    after.reserve(3, "new")
    assert after.release_owner(f"{OLD_READER}0") == 1
    assert (after.lookup(chain(1)), after.stats().num_pinned) == (1, 0)
    after.reserve(1, "new")
    after.check_integrity()


def test_generations_go_on():
    pool = Pool(4)
    for number in range(20):
        store(pool, chain(number))
    before = pool.generations(range(4))
    after, _ = next_life(pool)
    assert all(now > then for now, then in zip(after.generations(range(4)), before, strict=True))


def test_a_larger_pool_takes_it_over_and_a_smaller_or_used_one_does_not():
    pool = Pool(4)
    store(pool, chain(1, 2))
    image = pool.freeze()
    after, _ = next_life(pool, num_slots=9, image=image)
    assert (after.num_free, after.lookup(chain(1, 2))) == (7, 2)
    used = Pool(4)
    store(used, chain(9))
    for other in (Pool(3), used):
        with pytest.raises(InvalidRequest, match="unused pool of at least 4 slots"):
            other.adopt(image)
        other.check_integrity()


@pytest.mark.parametrize("seed", range(12))
def test_random_pools_are_the_same_in_the_next_life(seed):
    draw, eviction = random.Random(seed), ("lru", "learned")[seed % 2]
    pool, lives = Pool(24, eviction=policy_of(eviction, 24)), 0
    open_writes, open_leases = [], []
    for step in range(120):
        space = draw.choice([SPACE, OTHER])
        numbers = [(1 if space == SPACE else 5) + draw.randrange(4)]
        while len(numbers) < draw.randrange(1, 6):
            numbers.append(10 * numbers[-1] + draw.randrange(3))
        blocks, owner = chain(*numbers, space=space), f"o{draw.randrange(3)}"
        action = draw.randrange(7)
        if action < 3:
            retention = Retention(draw.choice(list(Priority)), draw.choice([float("inf"), clock.now_s()]))
            ticket = pool.prepare_store(blocks, owner, retention=retention)
            if ticket.write_id and draw.random() < 0.8:
                pool.complete_store(ticket.write_id, owner)
            elif ticket.write_id:
                open_writes.append((ticket, owner))
        elif action == 3:
            grant = pool.pin_prefix(blocks, owner, draw.choice([1e12, 2e12]))
            open_leases.append((grant.lease_id, owner))
        elif action == 4 and open_leases:
            pool.release(*open_leases.pop(draw.randrange(len(open_leases))))
        elif action == 5 and open_writes:
            ticket, owner = open_writes.pop(draw.randrange(len(open_writes)))
            pool.abort_store(ticket.write_id, owner, quarantine=draw.choice(["", "read"]))
        elif action == 6 and draw.random() < 0.1:
            pool.clear(space)
        if step % 40 != 39:
            continue
        lives += 1
        image = pool.freeze()
        after, _ = next_life(pool, eviction=eviction, image=image)
        assert sorted(after.resident_hashes()) == sorted(pool.resident_hashes())
        again = after.freeze()
        assert chains_of(again) == chains_of(image)
        pool, open_writes, open_leases = next_life(pool, eviction=eviction, image=image)[0], [], []
        for number in range(len(image.writers)):
            assert pool.release_owner(f"{OLD_WRITER}{number}") == 1
            pool.check_integrity()
        assert pool.num_free == 24 - len(image.blocks)
    assert lives == 3

"""What inspection says of a pool is what the pool was told; it never holds the lock for long, and changes nothing."""

import math

import pytest

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.grants import PinKind
from kvstore.blocks.priority import Priority, Retention
from kvstore.pool.eviction.learned import LearnedReuse
from kvstore.pool.inspection import slices
from kvstore.pool.inspection.chains import path_to, runs_of
from kvstore.pool.inspection.holders import HeldRun, held_runs, holders_of
from kvstore.pool.inspection.namespaces import NamespaceCounts, count_namespaces, details_of, num_cleared
from kvstore.pool.pool import Pool
from tests.kvstore.pool.pool_steps import NEVER_S, SPACE, chain, store

OTHER = b"o" * 32


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pool(clock):
    made = Pool(64, eviction=LearnedReuse(64, clock), now_s=clock)
    yield made
    made.check_integrity()


# Namespaces.


def test_each_namespace_has_its_own_counts(pool):
    store(pool, chain(1, 2, 3))
    store(pool, chain(11, 12, space=OTHER))
    pool.pin_prefix(chain(1, 2), "reader", NEVER_S)
    pool.pin(chain(1), "reader", PinKind.HARD)
    writing = pool.prepare_store(chain(11, 19, space=OTHER), "writer")
    found = count_namespaces(pool)
    assert found == {
        SPACE: NamespaceCounts(num_blocks=3, num_pinned=2),
        OTHER: NamespaceCounts(num_blocks=2, num_writing=1, num_pinned=1),
    }
    pool.abort_store(writing.write_id, "writer")


def test_what_was_cleared_is_counted_apart_until_its_reader_ends(pool):
    store(pool, chain(1, 2, 3))
    grant = pool.pin_prefix(chain(1, 2), "reader", NEVER_S)
    pool.clear(SPACE)
    assert count_namespaces(pool) == {}
    assert num_cleared(pool) == 2
    pool.release(grant.lease_id, "reader")
    assert num_cleared(pool) == 0


def test_details_count_chains_and_priorities_and_know_the_last_use(pool, clock):
    store(pool, chain(1, 2))
    store(pool, chain(1, 3))
    clock.now_s = 1060.0
    for numbers, priority in (((4, 5), Priority.HIGH), ((6,), Priority.LOW)):
        ticket = pool.prepare_store(chain(*numbers), "w", retention=Retention(priority, math.inf))
        pool.complete_store(ticket.write_id, "w")
    details = details_of(pool, [SPACE, OTHER])
    assert (details[SPACE].num_chains, details[SPACE].num_low, details[SPACE].num_high) == (3, 1, 2)
    assert details[SPACE].last_use_s == 1060.0
    assert (details[OTHER].num_chains, details[OTHER].last_use_s) == (0, None)


def test_a_pool_without_slots_has_nothing():
    pool = Pool(0)
    assert count_namespaces(pool) == {}
    assert holders_of(pool, 10) == []
    assert runs_of(pool, chain(1, 2)) == []


# Chains.


def test_a_run_ends_where_the_state_changes(pool, clock):
    store(pool, chain(1, 2, 3, 4, 5))
    clock.now_s = 1100.0
    pool.pin_prefix(chain(1, 2), "reader", NEVER_S)
    pool.pin(chain(1), "reader", PinKind.SOFT)
    ticket = pool.prepare_store(chain(1, 2, 3, 4, 5, 6, 7), "writer")
    runs = runs_of(pool, chain(1, 2, 3, 4, 5, 6, 7, 8))
    states = [(run.start, run.num_blocks, run.state.is_written, run.state.num_soft) for run in runs]
    assert states == [(0, 1, True, 1), (1, 1, True, 0), (2, 3, True, 0), (5, 2, False, 0)]
    assert [run.state.num_readers for run in runs] == [2, 2, 1, 0], "the writer pins what it found"
    assert runs[0].last_use_s == 1100.0
    pool.abort_store(ticket.write_id, "writer")


def test_a_priority_that_has_ended_is_normal(pool, clock):
    ticket = pool.prepare_store(chain(1), "w", retention=Retention(Priority.HIGH, 1010.0))
    pool.complete_store(ticket.write_id, "w")
    assert runs_of(pool, chain(1))[0].state.priority == "high"
    clock.now_s = 1020.0
    assert runs_of(pool, chain(1))[0].state.priority == "normal"


def test_where_the_policy_knows_no_times_there_is_none():
    pool = Pool(8)
    store(pool, chain(1, 2))
    (run,) = runs_of(pool, chain(1, 2))
    assert (run.num_blocks, run.last_use_s, run.first_use_s) == (2, None, None)


def test_the_hash_of_one_block_leads_to_its_root(pool):
    whole = chain(*range(1, 30), space=OTHER)
    store(pool, whole)
    store(pool, chain(40, 41))
    assert path_to(pool, whole[20]) == whole[:21]
    assert path_to(pool, chain(40)[0]) == chain(40)
    assert path_to(pool, b"?" * 32) is None


def test_a_path_longer_than_a_slice_is_whole():
    pool = Pool(2 * slices.AT_ONCE + 10)
    for num_blocks in (slices.AT_ONCE, slices.AT_ONCE + 1, 2 * slices.AT_ONCE + 3):
        whole = chain(*range(1, num_blocks + 1))
        store(pool, whole)
        assert path_to(pool, whole[-1]) == whole
    (run,) = runs_of(pool, whole)
    assert (run.start, run.num_blocks) == (0, len(whole))


def test_a_path_whose_root_is_not_here_begins_at_its_number(pool):
    whole = chain(*range(1, 10))
    ticket = pool.prepare_store(whole[4:], "writer", needs_parent=False)
    pool.complete_store(ticket.write_id, "writer")
    found = path_to(pool, whole[-1])
    assert (found, found.start) == (whole[4:], 4)


# Leases and pins.


def test_leases_and_pins_come_the_oldest_first_with_what_is_left(pool, clock):
    store(pool, chain(1, 2, 3))
    first = pool.pin_prefix(chain(1, 2), "reader", 1030.0).lease_id
    clock.now_s = 1005.0
    second = pool.pin(chain(1), "pinner", PinKind.HARD).lease_id
    third = pool.pin_prefix(chain(1, 2, 3), "reader", 1020.0).lease_id
    clock.now_s = 1010.0
    found = holders_of(pool, 10)
    assert [(each.lease_id, each.kind, each.owner) for each in found] == [
        (first, "lease", "reader"), (second, "hard", "pinner"), (third, "lease", "reader"),
    ]  # fmt: skip
    assert [(each.age_s, each.left_s) for each in found] == [(10.0, 20.0), (5.0, None), (5.0, 10.0)]
    assert {each.namespace for each in found} == {SPACE}
    assert [each.lease_id for each in holders_of(pool, 2)] == [first, second]
    assert [each.num_blocks for each in holders_of(pool, 1, third)] == [3]
    assert holders_of(pool, 1, 12345) == []


def test_a_lease_of_another_tier_is_said_to_be_one(pool):
    store(pool, chain(1, 2))
    pool.hold([0, 1], SPACE, "tier")
    (found,) = holders_of(pool, 10)
    assert found.is_of_tier
    assert found.left_s is None


def test_what_a_pin_holds_is_named_by_chain_and_what_is_gone_is_not():
    pool = Pool(4)
    store(pool, chain(1, 2, 3))
    pinned = pool.pin(chain(1, 2, 3), "pinner", PinKind.SOFT).lease_id
    assert held_runs(pool, pinned) == [HeldRun(namespace=SPACE, start=0, num_blocks=3, priority="normal")]
    pool.evict(2)
    kept, gone = held_runs(pool, pinned)
    assert (kept.namespace, kept.num_blocks) == (SPACE, 1)
    assert (gone.namespace, gone.num_blocks) == (None, 2)
    assert held_runs(pool, 12345) == []


# The lock.


@pytest.mark.parametrize(
    "look",
    [
        count_namespaces,
        lambda pool: details_of(pool, [SPACE]),
        lambda pool: runs_of(pool, chain(*range(1, 5001))),
        lambda pool: path_to(pool, chain(5000)[0]),
        lambda pool: held_runs(pool, holders_of(pool, 1)[0].lease_id),
    ],
    ids=["count", "details", "runs", "path", "held"],
)
def test_no_slice_looks_at_more_than_its_share(look, monkeypatch):
    pool = Pool(20_000)
    store(pool, chain(*range(1, 5001)))
    pool.pin_prefix(chain(*range(1, 5001)), "reader", NEVER_S)
    before, looks, sizes = pool.stats(), [], []
    original = pool.look
    monkeypatch.setattr(pool, "look", lambda read: looks.append(read) or original(read))
    monkeypatch.setattr(slices.time, "sleep", lambda seconds: sizes.append(seconds))
    look(pool)
    assert len(looks) >= 20_000 // slices.SLOTS_AT_ONCE
    assert pool.stats() == before


def test_looking_at_a_chain_is_no_use_of_it(pool, clock):
    store(pool, chain(1, 2))
    (before,) = runs_of(pool, chain(1, 2))
    clock.now_s = 2000.0
    path_to(pool, chain(1, 2)[1])
    (after,) = runs_of(pool, chain(1, 2))
    assert after == before


def test_a_run_of_a_chain_is_found_under_its_numbers(pool):
    whole = chain(1, 2, 3, 4)
    store(pool, whole)
    (run,) = runs_of(pool, whole[2:])
    assert (run.start, run.num_blocks) == (2, 2)
    assert isinstance(whole[2:], BlockHashes)

"""A tenant has no more than its quotas, takes no block of another for that, and the counters say why."""

from __future__ import annotations

import contextlib
import random

import pytest

from kvstore.blocks.grants import PinKind
from kvstore.blocks.priority import Priority, Retention
from kvstore.errors import PoolExhausted
from kvstore.pool.pool import Pool
from tests.kvstore.pool.pool_steps import NEVER_S, SPACE, chain
from tests.kvstore.pool.tenants.tenant_steps import NUM_SLOTS, make_pool, num_here, save, save_each


@pytest.mark.parametrize("eviction", ["lru", "learned"])
def test_a_tenant_at_its_quota_takes_the_slots_of_its_own_blocks(eviction):
    pool = make_pool(eviction=eviction, a=(3, None))
    save_each(pool, 1, 2, 3, 4, 5)  # Of the shared tenant, and older than all of a's.
    assert save_each(pool, *range(100, 140), tenant="a") == 0
    assert (num_here(pool, 1, 2, 3, 4, 5), num_here(pool, 137, 138, 139)) == (5, 3)
    assert pool.tenants()["a"].num_slots == 3


def test_a_quota_holds_while_slots_are_free():
    pool = make_pool(a=(2, None))
    save_each(pool, 1, 2, 3, tenant="a")
    assert (pool.num_free, num_here(pool, 1), num_here(pool, 2, 3)) == (NUM_SLOTS - 2, 0, 2)


def test_a_run_longer_than_the_quota_is_stored_as_far_as_it_fits():
    pool = make_pool(a=(3, None))
    assert save(pool, chain(1, 2, 3, 4, 5), "a") == 2
    assert pool.lookup(chain(1, 2, 3, 4, 5)) == 3
    assert save(pool, chain(6, 7), "a") == 0
    assert pool.lookup(chain(1, 2, 3)) == 1, "the leaves went before their root"


def test_below_its_quota_a_tenant_takes_whatever_goes_first():
    pool = make_pool(num_slots=4, a=(3, None))
    save_each(pool, 1, 2, 3, 4)
    save_each(pool, 10, 11, tenant="a")
    assert (num_here(pool, 1, 2), num_here(pool, 3, 4, 10, 11)) == (0, 4)


def test_a_tenant_without_limits_takes_the_slots_of_whatever_goes_first():
    pool = make_pool(num_slots=3, a=(None, None), b=(99, None))
    for tenant in ("a", "b"):
        assert save_each(pool, *range(10), tenant=tenant) == 0
    save_each(pool, 20)
    assert num_here(pool, 20) == 1


def test_a_name_that_the_pool_does_not_know_is_shared():
    pool = make_pool(a=(1, None))
    save_each(pool, 1, 2, 3, tenant="stranger")
    assert (num_here(pool, 1, 2, 3), pool.tenants()["a"].num_slots) == (3, 0)


def test_a_block_belongs_to_the_tenant_that_saved_it_first():
    pool = make_pool(a=(2, None), b=(2, None))
    save_each(pool, 1, 2, tenant="a")
    save_each(pool, 1, 2, tenant="b")
    found = pool.tenants()
    assert (found["a"].num_slots, found["b"].num_slots, pool.tenant_of(chain(1))) == (2, 0, "a")
    assert (pool.tenant_of(chain(9)), Pool(4).tenant_of(chain(9))) == ("", "")


def test_a_block_on_which_anothers_hang_stays():
    pool = make_pool(a=(1, None))
    save(pool, chain(1), "a")
    save(pool, chain(1, 2))
    assert save_each(pool, 7, tenant="a") == 1
    assert pool.lookup(chain(1, 2)) == 2


@pytest.mark.parametrize("way", ["written", "given up", "quarantined", "reserved"])
def test_all_that_a_tenant_began_counts(way):
    pool = make_pool(a=(2, None))
    if way == "reserved":
        pool.reserve(2, "w", tenant="a")
    else:
        ticket = pool.prepare_store(chain(1, 2), "w", tenant="a")
        if way == "given up":
            pool.free_names(ticket.write_id, "w")
        if way == "quarantined":
            pool.abort_store(ticket.write_id, "w", quarantine="read")
    pool.check_integrity()
    assert save_each(pool, 3, tenant="a") == 1
    pool.release_owner("w")
    pool.end_quarantine("read")
    pool.check_integrity()
    assert (save_each(pool, 3, 4, tenant="a"), pool.tenants()["a"].num_slots) == (0, 2)


def test_reservations_count_as_what_is_saved():
    pool = make_pool(a=(3, None))
    save_each(pool, 1, 2, tenant="a")
    ticket = pool.reserve(2, "handoff", tenant="a")
    pool.check_integrity()
    assert (pool.tenants()["a"].num_slots, num_here(pool, 1, 2)) == (3, 1)
    pool.abort_store(ticket.write_id, "handoff")
    pool.check_integrity()
    assert pool.tenants()["a"].num_slots == 1


def test_a_reservation_beyond_the_quota_is_refused_whole_and_evicts_nothing():
    pool = make_pool(a=(3, None))
    save_each(pool, 1, 2, 3)
    save(pool, chain(11, 12), "a")
    held = pool.pin_prefix(chain(11), "reader", NEVER_S)
    with pytest.raises(PoolExhausted, match=r"tenant 'a' has 2 of the 3 slots .*max_bytes"):
        pool.reserve(3, "w", tenant="a")
    with pytest.raises(PoolExhausted, match="tenant 'a'"):
        pool.reserve(2, "w", may_evict=False, tenant="a")
    assert (num_here(pool, 1, 2, 3), pool.lookup(chain(11, 12)), pool.stats().num_evicted) == (3, 2, 0)
    pool.reserve(2, "w", tenant="a")
    assert (pool.lookup(chain(11, 12)), num_here(pool, 1, 2, 3)) == (1, 3)
    pool.release(held.lease_id, "reader")
    pool.check_integrity()
    with pytest.raises(PoolExhausted, match="the others are pinned or being written"):
        pool.reserve(NUM_SLOTS + 1, "w")


def test_low_blocks_count_and_go_first():
    pool = make_pool(a=(2, None))
    low = pool.prepare_store(chain(1), "w", retention=Retention(Priority.LOW), tenant="a")
    pool.complete_store(low.write_id, "w")
    save_each(pool, 2, 3, tenant="a")
    assert (num_here(pool, 1), num_here(pool, 2, 3), pool.tenants()["a"].num_slots) == (0, 2, 2)


def test_a_lease_is_as_long_as_the_quota_of_pins_allows():
    pool = make_pool(a=(None, 2))
    save(pool, chain(1, 2, 3))
    grant = pool.pin_prefix(chain(1, 2, 3), "one", NEVER_S, tenant="a")
    assert (grant.num_blocks, grant.num_refused) == (2, 1)
    assert pool.pin_prefix(chain(1, 2, 3), "other", NEVER_S).num_blocks == 3, "the shared tenant has no quota"
    pool.check_integrity()
    assert pool.pin_prefix(chain(1, 2, 3), "two", NEVER_S, tenant="a").num_blocks == 2, "of slots that it has already"
    pool.release_owner("one")
    pool.release_owner("two")
    pool.check_integrity()
    assert pool.tenants()["a"].num_pinned == 0


def test_a_lease_that_grows_stays_within_the_quota_of_its_tenant():
    pool = make_pool(a=(None, 2))
    save(pool, chain(1, 2, 3))
    grant = pool.pin_prefix(chain(1), "load", NEVER_S, tenant="a")
    more = pool.pin_prefix(chain(1, 2, 3).tail(1), "load", NEVER_S, grant.lease_id)
    assert (more.num_blocks, more.num_refused) == (1, 1)
    pool.check_integrity()


def test_a_block_that_a_tenant_pins_twice_counts_once():
    pool = make_pool(a=(None, 2))
    save(pool, chain(1, 2))
    leases = [pool.pin_prefix(chain(1), f"r{number}", NEVER_S, tenant="a") for number in range(5)]
    assert [lease.num_blocks for lease in leases] == [1] * 5
    assert pool.pin_prefix(chain(1, 2), "r", NEVER_S, tenant="a").num_blocks == 2
    assert pool.tenants()["a"].num_pinned == 2


def test_a_save_that_does_not_end_keeps_no_more_of_others_than_the_quota_of_pins():
    pool = make_pool(a=(2, 3), b=(7, None))
    save(pool, chain(1, 2, 3, 4, 5, 6, 7), "b")
    assert pool.prepare_store(chain(1, 2, 3, 4, 5, 6, 7, 8), "greedy", tenant="a").num_refused == 5
    ticket = pool.prepare_store(chain(1, 2, 3, 9), "greedy", tenant="a")
    pool.check_integrity()
    assert (ticket.indexes, pool.tenants()["a"].num_pinned) == ((3,), 3)
    late = pool.prepare_store(chain(1, 2, 3, 4, 10).tail(4), "greedy", tenant="a")
    assert (late.write_id, late.num_refused) == (0, 1), "the block above a run counts, too"
    pool.complete_store(ticket.write_id, "greedy")
    pool.check_integrity()
    assert pool.tenants()["a"].num_pinned == 0


def test_a_tenant_without_pins_continues_its_own_chains_and_locks_no_others():
    pool = make_pool(a=(2, 0), b=(6, None))
    save(pool, chain(1, 2, 3, 4, 5, 6), "b")
    assert save(pool, chain(1, 2, 3, 4, 5, 6), "a") == 0, "all are here: there is nothing to keep"
    assert pool.prepare_store(chain(1, 2, 3, 4, 5, 6, 7), "greedy", tenant="a").num_refused == 7
    assert save(pool, chain(11, 12, 13, 14, 15, 16), "b") == 0
    assert save(pool, chain(8), "a") == 0
    assert save(pool, chain(8, 9), "a") == 0


@pytest.mark.parametrize("kind", [PinKind.HARD, PinKind.LEASE])
def test_a_pin_beyond_the_quota_is_refused_and_names_it(kind):
    pool = make_pool(a=(None, 1))
    save_each(pool, 1, 2)
    pool.pin(chain(1), "p", kind, tenant="a")
    with pytest.raises(PoolExhausted, match=r"tenant 'a' has used up its quota of pins.*max_pinned_bytes"):
        pool.pin(chain(2), "p", kind, tenant="a")
    assert pool.pin(chain(2), "p", PinKind.SOFT, tenant="a").num_blocks == 1, "a soft pin holds no slot"
    assert pool.pin(chain(2), "p", kind).num_blocks == 1
    pool.check_integrity()


def test_a_tenant_at_its_quota_gets_back_what_was_cleared():
    other = b"o" * 32
    pool = make_pool(a=(2, None))
    save(pool, chain(1, 2, space=other), "a")
    pool.begin_clear(other)
    assert save_each(pool, 3, 4, tenant="a") == 0, "before the sweep, and with free slots"
    pool.sweep_all()
    pool.check_integrity()
    assert (pool.tenants()["a"].num_slots, num_here(pool, 3, 4)) == (2, 2)


def test_more_was_cleared_than_one_claim_sweeps(monkeypatch):
    monkeypatch.setattr("kvstore.pool.slots._SWEPT_AT_QUOTA", 1)
    other = b"o" * 32
    pool = make_pool(a=(2, None))
    save(pool, chain(1, 2, space=other), "a")
    pool.begin_clear(other)
    assert save(pool, chain(3, 4), "a") == 1
    pool.sweep_all()
    assert (save(pool, chain(3, 4), "a"), pool.lookup(chain(3, 4))) == (0, 2)
    pool.check_integrity()


def test_a_cleared_block_counts_until_its_last_reader_has_gone():
    pool = make_pool(a=(1, None))
    save_each(pool, 1, tenant="a")
    grant = pool.pin_prefix(chain(1), "r", NEVER_S)
    pool.clear(SPACE)
    assert save_each(pool, 2, tenant="a") == 1
    pool.release(grant.lease_id, "r")
    assert save_each(pool, 2, tenant="a") == 0
    pool.check_integrity()


def test_the_counters_say_why():
    pool = make_pool(a=(2, 1))
    save(pool, chain(1, 2), "a")
    first = pool.pin_prefix(chain(1, 2), "r", NEVER_S, tenant="a")
    assert first.num_refused == 1
    pool.pin_prefix(chain(1, 2), "other", NEVER_S)
    save_each(pool, 3, tenant="a")
    found = pool.tenants()["a"]
    assert (found.num_refused_bytes, found.num_refused_pins, found.num_evicted) == (1, 1, 0)
    pool.release_owner("other")
    pool.release_owner("r")
    save_each(pool, 4, tenant="a")
    pool.evict(1)
    found = pool.tenants()["a"]
    assert (found.num_evicted, found.num_evicted_by_quota, found.num_slots) == (2, 1, 1)


def test_a_block_stays_its_tenants_in_the_next_life():
    pool = make_pool(a=(3, None), b=(2, None))
    save_each(pool, 1, 2, tenant="b")
    save(pool, chain(3, 4), "a")
    pool.prepare_store(chain(5), "writer of before", tenant="a")
    after = make_pool(c=(1, None), a=(3, None))
    after.adopt(pool.freeze())
    after.check_integrity()
    assert after.tenants()["a"].num_slots == 3, "with what an old writer may still write"
    assert after.tenants()["c"].num_slots == 0
    save_each(after, 6, tenant="a")
    assert (num_here(after, 1, 2, 6), after.lookup(chain(3, 4))) == (3, 1)


def test_with_a_smaller_quota_in_the_next_life_own_blocks_go_first():
    pool = make_pool(a=(6, None))
    save_each(pool, 1, 2)
    save_each(pool, *range(10, 16), tenant="a")
    after = make_pool(a=(2, None))
    assert after.adopt(pool.freeze()) == 4
    after.check_integrity()
    assert (num_here(after, 1, 2), num_here(after, 14, 15), after.num_free) == (2, 2, 4)


def test_what_old_readers_may_read_stays_beyond_the_quota_until_they_are_gone():
    pool = make_pool(a=(3, None))
    save_each(pool, 1, 2, 3, tenant="a")
    for number in (1, 2):
        pool.pin_prefix(chain(number), "r", 90.0)
    after = make_pool(a=(1, None))
    assert after.adopt(pool.freeze()) == 2
    after.check_integrity()
    assert save_each(after, 4, tenant="a") == 1
    after.expire(100.0)
    assert (save_each(after, 4, tenant="a"), after.tenants()["a"].num_slots, num_here(after, 1, 2, 4)) == (0, 1, 1)
    after.check_integrity()


@pytest.mark.parametrize("eviction", ["lru", "learned"])
@pytest.mark.parametrize("seed", range(4))
def test_the_hits_of_a_tenant_are_those_that_it_has_alone(seed, eviction):
    """One scans, loops, pins, and begins what it never ends; the others' blocks fit what its quota leaves."""
    num_slots, share = 64, 24

    def run(*, has_greedy):
        pool = make_pool(num_slots, eviction, greedy=(share, 10))
        memory, draw, mine, hits = {}, random.Random(seed), random.Random(seed + 100), []
        names = [tuple(range(10 * at + 1, 10 * at + 6)) for at in range(8)]  # 40 blocks.
        for step in range(400):
            if has_greedy:
                _be_greedy(pool, mine, step, names)
            wanted = chain(*draw.choice(names))
            grant = pool.pin_prefix(wanted, "b", NEVER_S)
            for slot, own in zip(grant.slots, wanted.hashes(), strict=False):
                assert memory[slot] == own, "a slot has the bytes of another block"
            hits.append(grant.num_blocks)
            ticket = pool.prepare_store(wanted, "b")
            assert not ticket.num_refused, "a save found no room"
            for at, slot in zip(ticket.indexes, ticket.slots, strict=True):
                memory[slot] = wanted.hash_at(at)
            if ticket.write_id:
                pool.complete_store(ticket.write_id, "b")
            pool.release(grant.lease_id, "b")
            assert pool.tenants()["greedy"].num_slots <= share
            if step % 20 == 0:
                pool.check_integrity()
        return hits, pool.tenants()["greedy"]

    alone, _ = run(has_greedy=False)
    beside, greedy = run(has_greedy=True)
    assert beside == alone
    assert sum(alone) > 1000
    assert min(greedy.num_refused_bytes, greedy.num_refused_pins, greedy.num_evicted_by_quota) > 0, "it was no threat"


def _be_greedy(pool, draw, step, names):
    """Take as much as the pool gives."""
    way, tenant = draw.random(), "greedy"
    if way < 0.5:  # A scan, and a loop that is longer than its share.
        first = 10_000 + (step * 7 if way < 0.25 else step % 9 * 7)
        ticket = pool.prepare_store(chain(*range(first, first + 7)), "greedy", tenant=tenant)
        if ticket.write_id and draw.random() < 0.8:
            pool.complete_store(ticket.write_id, "greedy")
    elif way < 0.7:
        pool.pin_prefix(chain(*draw.choice(names)), "greedy", NEVER_S, tenant=tenant)
    elif way < 0.85:
        with contextlib.suppress(PoolExhausted):
            pool.reserve(draw.randint(1, 5), "greedy", tenant=tenant)
    elif way < 0.9:
        pool.release_owner("greedy")
    else:  # A burst of half-done writes of others' names.
        pool.prepare_store(chain(*range(50_000 + 4 * step, 50_004 + 4 * step)), "greedy", num_parts=2, tenant=tenant)

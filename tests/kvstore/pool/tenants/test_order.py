"""The order in which a tenant at its quota gives up its own blocks is that of the pool's policy."""

from __future__ import annotations

import pytest

from kvstore.blocks.grants import PinKind
from kvstore.blocks.priority import Priority, Retention
from tests.kvstore.pool.pool_steps import NEVER_S, chain, read
from tests.kvstore.pool.tenants.tenant_steps import make_pool, num_here, save, save_each

EVICTIONS = pytest.mark.parametrize("eviction", ["lru", "learned"])


def save_as(pool, priority, number, tenant="a"):
    ticket = pool.prepare_store(chain(number), "w", retention=Retention(priority), tenant=tenant)
    pool.complete_store(ticket.write_id, "w")


@EVICTIONS
def test_what_was_touched_last_goes_last(eviction):
    pool = make_pool(eviction=eviction, a=(3, None))
    save_each(pool, 1, 2, 3, tenant="a")
    read(pool, chain(1))
    save_each(pool, 4, tenant="a")
    assert (num_here(pool, 2), num_here(pool, 1, 3, 4)) == (0, 3)


@EVICTIONS
def test_a_block_that_was_read_when_its_turn_came_goes_later(eviction):
    pool = make_pool(eviction=eviction, a=(3, None))
    save_each(pool, 1, 2, 3, tenant="a")
    grant = pool.pin_prefix(chain(1), "r", NEVER_S)
    save_each(pool, 4, 5, 6, tenant="a")
    assert num_here(pool, 1, 5, 6) == 3
    pool.release(grant.lease_id, "r")
    pool.check_integrity()
    save_each(pool, 7, 8, 9, tenant="a")
    assert num_here(pool, 7, 8, 9) == 3


@EVICTIONS
def test_low_ones_go_first_and_high_ones_last_of_its_own(eviction):
    pool = make_pool(eviction=eviction, a=(3, None))
    save_as(pool, Priority.HIGH, 1)
    save_as(pool, Priority.NORMAL, 2)
    save_as(pool, Priority.LOW, 3)
    save_as(pool, Priority.LOW, 9, tenant="")
    save_each(pool, 4, tenant="a")
    assert num_here(pool, 1, 2, 4, 9) == 4
    save_each(pool, 5, 6, tenant="a")
    assert num_here(pool, 1, 5, 6) == 3
    for number in (7, 8, 10):
        save_as(pool, Priority.HIGH, number)
    assert num_here(pool, 7, 8, 10) == 3
    pool.check_integrity()


def test_a_soft_pin_protects_within_the_quota_as_long_as_others_can_go():
    pool = make_pool(a=(2, None))
    save_each(pool, 1, 2, tenant="a")
    pinned = pool.pin(chain(1), "p", PinKind.SOFT)
    save_each(pool, 3, 4, tenant="a")
    assert num_here(pool, 1, 4) == 2
    pool.release(pinned.lease_id, "p")
    pool.check_integrity()
    save_each(pool, 5, 6, tenant="a")
    assert num_here(pool, 5, 6) == 2


def test_a_run_of_several_tenants_is_touched_for_each():
    pool = make_pool(a=(2, None), b=(2, None))
    save(pool, chain(1), "a")
    save(pool, chain(1, 2), "b")
    save_each(pool, 3, tenant="a")
    read(pool, chain(1, 2))
    save_each(pool, 4, tenant="a")
    save_each(pool, 5, 6, tenant="b")
    assert (pool.lookup(chain(1, 2)), num_here(pool, 3), num_here(pool, 4, 5, 6)) == (1, 0, 3)
    found = pool.tenants()
    assert [found[name].num_slots for name in "ab"] == [2, 2]


@EVICTIONS
def test_what_goes_by_the_common_order_is_gone_in_the_tenants_own(eviction):
    pool = make_pool(num_slots=4, eviction=eviction, a=(2, None), b=(3, None))
    save_each(pool, 1, 2, tenant="a")
    save_each(pool, 10, 11)
    assert pool.evict(2) == 2
    pool.check_integrity()
    save_each(pool, 20, 21, 22, tenant="b")
    pool.check_integrity()
    assert (pool.tenants()["a"].num_slots, save_each(pool, 3, tenant="a")) == (0, 0)
    pool.check_integrity()
    # Hashes of several tenants that go in one step are those of their own blocks.
    assert pool.evict(4) == 4
    pool.check_integrity()
    assert pool.num_free == 4

"""Steps of tests on a small pool with tenants."""

from __future__ import annotations

from kvstore.pool.eviction.make import make_policy
from kvstore.pool.pool import Pool
from kvstore.pool.tenants.limits import TenantLimits
from kvstore.pool.tenants.table import TenantTable
from tests.kvstore.pool.pool_steps import chain

NUM_SLOTS = 8


def make_pool(num_slots=NUM_SLOTS, eviction="lru", **limits):
    quotas = {name: TenantLimits(max_slots=most[0], max_pinned=most[1]) for name, most in limits.items()}

    def new_policy(*, most_blocks):
        return make_policy(eviction, num_slots, most_blocks=most_blocks)

    tenants = TenantTable(num_slots, quotas, new_policy)
    return Pool(num_slots, eviction=make_policy(eviction, num_slots), tenants=tenants)


def save(pool, hashes, tenant=""):
    """Store what fits; return how many blocks were refused."""
    ticket = pool.prepare_store(hashes, "writer", tenant=tenant)
    pool.check_integrity()
    if ticket.write_id:
        pool.complete_store(ticket.write_id, "writer")
    pool.check_integrity()
    return ticket.num_refused


def save_each(pool, *numbers, tenant=""):
    """Store chains of one block each."""
    return sum(save(pool, chain(number), tenant) for number in numbers)


def num_here(pool, *numbers):
    return sum(pool.lookup(chain(number)) for number in numbers)

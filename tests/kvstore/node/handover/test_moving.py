"""Blocks that a restart moves to a smaller memory: what stays, and whose it is."""

from __future__ import annotations

from contextlib import contextmanager

import msgspec

from kvstore.blocks.priority import Priority, Retention
from kvstore.config import StoreConfig
from kvstore.memory.arena import create_arena
from kvstore.node.handover.message import Message
from kvstore.node.handover.moving import move
from kvstore.pool.pool import Pool
from tests.kvstore.pool.pool_steps import SPACE, chain, store
from tests.kvstore.pool.tenants.tenant_steps import make_pool, num_here, save, save_each

BLOCK_BYTES = 16384


@contextmanager
def moved(pool, num_slots, tenants):
    """The index of a pool that has been moved to so many slots."""
    fields = dict.fromkeys(field.name for field in msgspec.structs.fields(Message))
    capacity_bytes = pool.table.num_slots * BLOCK_BYTES
    fields |= {"capacity_bytes": capacity_bytes, "slot_bytes": BLOCK_BYTES, "block_bytes": {SPACE: BLOCK_BYTES}}
    old = create_arena(capacity_bytes)
    config = StoreConfig(capacity_bytes=num_slots * BLOCK_BYTES, tenants=tenants)
    new, _, image = move(old, Message(**fields), pool.freeze(), config)
    try:
        yield image
    finally:
        new.close()
        old.close()


def test_a_block_of_high_priority_stays_before_younger_ones():
    pool, after = Pool(5), Pool(4)
    first = pool.prepare_store(chain(1), "writer", retention=Retention(Priority.HIGH))
    pool.complete_store(first.write_id, "writer")
    for number in (2, 3, 4, 5):
        store(pool, chain(number))
    with moved(pool, 4, {}) as image:
        after.adopt(image)
    assert [after.lookup(chain(number)) for number in (1, 2, 3)] == [1, 0, 1]


def test_what_a_tenant_has_beyond_its_new_quota_costs_the_others_nothing():
    pool = make_pool(num_slots=64, a=(40, None), b=(None, None))
    save_each(pool, *range(20), tenant="b")
    save_each(pool, *range(100, 140), tenant="a")
    after = make_pool(num_slots=32, a=(8, None), b=(None, None))
    with moved(pool, 32, {"a": {"max_bytes": 8 * BLOCK_BYTES}, "b": {}}) as image:
        after.adopt(image)
    after.check_integrity()
    found = {name: counts.num_slots for name, counts in after.tenants().items()}
    assert found == {"a": 8, "b": 20}, "moved blocks keep their owner"
    assert (num_here(after, *range(20)), num_here(after, *range(132, 140))) == (20, 8)


def test_a_block_on_which_others_hang_is_moved_beyond_the_quota():
    pool = make_pool(num_slots=8, a=(4, None), b=(None, None))
    save(pool, chain(1, 2), "a")
    save(pool, chain(1, 2, 3), "b")
    save_each(pool, 5, 6, tenant="a")
    after = make_pool(num_slots=4, a=(1, None), b=(None, None))
    with moved(pool, 4, {"a": {"max_bytes": BLOCK_BYTES}, "b": {}}) as image:
        after.adopt(image)
    after.check_integrity()
    assert after.lookup(chain(1, 2, 3)) == 3

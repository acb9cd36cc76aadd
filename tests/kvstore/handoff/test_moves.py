"""Slots of the arena to which blocks of a GPU are copied: whose they are."""

from __future__ import annotations

from kvstore.handoff.records import Place
from kvstore.handoff.table import HandoffTable
from kvstore.pool.pool import Pool
from kvstore.runtime import clock
from tests.kvstore.pool.tenants.tenant_steps import make_pool

KEY, SPACE, WRITER = b"k" * 16, b"n" * 32, 7


def test_what_is_moved_from_a_gpu_to_the_arena_is_the_publishers():
    table, stage, arena = HandoffTable(), Pool(8), make_pool(a=(3, None))
    table.prepare(KEY, WRITER, "client-1", SPACE, 0, 2, Place(stage, 8, slab=1, tenant="a"))
    table.complete(KEY, WRITER, "client-1", clock.now_s() + 60)
    claim = table.claim(KEY, "client-2", SPACE, 0, clock.now_s() + 30)
    assert len(table.move(claim.claim_id, Place(arena, 8))) == 2
    assert arena.tenants()["a"].num_slots == 2
    arena.check_integrity()

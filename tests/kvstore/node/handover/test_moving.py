"""Blocks of an old memory that has more of them than the new one holds."""

from __future__ import annotations

from kvstore.blocks.priority import Priority, Retention
from kvstore.node.handover.moving import _last_to_go
from kvstore.pool.pool import Pool
from tests.kvstore.pool.pool_steps import chain, store


def test_a_block_of_high_priority_stays_before_younger_ones():
    pool = Pool(4)
    first = pool.prepare_store(chain(1), "writer", retention=Retention(Priority.HIGH))
    pool.complete_store(first.write_id, "writer")
    for number in (2, 3):
        store(pool, chain(number))
    blocks = pool.freeze().blocks
    kept = blocks.slot[_last_to_go(blocks, 2)].tolist()
    assert first.slots[0] in kept
    assert len(kept) == 2

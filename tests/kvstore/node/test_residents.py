"""What a node announces of both its tiers: a block is here as long as one of them has it."""

import random

import pytest

from kvstore.blocks.chain import BlockHashes
from kvstore.node.residents import Residents
from kvstore.pool.pool import Pool

SPACE = b"n" * 32


def block(number):
    return BlockHashes(SPACE, SPACE, 0, (number + 1).to_bytes(4, "little") * 8)


def put(pool, number):
    ticket = pool.prepare_store(block(number), "writer")
    if ticket.write_id:
        pool.complete_store(ticket.write_id, "writer")


@pytest.mark.parametrize("seed", range(10))
def test_whoever_follows_knows_the_union_of_both_tiers(seed):
    """Changes of both tiers in any order, drained at any time, and lost now and then."""
    rng, tiers = random.Random(seed), [Pool(4), Pool(6)]
    residents, known = Residents(*tiers), set[bytes]()
    for _ in range(400):
        tier = rng.choice(tiers)
        if rng.random() < 0.7:
            put(tier, rng.randrange(12))
        else:
            tier.discard([rng.randrange(6)] if tier is tiers[1] else [rng.randrange(4)])
        if rng.random() < 0.1:
            known = set(residents.resident_hashes())
        elif rng.random() < 0.3:
            for is_here, own in residents.drain_events():
                (known.add if is_here else known.discard)(own)
        else:
            continue
        both = [block(number)[0] for number in range(12)]
        assert known == tiers[0].present(both) | tiers[1].present(both)


def test_too_many_changes_of_either_tier_want_a_snapshot():
    for which in range(2):
        tiers = [Pool(4), Pool(4)]
        residents = Residents(*tiers)
        for number in range(1 << 14):
            put(tiers[which], number % 100)
        assert residents.drain_events() is None
        assert len(residents.resident_hashes()) == 4
        assert residents.drain_events() == []

"""Hard and soft pins, budgets, refusals, and events that tell what happened (rules 9, 11; I12, I14)."""

from __future__ import annotations

import random

import pytest

from kvstore.errors import PoolExhausted
from kvstore.pool.pool import PinKind, Pool
from poolcheck.chains import NAMESPACES, chain_of, resident, store


def test_a_hard_pin_is_never_evicted_and_ends_only_by_hand_or_with_its_owner():
    """Rule 3; a pin is a lease without a deadline."""
    for end in (lambda pool, grant: pool.release(grant.lease_id, "p"), lambda pool, _: pool.release_owner("p") == 1):
        pool = Pool(4)
        store(pool, "ab")
        grant = pool.pin(chain_of("ab"), "p", PinKind.HARD)
        assert pool.expire(1e12) == 0
        for tokens in ("wxyz", "stuv"):
            assert pool.prepare_store(chain_of(tokens), "w", deadline_s=0.0).num_refused == 2
            pool.expire(1.0)
        assert (resident(pool, "ab"), pool.stats().num_hard_pinned) == (2, 2)
        assert end(pool, grant)
        pool.check_integrity()
        assert pool.stats().num_hard_pinned == pool.stats().num_pinned == 0
        assert pool.prepare_store(chain_of("wxyz"), "w").num_refused == 0


def test_hard_pins_have_a_quota_of_their_own():
    """Rule 9, I12: the prefix that fits, then a typed refusal; one release later there is room again."""
    pool = Pool(8, max_pinned=6, max_hard_pinned=3)
    store(pool, "abcd")
    store(pool, "xy")
    grant = pool.pin(chain_of("abcd"), "p", PinKind.HARD)
    assert (len(grant.slots), grant.num_refused) == (3, 1)
    again = pool.pin(chain_of("abc"), "q", PinKind.HARD)
    assert len(again.slots) == 3, "what is pinned already costs nothing more"
    before = pool.stats()
    with pytest.raises(PoolExhausted, match="wanted to pin 2 blocks"):
        pool.pin(chain_of("xy"), "p", PinKind.HARD)
    assert pool.stats() == before
    assert len(pool.pin_prefix(chain_of("abcd"), "r", 5.0).slots) == 4, "leases have room beyond it"
    assert pool.release(grant.lease_id, "p")
    with pytest.raises(PoolExhausted):
        pool.pin(chain_of("xy"), "p", PinKind.HARD)
    assert pool.release(again.lease_id, "q")
    assert len(pool.pin(chain_of("xy"), "p", PinKind.HARD).slots) == 2
    pool.check_integrity()


def test_a_pin_of_nothing_is_no_pin():
    pool = Pool(4)
    assert pool.pin(chain_of("ab"), "p", PinKind.HARD).lease_id == 0
    assert pool.pin(chain_of("ab"), "p", PinKind.SOFT).lease_id == 0
    assert pool.num_leases() == 0


def test_a_lease_says_how_much_the_budget_refused():
    """Rule 9: a full budget is not mistaken for a miss."""
    pool = Pool(4, max_pinned=3)
    store(pool, "abcd")
    assert pool.pin_prefix(chain_of("abcd"), "r", 5.0).num_refused == 1
    assert pool.pin_prefix(chain_of("abcd", start=3), "r", 5.0).num_refused == 1
    assert pool.pin_prefix(chain_of("abc"), "r", 5.0).num_refused == 0


def test_soft_pins_go_last_and_only_when_nothing_else_is_left():
    """Build 1, soft pins: the oldest block stays as long as any other can go, then its leaf goes first."""
    pool = Pool(4)
    store(pool, "ab")
    store(pool, "c")
    store(pool, "d")
    pin = pool.pin(chain_of("ab"), "p", PinKind.SOFT)
    assert (pool.stats().num_soft_pinned, pool.stats().num_pinned) == (2, 0)
    grants = [pool.pin_prefix(chain_of(tokens), "r", 5.0) for tokens in ("c", "d")]
    for grant in grants:
        pool.release(grant.lease_id, "r")
    store(pool, "wx")
    assert (resident(pool, "ab"), resident(pool, "c"), resident(pool, "d")) == (2, 0, 0)
    store(pool, "wxy")
    assert (resident(pool, "ab"), resident(pool, "wxy")) == (1, 3), "nothing else was left"
    assert pool.stats().num_soft_pinned == 1
    store(pool, "wxyz")
    assert (resident(pool, "ab"), resident(pool, "wxyz")) == (0, 4)
    assert pool.stats().num_soft_pinned == 0
    assert pool.release(pin.lease_id, "p")
    pool.check_integrity()


def test_a_soft_pin_that_ended_protects_no_more_and_not_the_next_block_in_the_slot():
    """I9: the pin belongs to one life of the slot."""
    pool = Pool(2)
    store(pool, "ab")
    old = pool.pin(chain_of("ab"), "p", PinKind.SOFT)
    store(pool, "xy")
    assert resident(pool, "xy") == 2
    new = pool.pin(chain_of("xy"), "q", PinKind.SOFT)
    assert pool.release(old.lease_id, "p")
    pool.check_integrity()
    assert pool.stats().num_soft_pinned == 2
    assert pool.release(new.lease_id, "q")
    assert pool.stats().num_soft_pinned == 0
    store(pool, "ab")
    assert (resident(pool, "ab"), resident(pool, "xy")) == (2, 0)


def test_a_soft_pin_that_was_passed_over_can_go_again_when_it_ends():
    pool = Pool(3)
    store(pool, "a")
    store(pool, "bc")
    pin = pool.pin(chain_of("a"), "p", PinKind.SOFT)
    pool.pin_prefix(chain_of("b"), "r", 5.0)
    store(pool, "x")
    assert (resident(pool, "a"), resident(pool, "bc")) == (1, 1)
    pool.pin_prefix(chain_of("x"), "r", 5.0)
    assert pool.release(pin.lease_id, "p")
    pool.check_integrity()
    store(pool, "y")
    assert (resident(pool, "a"), resident(pool, "y")) == (0, 1)


def test_a_cleared_block_has_no_soft_pin():
    pool = Pool(4)
    store(pool, "ab")
    pin = pool.pin(chain_of("ab"), "p", PinKind.SOFT)
    pool.clear(NAMESPACES[0])
    pool.check_integrity()
    assert pool.release(pin.lease_id, "p")
    assert pool.stats().num_free == 4


def test_a_fully_pinned_pool_refuses_at_once_and_serves_after_one_release():
    """Rule 9: by the call that asks, which waits for nothing; nothing half inserted."""
    pool = Pool(256)
    tokens = "".join(chr(200 + i) for i in range(256))
    store(pool, tokens)
    grant = pool.pin_prefix(chain_of(tokens), "r", 1e9)
    before = pool.stats()
    ticket = pool.prepare_store(chain_of("xyz"), "w")
    assert (ticket.write_id, ticket.num_refused) == (0, 3)
    assert pool.stats() == before
    assert pool.release(grant.lease_id, "r")
    assert len(pool.prepare_store(chain_of("xyz"), "w").slots) == 3
    pool.check_integrity()


def test_events_replayed_are_the_resident_set_whatever_happens():
    """I14: with parts, aborts, deaths, partial publishing, clearing and soft pins."""
    pool, rng, found = Pool(7, max_hard_pinned=2), random.Random(11), set()
    open_writes: list[tuple[int, str, int]] = []
    for step in range(1500):
        tokens, owner = "".join(rng.choice("ab") for _ in range(rng.randint(1, 4))), rng.choice("pq")
        what = rng.random()
        if what < 0.4:
            num_parts, part = rng.choice(((1, 0), (2, 0), (2, 1)))
            ticket = pool.prepare_store(
                chain_of(tokens), owner, num_parts=num_parts, part=part, parts_deadline_s=step + 20.0
            )
            if ticket.write_id:
                open_writes.append((ticket.write_id, owner, num_parts))
        elif what < 0.7 and open_writes:
            write_id, owner, num_parts = open_writes.pop(rng.randrange(len(open_writes)))
            count = rng.choice((None, None, 1)) if num_parts == 1 else None
            pool.complete_store(write_id, owner, count=count)
            if count or rng.random() < 0.3:
                pool.abort_store(write_id, owner)
        elif what < 0.8:
            pool.pin(chain_of(tokens), owner, PinKind.SOFT, step + 10.0)
        elif what < 0.9:
            pool.pin_prefix(chain_of(tokens), owner, step + 5.0)
        elif what < 0.95:
            pool.expire(float(step))
        elif what < 0.97:
            pool.release_owner(owner)
        elif what < 0.98:
            pool.clear(NAMESPACES[0])
        pool.check_integrity()
        if step % 7 == 0:
            for present, block_hash in pool.drain_events():
                (found.add if present else found.remove)(block_hash)
            missing = [h for h in found if h not in pool.table.index.space_of(NAMESPACES[0]).ready]
            assert not missing
            assert len(found) == len(pool.table.index.space_of(NAMESPACES[0]).ready)
    stats = pool.stats()
    assert stats.num_evicted > 20
    assert stats.num_published > 100
    for owner in "pq":
        pool.release_owner(owner)
    pool.expire(1e9)
    pool.check_integrity()
    stats = pool.stats()
    assert (stats.num_pinned, stats.num_writing, stats.num_leases, stats.num_soft_pinned) == (0, 0, 0, 0)


def test_to_hold_blocks_that_are_pinned_takes_nothing_from_the_budget():
    """A load may have all of them pinned while the disk writes them."""
    pool, chain = Pool(6, max_pinned=4), chain_of("abcdef")
    store(pool, "abcdef")
    grant = pool.pin_prefix(chain.head(3), "reader", 5.0)
    slots = list(grant.slots)
    lease_id, held = pool.hold(slots, chain.namespace, "disk")
    assert [block.slot for block in held] == slots
    assert pool.stats().num_pinned == 3
    others = [slot for slot in range(6) if slot not in slots]
    assert len(pool.hold(others, chain.namespace, "disk")[1]) == 1, "only one more may be pinned"
    assert pool.release(lease_id, "disk")
    pool.check_integrity()

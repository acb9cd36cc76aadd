"""Names of things that are over, of others, or never were: refused, and no count changes."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest, LeaseReleased, StaleTicket
from kvstore.pool.pool import Pool
from poolcheck.chains import LATER_S, NAMESPACES, chain_of

FOREIGN_EPOCH = b"x" * 8
NO_IDS = [0, -1, 2**64, 2**80, 1.5, None, "1", b"1", (1,), float("nan")]


@pytest.fixture(name="pool")
def _pool():
    """A pool with one of everything."""
    pool = Pool(8, max_pinned=6)
    ticket = pool.prepare_store(chain_of("ab"), "w")
    pool.complete_store(ticket.write_id, "w")
    pool.prepare_store(chain_of("xy"), "w")
    pool.pin_prefix(chain_of("a"), "r", LATER_S)
    aside = pool.prepare_store(chain_of("q"), "w")
    pool.abort_store(aside.write_id, "w", quarantine="read-1")
    return pool


@pytest.fixture(name="unchanged")
def _unchanged(pool):
    """No count changes, whatever is asked."""
    before, lives = pool.stats(), pool.generations(tuple(range(8)))
    pool.drain_events()
    yield
    pool.check_integrity()
    assert pool.stats() == before
    assert pool.generations(tuple(range(8))) == lives
    assert pool.drain_events() == []


@pytest.mark.parametrize("lease_id", NO_IDS, ids=repr)
def test_what_is_no_lease(pool, unchanged, lease_id):
    assert not pool.release(lease_id, "r")
    assert not pool.renew(lease_id, "r", LATER_S)
    if lease_id:
        with pytest.raises(LeaseReleased):
            pool.pin_prefix(chain_of("a"), "r", LATER_S, lease_id)


@pytest.mark.parametrize("write_id", NO_IDS, ids=repr)
def test_what_is_no_write(pool, unchanged, write_id):
    assert pool.complete_store(write_id, "w") == 0
    assert pool.abort_store(write_id, "w") == pool.abort_store(write_id, "w", quarantine="read-2") == 0


def test_what_is_over_and_what_is_of_others(pool, unchanged):
    lease = pool.pin_prefix(chain_of("ab"), "r2", LATER_S)
    write = pool.prepare_store(chain_of("k"), "w2")
    for verb in (pool.release, pool.complete_store, pool.abort_store):
        assert not verb(lease.lease_id, "thief")
        assert not verb(write.write_id, "thief")
        # A lease is no write and a write is no lease.
        assert not verb(write.write_id if verb == pool.release else lease.lease_id, "r2")
    assert pool.abort_store(write.write_id, "w2") == 1
    assert pool.release(lease.lease_id, "r2")
    for _ in range(3):
        assert not pool.release(lease.lease_id, "r2")
        assert pool.complete_store(write.write_id, "w2") == pool.abort_store(write.write_id, "w2") == 0
    # The slot of what was given up has begun a life, and that is not undone.
    pool.table.columns.generation[write.slots[0]] -= 1


def test_what_names_another_life_of_the_store_changes_nothing(pool, unchanged):
    lease = pool.pin_prefix(chain_of("a"), "r2", LATER_S)
    assert not pool.release(lease.lease_id, "r2", epoch=FOREIGN_EPOCH)
    assert not pool.renew(lease.lease_id, "r2", LATER_S, epoch=FOREIGN_EPOCH)
    assert pool.renew(lease.lease_id, "r2", LATER_S, epoch=lease.epoch)
    assert pool.release(lease.lease_id, "r2", epoch=lease.epoch)
    with pytest.raises(StaleTicket):
        pool.complete_store(1, "w", epoch=FOREIGN_EPOCH)
    assert pool.abort_store(1, "w", epoch=FOREIGN_EPOCH) == 0


def test_every_life_of_a_slot_has_a_number():
    pool = Pool(1)
    numbers = []
    for tokens in "abc":
        ticket = pool.prepare_store(chain_of(tokens), "w")
        old = numbers[-1] if numbers else b"\xff" * 4
        with pytest.raises(StaleTicket):
            pool.complete_store(ticket.write_id, "w", generations=old)
        assert pool.abort_store(ticket.write_id, "w", generations=old) == 0
        assert pool.lookup(chain_of(tokens)) == 0
        assert pool.complete_store(ticket.write_id, "w", generations=ticket.generations) == 1
        numbers.append(ticket.generations)
        pool.check_integrity()
    assert len(set(numbers)) == 3


@pytest.mark.parametrize("deadline_s", [float("nan"), float("-inf")])
def test_a_deadline_that_is_no_time(pool, unchanged, deadline_s):
    for call in (
        lambda: pool.pin_prefix(chain_of("a"), "r", deadline_s),
        lambda: pool.renew(1, "r", deadline_s),
        lambda: pool.prepare_store(chain_of("new"), "w", deadline_s=deadline_s),
    ):
        with pytest.raises(InvalidRequest):
            call()


@pytest.mark.parametrize(
    ("num_parts", "part"), [(0, 0), (-1, 0), (2, 2), (2, -1), (1, 1), (2, 0.5), (2, "0"), (None, 0), (2, None)]
)
def test_a_part_that_is_none(pool, unchanged, num_parts, part):
    with pytest.raises(InvalidRequest, match="part"):
        pool.prepare_store(chain_of("new"), "w", num_parts=num_parts, part=part)


def test_a_quarantine_and_an_owner_and_a_namespace_that_never_were(pool, unchanged):
    assert pool.end_quarantine("read-9") == pool.release_owner("nobody") == pool.clear(NAMESPACES[1]) == 0

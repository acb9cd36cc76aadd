"""Clearing in pieces: nothing is found from the first step on, and the slots come back some at a time."""

from __future__ import annotations

import pytest

from kvstore.pool.pool import PinKind, Pool
from poolcheck.chains import NAMESPACES, chain_of, store

NAMESPACE = NAMESPACES[0]
OTHER = chain_of("xy", namespace=NAMESPACES[1])


def pool_of(num_slots: int, swept_at_once: int = 1) -> Pool:
    pool = Pool(num_slots)
    pool.swept_at_once = swept_at_once
    return pool


def store_other(pool: Pool) -> None:
    """Store two blocks of another namespace."""
    assert pool.complete_store(pool.prepare_store(OTHER, "w").write_id, "w") == 2


def num_free(pool: Pool) -> int:
    pool.check_integrity()
    return pool.stats().num_free


def sweep(pool: Pool) -> int:
    """Sweep all, one step after the other; returns how many steps that were."""
    count = 1
    while pool.sweep():
        pool.check_integrity()
        count += 1
    pool.check_integrity()
    return count


def test_nothing_is_found_from_the_first_step_on_and_slots_come_back_in_steps():
    pool = pool_of(8, swept_at_once=2)
    store(pool, "abcde")
    store_other(pool)
    assert pool.begin_clear(NAMESPACE) == 5
    assert pool.lookup(chain_of("abcde")) == 0
    assert not pool.pin_prefix(chain_of("a"), "r", 1e9).slots
    assert pool.resident_hashes() == OTHER.hashes()
    assert (pool.has_cleared(), num_free(pool)) == (True, 1)
    assert [pool.sweep(), num_free(pool)] == [True, 3]
    assert sweep(pool) <= 3
    assert (pool.has_cleared(), num_free(pool)) == (False, 6)
    assert pool.lookup(OTHER) == 2
    assert (pool.clear(NAMESPACE), pool.begin_clear(b"never seen" * 3), pool.sweep()) == (0, 0, False)


def test_what_is_stored_again_between_two_steps_stays_and_its_event_comes_last():
    pool = pool_of(12)
    store(pool, "abcd")
    pool.drain_events()
    pool.begin_clear(NAMESPACE)
    pool.sweep()
    store(pool, "abc")
    sweep(pool)
    assert (pool.lookup(chain_of("abcd")), num_free(pool)) == (3, 9)
    final = dict((block_hash, present) for present, block_hash in pool.drain_events())
    assert {own for own, present in final.items() if present} == set(chain_of("abc").hashes())
    assert set(pool.resident_hashes()) == set(chain_of("abc").hashes())


@pytest.mark.parametrize("verb", ["prepare_store", "reserve"])
def test_a_claim_that_is_short_of_slots_takes_what_was_cleared_and_evicts_nothing(verb):
    pool = pool_of(6)
    store_other(pool)
    store(pool, "abc")
    half = pool.prepare_store(chain_of("z"), "dead", num_parts=2)
    pool.complete_store(half.write_id, "dead")
    pool.begin_clear(NAMESPACE)
    ticket = pool.reserve(4, "w") if verb == "reserve" else pool.prepare_store(chain_of("abcd"), "w")
    pool.check_integrity()
    assert (len(ticket.slots), pool.lookup(OTHER), pool.stats().num_evicted) == (4, 2, 0)
    sweep(pool)
    assert pool.abort_store(ticket.write_id, "w") == 4
    assert num_free(pool) == 4


@pytest.mark.parametrize("num_swept", [0, 1, 3])
def test_a_write_that_a_clearing_met_publishes_nothing_before_and_after_it_is_swept(num_swept):
    pool, told = pool_of(12), []
    old = pool.prepare_store(chain_of("abc"), "old")
    pool.begin_clear(NAMESPACE)
    for _ in range(num_swept):
        pool.sweep()
    new = pool.prepare_store(chain_of("abc"), "new")
    pool.watch(chain_of("abc"), told.append)
    assert (len(new.slots), set(new.slots) & set(old.slots)) == (3, set())
    assert pool.complete_store(old.write_id, "old") == 0
    pool.check_integrity()
    # Who waits for the new ones hears nothing of the old ones' end.
    assert (told, pool.lookup(chain_of("abc"))) == ([], 0)
    assert pool.complete_store(new.write_id, "new") == 3
    assert told == [3]
    sweep(pool)
    assert num_free(pool) == 9


@pytest.mark.parametrize("num_swept", [0, 2, 6])
@pytest.mark.parametrize("end", ["complete", "abort", "expire", "owner"])
def test_ranks_that_a_clearing_met_end_in_any_order(num_swept, end):
    pool = pool_of(16)
    tickets = [pool.prepare_store(chain_of("abcd"), f"r{part}", num_parts=3, part=part) for part in range(2)]
    assert tickets[0].slots == tickets[1].slots
    pool.complete_store(tickets[0].write_id, "r0")
    pool.begin_clear(NAMESPACE)
    for _ in range(num_swept):
        pool.sweep()
    again = [pool.prepare_store(chain_of("abcd"), f"n{part}", num_parts=3, part=part) for part in range(3)]
    pool.check_integrity()
    assert not set(again[0].slots) & set(tickets[0].slots)
    if end == "complete":
        assert pool.complete_store(tickets[1].write_id, "r1") == 0
    elif end == "abort":
        pool.abort_store(tickets[1].write_id, "r1")
    elif end == "owner":
        pool.release_owner("r1")
    else:
        pool.expire(0.0)
        pool.abort_store(tickets[1].write_id, "r1")
    pool.check_integrity()
    assert [pool.complete_store(ticket.write_id, f"n{part}") for part, ticket in enumerate(again)] == [0, 0, 4]
    sweep(pool)
    assert (num_free(pool), pool.lookup(chain_of("abcd"))) == (12, 4)


def test_readers_and_pins_of_what_was_cleared_end_before_and_after_it_is_swept():
    pool = pool_of(8)
    store(pool, "abcdef")
    early, late = (pool.pin_prefix(chain_of(tokens), "r", 1e9) for tokens in ("abc", "ab"))
    hard, soft = pool.pin(chain_of("a"), "p", PinKind.HARD), pool.pin(chain_of("abcdef"), "p", PinKind.SOFT)
    pool.begin_clear(NAMESPACE)
    assert pool.release(early.lease_id, "r")
    pool.check_integrity()
    sweep(pool)
    assert num_free(pool) == 6
    assert pool.release(late.lease_id, "r")
    assert num_free(pool) == 7
    assert pool.release(hard.lease_id, "p")
    assert pool.release(soft.lease_id, "p")
    assert num_free(pool) == 8


def test_several_clearings_are_swept_in_turn():
    pool = pool_of(12, swept_at_once=2)
    for tokens in ("abc", "ab", "abcd"):
        store(pool, tokens)
        assert pool.begin_clear(NAMESPACE) == len(tokens)
    store_other(pool)
    pool.begin_clear(NAMESPACES[1])
    assert sweep(pool) <= 9
    assert num_free(pool) == 12


def test_namespaces_that_have_nothing_here_are_forgotten():
    pool = Pool(4)
    for number in range(1000):
        namespace = number.to_bytes(32, "little")
        ticket = pool.prepare_store(chain_of("ab", namespace=namespace), "w")
        pool.complete_store(ticket.write_id, "w")
    pool.check_integrity()
    assert len(pool.table.index.spaces) < 200
    assert len(pool.resident_hashes()) == 4


def test_a_node_sweeps_by_itself_what_it_hears_was_cleared(cluster, wait_until):
    core = cluster.add("a", mover=False)
    worker, hashes = cluster.worker("a"), cluster.hashes(10)
    worker.save(hashes, range(10))
    core.state.pool_service.hear_clearing(cluster.space.digest, 3)
    assert worker.client.lookup(hashes).num_blocks == 0
    wait_until(lambda: core.pool.stats().num_free == core.pool.num_slots)
    assert not core.pool.has_cleared()

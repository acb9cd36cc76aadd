"""Who writes what: generations and epochs, duplicates, parts, deadlines (rules 4, 5, 6, 10; I7 to I9)."""

from __future__ import annotations

import random
import re
import threading

import pytest

from kvstore.errors import InvalidRequest, PoolExhausted, StaleTicket
from kvstore.pool.pool import Pool
from poolcheck.chains import NAMESPACES, chain_of, resident, store


def settle(pool: Pool, tokens: str) -> list[int]:
    """What a watch on a chain says; empty until it says something."""
    told: list[int] = []
    pool.watch(chain_of(tokens), told.append)
    return told


# Generations and epochs.


def test_grants_and_tickets_name_the_life_of_every_slot():
    """Rule 5, I9."""
    pool = Pool(2, epoch=b"8 bytes.")
    for life in (1, 2, 3):
        ticket = pool.prepare_store(chain_of(f"{life}x"), "w")
        assert (ticket.generations, ticket.epoch) == (life.to_bytes(4, "little") * 2, b"8 bytes.")
        pool.complete_store(ticket.write_id, "w")
        grant = pool.pin_prefix(chain_of(f"{life}x"), "r", 1e9)
        assert (grant.generations, grant.epoch) == (ticket.generations, b"8 bytes.")
        assert pool.release(grant.lease_id, "r")


def test_a_ticket_of_another_life_is_refused_and_changes_nothing():
    """Rule 5: epoch and generation, both on complete and on abort."""
    pool = Pool(4)
    ticket = pool.prepare_store(chain_of("ab"), "w")
    before = pool.stats()
    stale = bytes(len(ticket.generations))
    for more in ({"generations": stale}, {"generations": ticket.generations[:4]}, {"epoch": bytes(8)}):
        with pytest.raises(StaleTicket):
            pool.complete_store(ticket.write_id, "w", **more)
        assert pool.abort_store(ticket.write_id, "w", **more) == 0
        assert pool.stats() == before
        pool.check_integrity()
    assert pool.complete_store(ticket.write_id, "w", generations=ticket.generations, epoch=ticket.epoch) == 2
    assert pool.abort_store(ticket.write_id, "w", generations=ticket.generations, epoch=ticket.epoch) == 0


def test_leases_of_another_epoch_are_not_held():
    """Rules 5 and 6."""
    pool = Pool(2)
    store(pool, "a")
    grant = pool.pin_prefix(chain_of("a"), "r", 5.0)
    assert not pool.release(grant.lease_id, "r", epoch=bytes(8))
    assert not pool.renew(grant.lease_id, "r", 99.0, epoch=bytes(8))
    assert pool.stats().num_pinned == 1
    assert pool.renew(grant.lease_id, "r", 9.0, epoch=grant.epoch)
    assert pool.release(grant.lease_id, "r", epoch=grant.epoch)


@pytest.mark.parametrize("bad", [0, -1, 2**80, 1.5, "1", None, b"x", (), [1], {}])
def test_ids_that_are_none_change_nothing(bad):
    """Rule 6: malformed and unknown ids are answered with False or 0."""
    pool = Pool(4)
    store(pool, "a")
    grant, ticket = pool.pin_prefix(chain_of("a"), "r", 5.0), pool.prepare_store(chain_of("bc"), "w")
    before = pool.stats()
    assert not pool.release(bad, "r")
    assert not pool.release(float(grant.lease_id), "r")
    assert not pool.renew(bad, "r", 9.0)
    assert pool.complete_store(bad, "w") == pool.complete_store(float(ticket.write_id), "w") == 0
    assert pool.abort_store(bad, "w") == 0
    assert pool.stats() == before
    pool.check_integrity()


@pytest.mark.parametrize(("num_parts", "part"), [(0, 0), (-1, 0), (2, 2), (2, -1), (1, 1)])
def test_parts_that_cannot_be_are_refused(num_parts, part):
    pool = Pool(2)
    with pytest.raises(InvalidRequest, match="part: wanted"):
        pool.prepare_store(chain_of("a"), "w", num_parts=num_parts, part=part)
    assert pool.stats().num_free == 2


def test_a_time_that_is_no_number_is_refused():
    """Rule 10: such a deadline would never pass."""
    pool, nan = Pool(2), float("nan")
    store(pool, "a")
    for call in (
        lambda: pool.pin_prefix(chain_of("a"), "r", nan),
        lambda: pool.renew(1, "r", nan),
        lambda: pool.prepare_store(chain_of("b"), "w", deadline_s=nan),
        lambda: pool.prepare_store(chain_of("b"), "w", parts_deadline_s=nan),
    ):
        with pytest.raises(InvalidRequest, match="deadline_s"):
            call()
    assert (pool.stats().num_leases, pool.stats().num_writes) == (0, 0)


# Duplicates.


def test_a_ticket_says_what_others_are_still_writing():
    """Build 1, duplicates: what somebody may still give up is not reported as stored."""
    pool = Pool(8)
    store(pool, "a")
    first = pool.prepare_store(chain_of("abc"), "w1")
    assert (first.indexes, first.num_resident, first.num_awaited) == ((1, 2), 1, 0)
    second = pool.prepare_store(chain_of("abcd"), "w2")
    assert (second.indexes, second.num_resident, second.num_awaited) == ((3,), 3, 2)
    pool.check_integrity()
    told = settle(pool, "abcd")
    pool.complete_store(second.write_id, "w2")
    assert told == []
    pool.complete_store(first.write_id, "w1")
    assert told == [4]
    pool.check_integrity()


def test_a_watch_tells_when_a_writer_gives_up_and_the_next_takes_over():
    """Build 1, duplicates: takeover after an abort or a death."""
    for end in (lambda pool, ticket: pool.abort_store(ticket.write_id, "w1"), lambda pool, _: pool.release_owner("w1")):
        pool = Pool(8)
        first = pool.prepare_store(chain_of("ab"), "w1")
        told = settle(pool, "ab")
        end(pool, first)
        assert told == [0]
        again = pool.prepare_store(chain_of("ab"), "w2")
        assert again.indexes == (0, 1)
        assert pool.complete_store(again.write_id, "w2") == 2
        assert settle(pool, "ab") == [2], "told at once when nobody writes"
        pool.check_integrity()


@pytest.mark.parametrize("end", ["complete_store", "abort_store", "free_names"])
def test_a_watch_that_fails_harms_neither_the_others_nor_the_writer(end, caplog):
    pool, told = Pool(8), []

    def fail(count):
        raise OSError("its client is gone")

    ticket = pool.prepare_store(chain_of("ab"), "w")
    for then in (told.append, fail, told.append):
        pool.watch(chain_of("ab"), then)
    assert getattr(pool, end)(ticket.write_id, "w") == 2
    assert told == [2 if end == "complete_store" else 0] * 2
    assert [record.exc_info[0] for record in caplog.records] == [OSError]
    pool.check_integrity()


def test_a_watch_counts_up_to_the_first_lost_block():
    pool = Pool(8)
    first = pool.prepare_store(chain_of("abcd"), "w")
    told = settle(pool, "abcde")
    pool.complete_store(first.write_id, "w", count=2)
    assert told == []
    pool.abort_store(first.write_id, "w")
    assert told == [2]


def test_a_watch_that_ends_early_counts_nothing_unfinished():
    """Every wait has an end: the caller's."""
    pool, told = Pool(8), []
    store(pool, "a")
    ticket = pool.prepare_store(chain_of("ab"), "w")
    watch_id = pool.watch(chain_of("ab"), told.append)
    pool.end_watch(watch_id)
    pool.end_watch(watch_id)
    pool.complete_store(ticket.write_id, "w")
    assert told == [1]


def test_a_clearing_ends_the_waiting_for_it_and_is_counted():
    """What was computed under old weights can be kept from being stored under new ones."""
    pool = Pool(8)
    store(pool, "a")
    ticket = pool.prepare_store(chain_of("ab"), "w")
    assert ticket.num_clears == 0
    told = settle(pool, "ab")
    pool.clear(NAMESPACES[0])
    assert told == [0], "the first was here, and is no more"
    assert pool.complete_store(ticket.write_id, "w") == 0
    assert pool.prepare_store(chain_of("ab"), "w").num_clears == 1
    pool.check_integrity()


def test_eight_savers_of_one_chain_leave_one_copy_and_all_hear_of_it():
    """Build 1, duplicates; scenario of concurrent puts: every third writer gives up after a moment."""
    pool, tokens = Pool(16), "abcdefgh"
    barrier, ends, lock = threading.Barrier(8), [], threading.Lock()

    def save(number: int) -> None:
        owner, gives_up = f"w{number}", number % 3 == 0
        barrier.wait(10)
        for _ in range(50):
            ticket = pool.prepare_store(chain_of(tokens), owner)
            if ticket.write_id and gives_up:
                gives_up = pool.abort_store(ticket.write_id, owner) == 0
                continue
            if ticket.write_id:
                pool.complete_store(ticket.write_id, owner, generations=ticket.generations)
            told, event = [], threading.Event()
            pool.watch(chain_of(tokens), lambda count, told=told, event=event: (told.append(count), event.set()))
            assert event.wait(10)
            if told == [len(tokens)]:
                with lock:
                    ends.append(number)
                return

    threads = [threading.Thread(target=save, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(ends) == list(range(8))
    stats = pool.stats()
    assert (stats.num_idle, stats.num_free, stats.num_published, stats.num_writes) == (8, 8, 8, 0)
    pool.check_integrity()


# Parts.


def parts(pool: Pool, tokens: str, num_parts: int, **more):
    return [
        pool.prepare_store(chain_of(tokens), f"rank{part}", num_parts=num_parts, part=part, **more)
        for part in range(num_parts)
    ]


def test_ranks_join_one_slot_and_the_last_part_publishes():
    """Rule 4, in every order of the ranks."""
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        pool = Pool(4)
        tickets = parts(pool, "ab", 3)
        assert {ticket.slots for ticket in tickets} == {(0, 1)}
        assert pool.stats().num_writing == 2
        for rank in order:
            assert resident(pool, "ab") == 0
            published = pool.complete_store(tickets[rank].write_id, f"rank{rank}")
            pool.check_integrity()
        assert (published, resident(pool, "ab")) == (2, 2)


def test_a_rank_joins_after_another_has_completed():
    """Rule 4."""
    pool = Pool(4)
    first = pool.prepare_store(chain_of("ab"), "rank0", num_parts=2)
    assert pool.complete_store(first.write_id, "rank0") == 0
    pool.check_integrity()
    again = pool.prepare_store(chain_of("ab"), "rank0", num_parts=2)
    assert (again.write_id, again.num_awaited) == (0, 2), "its part is done; the block is not"
    second = pool.prepare_store(chain_of("ab"), "rank1", num_parts=2, part=1)
    assert second.slots == first.slots
    assert pool.complete_store(second.write_id, "rank1") == 2
    pool.check_integrity()


def test_ranks_with_chains_of_unlike_length_share_what_they_have_in_common():
    pool = Pool(8)
    one = pool.prepare_store(chain_of("ab"), "rank0", num_parts=2)
    two = pool.prepare_store(chain_of("abcd"), "rank1", num_parts=2, part=1)
    assert (two.slots[:2], two.indexes) == (one.slots, (0, 1, 2, 3))
    assert pool.complete_store(two.write_id, "rank1") == 0
    assert pool.complete_store(one.write_id, "rank0") == 2
    pool.check_integrity()
    rest = pool.prepare_store(chain_of("abcd"), "rank0", num_parts=2)
    assert (rest.indexes, rest.slots) == ((2, 3), two.slots[2:])
    assert pool.complete_store(rest.write_id, "rank0") == 2
    assert resident(pool, "abcd") == 4
    pool.check_integrity()


def test_the_same_part_twice_or_another_number_of_parts_waits():
    pool = Pool(4)
    pool.prepare_store(chain_of("a"), "rank0", num_parts=2)
    for owner, num_parts, part in (("other", 2, 0), ("whole", 1, 0), ("rank2", 3, 2)):
        ticket = pool.prepare_store(chain_of("a"), owner, num_parts=num_parts, part=part)
        assert (ticket.write_id, ticket.num_awaited) == (0, 1)
    pool.check_integrity()


@pytest.mark.parametrize("how", ["abort", "death"])
def test_a_rank_that_gives_up_aborts_the_block_for_all(how):
    """Rule 4: and the slot is not free before the last live rank has let go of it."""
    pool = Pool(4)
    one, two, three = parts(pool, "ab", 3)
    told = settle(pool, "ab")
    assert pool.complete_store(one.write_id, "rank0") == 0
    if how == "abort":
        assert pool.abort_store(two.write_id, "rank1") == 2
    else:
        assert pool.release_owner("rank1") == 1
    pool.check_integrity()
    assert told == [0], "the others are told the truth"
    assert (pool.stats().num_writing, pool.stats().num_free) == (2, 2), "rank 2 may still write"
    fresh = parts(pool, "ab", 3)
    assert {ticket.slots for ticket in fresh} == {(2, 3)}
    assert pool.complete_store(three.write_id, "rank2") == 0
    assert (resident(pool, "ab"), pool.stats().num_free) == (0, 2)
    pool.check_integrity()
    for part, ticket in enumerate(fresh):
        pool.complete_store(ticket.write_id, f"rank{part}")
    assert resident(pool, "ab") == 2
    pool.check_integrity()


def test_the_death_of_a_rank_whose_part_is_in_place_harms_nobody():
    pool = Pool(4)
    one, two = parts(pool, "ab", 2)
    pool.complete_store(one.write_id, "rank0")
    assert pool.release_owner("rank0") == 0
    assert pool.complete_store(two.write_id, "rank1") == 2


def test_a_rank_that_never_comes_is_waited_for_until_the_deadline():
    """Rules 4 and 10: bounded, and a live rank's slot is not taken from it."""
    pool = Pool(4)
    one = pool.prepare_store(chain_of("ab"), "rank0", num_parts=3, parts_deadline_s=5.0)
    two = pool.prepare_store(chain_of("ab"), "rank1", num_parts=3, part=1, parts_deadline_s=9.0)
    pool.complete_store(one.write_id, "rank0")
    told = settle(pool, "ab")
    pool.expire(5.0)
    assert (told, pool.stats().num_writing) == ([], 2), "never before its deadline"
    pool.expire(5.1)
    pool.check_integrity()
    assert (told, pool.stats().num_writing, pool.stats().num_free) == ([0], 2, 2)
    late = pool.prepare_store(chain_of("ab"), "rank2", num_parts=3, part=2)
    assert set(late.slots).isdisjoint(one.slots)
    assert pool.complete_store(two.write_id, "rank1") == 0
    assert pool.stats().num_free == 2
    pool.check_integrity()


def test_nobody_left_to_write_means_free_at_the_deadline_and_on_clearing():
    for end in (lambda pool: pool.expire(6.0), lambda pool: pool.clear(NAMESPACES[0])):
        pool = Pool(2)
        one = pool.prepare_store(chain_of("ab"), "rank0", num_parts=2, parts_deadline_s=5.0)
        pool.complete_store(one.write_id, "rank0")
        end(pool)
        pool.check_integrity()
        assert pool.stats().num_free == 2


def test_parts_are_not_published_front_to_back_nor_quarantined():
    pool = Pool(2)
    ticket = pool.prepare_store(chain_of("ab"), "rank0", num_parts=2)
    with pytest.raises(InvalidRequest, match="count"):
        pool.complete_store(ticket.write_id, "rank0", count=1)
    with pytest.raises(InvalidRequest, match="quarantine"):
        pool.abort_store(ticket.write_id, "rank0", quarantine="read-1")
    pool.check_integrity()
    assert pool.stats().num_writing == 2


def test_a_writer_whose_death_nobody_sees_loses_its_slots_at_its_deadline():
    """Rule 10, for owners that are known by a name only."""
    pool = Pool(2)
    ticket = pool.prepare_store(chain_of("ab"), "w", deadline_s=5.0)
    assert pool.has_deadlines()
    assert pool.expire(5.0) == 0
    assert pool.expire(5.1) == 1
    assert not pool.has_deadlines()
    assert pool.complete_store(ticket.write_id, "w") == 0
    assert (pool.stats().num_free, resident(pool, "ab")) == (2, 0)
    pool.check_integrity()


# Slots without names.


def test_reserved_slots_are_found_by_nobody_and_come_back_at_once():
    pool = Pool(8)
    store(pool, "abcd")
    pool.drain_events()
    ticket = pool.reserve(6, "w")
    pool.check_integrity()
    stats = pool.stats()
    assert (stats.num_writing, stats.num_writes, stats.num_idle, stats.num_evicted) == (6, 1, 2, 2)
    assert pool.drain_events() == [(False, chain_of("abcd").hash_at(3)), (False, chain_of("abcd").hash_at(2))]
    assert len(set(ticket.slots)) == 6
    assert set(pool.resident_hashes()) == set(chain_of("ab").hashes())
    assert pool.abort_store(ticket.write_id, "other") == 0
    assert pool.abort_store(ticket.write_id, "w") == 6
    pool.check_integrity()
    assert (pool.stats().num_free, resident(pool, "abcd")) == (6, 2)


def test_a_reservation_is_whole_or_refused():
    pool = Pool(4, max_pinned=4)
    store(pool, "ab")
    grant = pool.pin_prefix(chain_of("ab"), "r", 1e9)
    with pytest.raises(PoolExhausted, match="wanted 3 slots, got 2"):
        pool.reserve(3, "w")
    pool.check_integrity()
    assert (pool.stats().num_writing, pool.stats().num_free) == (0, 2)
    pool.release(grant.lease_id, "r")
    ticket = pool.reserve(3, "w")
    with pytest.raises(InvalidRequest):
        pool.reserve(0, "w")
    assert pool.release_owner("w") == 1
    assert pool.abort_store(ticket.write_id, "w") == 0
    pool.check_integrity()


@pytest.mark.parametrize("wanted", [5, 9, 1 << 20, (1 << 32) - 1])
def test_a_reservation_that_cannot_be_whole_evicts_nothing(wanted):
    pool = Pool(8, max_pinned=8)
    store(pool, "abcd")
    store(pool, "xyz")
    pool.pin_prefix(chain_of("abc", start=2), "r", 1e9)
    pool.prepare_store(chain_of("xw", start=1), "w")
    pool.drain_events()
    before = pool.stats()
    # None is free. `d`, `z` and `y` could go; `c`, `w` and `x` are held, and `a` and `b` stay above them.
    with pytest.raises(PoolExhausted, match=f"wanted {wanted} slots, got 3"):
        pool.reserve(wanted, "f")
    assert (pool.stats(), pool.drain_events()) == (before, [])
    pool.check_integrity()
    assert len(pool.reserve(3, "f").slots) == 3
    pool.check_integrity()
    assert (resident(pool, "abcd"), resident(pool, "xyz")) == (3, 1)


@pytest.mark.parametrize("seed", range(40))
def test_a_reservation_gets_what_is_there_to_the_last_slot(seed):
    rng = random.Random(seed)
    pool = Pool(12, max_pinned=12)
    for turn in range(8):
        tokens = "".join(rng.choices("ab", k=rng.randrange(1, 6)))
        ticket = pool.prepare_store(chain_of(tokens), f"w{turn}")
        if rng.random() < 0.8:
            pool.complete_store(ticket.write_id, f"w{turn}")
        if rng.random() < 0.4:
            pool.pin_prefix(chain_of(tokens, start=rng.randrange(len(tokens))), "r", 1e9)
        if rng.random() < 0.1:
            pool.begin_clear(NAMESPACES[0])
    num_ready = len(pool.resident_hashes())
    with pytest.raises(PoolExhausted) as refused:
        pool.reserve(13, "f")
    num_there = int(re.search(r"got (\d+)", str(refused.value))[1])
    with pytest.raises(PoolExhausted):
        pool.reserve(num_there + 1, "f")
    assert len(pool.resident_hashes()) == num_ready
    pool.check_integrity()
    if num_there:
        assert len(pool.reserve(num_there, "f").slots) == num_there
    pool.check_integrity()


def test_reserved_slots_end_with_their_time_and_are_never_published():
    pool = Pool(4)
    ticket = pool.reserve(2, "w", deadline_s=5.0)
    assert pool.complete_store(ticket.write_id, "w") == 0
    pool.check_integrity()
    assert (pool.stats().num_free, pool.resident_hashes()) == (4, [])
    pool.reserve(2, "w", deadline_s=5.0)
    assert pool.has_deadlines()
    assert (pool.expire(4.9), pool.expire(5.1)) == (0, 1)
    assert pool.stats().num_free == 4


def test_reserved_slots_that_a_transfer_may_still_write_wait_for_it():
    pool = Pool(4)
    ticket = pool.reserve(3, "w")
    assert pool.abort_store(ticket.write_id, "w", quarantine="read-1") == 3
    pool.check_integrity()
    assert (pool.stats().num_quarantined, pool.stats().num_free) == (3, 1)
    assert pool.end_quarantine("read-1") == 3
    pool.check_integrity()


def test_a_slot_that_was_reserved_begins_a_new_life():
    pool = Pool(1)
    first = pool.reserve(1, "w")
    pool.abort_store(first.write_id, "w")
    assert pool.reserve(1, "w").generations != first.generations


# Names that are given up before the slots are.


def test_blocks_whose_names_were_freed_are_written_by_another_in_other_slots():
    pool = Pool(8)
    old = pool.prepare_store(chain_of("abc"), "disk", needs_parent=False)
    assert pool.complete_store(old.write_id, "disk", count=1) == 1
    told = settle(pool, "abc")
    assert pool.free_names(old.write_id, "somebody") == 0
    assert told == []
    assert pool.free_names(old.write_id, "disk") == 2
    assert told == [1], "who waited for them hears that they will not come"
    pool.check_integrity()
    new = pool.prepare_store(chain_of("abc"), "peer", needs_parent=False)
    assert new.indexes == (1, 2)
    assert not set(new.slots) & set(old.slots)
    assert pool.free_names(old.write_id, "disk") == 2, "a second call changes nothing"
    pool.check_integrity()
    assert pool.complete_store(new.write_id, "peer") == 2
    assert pool.complete_store(old.write_id, "disk", count=2) == 0
    pool.check_integrity()
    assert pool.lookup(chain_of("abc")) == 3
    assert pool.stats().num_writing == 1
    pool.abort_store(old.write_id, "disk")
    pool.check_integrity()
    assert (pool.stats().num_writing, pool.stats().num_free) == (0, 5)
    assert pool.free_names(old.write_id, "disk") == 0


def test_names_of_blocks_in_parts_are_not_freed():
    pool = Pool(4)
    ticket = pool.prepare_store(chain_of("ab"), "w", num_parts=2)
    with pytest.raises(InvalidRequest, match="several parts"):
        pool.free_names(ticket.write_id, "w")
    pool.check_integrity()


def test_a_clearing_between_the_freeing_of_names_and_the_end_loses_no_slot():
    pool = Pool(4)
    ticket = pool.prepare_store(chain_of("ab"), "w")
    pool.free_names(ticket.write_id, "w")
    pool.clear(chain_of("ab").namespace)
    pool.check_integrity()
    assert pool.complete_store(ticket.write_id, "w") == 0
    pool.check_integrity()
    assert pool.stats().num_free == 4

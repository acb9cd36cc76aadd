"""The pool's rules, each with a direct test. All together, and beside each other: tests/pool."""

from __future__ import annotations

import hashlib
import random

import pytest

from kvstore.blocks.chain import BlockHashes
from kvstore.errors import ChainBroken, InvalidRequest, LeaseReleased, PoolExhausted
from kvstore.pool.pool import Pool
from poolcheck.chains import LATER_S, NAMESPACES, chain_of, resident, store


def add_up(pool: Pool) -> bool:
    s = pool.stats()
    return s.num_free + s.num_writing + s.num_idle + s.num_pinned + s.num_quarantined == s.num_slots


def test_fewer_slots_than_none_are_refused():
    with pytest.raises(InvalidRequest, match="num_slots"):
        Pool(-1)


def test_a_pool_of_no_slots_has_nothing_and_gives_nothing():
    pool = Pool(0)
    assert pool.lookup(chain_of("ab")) == 0
    grant = pool.pin_prefix(chain_of("ab"), "o", LATER_S)
    assert (grant.slots, grant.num_refused) == ((), 0)
    ticket = pool.prepare_store(chain_of("ab"), "o")
    assert (ticket.slots, ticket.num_refused) == ((), 2)
    with pytest.raises(PoolExhausted):
        pool.reserve(1, "o")
    assert pool.begin_clear(NAMESPACES[0], lambda: True) == 0
    assert pool.release_owner("o") == 1
    pool.expire(LATER_S)
    pool.sweep()
    assert not pool.holds("o")
    assert not pool.has_deadlines()
    assert add_up(pool)
    pool.check_integrity()


def test_stored_blocks_are_found_up_to_the_first_hole():
    pool = Pool(8)
    store(pool, "abcd")
    assert resident(pool, "abcd") == 4
    assert resident(pool, "abcdef") == 4
    assert resident(pool, "abxd") == 2
    assert resident(pool, "x") == 0
    # A run whose first block is missing has no usable prefix, whatever lies behind it.
    assert pool.lookup(chain_of("abcd", NAMESPACES[1])) == 0


def test_lookup_changes_nothing():
    pool = Pool(4)
    store(pool, "ab")
    before = pool.stats()
    pool.drain_events()
    for tokens in ("ab", "abc", "x"):
        resident(pool, tokens)
    assert pool.stats() == before
    assert pool.drain_events() == []
    # Nor the order of eviction: `a.` was stored first and goes first although it was looked up last.
    pool = Pool(2)
    store(pool, "a")
    store(pool, "b")
    resident(pool, "a")
    store(pool, "c")
    assert (resident(pool, "a"), resident(pool, "b")) == (0, 1)


def test_a_block_is_not_found_while_it_is_written():
    pool = Pool(4)
    ticket = pool.prepare_store(chain_of("ab"), "w")
    assert resident(pool, "ab") == 0
    assert pool.pin_prefix(chain_of("ab"), "r", LATER_S).slots == ()
    assert pool.stats().num_writing == 2
    assert pool.complete_store(ticket.write_id, "w") == 2
    assert resident(pool, "ab") == 2
    pool.check_integrity()


def test_a_second_writer_of_the_same_blocks_writes_nothing():
    pool = Pool(4)
    first = pool.prepare_store(chain_of("ab"), "w1")
    second = pool.prepare_store(chain_of("ab"), "w2")
    assert (second.write_id, second.slots, second.num_resident, second.num_refused) == (0, (), 2, 0)
    third = pool.prepare_store(chain_of("abc"), "w3")
    assert third.indexes == (2,)
    pool.check_integrity()
    pool.complete_store(first.write_id, "w1")
    pool.complete_store(third.write_id, "w3")
    pool.check_integrity()
    assert resident(pool, "abc") == 3


def test_publication_waits_for_all_parts():
    pool = Pool(4)
    tickets = [pool.prepare_store(chain_of("ab"), f"w{part}", num_parts=3, part=part) for part in range(3)]
    assert {ticket.slots for ticket in tickets} == {(0, 1)}, "one slot for all parts"
    assert pool.complete_store(tickets[0].write_id, "w0") == 0
    assert pool.complete_store(tickets[2].write_id, "w2") == 0
    assert pool.complete_store(tickets[2].write_id, "w2") == 0, "a part counts once"
    assert resident(pool, "ab") == 0
    pool.check_integrity()
    assert pool.complete_store(tickets[1].write_id, "w1") == 2
    assert resident(pool, "ab") == 2
    pool.check_integrity()


def test_a_write_front_to_back_publishes_as_it_goes():
    pool = Pool(8)
    ticket = pool.prepare_store(chain_of("abcd"), "w")
    assert pool.complete_store(ticket.write_id, "w", count=1) == 1
    assert pool.complete_store(ticket.write_id, "w", count=1) == 0
    assert resident(pool, "abcd") == 1
    assert pool.complete_store(ticket.write_id, "w", count=3) == 2
    assert pool.abort_store(ticket.write_id, "w") == 1
    pool.check_integrity()
    assert resident(pool, "abcd") == 3
    assert pool.stats().num_writes == 0


def test_an_aborted_write_was_never_visible():
    pool = Pool(4)
    ticket = pool.prepare_store(chain_of("abc"), "w")
    assert pool.abort_store(ticket.write_id, "someone else") == 0
    assert pool.stats().num_writing == 3
    assert pool.abort_store(ticket.write_id, "w") == 3
    assert pool.abort_store(ticket.write_id, "w") == 0
    pool.check_integrity()
    assert pool.stats().num_free == 4
    assert resident(pool, "abc") == 0
    assert pool.drain_events() == []
    assert pool.complete_store(ticket.write_id, "w") == 0
    assert resident(pool, "abc") == 0


def test_only_its_owner_completes_a_write():
    pool = Pool(2)
    ticket = pool.prepare_store(chain_of("a"), "w")
    assert pool.complete_store(ticket.write_id, "x") == 0
    assert resident(pool, "a") == 0
    assert pool.complete_store(ticket.write_id, "w") == 1


def test_quarantined_slots_come_back_only_when_told():
    pool = Pool(4)
    ticket = pool.prepare_store(chain_of("abc"), "w")
    assert pool.complete_store(ticket.write_id, "w", count=1) == 1
    assert pool.abort_store(ticket.write_id, "w", quarantine="read-1") == 2
    pool.check_integrity()
    assert (pool.stats().num_quarantined, pool.stats().num_free, resident(pool, "abc")) == (2, 1, 1)
    # They are nobody's: not even a full pool hands them out.
    full = pool.prepare_store(chain_of("xyz"), "w")
    assert set(full.slots).isdisjoint(ticket.slots[1:])
    assert (len(full.slots), full.num_refused) == (2, 1)
    assert pool.end_quarantine("read-2") == 0
    assert pool.end_quarantine("read-1") == 2
    assert pool.end_quarantine("read-1") == 0
    pool.check_integrity()
    assert pool.stats().num_quarantined == 0


def test_leaf_goes_before_root():
    pool = Pool(4)
    store(pool, "abcd")
    order = []
    for number in range(4):
        before = resident(pool, "abcd")
        store(pool, f"{number}")
        order.append((before, resident(pool, "abcd")))
    assert order == [(4, 3), (3, 2), (2, 1), (1, 0)]


def test_least_recently_used_goes_first():
    pool = Pool(4)
    store(pool, "ab")
    store(pool, "cd")
    grant = pool.pin_prefix(chain_of("ab"), "r", LATER_S)
    assert pool.release(grant.lease_id, "r")
    store(pool, "x")
    assert (resident(pool, "ab"), resident(pool, "cd")) == (2, 1)
    store(pool, "y")
    assert (resident(pool, "ab"), resident(pool, "cd")) == (2, 0)
    store(pool, "z")
    assert resident(pool, "ab") == 1


def test_a_save_that_finds_its_blocks_makes_them_recent():
    pool = Pool(4)
    store(pool, "ab")
    store(pool, "cd")
    assert store(pool, "ab") == ()
    store(pool, "x")
    assert (resident(pool, "ab"), resident(pool, "cd")) == (2, 1)


def test_a_root_put_back_under_its_children_goes_after_them():
    pool = Pool(4)
    root = pool.prepare_store(chain_of("ab"), "w1")
    rest = pool.prepare_store(chain_of("abcd"), "w2")
    pool.complete_store(rest.write_id, "w2")
    pool.abort_store(root.write_id, "w1")
    pool.check_integrity()
    assert resident(pool, "abcd") == 0
    store(pool, "abcd")
    assert resident(pool, "abcd") == 4
    # The children are the more recent ones now, and still go first.
    grant = pool.pin_prefix(chain_of("abcd", start=2), "r", LATER_S)
    pool.release(grant.lease_id, "r")
    for left in (3, 2, 1):
        store(pool, f"{left}")
        assert resident(pool, "abcd") == left


def test_pinned_is_never_evicted_and_does_not_protect_the_rest():
    pool = Pool(4)
    first = store(pool, "ab")
    store(pool, "c")
    store(pool, "d")
    grant = pool.pin_prefix(chain_of("ab"), "r", LATER_S)
    assert grant.slots == first
    generations = pool.generations(grant.slots)
    ticket = pool.prepare_store(chain_of("wxyz"), "w")
    assert set(ticket.slots).isdisjoint(grant.slots)
    assert (len(ticket.slots), ticket.num_refused) == (2, 2)
    pool.check_integrity()
    assert pool.generations(grant.slots) == generations
    assert resident(pool, "ab") == 2


def test_a_pinned_leaf_keeps_its_roots():
    pool = Pool(4)
    store(pool, "abc")
    grant = pool.pin_prefix(chain_of("abc", start=2), "r", LATER_S)
    assert len(grant.slots) == 1
    ticket = pool.prepare_store(chain_of("xyz"), "w")
    assert (len(ticket.slots), ticket.num_refused) == (1, 2)
    assert resident(pool, "abc") == 3
    pool.check_integrity()


def test_a_full_pool_gives_a_partial_ticket():
    pool = Pool(3)
    ticket = pool.prepare_store(chain_of("abcde"), "w")
    assert (ticket.indexes, ticket.num_resident, ticket.num_refused) == ((0, 1, 2), 0, 2)
    pool.complete_store(ticket.write_id, "w")
    grant = pool.pin_prefix(chain_of("abc"), "r", LATER_S)
    nothing = pool.prepare_store(chain_of("abcde"), "w")
    assert (nothing.write_id, nothing.num_resident, nothing.num_refused) == (0, 3, 2)
    assert pool.stats().num_pinned == 3
    pool.release(grant.lease_id, "r")
    # A chain never evicts its own beginning to make room for its end.
    again = pool.prepare_store(chain_of("abcde"), "w")
    assert (again.write_id, again.num_refused) == (0, 2)
    assert resident(pool, "abc") == 3
    pool.check_integrity()


def test_a_block_kept_behind_a_refused_one_can_be_evicted_afterwards():
    pool = Pool(4)
    store(pool, "aab")
    pool.clear(NAMESPACES[0])
    tail = pool.prepare_store(chain_of("aab", start=1), "w", needs_parent=False)
    pool.complete_store(tail.write_id, "w")
    full = pool.prepare_store(chain_of("xyz"), "w")
    assert len(full.slots) == 3
    # The root finds no slot; its child was kept meanwhile, and passed over when room was looked for.
    assert pool.prepare_store(chain_of("aa"), "w").num_refused == 2
    pool.check_integrity()
    assert len(store(pool, "q")) == 1


def test_claimed_slots_are_neighbours_in_chain_order():
    pool = Pool(16)
    assert store(pool, "abcdefgh") == tuple(range(8))
    ticket = pool.prepare_store(chain_of("abXYZ"), "w")
    assert (ticket.indexes, ticket.slots) == ((2, 3, 4), (8, 9, 10))


def test_generations_grow_at_each_claim():
    pool = Pool(1)
    seen = [pool.generations((0,))]
    for tokens in "abc":
        store(pool, tokens)
        seen.append(pool.generations((0,)))
    aborted = pool.prepare_store(chain_of("d"), "w")
    seen.append(pool.generations((0,)))
    pool.abort_store(aborted.write_id, "w")
    assert seen == [(0,), (1,), (2,), (3,), (4,)]


def test_release_checks_the_owner_and_may_be_repeated():
    pool = Pool(2)
    store(pool, "a")
    grant = pool.pin_prefix(chain_of("a"), "r", LATER_S)
    assert not pool.release(grant.lease_id, "thief")
    assert not pool.release(grant.lease_id + 1, "r")
    assert pool.stats().num_pinned == 1
    assert pool.release(grant.lease_id, "r")
    assert not pool.release(grant.lease_id, "r")
    assert pool.stats().num_pinned == 0
    pool.check_integrity()


def test_two_leases_count_twice():
    pool = Pool(2)
    store(pool, "a")
    one = pool.pin_prefix(chain_of("a"), "r1", LATER_S)
    two = pool.pin_prefix(chain_of("a"), "r2", LATER_S)
    assert one.lease_id != two.lease_id
    pool.release(one.lease_id, "r1")
    pool.check_integrity()
    assert pool.stats().num_pinned == 1
    assert pool.prepare_store(chain_of("xy"), "w").num_refused == 1
    pool.release(two.lease_id, "r2")
    assert pool.stats().num_pinned == 0


def test_a_lease_grows():
    pool = Pool(4)
    store(pool, "ab")
    lease = pool.pin_prefix(chain_of("ab"), "r", 5.0)
    store(pool, "abcd")
    more = pool.pin_prefix(chain_of("abcd", start=2), "r", 9.0, lease.lease_id)
    assert (more.lease_id, len(more.slots)) == (lease.lease_id, 2)
    assert pool.stats().num_pinned == 4
    with pytest.raises(LeaseReleased):
        pool.pin_prefix(chain_of("ab"), "thief", 9.0, lease.lease_id)
    pool.check_integrity()
    assert pool.expire(8.9) == 0, "growing renewed it"
    assert pool.release(lease.lease_id, "r")
    assert pool.stats().num_pinned == 0
    with pytest.raises(LeaseReleased):
        pool.pin_prefix(chain_of("ab"), "r", 9.0, lease.lease_id)


def test_expiry_takes_each_lease_by_its_own_deadline():
    pool = Pool(4)
    store(pool, "abc")
    renewed = pool.pin_prefix(chain_of("abc"), "r", 1.0)
    expired = pool.pin_prefix(chain_of("ab"), "r", 2.0)
    later = pool.pin_prefix(chain_of("a"), "r", 3.0)
    assert pool.renew(renewed.lease_id, "r", 10.0)
    assert pool.renew(renewed.lease_id, "r", 4.0), "still held"
    assert not pool.renew(renewed.lease_id, "thief", 99.0)
    assert pool.expire(2.0) == 0, "never before its deadline"
    # An expired lease behind a renewed one is found, and one before its deadline is left.
    assert pool.expire(2.5) == 1
    pool.check_integrity()
    assert not pool.release(expired.lease_id, "r")
    assert not pool.renew(expired.lease_id, "r", 99.0)
    assert pool.expire(9.0) == 1
    assert not pool.release(later.lease_id, "r")
    assert pool.release(renewed.lease_id, "r"), "renewing never shortens"


def test_pins_have_a_budget():
    pool = Pool(4, max_pinned=3)
    store(pool, "abcd")
    grant = pool.pin_prefix(chain_of("abcd"), "r1", LATER_S)
    assert len(grant.slots) == 3
    # Blocks that are pinned already cost nothing more.
    assert len(pool.pin_prefix(chain_of("abcd"), "r2", LATER_S).slots) == 3
    assert len(pool.pin_prefix(chain_of("abcd", start=3), "r3", LATER_S).slots) == 0
    pool.check_integrity()


def test_only_blocks_that_nobody_reads_count_against_the_budget():
    pool = Pool(4, max_pinned=2)
    store(pool, "abcd")
    assert len(pool.pin_prefix(chain_of("abc", start=1), "r1", LATER_S).slots) == 2
    assert len(pool.pin_prefix(chain_of("abcd"), "r2", LATER_S).slots) == 0
    assert len(pool.pin_prefix(chain_of("abcd", start=1), "r3", LATER_S).slots) == 2


def test_blocks_that_are_pinned_cost_nothing_where_writers_have_used_up_more_than_the_budget():
    pool = Pool(8, max_pinned=1)
    store(pool, "abcd")
    assert pool.prepare_store(chain_of("abcx"), "w").num_resident == 3
    assert pool.stats().num_pinned == 3
    assert len(pool.pin_prefix(chain_of("abcd"), "r", LATER_S).slots) == 3
    pool.check_integrity()


def test_an_owner_that_is_gone_leaves_nothing():
    pool = Pool(8)
    store(pool, "ab", "dead")
    pool.pin_prefix(chain_of("ab"), "dead", LATER_S)
    other = pool.pin_prefix(chain_of("a"), "alive", LATER_S)
    write = pool.prepare_store(chain_of("xyz"), "dead")
    alive = pool.prepare_store(chain_of("q"), "alive")
    assert pool.release_owner("dead") == 2
    pool.check_integrity()
    assert (pool.stats().num_leases, pool.stats().num_writes, pool.stats().num_writing) == (1, 1, 1)
    assert pool.complete_store(write.write_id, "dead") == 0
    assert pool.complete_store(alive.write_id, "alive") == 1
    assert pool.release(other.lease_id, "alive")
    assert pool.release_owner("dead") == 0
    assert resident(pool, "ab") == 2, "what it stored stays"


def test_clear_aborts_writes_and_lets_pinned_readers_finish():
    pool = Pool(12)
    slots = store(pool, "abc")
    other = pool.prepare_store(chain_of("abc", NAMESPACES[1]), "w")
    pool.complete_store(other.write_id, "w")
    reader = pool.pin_prefix(chain_of("ab"), "r", LATER_S)
    write = pool.prepare_store(chain_of("xy"), "w")
    generations = pool.generations(slots[:2])
    assert pool.clear(NAMESPACES[0]) == 5
    pool.check_integrity()
    assert resident(pool, "abc") == resident(pool, "xy") == 0
    assert pool.lookup(chain_of("abc", NAMESPACES[1])) == 3, "another namespace is not touched"
    # The reader's slots keep their life, and the same blocks go elsewhere when they are stored again.
    again = store(pool, "abc")
    assert set(again).isdisjoint(slots[:2])
    assert set(again).isdisjoint(write.slots)
    assert pool.generations(slots[:2]) == generations
    assert pool.complete_store(write.write_id, "w") == 0
    pool.check_integrity()
    assert resident(pool, "xy") == 0
    assert pool.release(reader.lease_id, "r")
    pool.check_integrity()
    assert (pool.stats().num_pinned, resident(pool, "abc")) == (0, 3)
    assert pool.stats().num_free == 12 - 3 - 3
    assert pool.clear(b"c" * 32) == 0


def test_a_run_that_cannot_be_attached_is_refused_with_nothing_changed():
    pool = Pool(8)
    store(pool, "ab")
    before = pool.stats()
    with pytest.raises(ChainBroken, match="parent is not resident"):
        pool.prepare_store(chain_of("xyz", start=1), "w")
    twice = chain_of("ab")
    with pytest.raises(ChainBroken, match="different"):
        pool.prepare_store(BlockHashes(twice.namespace, twice.parent, 0, twice.data * 2), "w")
    assert pool.stats() == before
    pool.check_integrity()
    assert len(store(pool, "abcd", start=2)) == 2
    # What a fetch brings hangs on blocks that are pinned elsewhere or on nothing.
    ticket = pool.prepare_store(chain_of("xyz", start=1), "w", needs_parent=False)
    assert len(ticket.slots) == 2


def run_on(parent: bytes, *own: bytes, start: int = 1) -> BlockHashes:
    """Return blocks that say of themselves that they hang on another, as any client can."""
    return BlockHashes(NAMESPACES[0], parent, start, b"".join(own))


def stored(pool: Pool, run: BlockHashes, owner: str = "w") -> None:
    ticket = pool.prepare_store(run, owner, needs_parent=False)
    pool.complete_store(ticket.write_id, owner)
    pool.check_integrity()


A, B, C, D = (bytes([number]) * 32 for number in range(1, 5))


@pytest.mark.parametrize(
    ("before", "closing"),
    [
        (run_on(B, A, start=3), (A, B)),
        (run_on(C, A, B, start=3), (B, C)),
        (run_on(C, A, start=3), (A, B, C)),
        # Closed by a block in the middle of a run whose last is here.
        (run_on(B, A, D, start=3), (A, B, D)),
        # By the way of a block of the run that is here and hangs on another than the run says.
        (run_on(C, B, start=3), (A, B, C)),
    ],
    ids=["two", "behind a run", "before a run", "in a run", "through a run"],
)
@pytest.mark.parametrize("start", [1, 2, 3, 4, 5, 9])
def test_blocks_that_hang_on_each_other_are_refused_and_everything_stays_evictable(before, closing, start):
    pool = Pool(4)
    stored(pool, before)
    stats = pool.stats()
    with pytest.raises(ChainBroken, match="further from the root"):
        pool.prepare_store(run_on(*closing, start=start), "w", needs_parent=False)
    assert pool.stats() == stats
    pool.check_integrity()
    assert len(store(pool, "abcd")) == 4


@pytest.mark.parametrize("start", [1, 2, 3, 4, 9])
def test_a_parent_that_is_here_may_hang_on_the_run_that_names_it(start):
    pool = Pool(4)
    first = pool.prepare_store(run_on(D, A, start=2), "first", needs_parent=False)
    stored(pool, run_on(A, B, start=3))
    pool.abort_store(first.write_id, "first")
    with pytest.raises(ChainBroken, match="further from the root"):
        pool.prepare_store(run_on(B, A, start=start), "w")
    pool.check_integrity()
    assert len(store(pool, "abcd")) == 4


def test_a_block_with_the_name_of_its_namespace_is_refused():
    pool = Pool(4)
    store(pool, "a")
    with pytest.raises(ChainBroken, match="none of them"):
        pool.prepare_store(run_on(chain_of("a").hash_at(0), A, NAMESPACES[0], B), "w")
    pool.check_integrity()
    assert len(store(pool, "abcd")) == 3


def test_a_block_comes_back_between_those_that_stayed():
    pool = Pool(8)
    root = pool.prepare_store(chain_of("ab"), "w1")
    stored(pool, chain_of("abcd", start=2))
    pool.abort_store(root.write_id, "w1")
    stored(pool, chain_of("abcde"))
    assert resident(pool, "abcde") == 5


def test_the_parent_of_a_write_is_not_evicted_to_make_room_for_it():
    pool = Pool(2)
    store(pool, "a")
    ticket = pool.prepare_store(chain_of("abc", start=1), "w")
    assert (len(ticket.slots), ticket.num_refused) == (1, 1)
    assert resident(pool, "a") == 1
    assert pool.stats().num_pinned == 1
    pool.complete_store(ticket.write_id, "w")
    assert pool.stats().num_pinned == 0
    assert resident(pool, "ab") == 2


def test_a_slot_offered_twice_is_claimed_once():
    pool = Pool(2)
    store(pool, "a")
    for _ in range(3):
        ticket = pool.prepare_store(chain_of("ab", start=1), "w")
        pool.abort_store(ticket.write_id, "w")
    ticket = pool.prepare_store(chain_of("wxyz"), "w")
    assert sorted(ticket.slots) == [0, 1]
    assert ticket.num_refused == 2
    pool.check_integrity()


def test_events_replayed_are_the_resident_set():
    pool, rng, seen, found = Pool(6), random.Random(7), [], set()
    for step in range(300):
        tokens = "".join(rng.choice("ab") for _ in range(rng.randint(1, 4)))
        ticket = pool.prepare_store(chain_of(tokens), "w")
        if ticket.write_id:
            if rng.random() < 0.2:
                pool.abort_store(ticket.write_id, "w")
            else:
                pool.complete_store(ticket.write_id, "w")
        if step % 40 == 39:
            pool.clear(NAMESPACES[0])
        pool.check_integrity()
        seen += pool.drain_events()
        if step % 40 == 30:
            for present, block_hash in seen:
                (found.add if present else found.remove)(block_hash)
            seen = []
            assert found == set(pool.resident_hashes())
    assert pool.stats().num_evicted > 10


def test_a_snapshot_forgets_pending_events():
    pool = Pool(2)
    store(pool, "ab")
    assert len(pool.resident_hashes()) == 2
    assert pool.drain_events() == []


def test_hot_chains_come_from_the_root_most_recent_first():
    pool = Pool(8)
    store(pool, "abc")
    store(pool, "xy")
    store(pool, "abd")
    assert pool.hot_chains(8) == [chain_of("abd"), chain_of("xy"), chain_of("abc")]
    assert pool.hot_chains(4) == [chain_of("abd"), chain_of("abc")]
    assert pool.hot_chains(2) == [chain_of("xy")]
    assert pool.hot_chains(0) == []


def test_hot_chains_leave_out_what_has_lost_its_root():
    pool = Pool(8)
    root = pool.prepare_store(chain_of("ab"), "w1")
    rest = pool.prepare_store(chain_of("abcd"), "w2")
    pool.complete_store(rest.write_id, "w2")
    pool.abort_store(root.write_id, "w1")
    assert resident(pool, "abcd") == 0
    assert pool.hot_chains(8) == []
    store(pool, "abcd")
    assert pool.hot_chains(8) == [chain_of("abcd")]


def test_many_touches_keep_the_order_of_eviction_small():
    pool = Pool(4)
    store(pool, "ab")
    for _ in range(500):
        grant = pool.pin_prefix(chain_of("ab"), "r", LATER_S)
        pool.release(grant.lease_id, "r")
    pool.check_integrity()
    assert pool.table.eviction.policy.log.num_logged <= 2 * 4 + 64 + 2


@pytest.mark.parametrize("by", ["eviction", "giving up", "giving up parts"])
def test_a_few_blocks_do_not_keep_the_memory_of_many(by):
    """One block is left of each claim."""
    num_slots, num_rounds, own = 128, 100, NAMESPACES[0]
    pool, firsts = Pool(num_slots), []
    for number in range(num_rounds):
        names = [hashlib.sha256(b"%d/%d" % (number, i)).digest() for i in range(num_slots - number)]
        chain = BlockHashes(own, own, 0, b"".join(names))
        firsts.append(chain[:1])
        parts = {"num_parts": 2, "parts_deadline_s": float(number)} if by == "giving up parts" else {}
        ticket = pool.prepare_store(chain, "w", **parts)
        if by == "giving up":
            pool.complete_store(ticket.write_id, "w", count=1)
            pool.abort_store(ticket.write_id, "w")
        else:
            pool.complete_store(ticket.write_id, "w")
        if parts:  # The other rank came for one block alone.
            other = pool.prepare_store(firsts[-1], "other", part=1, **parts)
            pool.complete_store(other.write_id, "other")
            pool.expire(number + 0.5)
        pool.pin_prefix(firsts[-1], "r", 1e9)
        pool.check_integrity()
    runs = {id(run): run for run in pool.table.index.run}
    assert sum(len(run.slots) for run in runs.values()) < 20 * num_slots
    assert all(pool.lookup(first) == 1 for first in firsts)


def test_a_reader_of_a_few_slots_does_not_keep_the_array_of_many():
    pool = Pool(64)
    apart = pool.prepare_store(chain_of("xyz"), "w")
    one = pool.prepare_store(chain_of("v"), "w")
    pool.complete_store(one.write_id, "w")
    pool.abort_store(apart.write_id, "w")  # The slots of the next claim are no neighbours.
    names = [hashlib.sha256(b"%d" % i).digest() for i in range(40)]
    chain = BlockHashes(NAMESPACES[0], NAMESPACES[0], 0, b"".join(names))
    pool.complete_store(pool.prepare_store(chain, "w").write_id, "w")
    found = pool.table.index.find_prefix(chain.namespace, chain[:2].data)
    assert list(found) == list(pool.pin_prefix(chain[:2], "r", 1e9).slots)
    assert not isinstance(found.index, slice)
    assert found.index.base is None

"""Evict ahead of claims, and pin what is evicted next: the order of the policy, and no place is lost."""

import random

import pytest

from kvstore.pool.eviction.learned import LearnedReuse
from kvstore.pool.pool import Pool
from kvstore.pool.tenants.limits import TenantLimits
from kvstore.pool.tenants.table import TenantTable
from tests.kvstore.pool.pool_steps import NEVER_S, NUM_SLOTS, SPACE, chain, read, store


@pytest.fixture(params=["lru", "learned"])
def make(request):
    def make(num_slots=NUM_SLOTS, **more):
        policy = LearnedReuse(num_slots, lambda: 0.0) if request.param == "learned" else None
        return Pool(num_slots, eviction=policy, **more)

    return make


@pytest.fixture
def pool(make):
    made = make()
    yield made
    made.check_integrity()
    assert made.num_leases() == 0


def order_of(pool, count):
    """The hashes that go one after the other, by evicting them."""
    gone = []
    for _ in range(count):
        before = set(pool.resident_hashes())
        assert pool.evict(1) == 1
        pool.check_integrity()
        gone += before - set(pool.resident_hashes())
    return gone


def fill(pool):
    for numbers in ((1, 2, 3, 4), (1, 2, 5, 6), (7, 8), (9,)):
        store(pool, chain(*numbers))


def test_evict_frees_slots_leaf_before_root(pool):
    fill(pool)
    assert pool.num_free == NUM_SLOTS - 9
    assert pool.evict(3) == 3
    pool.check_integrity()
    assert pool.num_free == NUM_SLOTS - 6
    assert pool.lookup(chain(1, 2, 3, 4)) == 2, "the oldest leaves are gone, what others build on stays"
    assert pool.evict(100) == 6
    pool.check_integrity()
    assert (pool.num_free, pool.evict(1)) == (NUM_SLOTS, 0)
    assert pool.stats().num_evicted == 9


def test_evict_spares_what_is_read_or_written_and_sweeps_first(pool):
    fill(pool)
    grant = pool.pin_prefix(chain(7, 8), "look", NEVER_S)
    ticket = pool.prepare_store(chain(20, 21), "writer")
    other = b"o" * 32
    store(pool, chain(30, 31, space=other))
    pool.begin_clear(other)
    assert pool.evict(2) == 0, "two slots came by sweeping"
    assert pool.evict(100) == 7
    pool.check_integrity()
    assert pool.lookup(chain(7, 8)) == 2
    assert pool.complete_store(ticket.write_id, "writer") == 2
    pool.release(grant.lease_id, "look")


@pytest.mark.parametrize("seed", range(30))
def test_victims_are_those_that_eviction_takes_in_that_order(make, seed):
    def grown():
        rng, made = random.Random(seed), make()
        for _ in range(30):
            numbers = [rng.randrange(3) + 10 * depth for depth in range(rng.randint(1, 5))]
            own = [
                sum(3**at * number for at, number in enumerate(numbers[: depth + 1])) for depth in range(len(numbers))
            ]
            store(made, chain(*own))
            if rng.random() < 0.3:
                read(made, chain(*own[:2]))
        return made

    one, other = grown(), grown()
    count = NUM_SLOTS - one.num_free
    victims = one.hold_victims(count, "disk")
    one.check_integrity()
    hashes = one.hashes_of(victims.slots)
    assert hashes == order_of(other, count)
    assert one.evict_held(victims, "disk") == count
    one.check_integrity()
    assert one.num_free == NUM_SLOTS
    assert one.num_leases() == 0


@pytest.mark.parametrize("num_held", [1, 3, 5, 9])
def test_victims_that_are_released_have_their_places_again(make, num_held):
    one, other = make(), make()
    fill(one)
    fill(other)
    for _ in range(2):
        victims = one.hold_victims(num_held, "disk")
        assert len(victims.slots) == num_held
        one.check_integrity()
        assert one.release(victims.lease_id, "disk")
        one.check_integrity()
    assert order_of(one, 9) == order_of(other, 9)


def test_a_victim_that_is_used_meanwhile_stays_with_what_it_hangs_on(pool):
    fill(pool)
    victims = pool.hold_victims(9, "disk")
    assert pool.lookup(chain(1, 2, 3, 4)) == 4, "they are found until they go"
    read(pool, chain(1, 2, 3, 4))
    assert pool.evict_held(victims, "disk") == 5
    pool.check_integrity()
    assert pool.lookup(chain(1, 2, 3, 4)) == 4
    assert pool.evict(100) == 4


def test_a_victim_with_a_reader_or_a_new_child_stays(pool):
    fill(pool)
    grant = pool.pin_prefix(chain(9), "look", NEVER_S)
    victims = pool.hold_victims(9, "disk")
    assert len(victims.slots) == 8
    store(pool, chain(7, 8, 10))
    assert pool.evict_held(victims, "disk") == 6
    pool.check_integrity()
    assert pool.lookup(chain(7, 8, 10)) == 3
    pool.release(grant.lease_id, "look")


def test_victims_of_a_cleared_namespace_come_back_without_eviction(pool):
    fill(pool)
    victims = pool.hold_victims(4, "disk")
    pool.begin_clear(SPACE)
    assert pool.hold_victims(9, "disk").slots == [], "cleared, not swept"
    assert pool.evict_held(victims, "disk") == 0
    pool.check_integrity()
    pool.sweep_all()
    pool.check_integrity()
    assert pool.num_free == NUM_SLOTS
    fill(pool)
    victims = pool.hold_victims(4, "disk")
    pool.clear(SPACE)  # Swept before the pin ends, too.
    assert pool.evict_held(victims, "disk") == 0
    assert pool.num_free == NUM_SLOTS


def test_victims_under_the_budget_of_pins(make):
    pool = make(max_pinned=3)
    fill(pool)
    assert len(pool.hold_victims(9, "disk").slots) == 3
    assert pool.hold_victims(9, "disk").slots == []
    assert pool.hold_victims(0, "disk").slots == []
    pool.release_owner("disk")
    pool.check_integrity()


def test_where_clients_use_up_the_budget_another_tier_may_still_pin_a_32nd(make):
    pool, read_ones = make(64, max_pinned=8), chain(*range(1, 9))
    store(pool, read_ones)
    store(pool, chain(*range(20, 40)))
    grant = pool.pin_prefix(read_ones, "reader", NEVER_S)
    assert grant.num_blocks == 8
    victims = pool.hold_victims(9, "disk")
    assert len(victims.slots) == 2
    assert pool.hold_victims(9, "disk").slots == []
    assert pool.hold(list(range(64)), SPACE, "other")[1] != [], "of what is pinned already"
    assert pool.stats().num_pinned == 10
    pool.check_integrity()
    assert pool.release_owner("other") == 1
    assert pool.evict_held(victims, "disk") == 2
    pool.check_integrity()
    lease_id, held = pool.hold([slot for slot in range(8, 28)], SPACE, "disk")
    assert len(held) == 2
    assert pool.release(lease_id, "disk")
    pool.release(grant.lease_id, "reader")
    pool.check_integrity()


def test_what_is_lent_takes_nothing_from_the_budget_of_clients(make):
    pool, read_ones, others = make(64, max_pinned=8), chain(*range(1, 9)), chain(*range(20, 30))
    store(pool, others)
    store(pool, read_ones)
    first = pool.pin_prefix(read_ones, "reader", NEVER_S)
    victims = pool.hold_victims(2, "disk")
    pool.release(first.lease_id, "reader")
    again = pool.pin_prefix(read_ones, "reader", NEVER_S)
    assert (first.num_blocks, again.num_blocks) == (8, 8)
    grant = pool.pin_prefix(others, "reader", NEVER_S)
    assert (grant.num_blocks, grant.num_refused) == (0, 10)
    pool.check_integrity()
    assert pool.evict_held(victims, "disk") == 2
    pool.release_owner("reader")


def test_a_client_that_pins_what_is_lent_exceeds_the_budget_by_no_more_than_that(make):
    pool, lent, others = make(64, max_pinned=8), chain(1, 2), chain(*range(20, 30))
    store(pool, lent)
    store(pool, others)
    full = pool.pin_prefix(others, "reader", NEVER_S)
    victims = pool.hold_victims(2, "disk")
    assert pool.pin_prefix(lent, "reader", NEVER_S).num_blocks == 2
    assert pool.evict_held(victims, "disk") == 0, "they are read"
    assert (full.num_blocks, pool.stats().num_pinned) == (8, 10)
    assert pool.pin_prefix(others, "other", NEVER_S).num_blocks == 8
    pool.check_integrity()
    pool.release_owner("reader")
    pool.release_owner("other")


def test_a_client_that_pins_what_is_lent_again_and_again_gets_no_more_than_the_share(make):
    pool, runs = make(64, max_pinned=8), [chain(2 * n + 1, 2 * n + 2) for n in range(32)]
    for run in runs:
        store(pool, run)
    for _ in range(40):
        victims = pool.hold_victims(64, "disk")
        for run in runs:
            grant = pool.pin_prefix(run, "reader", NEVER_S)
            if not grant.num_blocks:
                pool.release(grant.lease_id, "reader")
        pool.evict_held(victims, "disk")
        pool.check_integrity()
    assert pool.stats().num_pinned <= 8 + 2
    pool.release_owner("reader")
    assert len(pool.hold_victims(64, "disk").slots) == 8, "nothing of the budget is lost"
    pool.release_owner("disk")


def test_only_the_owner_evicts_and_only_once(pool):
    fill(pool)
    victims = pool.hold_victims(2, "disk")
    assert pool.evict_held(victims, "other") == 0
    assert pool.evict_held(victims, "disk") == 2
    assert pool.evict_held(victims, "disk") == 0


def test_soft_pins_go_last_and_stay_soft(pool):
    fill(pool)
    pin = pool.pin(chain(1, 2, 3, 4), "keep", pool_kind())
    victims = pool.hold_victims(5, "disk")
    pool.check_integrity()
    assert pool.release(victims.lease_id, "disk")
    pool.check_integrity()
    assert pool.evict(5) == 5
    assert pool.lookup(chain(1, 2, 3, 4)) == 4
    pool.release(pin.lease_id, "keep")


def pool_kind():
    from kvstore.blocks.grants import PinKind

    return PinKind.SOFT


def test_claims_say_when_slots_are_short_and_what_they_evict(pool):
    told, gone = [], []
    pool.keep_free(4, lambda: told.append(pool.table.columns.num_free), lambda hashes, num_low: gone.extend(hashes))
    store(pool, chain(*range(1, 13)))
    assert (told, gone) == ([], [])
    store(pool, chain(20))
    assert told == [3]
    store(pool, chain(30, 31, 32, 33, 34))
    assert told == [3, 0]
    assert gone == [hashes for hashes in chain(12, 11).hashes()]
    victims = pool.hold_victims(2, "disk")
    assert pool.evict_held(victims, "disk") == 2
    assert len(gone) == 2, "the holder knows"


def is_any(block_hash):
    return True


def by_touch(pool, most, is_wanted=is_any):
    return [pool.hashes_of(slots) for _, slots in pool.by_touch(most, is_wanted, lambda name: most)]


def test_by_touch(pool):
    fill(pool)
    read(pool, chain(7, 8))
    assert by_touch(pool, 2) == [chain(7, 8).hashes()]
    assert by_touch(pool, 100) == [
        chain(7, 8).hashes(), chain(9).hashes(), chain(1, 2, 5, 6).hashes(), chain(3, 4).hashes(),
    ]  # fmt: skip
    assert {namespace for namespace, _ in pool.by_touch(100, is_any, lambda name: 100)} == {SPACE}


def test_what_was_touched_last_comes_after_what_it_builds_on_and_both_count(pool):
    whole = chain(*range(1, 7))
    for end in (2, 4, 6):
        store(pool, whole.head(end) if end == 2 else whole.tail(end - 2).head(2))
    store(pool, chain(20, 21))
    names = whole.hashes()
    assert by_touch(pool, 100) == [chain(20, 21).hashes(), names]
    assert by_touch(pool, 5) == [chain(20, 21).hashes(), names[:3]], "its end has no room, so its beginning has it"
    assert by_touch(pool, 2) == [chain(20, 21).hashes()]
    assert by_touch(pool, 100, lambda own: own == names[3]) == [names[:4]]
    assert by_touch(pool, 0) == []
    pool.discard([read(pool, whole)[1]])
    assert by_touch(pool, 100)[0] == [names[0], *names[2:]], "one of them is not here"


def test_by_touch_has_no_more_of_a_tenant_than_its_share_and_nothing_that_builds_on_what_is_left_out(make):
    pool = make(tenants=TenantTable(NUM_SLOTS, {"a": TenantLimits(), "b": TenantLimits()}))

    def save(hashes, tenant):
        ticket = pool.prepare_store(hashes, "writer", tenant=tenant)
        pool.complete_store(ticket.write_id, "writer")

    on_a, shared, own = chain(1, 2, 3, 4), chain(5, 6), chain(7, 8, 9)
    save(on_a.head(3), "a")
    save(on_a, "b")
    save(shared, "")
    save(own, "b")

    def found(**shares):
        most = {"": 100, "a": 100, "b": 100} | shares
        return [pool.hashes_of(slots) for _, slots in pool.by_touch(100, is_any, most.__getitem__)]

    assert found() == [own.hashes(), shared.hashes(), on_a.hashes()]
    assert found(a=2) == [own.hashes(), shared.hashes(), on_a.hashes()[:2]]
    assert found(b=2) == [own.hashes()[:2], shared.hashes(), on_a.hashes()[:3]]
    assert found(a=0, b=0) == [shared.hashes()]
    save(chain(10, 11), "b")
    save(chain(10, 11, 12, 13), "a")
    assert found(a=2, b=0) == [shared.hashes(), on_a.hashes()[:2]], "older ones come for those that build on b's"
    assert pool.by_touch(0, is_any, lambda name: 100) == []

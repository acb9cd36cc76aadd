"""Blocks of the disk are found behind what they build on, whatever was evicted, refused or left out before."""

from __future__ import annotations

import errno
import itertools
import random
import time
from dataclasses import replace

import numpy as np
import pytest
from disk_store import refuse, stops_writing, wait_until

from kvstore.disk.records import place_bytes
from kvstore.disk.writing.chains import Lost, Rewrites, Sweep, allowed, holes, mends, put_off, runs_to_write
from kvstore.disk.writing.offers import Offer, OfferKind
from kvstore.pool.pool import Pool
from kvstore.pool.tenants.limits import TenantLimits
from kvstore.pool.tenants.table import TenantTable
from tests.kvstore.conftest import SHAPE
from tests.kvstore.pool.pool_steps import SPACE, chain, read, store


def lost(disk, space, memory=None):
    """Return the blocks of a disk that are not behind all that they build on, there or in a memory."""
    index = disk.table.index.space_of(space)
    ready = set(index.ready) | (set() if memory is None else set(memory.table.index.space_of(space).ready))
    parents = {own: disk.table.index.parent[slot] for own, slot in index.ready.items()}
    return [own for own, parent in parents.items() if parent != space and parent not in ready]


def run_of(pool, hashes, at):
    lease_id, blocks = pool.hold(read(pool, hashes)[at:], SPACE, "test")
    pool.release(lease_id, "test")
    return blocks


def offer_of(pool, hashes, kind, **more):
    return Offer(SPACE, read(pool, hashes), list(hashes), 3, 4, kind, **more)


def test_what_is_written_before_blocks_that_were_saved():
    memory, disk, hashes = Pool(620), Pool(620), chain(*range(1, 601))
    store(memory, hashes)
    store(memory, chain(700, 701))
    names, slots, run = list(hashes), read(memory, hashes), run_of(memory, hashes, 598)
    other = run_of(memory, chain(700, 701), 0)
    saved = offer_of(memory, hashes, OfferKind.SAVED)

    def offers(disk=disk):
        *before, behind, rest = found = put_off(memory, disk, saved, run, other)
        assert {(offer.namespace, offer.num_clears, offer.version, len(offer.generations)) for offer in found} == {
            (SPACE, 3, 4, 0)
        }
        assert (rest.kind, rest.slots) == (OfferKind.SAVED, [block.slot for block in other])
        assert rest.hashes == [block.block_hash for block in other]
        assert (behind.kind, behind.slots, behind.hashes) == (OfferKind.BEHIND, slots[598:], names[598:])
        assert [offer.kind for offer in before] == [OfferKind.BEFORE] * len(before)
        assert all(offer.why is behind.why is not rest.why for offer in before)
        assert all(offer.hashes == [names[slots.index(slot)] for slot in offer.slots] for offer in before)
        assert not any(offer.is_unlinked for offer in found[1:])
        return [offer.slots for offer in before], found[0].is_unlinked, behind.why

    assert offers() == ([slots[:598]], False, [])
    for num_there in (1, 342, 343, 344, 598):
        store(disk, hashes.head(num_there))
        assert offers() == ([slots[num_there:598]] if num_there < 598 else [], False, [])
    disk.clear(SPACE)
    ticket = disk.prepare_store(hashes.head(400), "writer")
    assert offers() == ([slots[400:598]], False, []), "the others are being written"
    disk.abort_store(ticket.write_id, "writer")
    memory.discard(slots[99:100])
    assert offers() == ([slots[100:598]], True, []), "memory cannot tell what is before these"
    store(disk, hashes.head(100))
    assert offers() == ([slots[100:598]], False, [])
    memory.discard(slots[597:598])
    assert offers() == ([], True, [])
    assert len(put_off(memory, disk, saved, run, [])) == 1


def test_what_can_have_no_places_together_is_not_tried():
    memory, hashes = Pool(20), chain(*range(1, 11))
    store(memory, hashes)
    saved, run = offer_of(memory, hashes, OfferKind.SAVED), run_of(memory, hashes, 8)
    for num_slots in (9, 10):
        offers = put_off(memory, Pool(num_slots), saved, run, [])
        both = [(OfferKind.BEFORE, []), (OfferKind.BEHIND, [])]
        assert [(offer.kind, offer.why) for offer in offers] == (
            both if num_slots == 10 else [(OfferKind.BEHIND, ["disk_full"])]
        )


@pytest.mark.parametrize(
    ("num_shared", "num_there", "can_fit"), [(0, 0, False), (2, 0, True), (1, 0, False), (2, 2, True), (0, 1, False)]
)
def test_a_chain_of_which_a_tenant_would_own_more_than_its_quota_is_not_tried(num_shared, num_there, can_fit):
    limits = {"a": TenantLimits(max_slots=8)}
    memory = Pool(20, tenants=TenantTable(20, {"a": TenantLimits()}))
    disk, hashes = Pool(20, tenants=TenantTable(20, limits)), chain(*range(1, 11))
    for pool, end in ((disk, num_there), (memory, 10)):
        for first, last, tenant in ((0, min(num_shared, end), ""), (min(num_shared, end), end, "a")):
            if first < last:
                store(pool, hashes.tail(first).head(last - first), tenant)
    run = run_of(memory, hashes, 8)
    assert run[0].tenant == "a"
    *before, behind = put_off(memory, disk, offer_of(memory, hashes, OfferKind.SAVED), run, [])
    assert (len(before), behind.why) == ((1, []) if can_fit else (0, ["disk_full"]))
    assert disk.tenants()["a"].num_refused_bytes == (0 if can_fit else 2)
    if num_there == 0:  # What is being written counts as another's: whose it is cannot be seen yet.
        ticket = disk.prepare_store(hashes.head(2), "writer", tenant="a")
        assert put_off(memory, disk, offer_of(memory, hashes, OfferKind.SAVED), run, [])[-1].why == []
        disk.abort_store(ticket.write_id, "writer")


@pytest.mark.parametrize(("num_own", "can_fit"), [(0, True), (5, True), (6, False)])
def test_a_chain_is_not_tried_if_its_tenant_would_pay_for_more_than_it_may_have(num_own, can_fit):
    limits = {"a": TenantLimits(max_slots=3), "b": TenantLimits(max_slots=12)}
    memory, disk = (Pool(40, tenants=TenantTable(40, each)) for each in (dict.fromkeys("ab", TenantLimits()), limits))
    hashes = chain(*range(1, 11))
    store(memory, hashes.head(8), tenant="b")
    store(memory, hashes.tail(8), tenant="a")
    if num_own:
        store(disk, chain(*range(20, 20 + num_own)), tenant="b")
    run = run_of(memory, hashes, 8)
    assert (run[0].tenant, disk.room_of("b")) == ("a", 12 - num_own)
    *_, behind = put_off(memory, disk, offer_of(memory, hashes, OfferKind.SAVED), run, [])
    assert behind.why == ([] if can_fit else ["disk_full"]), "b pays for 7 or 6 of its 8, and a may have 3, not 4"


def test_of_a_failed_write_what_others_on_the_disk_hang_on_is_written_again():
    memory, disk, hashes = Pool(20), Pool(20), chain(*range(1, 11))
    store(memory, hashes)
    saved, run = offer_of(memory, hashes, OfferKind.SAVED), run_of(memory, hashes, 0)
    assert holes(disk, saved, [run[:4], run[4:]]) == []
    first = disk.prepare_store(hashes.head(3), "writer")
    disk.prepare_store(hashes.tail(3).head(2), "writer")
    disk.abort_store(first.write_id, "writer")
    (again,) = holes(disk, saved, [run[:4], run[6:]])
    assert (again.kind, again.hashes) == (OfferKind.SAVED, list(hashes)[:3])
    assert (again.is_counted, again.is_again) == (False, True)
    (before,) = holes(disk, replace(saved, kind=OfferKind.BEFORE, tenant="a", is_unlinked=True), [run])
    assert (before.kind, before.tenant, before.is_unlinked) == (OfferKind.BEFORE, "a", True), "the same tenant pays"
    numbered = replace(saved, kind=OfferKind.BEHIND, generations=range(20, 30))
    (late,) = holes(disk, numbered, [run[4:6]])
    assert list(late.generations) == [24, 25], "as old as before"
    disk.clear(SPACE)
    before, behind = put_off(memory, disk, late, run[4:6], [])
    assert (list(before.generations), list(behind.generations), behind.is_again) == ([], [24, 25], True)
    (failed,) = holes(disk, replace(before, tenant="a"), [run[:4]])
    assert (failed.kind, failed.tenant, failed.is_again) == (OfferKind.BEFORE, "a", True)
    (whole,) = holes(disk, replace(saved, kind=OfferKind.BEHIND), [run[4:]])
    assert whole.hashes == list(hashes)[4:], "what is behind them was offered already"
    assert holes(disk, replace(saved, kind=OfferKind.VICTIMS), [run]) == [], "they stay in memory"


def mended(memory, disk, runs):
    return [
        (offer.hashes, offer.tenant, offer.is_unlinked)
        for offer in mends(memory, disk, runs, lambda *args: Offer(args[0], args[1], [], 3, 4, args[2]))
    ]


def test_lost_runs_are_written_with_all_that_the_disk_lacks_of_their_chains():
    memory = Pool(20, tenants=TenantTable(20, {"a": TenantLimits()}))
    disk, hashes = Pool(20), chain(*range(1, 11))
    names = list(hashes)
    store(memory, hashes.head(8), tenant="a")
    run = offer_of(memory, hashes.head(8), OfferKind.SAVED)
    late = replace(run, slots=run.slots[6:], hashes=run.hashes[6:])
    assert mended(memory, disk, [late]) == [(names[:8], "a", False)], "its owner pays"
    assert mended(memory, disk, [run, late, replace(run, tenant="b")]) == [(names[:8], "a", False)], "once"
    ticket = disk.prepare_store(hashes.tail(4).head(2), "writer", needs_parent=False)
    assert mended(memory, disk, [replace(run, tenant="b")]) == [(names[:4], "b", False), (names[6:8], "b", False)]
    disk.complete_store(ticket.write_id, "writer")
    assert mended(memory, disk, [run]) == [(names[:4], "a", False), (names[6:8], "a", False)], "around what is there"
    memory.discard(run.slots[1:2])
    both = [(names[:1], "a", False), (names[6:8], "a", False)]
    assert mended(memory, disk, [run]) == both, "nobody could find the third and fourth"
    last = memory.prepare_store(hashes.head(2), "writer")
    assert mended(memory, disk, [run]) == [both[0], (names[2:4], "a", True), both[1]], "what is before them comes later"
    memory.abort_store(last.write_id, "writer")
    store(disk, hashes.head(8))
    assert mended(memory, disk, [run, late]) == []


def test_the_chain_of_a_lost_run_is_looked_at_once_however_much_memory_has_evicted(monkeypatch):
    memory, disk, hashes, climbs = Pool(20), Pool(20), chain(*range(1, 11)), []
    store(memory, hashes)
    run, climb = offer_of(memory, hashes, OfferKind.SAVED), memory.climb
    monkeypatch.setattr(memory, "climb", lambda *args: climbs.append(args) or climb(*args))
    memory.discard(run.slots[6:])
    assert mended(memory, disk, [run]) == [(list(hashes)[:6], "", False)]
    assert len(climbs) == 1
    memory.discard(run.slots[:1])
    assert mended(memory, disk, [run]) == []
    assert len(climbs) == 2, "nobody could find these"


def test_of_lost_runs_each_is_kept_once_and_the_oldest_are_forgotten():
    lost = Lost()
    offers = [Offer(SPACE, [at], [bytes([at // 256, at % 256])], 3, 4, OfferKind.SAVED) for at in range(400)]
    lost.note(offers)
    lost.note(offers[200:300])
    taken = [offer.slots[0] for offer in lost.take()]
    assert (len(taken), sorted(taken), taken[-100:]) == (256, list(range(144, 400)), list(range(200, 300)))
    assert lost.take() == []


def test_what_takes_the_places_of_others_is_bounded_by_what_was_saved():
    memory, disk, hashes = Pool(20), Pool(20), chain(*range(1, 11))
    store(memory, hashes)
    run, rewrites = run_of(memory, hashes, 0), Rewrites(20)
    before, saved = (offer_of(memory, hashes, kind) for kind in (OfferKind.BEFORE, OfferKind.SAVED))
    assert [allowed(disk, rewrites, before, run) for _ in range(5)] == [(run, 0)] * 5, "free places cost nothing"
    store(disk, chain(*range(50, 66)))
    assert allowed(disk, rewrites, saved, run) == (run, 0), "only what is before others is bounded"
    assert [allowed(disk, rewrites, before, run) for _ in range(4)] == [(run, 6), (run, 6), (run, 6), (run[:6], 2)]
    assert allowed(disk, rewrites, before, run) == (run[:4], 0)
    store(disk, chain(*range(70, 74)))
    assert allowed(disk, rewrites, before, run) == ([], 0)
    rewrites.earn(1)
    assert allowed(disk, rewrites, before, run) == (run[:4], 4)
    rewrites.give_back(100)
    assert [allowed(disk, rewrites, before, run)[1] for _ in range(3)] == [10, 10, 0], "never more than the disk has"


def test_the_owner_pays_for_what_is_before_others_or_the_tenant_that_saved_but_nobody_takes_anothers_places():
    limits = {"a": TenantLimits(max_slots=4), "b": TenantLimits(max_slots=3)}
    memory, disk, hashes = Pool(20), Pool(20, tenants=TenantTable(20, limits)), chain(*range(1, 6))
    store(memory, hashes)
    run, rewrites = run_of(memory, hashes, 0), Rewrites(20)
    before = replace(offer_of(memory, hashes, OfferKind.BEFORE), tenant="a")

    def whose(num_blocks, owner):
        runs = runs_to_write(disk, before, [each._replace(tenant=owner) for each in run[:num_blocks]])
        found = [allowed(disk, rewrites, before, each) for each in runs]
        return "".join(block.tenant or "-" for blocks, _ in found for block in blocks), [num for _, num in found]

    assert whose(3, "b") == ("bbb", [0])
    assert whose(5, "b") == ("bbbaa", [0, 0]), "its owner pays as far as it has room"
    assert whose(5, "") == ("-----", [0])
    assert whose(5, "a") == ("aaaaa", [1]), "its own places it may take, within the bound"
    store(disk, chain(50, 51, 52), tenant="b")
    assert whose(5, "b") == ("aaaaa", [1]), "none of them has room: those of the tenant that saved go"
    saved = replace(before, kind=OfferKind.SAVED)
    assert [len(each) for each in runs_to_write(disk, saved, run)] == [5], "others are always their owner's"
    assert before.held([run[0]._replace(block_hash=bytes(32))]) == [], "the slot has another block"


def test_an_offer_is_split_with_its_generations_and_only_its_first_block_is_unlinked():
    memory, hashes = Pool(8), chain(1, 2, 3)
    store(memory, hashes)
    offer = offer_of(memory, hashes, OfferKind.BEHIND, generations=[7, 9, 8], is_unlinked=True)
    first, rest = offer.split(1)
    assert (first.slots + rest.slots, first.hashes + rest.hashes) == (offer.slots, offer.hashes)
    assert (first.generations, rest.generations) == ([7], [9, 8])
    assert (first.is_unlinked, rest.is_unlinked) == (True, False)
    assert offer_of(memory, hashes, OfferKind.BEHIND).split(1)[1].generations == ()


def test_only_victims_and_blocks_of_which_memory_cannot_tell_are_written_without_their_parent():
    memory, hashes = Pool(8), chain(1, 2, 3)
    store(memory, hashes)
    blocks = run_of(memory, hashes, 0)
    for kind in OfferKind:
        is_bound = kind is not OfferKind.VICTIMS
        assert offer_of(memory, hashes, kind).needs_parent(blocks[0]) is is_bound
        unlinked = offer_of(memory, hashes, kind, is_unlinked=True)
        assert (unlinked.needs_parent(blocks[0]), unlinked.needs_parent(blocks[1])) == (False, is_bound)


def test_what_nobody_can_find_is_evicted_when_the_disk_has_evicted_others():
    memory, disk = Pool(40), Pool(40)
    one, two = chain(*range(1, 11)), chain(*range(20, 30))
    for hashes in (one, two):
        store(memory, hashes)
        store(disk, hashes)
    fork = chain(1, 2, 3, 4, 50, 51)
    store(disk, fork)
    disk.discard([*read(disk, one)[3:4], *read(disk, two)[5:6]])
    sweep = Sweep(memory, disk)
    memory.discard(read(memory, one)[3:4])
    assert not sweep.is_due, "nothing is evicted, so they take nobody's place"
    store(disk, chain(*range(60, 84)))
    num_there = len(disk.links(SPACE, 0, 99))
    assert disk.num_evicted > 0
    assert sweep.is_due
    num_swept = sweep.run()
    assert num_swept == num_there - len(disk.links(SPACE, 0, 99)) > 0
    assert {parent for _, _, parent in disk.links(SPACE, 0, 99)} & {list(one)[3], list(fork)[4]} == set()
    assert lost(disk, SPACE, memory) == []
    assert lost(disk, SPACE) == [list(two)[6]], "memory has what is before it"
    # Again only when a 16th of the blocks has gone.
    memory.discard(read(memory, two)[5:6])
    store(disk, chain(*range(100, 101 + disk.num_free)))
    assert not sweep.is_due
    store(disk, chain(200, 201))
    assert sweep.is_due
    assert sweep.run() > 0
    assert lost(disk, SPACE) == []
    disk.check_integrity()


def test_a_sweep_keeps_what_hangs_on_blocks_that_are_being_written():
    for pool_of_write in range(2):
        pools = memory, disk = Pool(20), Pool(20)
        hashes = chain(*range(1, 9))
        store(disk, hashes)
        disk.discard(read(disk, hashes)[3:4])
        ticket = pools[pool_of_write].prepare_store(hashes, "writer")
        store(disk, chain(*range(30, 40)))
        store(disk, chain(*range(60, 66)))
        left = disk.present(list(hashes))
        assert Sweep(memory, disk).run() == 0
        pools[pool_of_write].abort_store(ticket.write_id, "writer")
        assert len(left) >= 3
        assert Sweep(memory, disk).run() == len(left) - 3
        disk.check_integrity()


def test_what_the_disk_evicted_of_a_chain_is_written_before_its_next_blocks(start, cluster):
    saves = start(disk_capacity_bytes=1 << 16)  # 7 places.
    mine, other = cluster.hashes(12), cluster.hashes(5, seed=1)
    for hashes in (mine[:5], other):
        saves.save(hashes, is_written=False)
        stops_writing(saves)
    assert [saves.disk.pool.lookup(hashes) for hashes in (mine, other)] == [2, 5]
    for end in (6, 7, 12):
        saves.save(mine[:end], is_written=False)
        stops_writing(saves)
        assert saves.disk.pool.lookup(mine) == min(end, 7)
    assert saves.stats()["dropped"] == {"disk_full": 5}
    saves.empty_memory()
    assert saves.load(mine).num_disk == 7


def test_what_a_failed_write_left_out_is_written_before_the_next_blocks(start, cluster, writes):
    saves, hashes = start(), cluster.hashes(12)
    writes.error = refuse(errno.EIO)
    saves.save(hashes[:2], is_written=False)
    stops_writing(saves)
    assert saves.dropped("error") == 2
    writes.error = None
    saves.save(hashes)
    assert saves.disk.pool.lookup(hashes) == 12


def test_a_failed_write_leaves_no_hole_below_what_other_threads_wrote_behind_it(start, cluster, writes):
    saves, hashes, is_first = start(), cluster.hashes(12), iter([True])

    def fails_late(file, first):
        if next(is_first, False):
            wait_until(lambda: writes.num_calls > 2)
            raise refuse(errno.EIO)

    writes.before = fails_late
    saves.save(hashes, is_written=False)
    wait_until(lambda: saves.dropped("error") == 2)
    saves.save(cluster.hashes(2, seed=1), 20)
    wait_until(lambda: saves.disk.pool.lookup(hashes) == 12)


def test_two_failed_writes_at_once_leave_no_hole_in_what_is_written_before_others(start, cluster, writes):
    saves, hashes, numbers = start(), cluster.hashes(6), itertools.count()
    saves.save(hashes[:4])
    saves.disk.pool.evict(4)

    def fail_late(file, first):
        if next(numbers) < 2:
            wait_until(lambda: writes.num_calls > num_before + 2)
            raise refuse(errno.EIO)

    num_before, writes.before = writes.num_calls, fail_late
    saves.save(hashes, is_written=False)
    stops_writing(saves)
    saves.save(cluster.hashes(2, seed=1), 20)
    stops_writing(saves)
    assert saves.disk.pool.lookup(hashes) == 6
    assert saves.stats()["dropped"] == {}


def test_while_no_write_works_nothing_is_tried_again_and_again(start, cluster, writes, monkeypatch):
    monkeypatch.setattr("kvstore.disk.breaker._MOST_ERRORS", 1 << 20)  # As if reads worked between the writes.
    saves, hashes, writes.error = start(), cluster.hashes(42), refuse(errno.EIO)
    for end in range(2, 42, 2):
        saves.save(hashes[:end], is_written=False)
        stops_writing(saves)
    assert writes.num_calls <= 4 * 20
    writes.error = None
    saves.save(cluster.hashes(2, seed=1), 20)
    stops_writing(saves)
    saves.save(hashes)
    assert saves.disk.pool.lookup(hashes) == 42


def test_behind_low_blocks_nothing_is_written(start, cluster):
    saves, hashes = start(), cluster.hashes(8)
    saves.worker.client.save(hashes[:4], range(4), priority="low").result(10.0)
    saves.worker.client.save(hashes.tail(4), range(4, 8)).result(10.0)
    stops_writing(saves)
    assert (saves.disk.pool.lookup(hashes), saves.num("num_written")) == (0, 0)
    assert saves.dropped("low_priority") == 8


def converse(saves, cluster, seed, num_steps=60, between=lambda: None):
    """Save conversations that grow, and that share beginnings. Memory never evicts what is still to be written."""
    rng = random.Random(seed)
    prompts = [list(np.random.default_rng([seed, number]).integers(0, 1000, 4)) for number in range(5)]
    for step in range(num_steps):
        prompt = rng.choice(prompts)
        if rng.random() < 0.2:
            prompt = prompt[: rng.randint(1, len(prompt))]
            prompts.append(prompt)
        prompt += np.random.default_rng([seed, step, 99]).integers(0, 1000, rng.randint(1, 6)).tolist()
        tokens = np.repeat(np.asarray(prompt[:20]), SHAPE.block_size)
        saves.save(cluster.space.block_hashes(tokens), is_written=False)
        wait_until(lambda: saves.num("num_unwritten") <= 20)
        if rng.random() < 0.5:
            between()
    between()


@pytest.mark.parametrize("seed", range(3))
def test_conversations_that_the_disk_cannot_hold_together_have_no_gaps_there(start, cluster, seed):
    saves = start(disk_capacity_bytes=1 << 18)  # 31 places, 64 slots of memory.

    def check():
        stops_writing(saves)
        assert lost(saves.disk.pool, cluster.space.digest) == []

    converse(saves, cluster, seed, between=check)
    assert saves.disk.pool.stats().num_evicted > 0
    assert saves.dropped("evicted") == 0


BACK = {"disk_write": "back", "eviction": "lru"}


@pytest.mark.parametrize("seed", range(3))
def test_with_back_the_disk_and_memory_together_have_no_gaps(start, cluster, seed):
    saves = start(disk_capacity_bytes=1 << 18, **BACK, low_watermark=0.4, high_watermark=0.5)

    def check():
        stops_writing(saves)
        if not saves.dropped("evicted"):
            assert lost(saves.disk.pool, cluster.space.digest, saves.core.pool) == []

    converse(saves, cluster, seed, between=check)
    assert saves.disk.pool.stats().num_evicted > 0
    # Saves that were faster than the disk cost blocks, but what is behind these does not stay.
    Sweep(saves.core.pool, saves.disk.pool).run()
    assert lost(saves.disk.pool, cluster.space.digest, saves.core.pool) == []
    saves.restart()
    Sweep(saves.core.pool, saves.disk.pool).run()
    assert saves.disk.pool.num_free < 31


def test_with_back_a_long_chain_is_written_once_and_all_of_it_is_found(start, cluster):
    saves, hashes = start(**BACK, low_watermark=0.05, high_watermark=0.1), cluster.hashes(60)
    saves.save(hashes, is_written=False)
    stops_writing(saves)
    at, num_left = 0, 60
    while num_left:  # Each save takes places of the chain's end, and of what was saved before.
        saves.save(cluster.hashes(1, seed=1 + at), 60, is_written=False)
        wait_until(lambda: saves.core.pool.num_free >= 4)
        stops_writing(saves)
        at, num_left = at + 1, saves.core.pool.lookup(hashes)
        assert saves.disk.lookup(hashes.tail(num_left)) == 60 - num_left
    assert saves.stats()["dropped"] == {}
    assert saves.num("num_written") <= 60 + at
    assert saves.load(hashes[:40]).num_disk == 40


def test_with_back_an_idle_store_writes_nothing_more(start, cluster):
    saves = start(disk_capacity_bytes=1 << 17, **BACK, low_watermark=0.1, high_watermark=0.2)  # 15 places.
    prompts = [cluster.hashes(14, seed=seed) for seed in range(4)]
    for number, prompt in enumerate(prompts):
        saves.save(prompt, 14 * (number % 2), is_written=False)
    for prompt in prompts:  # Now their ends are what was used least recently.
        saves.load(prompt[:13])
    saves.save(cluster.hashes(6, seed=9), 40, is_written=False)
    wait_until(lambda: saves.core.pool.num_free >= 12)
    stops_writing(saves)
    assert saves.num("num_written") <= 13
    assert lost(saves.disk.pool, cluster.space.digest, saves.core.pool) == []


@pytest.mark.parametrize("num_places", [15, 31])
def test_at_a_stop_with_back_what_is_written_can_be_found_without_memory(start, cluster, num_places):
    """Chains that were saved in pieces, by turns: their ends were touched last."""
    saves = start(disk_capacity_bytes=1 << (17 if num_places == 15 else 18), **BACK)
    chains = [cluster.hashes(12, seed=seed) for seed in range(5)]
    for begin in range(0, 12, 3):
        for number, hashes in enumerate(chains):
            saves.worker.save(hashes[: begin + 3], range(12 * number, 12 * number + begin + 3))
    for number, hashes in enumerate(chains):
        saves.saved.update((own, saves.worker.block(12 * number + at)) for at, own in enumerate(hashes))
    saves.settle()
    saves.restart()
    assert (saves.disk.pool.num_slots, saves.disk.pool.num_free) == (num_places, 0)
    assert lost(saves.disk.pool, cluster.space.digest) == []
    found = [saves.load(hashes).num_blocks for hashes in chains]
    assert found[-1] == 12, "the one that was used last is whole"
    assert sum(found) == num_places


def test_a_disk_that_is_small_for_the_chains_in_use_is_not_written_over_and_over(start, cluster):
    saves = start(disk_capacity_bytes=1 << 17)  # 15 places.
    chains = [cluster.hashes(30, seed=seed) for seed in range(2)]
    for end in range(10, 15):
        for number, hashes in enumerate(chains):
            saves.save(hashes[:end], 30 * number, is_written=False)
            stops_writing(saves)
    assert lost(saves.disk.pool, cluster.space.digest) == []
    num_saved = 2 * 14
    assert saves.num("num_written") <= 15 + 5 * num_saved


def test_at_a_stop_with_back_what_the_disk_has_of_the_blocks_used_last_stays(start, cluster):
    # 31 places, and an eviction loop that rests with 13 of the 64 slots of memory free.
    saves = start(disk_capacity_bytes=1 << 18, **BACK, low_watermark=0.2, high_watermark=0.203)
    used, new = cluster.hashes(12), cluster.hashes(12, seed=1)

    def rests():
        wait_until(lambda: saves.core.pool.num_free >= 13)
        stops_writing(saves)

    saves.save(used, is_written=False)
    singles = iter(range(2, 200))
    while saves.core.pool.lookup(used):  # By single blocks: each is a leaf, so they go in the order of their saves.
        saves.save(cluster.hashes(1, seed=next(singles)), 30, is_written=False)
        rests()
    used = used[: saves.disk.pool.lookup(used)]
    assert len(used) > 4
    saves.load(used)
    rests()
    saves.save(new, is_written=False)
    rests()
    assert [saves.core.pool.lookup(hashes) for hashes in (used, new)] == [len(used), 12]
    saves.restart()
    assert [saves.disk.pool.lookup(hashes) for hashes in (used, new)] == [len(used), 12]


def test_blocks_that_come_from_the_end_of_their_chain_on_are_all_written(start, cluster):
    """As a store that took over the memory of another one offers them."""
    saves, hashes = start(disk_capacity_bytes=1 << 19), cluster.hashes(40)
    pool = saves.core.pool
    saves.worker.save(hashes[:1], range(1))
    stops_writing(saves)
    lease = saves.disk.pool.pin_prefix(hashes, "a-reader", float("inf"))
    saves.disk.pool.release(lease.lease_id, "a-reader")
    saves.worker.save(hashes, range(40))
    stops_writing(saves)
    saves.disk.pool.discard(read(saves.disk.pool, hashes))
    slots = read(pool, hashes)
    for begin in (30, 20, 10, 0):
        saves.disk.offer(cluster.space.digest, slots[begin : begin + 10], "another-life")
    stops_writing(saves)
    assert saves.disk.pool.lookup(hashes) == 40
    assert saves.stats()["dropped"] == {}


def test_a_disk_that_goes_off_takes_nothing_back_into_its_queue(start, cluster, writes):
    saves, hashes = start(), cluster.hashes(12)
    saves.save(hashes[:2])
    saves.disk.pool.discard(read(saves.disk.pool, hashes[:2])[:1])
    writes.error = refuse(errno.EIO)
    saves.save(hashes[:8], is_written=False)
    wait_until(lambda: saves.num("num_unwritten") == 0)
    stops_writing(saves)
    assert sum(saves.stats()["dropped"].values()) == 6


def test_what_is_behind_a_turn_is_another_threads_turn_only_when_all_of_that_turn_has_places(start, cluster, writes):
    """At a stop, a turn of the first block and the first new one, between which the disk has the others."""
    saves, hashes = start(**BACK), cluster.hashes(12)
    saves.save(hashes[:4], is_written=False)
    wait_until(lambda: saves.disk.write_back(1, 1.0) is not None and saves.core.pool.lookup(hashes) == 1)
    assert saves.load(hashes).num_disk == 3
    saves.save(hashes, is_written=False)
    writes.before = lambda file, first: time.sleep(0.05)
    disk = saves.disk
    saves.restart()
    assert disk.stats()["dropped"] == {}
    assert saves.disk.pool.lookup(hashes) == 12


def test_at_a_stop_a_tenant_keeps_what_it_used_last_within_its_quota_of_the_disk(start, cluster):
    saves = start(**BACK, tenants={"batch": {"max_disk_bytes": 8 * place_bytes(4096)}})
    saves.worker = cluster.worker("a", tenant="batch")
    chains = [cluster.hashes(4, seed=seed) for seed in range(6)]
    for hashes in chains:
        saves.save(hashes, is_written=False)
    disk = saves.disk
    saves.restart()
    assert disk.stats()["num_written"] == 8
    assert [saves.disk.pool.lookup(hashes) for hashes in chains] == [0, 0, 0, 0, 4, 4]


def test_at_a_stop_what_the_disk_lost_for_it_counts_as_not_written(start, cluster, caplog):
    """A tenant's oldest blocks cannot go, because another's are behind them: newer ones go for what is written."""
    saves = start(**BACK, tenants={"a": {"max_disk_bytes": 8 * place_bytes(4096)}, "b": {}})
    of_a, of_b = (cluster.worker("a", tenant=tenant) for tenant in "ab")
    oldest, newest, last = (cluster.hashes(4, seed=seed) for seed in range(3))
    behind = cluster.hashes(6, seed=0)
    for worker, hashes in ((of_a, oldest), (of_b, behind), (of_a, newest)):
        saves.worker = worker
        saves.save(hashes, is_written=False)
    wait_until(lambda: saves.disk.write_back(14, 1.0) is not None and saves.disk.pool.lookup(newest) == 4)
    for hashes in (last, newest):
        saves.save(hashes, is_written=False)
    saves.restart()
    num_missing = sum(4 - saves.disk.pool.lookup(hashes) for hashes in (last, newest))
    assert num_missing > 0
    assert f"{num_missing} blocks of memory were not written back" in caplog.text

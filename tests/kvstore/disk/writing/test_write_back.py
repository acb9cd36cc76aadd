"""`disk_write="back"`: blocks are written when they are about to be evicted, and nobody waits for that."""

import errno
import threading

import numpy as np
import pytest
from disk_store import refuse, wait_until

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.hashing import Namespace
from tests.kvstore.conftest import SHAPE

NUM_SLOTS = 64
#: Of 64 slots: the loop begins below 16 free ones, and ends at 32.
BACK = {"disk_write": "back", "low_watermark": 0.25, "high_watermark": 0.5}


@pytest.fixture
def store(start):
    made = start(**BACK)
    assert made.core.state.arena.num_bytes // 4096 == NUM_SLOTS
    return made


def fill(store, cluster, count=6, first_seed=0):
    """Save chains of eight blocks each, one after the other."""
    chains = [cluster.hashes(8, seed=first_seed + seed) for seed in range(count)]
    for hashes in chains:
        store.save(hashes, is_written=False)
    return chains


def rests(store, num_free=NUM_SLOTS // 4):
    """Wait until the loop has nothing to do."""
    wait_until(lambda: store.core.pool.num_free >= num_free)
    store.settle()


def reclaimed(store):
    return store.core.stats()["reclaim"]["num_evicted"]


def test_a_save_writes_nothing_and_an_eviction_does(store, cluster):
    chains = fill(store, cluster, 6)
    store.settle()
    assert (store.num("num_written"), store.core.pool.num_free) == (0, 16)
    more = cluster.hashes(8, seed=50)
    store.save(more, is_written=False)
    rests(store, 32)
    assert store.core.pool.num_free == 32
    assert store.num("num_written") == 24
    assert reclaimed(store) == 24
    # Four turns may be under way, each with the leaves of another chain.
    assert [store.disk.lookup(hashes) for hashes in chains[5:]] == [0]
    assert [store.core.pool.lookup(hashes) for hashes in (chains[5], more)] == [8, 8]
    assert store.stats()["dropped"] == {}
    for hashes in chains:
        assert store.load(hashes).num_blocks == 8


def test_pins_that_use_up_their_budget_do_not_keep_others_from_being_written(start, cluster):
    """Else saves would evict these others without a write."""
    store = start(**BACK | {"max_pinned_fraction": 0.25})
    pinned = fill(store, cluster, 2)
    leases = [store.worker.client.lease(hashes) for hashes in pinned]
    assert store.core.pool.stats().num_pinned == NUM_SLOTS // 4
    chains = fill(store, cluster, 5, first_seed=10)
    wait_until(lambda: store.core.pool.num_free >= 32 and store.core.pool.num_leases() == len(leases))
    store.check()
    assert store.stats()["dropped"] == {}
    assert store.num("num_written") == reclaimed(store) >= 24
    assert store.core.pool.stats().num_pinned == NUM_SLOTS // 4
    assert all(lease.release() for lease in leases)
    for hashes in (*pinned, *chains):
        assert store.load(hashes).num_blocks == 8


def test_a_part_of_a_chain_goes_from_its_leaf_on(start, cluster):
    # Up to 13 free slots: fewer blocks go than a chain has, however many turns share them.
    store = start(**BACK | {"low_watermark": 0.15, "high_watermark": 0.2})
    chains = fill(store, cluster, 7)
    rests(store, 13)
    assert store.disk.lookup(chains[0]) == 0, "its beginning is in memory only"
    num_left = store.core.pool.lookup(chains[0])
    assert 0 < num_left < 8
    assert store.disk.lookup(chains[0].tail(num_left)) == 8 - num_left
    result = store.load(chains[0])
    assert (result.num_local, result.num_disk) == (num_left, 8 - num_left)


def test_what_is_on_disk_already_is_not_written_again(store, cluster, writes):
    chains = fill(store, cluster, 7)
    rests(store)
    num_written, num_calls = store.num("num_written"), writes.num_calls
    assert store.load(chains[0]).num_blocks == 8
    for hashes in chains[3:]:
        store.load(hashes)
    fill(store, cluster, 1, first_seed=60)
    # The first chain is the oldest, and goes again, with some others.
    fill(store, cluster, 2, first_seed=70)
    rests(store)
    assert store.core.pool.lookup(chains[0]) < 8
    assert store.num("num_written") > num_written
    assert writes.num_calls > num_calls
    assert store.load(chains[0]).num_blocks == 8
    assert len(set(store.disk.pool.resident_hashes())) == store.num("num_written")


def test_only_what_was_used_often_enough_is_written(start, cluster, monkeypatch):
    monkeypatch.setattr("kvstore.disk.writing.writer.USE_GAP_S", 0.0)
    store = start(**BACK, disk_min_uses=2, eviction="lru")
    chains = fill(store, cluster, 6)
    store.load(chains[0])
    assert store.num("num_written") == 0
    for seed in range(60, 70):
        fill(store, cluster, 1, first_seed=seed)
        rests(store)  # Saves that are faster evict blocks unwritten.
    assert set(store.disk.pool.resident_hashes()) <= set(chains[0]), "of all of them it alone was used twice"
    assert store.num("num_written") > 0
    assert store.dropped("evicted") == 0, "the others are not worth a write, so they are not missing"


def test_claims_that_are_faster_evict_unwritten_blocks_and_count_them(store, cluster, writes):
    with writes.held():
        fill(store, cluster, 7)
        wait_until(lambda: writes.num_waiting)
        fill(store, cluster, 8, first_seed=20)  # No save waits for the disk.
        store.check()
        assert store.core.pool.stats().num_pinned <= 8
        assert store.dropped("evicted") > 0
    rests(store)
    stats = store.stats()
    num_all = 15 * 8
    in_memory = NUM_SLOTS - store.core.pool.num_free
    assert stats["num_written"] + stats["dropped"]["evicted"] + in_memory >= num_all
    assert set(stats["dropped"]) == {"evicted"}


def test_a_victim_that_is_used_while_it_is_written_stays(store, cluster, writes):
    with writes.held():
        chains = fill(store, cluster, 7)
        wait_until(lambda: writes.num_waiting)
        assert store.load(chains[0]).num_local == 8
    rests(store)
    assert store.core.pool.lookup(chains[0]) == 8, "it was just used"
    assert store.disk.pool.present(list(chains[0])), "and written all the same"


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_refuses_costs_blocks_and_nothing_hangs(store, cluster, writes, monkeypatch, code):
    monkeypatch.setattr("kvstore.disk.breaker._FIRST_REST_S", 0.5)
    writes.error = OSError(code, "broken")
    chains = fill(store, cluster, 7)
    wait_until(lambda: store.core.pool.num_free >= 32)
    assert store.stats()["num_trips"] >= 1
    assert store.dropped("error") > 0
    assert store.dropped("off") + store.dropped("evicted") > 0
    assert store.num("num_written") == 0
    writes.error = None
    wait_until(lambda: not store.disk.is_off)
    store.settle()
    fill(store, cluster, 4, first_seed=40)
    rests(store)
    assert store.num("num_written") > 0
    for hashes in chains:
        store.load(hashes)


def test_one_write_that_fails_loses_nothing(store, cluster, writes):
    writes.error = OSError(errno.EIO, "broken")

    def heal(file, first):
        if writes.num_calls > 1:
            writes.error = None

    writes.before = heal
    chains = fill(store, cluster, 7)
    rests(store)
    assert store.dropped("error") > 0
    assert sum(store.load(hashes).num_blocks for hashes in chains) == 56


def test_a_disk_that_hangs_is_left_out(start, cluster, writes):
    store = start(**BACK, disk_timeout_s=0.2, transfer_timeout_s=2.0)
    with writes.held():
        fill(store, cluster, 7)
        wait_until(lambda: store.disk.is_off)
        wait_until(lambda: store.core.pool.num_free >= 32 - 8)
        for seed in range(3):
            fill(store, cluster, 3, first_seed=100 + 10 * seed)
            wait_until(lambda: store.core.pool.num_free >= 16)
        assert store.dropped("off") > 0
    wait_until(lambda: not store.disk.is_off)
    store.settle()


def test_a_clearing_while_victims_are_written(store, cluster, writes):
    with writes.held():
        chains = fill(store, cluster, 7)
        wait_until(lambda: writes.num_waiting)
        store.core.state.pool_service.clear(chains[0].namespace)
    store.settle()
    wait_until(lambda: store.core.pool.num_free == NUM_SLOTS)
    assert [store.disk.lookup(hashes) for hashes in chains] == [0] * 7
    assert store.disk.pool.resident_hashes() == []
    store.restart()
    assert [store.disk.lookup(hashes) for hashes in chains] == [0] * 7


def test_an_orderly_stop_writes_what_is_in_memory(store, cluster):
    chains = fill(store, cluster, 4)
    assert store.num("num_written") == 0
    store.restart()
    assert store.num("num_restored") == 32
    for hashes in chains:
        assert store.load(hashes).num_disk == 8


def test_a_stop_has_a_time_limit_and_begins_with_what_was_used_last(store, cluster, writes, monkeypatch, caplog):
    monkeypatch.setattr("kvstore.disk.tier._WRITE_BACK_S", 0.3)
    monkeypatch.setattr("kvstore.disk.tier._STOP_S", 0.3)
    chains = fill(store, cluster, 5)
    disk = store.disk
    firsts = []
    writes.before = lambda file, first: firsts.append(first)
    store.load(chains[2])
    with writes.held():
        store.stop()
    assert disk.stats()["dropped"]["stopped"] > 0
    assert "were not written back" in caplog.text
    assert 0 < len(firsts) <= 4


def test_a_second_stop_waits_until_the_first_has_written_what_is_in_memory(store, cluster, writes):
    chains, disk = fill(store, cluster, 2), store.disk
    stops = [threading.Thread(target=stop, daemon=True) for stop in (store.stop, disk.stop)]
    with writes.held():
        stops[0].start()
        wait_until(lambda: disk.stats()["num_unwritten"] > 0)
        stops[1].start()
        stops[1].join(0.2)
        assert stops[1].is_alive()
    for stop in stops:
        stop.join(10.0)
        assert not stop.is_alive()
    assert [disk.pool.lookup(hashes) for hashes in chains] == [8, 8]


def test_a_stop_tells_also_of_blocks_whose_write_failed(store, cluster, writes, caplog):
    store.save(cluster.hashes(2), is_written=False)
    writes.error = refuse()
    store.stop()
    assert "2 blocks of memory were not written back" in caplog.text


def test_a_stop_tells_of_all_blocks_while_the_disk_is_off(store, cluster, writes, caplog):
    writes.error, disk = refuse(errno.ENOSPC), store.disk
    fill(store, cluster, 7)
    wait_until(lambda: disk.is_off and store.core.pool.num_free >= NUM_SLOTS // 2)
    num_held, num_off = NUM_SLOTS - store.core.pool.num_free, disk.stats()["dropped"].get("off", 0)
    store.stop()
    assert f"{num_held} blocks of memory were not written back" in caplog.text
    assert disk.stats()["dropped"]["off"] == num_off + num_held


def test_a_stop_tries_once_more_what_failed_before_what_is_behind_it(store, cluster, writes, caplog):
    hashes, errors = cluster.hashes(2), iter([refuse()])
    store.save(hashes, is_written=False)

    def fails_once(file, first):
        if error := next(errors, None):
            raise error

    writes.before = fails_once
    disk = store.disk
    store.restart()
    assert disk.stats()["dropped"] == {"error": 2}
    assert store.disk.pool.lookup(hashes) == 2
    assert "not written back" not in caplog.text


def test_nothing_is_written_back_at_a_stop_with_through(start, cluster, writes):
    store = start()
    store.save(cluster.hashes(4))
    count = writes.num_calls
    store.restart()
    assert writes.num_calls == count


def test_a_chain_of_another_namespace(store, cluster):
    """The victims of one turn may be of several namespaces."""
    other = b"o" * 32
    store.core.state.pool_service.attach(other, 4096)
    pool = store.core.pool
    for number in range(10):
        hashes = b"".join(bytes([number, at]) * 16 for at in range(4))
        chain = BlockHashes(other, other, 0, hashes)
        ticket = pool.prepare_store(chain, "writer")
        pool.complete_store(ticket.write_id, "writer")
        store.save(cluster.hashes(4, seed=number), is_written=False)
        rests(store)  # Saves that are faster evict blocks unwritten.
    spaces = {
        namespace for namespace, _ in store.disk.pool.by_touch(NUM_SLOTS, lambda own: True, lambda name: NUM_SLOTS)
    }
    assert len(spaces) == 2
    assert store.load(cluster.hashes(4, seed=0)).num_disk == 4


@pytest.mark.parametrize("settings", [{"low_watermark": 0.25}, BACK])
def test_the_loop_ends_with_its_store(start, cluster, settings):
    store = start(**settings)
    loop = store.core.state.pool_service.reclaimer
    fill(store, cluster, 7)
    wait_until(lambda: store.core.pool.num_free >= 16)
    store.settle()
    stats = store.core.stats()
    assert stats["reclaim"]["is_alive"]
    watermarks = stats["reclaim"]["low_watermark"], stats["reclaim"]["high_watermark"]
    assert (*watermarks, stats["disk"]["disk_write"]) == (0.25, 0.5, settings.get("disk_write", "through"))
    assert store.num("num_written") > 0
    store.stop()
    assert not loop.thread.is_alive()


def test_without_watermarks_there_is_no_loop(start):
    assert start().core.stats()["reclaim"] is None


def test_blocks_of_a_namespace_that_no_client_has_opened_are_evicted_unwritten(start, cluster):
    """A peer had them brought from the disk of a node whose store began anew: their size is not known there."""
    store, other = start("a", **BACK, block_bytes=4096), start("b")
    chain = cluster.hashes(4)
    store.save(chain, is_written=False)
    store.stop()
    store.core = cluster.add("a", **store.settings)
    store.disk = store.core.state.disk
    space = Namespace(model="another", shape=SHAPE)
    worker = cluster.worker("a", 64, space=space)
    wait_until(lambda: dict(other.core.state.hints.locate(chain)) == {"a": 4})
    assert other.load(chain).num_blocks == 4
    store.disk.pool.discard(list(range(store.disk.pool.num_slots)))  # As if other blocks had taken their places.
    assert store.core.pool.lookup(chain) == 4
    for seed in range(12):
        tokens = np.random.default_rng(seed).integers(0, 1000, 8 * SHAPE.block_size)
        worker.save(space.block_hashes(tokens), range(8))
        rests(store)  # Or the saves would evict them, before it is their turn to be written.
    wait_until(lambda: store.core.pool.lookup(chain) == 0)
    wait_until(lambda: store.dropped("unknown_size") == 4)
    assert store.dropped("error") == 0


def test_a_turn_that_fails_for_good_evicts_its_victims(store, cluster, monkeypatch):
    """Else they would be the next ones again and again, and an idle store would use a whole core."""

    def fails(writer, offer, claimed):
        raise RuntimeError("a fault of the program")

    monkeypatch.setattr("kvstore.disk.writing.writer.Writer.write", fails)
    fill(store, cluster, 8)
    rests(store, 32)
    assert store.num("num_written") == 0
    assert not store.stats()["is_off"]


def test_what_was_used_last_before_a_stop_is_evicted_last_after_it(start, cluster):
    store = start(**BACK)
    chains = fill(store, cluster, 5)
    store.load(chains[1])
    store.restart(disk_write="through", low_watermark=None, high_watermark=None)
    assert [store.disk.lookup(hashes) for hashes in chains] == [8] * 5
    gone, seed = list[int](), 100
    while len(gone) < 5:
        assert seed < 200
        store.save(cluster.hashes(8, seed=seed))
        seed += 1
        gone += [at for at, hashes in enumerate(chains) if at not in gone and store.disk.pool.lookup(hashes) < 8]
    assert gone == [0, 2, 3, 4, 1]


def test_a_stop_keeps_what_was_used_last_if_the_disk_is_smaller_than_memory(start, cluster):
    store = start(**BACK, disk_capacity_bytes=24 * (8192 + 256))
    chains = fill(store, cluster, 5)
    store.load(chains[1])
    store.restart()
    assert [store.disk.lookup(hashes) for hashes in chains] == [0, 8, 0, 8, 8]


def test_low_blocks_that_saves_evict_are_no_sign_of_a_slow_disk(store, cluster, writes):
    client = store.worker.client
    with writes.held():
        fill(store, cluster, 7)
        for seed in range(100, 110):
            client.save(cluster.hashes(8, seed=seed), list(range(8)), priority="low").result(10.0)
    assert store.dropped("low_priority") >= 9 * 8 - 8
    assert store.dropped("evicted") == 0

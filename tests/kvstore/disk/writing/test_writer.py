"""Blocks written behind saves: what is left out is counted, what fails costs its blocks only."""

import errno

import numpy as np
import pytest
from disk_store import HALF, SOON_S, refuse, stops_writing, wait_until

from kvstore.blocks.hashing import Namespace
from kvstore.disk.records import PAGE_BYTES
from kvstore.disk.threads import _NUM_THREADS
from tests.kvstore.conftest import SHAPE


def test_all_requests_of_a_batch_are_written(start, cluster):
    """A2: five saves that end together all reach the disk. A13: each under its own chain."""
    store = start()
    chains = [cluster.hashes(4 + seed, seed=seed) for seed in range(5)]
    firsts = [sum(map(len, chains[:at])) for at in range(5)]
    jobs = [
        store.worker.client.save(chain, list(range(first, first + len(chain))))
        for chain, first in zip(chains, firsts, strict=True)
    ]
    assert [job.result(SOON_S).num_written for job in jobs] == [4, 5, 6, 7, 8]
    for chain, first in zip(chains, firsts, strict=True):
        for at, own in enumerate(chain):
            store.saved[own] = store.worker.block(first + at)
    wait_until(lambda: all(store.disk.lookup(chain) == len(chain) for chain in chains))
    store.settle()
    store.empty_memory()
    assert [store.load(chain).num_disk for chain in chains] == [4, 5, 6, 7, 8]
    assert store.num("num_written") == 30


def test_a_block_is_written_once(start, cluster, writes):
    store, hashes = start(), cluster.hashes(8)
    store.save(hashes)
    count = writes.num_calls
    store.empty_memory()
    store.load(hashes)
    store.save(hashes)
    store.settle()
    assert (writes.num_calls, store.num("num_written")) == (count, 8)


def test_nothing_is_found_on_disk_before_it_was_written(start, cluster, writes):
    """A17: a block counts only when all of it is there."""
    store, hashes = start(), cluster.hashes(8)
    with writes.held():
        store.save(hashes, is_written=False)
        wait_until(lambda: writes.num_waiting)
        assert store.disk.lookup(hashes) == 0
        # A thread may take a block off the queue between the two questions.
        wait_until(lambda: store.disk.pool.stats().num_writing == 8 - store.num("num_queued"))
        store.check()
    store.settle()
    assert store.disk.lookup(hashes) == 8


def test_a_full_queue_drops_and_counts(start, cluster, writes):
    store = start(capacity_bytes=1 << 17)  # 32 slots, so as many may wait.
    with writes.held():
        for seed in range(8):
            store.save(cluster.hashes(10, seed=seed), is_written=False)
            store.check()
        assert store.dropped("queue_full") > 0
        assert store.num("num_queued") <= 32
    stops_writing(store)
    stats = store.stats()
    # A block whose slot has another one by then is neither: the other one is written for it.
    assert stats["num_written"] + sum(stats["dropped"].values()) <= 80
    assert stats["num_written"] > 0


def test_a_block_evicted_before_its_turn_is_counted(start, cluster, writes):
    store = start()
    with writes.held():
        for seed in range(6):
            store.save(cluster.hashes(10, seed=seed), is_written=False)
        wait_until(lambda: writes.num_waiting == _NUM_THREADS // 2)
        store.empty_memory()
    stops_writing(store)
    stats = store.stats()
    assert 0 < stats["num_written"] < 60
    assert stats["dropped"] == {"evicted": 60 - stats["num_written"]}


def test_the_disk_is_smaller_than_what_is_saved(start, cluster):
    """A14: of a chain that does not fit, the leading blocks are there, and no others. Each turn writes few of them."""
    store = start(disk_capacity_bytes=1 << 16)  # 7 places.
    hashes = cluster.hashes(30)
    store.save(hashes, is_written=False)
    stops_writing(store)
    assert store.stats()["dropped"] == {"disk_full": 23}
    store.empty_memory()
    assert store.disk.lookup(hashes) == store.disk.pool.lookup(hashes) == 7
    assert store.disk.pool.stats().num_evicted == 0
    assert store.load(hashes).num_blocks == 7


@pytest.mark.parametrize("num_shared", [20, 13])
def test_branches_of_a_prompt_that_does_not_fit_leave_what_is_there_of_it(start, cluster, num_shared):
    store = start(disk_capacity_bytes=1 << 16)  # 7 places.
    rng = np.random.default_rng(4)
    prompt = rng.integers(0, 1000, 20 * SHAPE.block_size)
    store.save(cluster.space.block_hashes(prompt), is_written=False)
    stops_writing(store)
    for _ in range(3):
        tail = rng.integers(0, 1000, 4 * SHAPE.block_size)
        chain = cluster.space.block_hashes(np.concatenate([prompt[: num_shared * SHAPE.block_size], tail]))
        store.save(chain, 20, is_written=False)
        stops_writing(store)
        assert store.disk.lookup(chain) == 7
    assert store.disk.pool.stats().num_evicted == 0


def test_a_chain_that_found_no_room_for_a_while_is_written_where_it_goes_on(start, cluster):
    store = start(disk_capacity_bytes=1 << 16)
    read, chain = cluster.hashes(7, seed=1), cluster.hashes(10, seed=2)
    store.save(read)
    grant = store.disk.pool.pin_prefix(read, "a-reader", float("inf"))
    store.save(chain[:4], 8, is_written=False)
    stops_writing(store)
    assert store.stats()["dropped"] == {"disk_full": 4}
    store.disk.pool.release(grant.lease_id, "a-reader")
    store.worker.save(chain, range(8, 18))
    stops_writing(store)
    # Those that were refused are in memory, and are written before what follows them.
    assert store.disk.lookup(chain) == 7
    store.empty_memory()
    assert store.worker.client.lookup(chain).num_here == 7


def test_old_blocks_make_room(start, cluster):
    store = start(disk_capacity_bytes=1 << 16)
    for seed in range(6):
        hashes = cluster.hashes(3, seed=seed)
        store.save(hashes)
        store.empty_memory()
        assert store.load(hashes).num_disk == 3
    assert store.disk.pool.stats().num_evicted > 0
    assert store.load(cluster.hashes(3, seed=0)).num_blocks == 0


def test_the_budget(start, cluster):
    stride = 2 * PAGE_BYTES
    store = start(disk_write_bytes_per_day=24 * 10 * stride)  # Ten blocks at once.
    store.save(cluster.hashes(4, seed=0))
    store.save(cluster.hashes(4, seed=1))
    store.save(cluster.hashes(4, seed=2), is_written=False)
    stops_writing(store)
    # A turn's blocks are written or left out together.
    assert 8 <= store.num("num_written") <= 10
    assert store.num("num_written") + store.dropped("budget") == 12
    assert store.num("num_written_bytes") == store.num("num_written") * stride


def test_low_blocks_are_not_written_unless_they_are_used_before_their_turn(start, cluster, writes):
    store, first = start(), cluster.hashes(16)
    low, used = cluster.hashes(4, seed=1), cluster.hashes(4, seed=2)
    with writes.held():
        store.save(first, is_written=False)
        wait_until(lambda: writes.num_waiting == _NUM_THREADS // 2)  # All that may write at once.
        for chain, ids in ((low, range(16, 20)), (used, range(20, 24))):
            assert store.worker.client.save(chain, list(ids), priority="low").result(SOON_S).num_written == 4
        assert store.worker.client.prefetch(used).result(SOON_S).num_local == 4
    stops_writing(store)
    assert [store.disk.lookup(chain) for chain in (first, low, used)] == [16, 0, 4]
    assert (store.num("num_written"), store.dropped("low_priority")) == (20, 4)


@pytest.fixture
def no_gaps(monkeypatch):
    """Each touch is a use of its own, however soon it comes."""
    monkeypatch.setattr("kvstore.disk.writing.writer.USE_GAP_S", 0.0)


@pytest.mark.usefixtures("no_gaps")
@pytest.mark.parametrize("min_uses", [2, 4])
def test_a_block_is_written_when_it_is_stored_for_the_nth_time(start, cluster, min_uses):
    store, hashes = start(disk_min_uses=min_uses), cluster.hashes(6)
    for _ in range(min_uses - 1):
        store.save(hashes, is_written=False)
        stops_writing(store)
        assert store.num("num_written") == 0
        store.empty_memory()
    store.save(hashes)
    assert store.num("num_written") == 6


@pytest.mark.usefixtures("no_gaps")
@pytest.mark.parametrize("min_uses", [2, 4])
def test_a_block_is_written_when_it_is_used_for_the_nth_time(start, cluster, min_uses):
    store, hashes = start(disk_min_uses=min_uses), cluster.hashes(6)
    store.save(hashes, is_written=False)
    for _ in range(min_uses - 1):
        stops_writing(store)
        assert store.num("num_written") == 0
        assert store.load(hashes[:4]).num_local == 4
    wait_until(lambda: store.disk.lookup(hashes) == 4)
    store.settle()
    assert store.load(hashes[:4]).num_local == 4
    store.settle()
    assert store.num("num_written") == 4


def test_one_prompt_is_one_use(start, cluster):
    """It is loaded, loaded again at once, and saved: written only after a pause."""
    store, hashes = start(disk_min_uses=2), cluster.hashes(6)
    store.save(hashes, is_written=False)
    store.load(hashes)
    store.save(hashes, is_written=False)
    store.core.state.pool_service.lease(hashes, "test", 1e-3)
    stops_writing(store)
    assert store.num("num_written") == 0


@pytest.mark.usefixtures("no_gaps")
def test_a_lease_is_a_use_and_a_lookup_is_none(start, cluster):
    store, hashes = start(disk_min_uses=2), cluster.hashes(6)
    store.save(hashes, is_written=False)
    assert store.worker.client.lookup(hashes).num_local == 6
    stops_writing(store)
    assert store.num("num_written") == 0
    service = store.core.state.pool_service
    service.release(service.lease(hashes, "test", 10.0).lease_id, "test")
    wait_until(lambda: store.disk.lookup(hashes) == 6)
    store.settle()


@pytest.mark.usefixtures("no_gaps")
def test_a_block_that_is_named_twice_is_pinned_right(start, cluster):
    store, hashes = start(disk_min_uses=3), cluster.hashes(4)
    store.save(hashes, is_written=False)
    stops_writing(store)
    grant = store.core.pool.pin_prefix(hashes, "test", 1e12)
    slots = list(grant.slots)
    store.core.pool.release(grant.lease_id, "test")
    store.disk.used(hashes.namespace, [*slots, *slots, slots[0]], True)
    wait_until(lambda: store.disk.lookup(hashes) == 4)
    store.settle()
    store.empty_memory()
    assert store.load(hashes).num_disk == 4


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_an_error_drops_only_its_blocks(start, cluster, writes, code):
    store, bad, good = start(), cluster.hashes(3), cluster.hashes(4, seed=1)
    writes.error = refuse(code)
    store.save(bad, is_written=False)
    stops_writing(store)
    # After the first error of some kinds the others are not even tried.
    assert (store.dropped("error") + store.dropped("off"), store.disk.pool.lookup(bad)) == (3, 0)
    writes.error = None
    wait_until(lambda: not store.disk.is_off)
    store.save(good, first=10)
    assert store.load(bad).num_local == 3, "in memory nothing happened"
    stops_writing(store)
    store.empty_memory()
    # What is before others that were offered is written again after a write that works; the last block is not.
    assert store.load(bad).num_disk == store.disk.pool.lookup(bad) < 3
    store.save(bad)
    assert store.disk.pool.lookup(bad) == 3


def test_three_errors_in_a_row_turn_the_tier_off_for_a_while(start, cluster, writes, monkeypatch):
    monkeypatch.setattr("kvstore.disk.breaker._FIRST_REST_S", 0.3)
    store = start()
    writes.error = refuse()
    for seed in range(3):
        store.save(cluster.hashes(2, seed=seed), is_written=False)
        wait_until(lambda seed=seed: store.dropped("error") == 2 * seed + 2)
    wait_until(lambda: store.stats()["num_trips"] == 1)
    assert "broken" in store.stats()["reason"]
    # Nothing is written, or queued, while it is off.
    count = writes.num_calls
    store.save(cluster.hashes(2, seed=7), is_written=False)
    if store.disk.is_off:
        assert (store.dropped("off"), writes.num_calls) == (2, count)
    writes.error = None
    wait_until(lambda: not store.disk.is_off)
    store.save(cluster.hashes(2, seed=8))
    assert not store.disk.is_off


def test_blocks_on_disk_are_misses_while_it_is_off(start, cluster, writes, monkeypatch):
    monkeypatch.setattr("kvstore.disk.breaker._FIRST_REST_S", 0.5)
    store, hashes = start(), cluster.hashes(4)
    store.save(hashes)
    store.empty_memory()
    writes.error = refuse(errno.EROFS)
    store.save(cluster.hashes(2, seed=7), is_written=False)
    wait_until(lambda: store.stats()["num_trips"] == 1)
    if store.disk.is_off:
        assert store.worker.client.lookup(hashes).num_here == 0
    writes.error = None
    wait_until(lambda: not store.disk.is_off)
    assert store.load(hashes).num_disk == 4


def test_a_hanging_write(start, cluster, writes):
    store = start(disk_timeout_s=0.2, transfer_timeout_s=2.0)
    stored = cluster.hashes(4, seed=1)
    store.save(stored)
    hashes = cluster.hashes(6)
    with writes.held():
        store.save(hashes, is_written=False)
        wait_until(lambda: store.disk.is_off and "hangs" in store.stats()["reason"])
        # Saves and loads go on in memory.
        for seed in range(2, 9):
            own = cluster.hashes(6, seed=seed)
            store.save(own, first=10, is_written=False)
            assert store.load(own).num_local == 6
        assert store.disk.pool.stats().num_writing > 0, "the disk may still write there"
    wait_until(lambda: not store.disk.is_off)
    store.settle()
    assert store.disk.pool.stats().num_writing == 0
    assert store.disk.lookup(hashes) > 0, "what came late counts"
    store.save(cluster.hashes(5, seed=20))


def test_a_write_that_hangs_pins_a_part_of_a_small_memory_only(start, cluster, writes):
    store = start(capacity_bytes=1 << 17, disk_timeout_s=0.2, transfer_timeout_s=2.0)
    with writes.held():
        for seed in range(6):
            store.save(cluster.hashes(16, seed=seed), is_written=False)
        wait_until(lambda: store.disk.is_off)
        assert store.core.pool.stats().num_pinned <= 8
        own = cluster.hashes(20, seed=10)
        assert store.save(own, is_written=False).num_written == 20
    store.settle()


def test_reads_go_on_while_writes_are_slow(start, cluster, writes):
    store, hashes = start(), cluster.hashes(4)
    store.save(hashes)
    store.empty_memory()
    with writes.held():
        for seed in range(1, 5):
            store.save(cluster.hashes(3, seed=seed), first=5, is_written=False)
        wait_until(lambda: writes.num_waiting == _NUM_THREADS // 2)
        assert store.load(hashes).num_disk == 4
    store.settle()


def test_stop_with_a_hanging_write(start, cluster, writes, monkeypatch):
    monkeypatch.setattr("kvstore.disk.tier._STOP_S", 0.2)
    store = start()
    path, hashes = store.folder, cluster.hashes(4)
    with writes.held():
        store.save(hashes, is_written=False)
        wait_until(lambda: writes.num_waiting)
        cluster.stop_node("a")
        # Its folder stays locked: the call may still write there.
        other = start("b", disk_path=str(path.parent))
        assert other.folder != path
        assert other.load(hashes).num_blocks == 0


def test_a_namespace_with_a_space_of_its_own(start, cluster):
    """A19: the same tokens in another namespace are another block, on disk, too."""
    store, hashes = start(), cluster.hashes(4)
    store.save(hashes)
    store.empty_memory()
    other = Namespace(model="other", shape=cluster.space.shape)
    worker = cluster.worker("a", 2 * HALF, seed=3, space=other)
    tokens = np.random.default_rng(0).integers(0, 1000, 4 * cluster.space.shape.block_size)
    assert cluster.space.block_hashes(tokens) == hashes
    own = other.block_hashes(tokens)
    assert worker.load(own, range(4)).num_blocks == 0
    assert worker.save(own, range(10, 14)).num_written == 4
    wait_until(lambda: store.disk.lookup(own) == 4)
    store.settle()
    store.empty_memory()
    assert worker.load(own, range(20, 24)).num_disk == 4
    assert [worker.block(20 + at) for at in range(4)] == [worker.block(10 + at) for at in range(4)]
    assert store.load(hashes).num_disk == 4


def test_a_budget_that_is_smaller_than_a_turn_is_used(start, cluster, in_one_turn):
    """Three blocks an hour, and saves of six: three of them are written, not none."""
    store = start(disk_write_bytes_per_day=24 * 3 * 2 * PAGE_BYTES)
    store.save(cluster.hashes(6), is_written=False)
    wait_until(lambda: store.dropped("budget") == 3)
    store.settle()
    assert store.num("num_written") == 3


def test_a_block_is_queued_once_for_its_use(start, cluster, writes, monkeypatch):
    """However often one prompt names it: the queue has room for others."""
    monkeypatch.setattr("kvstore.disk.writing.writer.USE_GAP_S", 3600.0)
    store = start(disk_min_uses=2)
    hot, other = cluster.hashes(8, seed=1), cluster.hashes(8, seed=2)
    for first, hashes in enumerate((hot, other)):
        store.save(hashes, first=8 * first, is_written=False)
    monkeypatch.setattr("kvstore.disk.writing.writer.USE_GAP_S", 0.0)
    with writes.held():
        store.load(hot)
        monkeypatch.setattr("kvstore.disk.writing.writer.USE_GAP_S", 3600.0)
        for _ in range(20):
            store.load(hot)
        monkeypatch.setattr("kvstore.disk.writing.writer.USE_GAP_S", 0.0)
        store.load(other)
    wait_until(lambda: not store.num("num_unwritten"))
    assert [store.disk.lookup(hashes) for hashes in (hot, other)] == [8, 8]
    assert store.dropped("queue_full") == 0

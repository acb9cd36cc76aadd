"""Clearings and the disk: no block of before is ever found again, whatever was under way, and whoever was away."""

import threading

import pytest
from disk_store import HALF, SOON_S, Store, wait_until

from kvstore.disk import restore as module
from kvstore.disk.folder import VERSIONS
from kvstore.disk.threads import _NUM_THREADS
from kvstore.disk.versions_file import read_versions
from kvstore.errors import ConfigError
from kvstore.remote.directory import DirectoryServer


def clear(store, hashes):
    return store.core.state.pool_service.clear(hashes.namespace)


def store_anew(store, hashes):
    """Save the same names with other bytes, as new weights would; and read them from the disk."""
    store.save(hashes, first=30)
    store.empty_memory()
    assert store.load(hashes).num_disk == len(hashes)


@pytest.fixture
def hashes(cluster):
    return cluster.hashes(8)


def test_cleared_blocks_are_gone_from_both_tiers(start, hashes):
    store = start()
    store.save(hashes)
    clear(store, hashes)
    assert store.worker.client.lookup(hashes).num_here == 0
    assert store.load(hashes).num_blocks == 0
    wait_until(lambda: not store.disk.has_cleared())
    store.check()
    store_anew(store, hashes)


def test_clearing_while_blocks_wait_to_be_written(start, cluster, hashes, writes):
    store = start()
    with writes.held():
        for seed in range(1, 4):
            store.save(cluster.hashes(6, seed=seed), first=8, is_written=False)
        wait_until(lambda: writes.num_waiting == _NUM_THREADS // 2)
        store.save(hashes, is_written=False)
        clear(store, hashes)
    wait_until(lambda: not store.num("num_queued"))
    store.settle()
    assert store.disk.lookup(hashes) == 0
    assert all(store.disk.lookup(cluster.hashes(6, seed=seed)) == 0 for seed in range(1, 4))
    store_anew(store, hashes)


def test_clearing_during_a_write(start, hashes, writes):
    store = start()
    with writes.held():
        store.save(hashes, is_written=False)
        wait_until(lambda: writes.num_waiting)
        clear(store, hashes)
        # Saved again while the old bytes are still being written.
        store.save(hashes, first=30, is_written=False)
    wait_until(lambda: store.disk.lookup(hashes) == 8)
    store.settle()
    store.empty_memory()
    assert store.load(hashes).num_disk == 8
    store.restart()
    assert store.load(hashes).num_disk == 8


def test_clearing_during_a_read(start, hashes, reads):
    store = start(transfer_timeout_s=SOON_S)
    store.save(hashes)
    store.empty_memory()
    with reads.held():
        job = store.worker.client.load(hashes, list(range(HALF, HALF + 8)))
        wait_until(lambda: reads.num_waiting)
        clear(store, hashes)
        store.save(hashes, first=30, is_written=False)
    assert job.result(SOON_S).num_blocks == 0
    assert store.load(hashes).num_local == 8
    store.settle()
    store.empty_memory()
    assert store.load(hashes).num_disk == 8


def test_clearing_lasts_over_a_restart(start, hashes):
    store = start()
    store.save(hashes)
    clear(store, hashes)
    store.restart()
    assert store.num("num_restored") == 0
    assert store.load(hashes).num_blocks == 0
    store_anew(store, hashes)
    store.restart()
    assert store.load(hashes).num_disk == 8


def test_clearing_before_the_first_client_lasts(start, cluster, hashes):
    """The store has no slots yet, and its thread for versions runs all the same."""
    store = start()
    store.save(hashes)
    store.stop()
    core = cluster.add("a", **store.settings)
    core.state.pool_service.clear(hashes.namespace)
    assert read_versions(store.folder / VERSIONS) == {hashes.namespace: 1}
    cluster.stop_node("a")
    cluster.directory.stop()
    cluster.directory = DirectoryServer("127.0.0.1", settle_s=0.0)
    store.begin()
    assert store.num("num_restored") == 0
    assert store.load(hashes).num_blocks == 0


def test_clearing_while_the_node_was_away(start, hashes):
    """Another node was cleared meanwhile, and the directory says so before old blocks are found."""
    store, other = start("a"), start("b")
    store.save(hashes)
    store.stop()
    clear(other, hashes)
    store.begin()
    assert store.num("num_restored") == 0
    assert store.load(hashes).num_blocks == 0
    other.save(hashes, first=30)
    assert store.load(hashes).num_peer == 8


def test_all_stores_were_stopped_and_the_one_that_cleared_begins_first(start, cluster, hashes):
    store, other = start("a"), start("b")
    store.save(hashes)
    store.stop()
    clear(other, hashes)
    other.stop()
    cluster.directory.stop()
    cluster.directory = DirectoryServer("127.0.0.1", settle_s=0.0)
    other.begin()
    store.begin()
    assert store.num("num_restored") == 0
    assert store.load(hashes).num_blocks == 0


def test_old_blocks_go_when_a_store_that_knows_begins_later(start, cluster, hashes):
    store, other = start("a"), start("b")
    store.save(hashes)
    store.stop()
    clear(other, hashes)
    other.stop()
    cluster.directory.stop()
    cluster.directory = DirectoryServer("127.0.0.1", settle_s=0.0)
    store.begin()
    other.begin()
    store.core.state.hints.publish_soon()  # Instead of waiting for its heartbeat.
    wait_until(lambda: store.core.state.versions.get(hashes.namespace) == 1)
    assert store.load(hashes).num_blocks == 0
    store.restart()
    assert store.num("num_restored") == 0


def test_old_blocks_are_not_found_before_the_directory_has_answered(start, cluster, hashes):
    store, other = start("a"), start("b")
    store.save(hashes)
    store.stop()
    clear(other, hashes)
    resolve = cluster.directory.address
    answers = threading.Event()

    def address():
        assert answers.wait(SOON_S)
        return resolve()

    cluster.directory.address = address
    try:
        store.begin(waits=False)
        assert store.disk.is_off
        assert store.worker.client.lookup(hashes, remote=False).num_here == 0
    finally:
        answers.set()
    wait_until(lambda: not store.disk.is_off)
    assert store.load(hashes).num_blocks == 0


def test_a_directory_that_began_anew_is_no_witness_before_all_nodes_had_the_time_to_tell_it(start, cluster, hashes):
    store, other = start("a"), start("b")
    store.save(hashes)
    store.stop()
    clear(other, hashes)
    cluster.directory.stop()
    cluster.directory = DirectoryServer("127.0.0.1", settle_s=0.5)
    store.begin(waits=False)  # Before the other one has told the new directory.
    assert store.core.state.hints.has_met.wait(SOON_S)
    assert store.disk.is_off
    assert store.worker.client.lookup(hashes).num_here == 0
    other.core.state.hints.publish_soon()  # Instead of waiting for their heartbeats.
    wait_until(lambda: cluster.directory.versions.get(hashes.namespace) == 1)
    wait_until(lambda: store.core.state.hints.publish_soon() or not store.disk.is_off)
    assert store.core.state.versions.get(hashes.namespace) == 1
    assert store.load(hashes).num_blocks == 0
    store_anew(store, hashes)


def test_clearing_between_the_versions_and_the_claim_of_a_restore(start, hashes, monkeypatch):
    """The clearing comes exactly when old blocks are about to be found."""
    store = start()
    store.save(hashes)
    store.stop()
    original = module.restore

    def restore(*args):
        clear(store, hashes)
        return original(*args)

    monkeypatch.setattr(module, "restore", restore)
    original_add = store.cluster.add

    def add(*args, **more):
        store.core = original_add(*args, **more)
        return store.core

    monkeypatch.setattr(store.cluster, "add", add)
    store.begin()
    assert store.disk.pool.lookup(hashes) == 0
    assert store.load(hashes).num_blocks == 0
    store_anew(store, hashes)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\0" * 100])
def test_a_damaged_file_of_versions_serves_nothing(start, cluster, hashes, text, num_fds):
    store = start()
    store.save(hashes)
    store.stop()
    (store.folder / VERSIONS).write_bytes(text)
    before = num_fds()
    for _ in range(3):
        with pytest.raises(ConfigError, match="remove the folder"):
            cluster.add("a", **store.settings)
    assert num_fds() <= before
    (store.folder / VERSIONS).unlink()
    store.begin()
    assert store.load(hashes).num_disk == 8


def test_clear_returns_when_the_disk_keeps_it(start, hashes):
    store = start()
    for version in range(1, 6):
        clear(store, hashes)
        assert read_versions(store.folder / VERSIONS) == {hashes.namespace: version}


def test_clearing_again_and_again_while_loads_and_saves_run(start, cluster, hashes):
    """Two threads save and load what a third clears; every block that comes has bytes of its own save."""
    store: Store = start()
    other = cluster.worker("a", 2 * HALF, seed=77)
    ours = {store.worker.block(at)[0] for at in range(8)} | {other.block(at)[0] for at in range(8)}
    failed, ends = [], threading.Event()

    def work(worker):
        while not ends.is_set():
            worker.save(hashes, range(8))
            result = worker.load(hashes, range(HALF, HALF + 8))
            for at in range(result.num_blocks):
                if worker.block(HALF + at)[0] not in ours:
                    failed.append(at)

    workers = [threading.Thread(target=work, args=(worker,)) for worker in (store.worker, other)]
    for each in workers:
        each.start()
    for _ in range(25):
        clear(store, hashes)
        store.core.pool.discard(list(range(store.core.pool.num_slots)))
        store.check()
    ends.set()
    for each in workers:
        each.join(2 * SOON_S)
        assert not each.is_alive()
    assert failed == []
    clear(store, hashes)
    store.settle()
    store.restart()
    assert store.num("num_restored") == 0


@pytest.mark.parametrize("is_heard", [False, True])
def test_the_slots_of_cleared_blocks_come_back_without_any_traffic(start, hashes, is_heard):
    store = start()
    store.save(hashes)
    store.empty_memory()
    service = store.core.state.pool_service
    if is_heard:
        service.hear_clearing(hashes.namespace, 1)
    else:
        clear(store, hashes)
    wait_until(lambda: store.disk.pool.stats().num_free == store.disk.pool.num_slots)

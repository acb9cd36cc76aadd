"""Lives of a store on one folder: what is left of the files is served, and the rest is a miss."""

import os
import threading
from dataclasses import replace

import pytest
from disk_store import SOON_S, checksum, flip, records_of, wait_until

from kvstore.blocks.hashing import Namespace
from kvstore.client.client import Client
from kvstore.config import StoreConfig
from kvstore.disk import tier as module
from kvstore.disk.folder import LABEL, LOCK, VERSIONS, sizes_in
from kvstore.disk.records import PAGE_BYTES, RECORD_BYTES
from kvstore.node.core import NodeCore
from kvstore.runtime import clock
from tests.kvstore.conftest import SHAPE

STRIDE = 2 * PAGE_BYTES


@pytest.fixture
def stopped(start, cluster):
    """A store that was stopped with 12 blocks on its disk, in the places 0 to 11 in some order."""
    store, hashes = start(), cluster.hashes(12)
    store.save(hashes)
    store.stop()
    return store, hashes


def num_below(store, hashes, place):
    """Return how many leading blocks of a chain are in places below one."""
    records = records_of(store.folder)
    return next((at for at, own in enumerate(hashes) if records[own].place >= place), len(hashes))


def test_files_and_modes(stopped):
    store, _ = stopped
    modes = {path.name: path.stat().st_mode & 0o777 for path in store.folder.iterdir()}
    assert modes == dict.fromkeys((LABEL, LOCK, store.slots.name, store.index.name), 0o600)
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert store.folder.parent.stat().st_mode & 0o777 == 0o700


def test_restarts_change_nothing_on_disk(stopped):
    store, hashes = stopped
    before = checksum(store.folder)
    for _ in range(3):
        store.begin()
        assert store.num("num_restored") == 12
        store.stop()
    assert checksum(store.folder) == before
    store.begin()
    assert store.load(hashes).num_disk == 12


def test_a_slot_file_that_was_cut(stopped):
    """What is beyond the cut is a miss, the rest is served."""
    store, hashes = stopped
    left = num_below(store, hashes, 7)
    os.truncate(store.slots, 7 * STRIDE + 5000)
    store.begin()
    assert (store.num("num_restored"), store.disk.lookup(hashes)) == (7, left)
    assert store.load(hashes).num_blocks == left
    store.save(hashes)
    store.restart()
    assert store.load(hashes).num_disk == 12


def test_a_slot_file_that_is_gone(stopped):
    store, hashes = stopped
    store.slots.unlink()
    store.begin()
    assert store.num("num_restored") == 0
    store.save(hashes)


@pytest.mark.parametrize("kept", [0, 1, 5 * RECORD_BYTES, 5 * RECORD_BYTES + 100])
def test_an_index_that_was_cut(stopped, kept):
    store, hashes = stopped
    left = num_below(store, hashes, kept // RECORD_BYTES)
    os.truncate(store.index, kept)
    store.begin()
    assert store.num("num_restored") == kept // RECORD_BYTES
    assert store.load(hashes).num_disk == left
    store.save(hashes)
    store.empty_memory()
    assert store.load(hashes).num_disk == 12


def test_an_index_that_is_gone_or_of_other_bytes(stopped):
    store, hashes = stopped
    store.index.unlink()
    store.begin()
    assert store.num("num_restored") == 0
    store.stop()
    store.index.write_bytes(os.urandom(1 << 16))
    store.begin()
    assert store.num("num_restored") == 0
    assert store.load(hashes).num_blocks == 0
    store.save(hashes)
    store.restart()
    assert store.load(hashes).num_disk == 12


@pytest.mark.parametrize("at", [0, 8, 30, 100, 183])
def test_a_changed_record_of_the_index_costs_its_block(stopped, at):
    store, hashes = stopped
    flip(store.index, records_of(store.folder)[hashes[4]].place * RECORD_BYTES + at)
    store.begin()
    assert store.num("num_restored") == 11
    assert store.load(hashes).num_blocks == 4
    store.save(hashes)
    store.empty_memory()
    assert store.load(hashes).num_disk == 12


def test_an_old_record_of_the_index_is_noticed(stopped):
    """The index says that a place has a block which was overwritten: its record before the bytes says so."""
    store, hashes = stopped
    index = store.index
    old = index.read_bytes()
    store.begin()
    for seed in range(1, 7):
        store.save(store.cluster.hashes(20, seed=seed), first=20)
    store.stop()
    index.write_bytes(old)
    store.begin()
    assert store.num("num_restored") == 12
    result = store.load(hashes)
    assert result.num_blocks == 12 - store.num("num_damaged") < 12
    store.save(hashes)
    store.restart()
    assert store.load(hashes).num_disk == 12


def test_a_smaller_capacity_keeps_what_fits(stopped):
    store, hashes = stopped
    left = num_below(store, hashes, 7)
    store.begin(disk_capacity_bytes=1 << 16)  # 7 places.
    assert store.num("num_restored") == 7
    assert store.load(hashes).num_disk == left
    before = store.slots.stat().st_size
    store.save(store.cluster.hashes(1, seed=2), first=20)
    assert (before, store.slots.stat().st_size) == (124 * STRIDE, 7 * STRIDE), "cut when it is written, not before"


def test_a_larger_capacity_keeps_all(stopped):
    store, hashes = stopped
    store.begin(disk_capacity_bytes=1 << 21)
    assert store.num("num_restored") == 12
    assert store.load(hashes).num_disk == 12
    store.save(store.cluster.hashes(40, seed=2))
    left = num_below(store, hashes, 7)
    store.restart(disk_capacity_bytes=1 << 16)
    assert store.load(hashes).num_disk == left


def test_a_client_of_another_size_changes_nothing_on_disk(stopped):
    """Files of another size of slots stay, and their blocks are found when a store has that size again."""
    store, hashes = stopped
    before = checksum(store.folder)
    store.begin(block_bytes=6000)
    assert (store.num("num_restored"), store.disk.lookup(hashes)) == (0, 0)
    assert store.num("num_other_bytes") == store.slots.stat().st_size + store.index.stat().st_size
    store.stop()
    assert checksum(store.folder) == before
    store.begin(block_bytes=0)
    assert store.num("num_other_bytes") == 0
    assert store.load(hashes).num_disk == 12


def test_two_sizes_share_the_capacity_and_each_is_found_again(stopped):
    """What another size has goes only as far as the present one needs its room, from the end of its file."""
    store, hashes = stopped
    others = store.cluster.hashes(2, seed=2)
    store.begin(block_bytes=6000)
    store.save(others, first=20)
    capacity, sizes = store.settings["disk_capacity_bytes"], sizes_in(store.folder)
    assert sum(num_bytes for _, num_bytes in sizes.values()) <= capacity
    assert store.num("num_other_bytes") == sizes[4096][1] > capacity - (1 << 15), "no more than that"
    store.restart(block_bytes=0)
    assert store.load(hashes).num_disk == 12
    store.restart(block_bytes=6000)
    assert store.load(others).num_disk == 2
    for seed in range(3, 8):  # More than has room beside the other size.
        store.save(store.cluster.hashes(20, seed=seed))
    sizes = sizes_in(store.folder)
    assert sum(num_bytes for _, num_bytes in sizes.values()) <= capacity
    assert store.num("num_other_bytes") == sizes[4096][1] < capacity // 50
    store.stop()


def test_the_size_that_was_written_longest_ago_goes_first(stopped):
    store, _ = stopped
    stopped_bytes = dict[int, int]()
    for block_bytes, count in ((6000, 20), (10000, 20)):
        store.begin(block_bytes=block_bytes)
        store.save(store.cluster.hashes(count, seed=block_bytes), first=20)
        stopped_bytes = {size: num_bytes for size, (_, num_bytes) in sizes_in(store.folder).items()}
        store.stop()
    store.begin(block_bytes=14000)
    for seed in range(2):
        store.save(store.cluster.hashes(10, seed=seed), first=30)
    now_bytes = {size: num_bytes for size, (_, num_bytes) in sizes_in(store.folder).items()}
    assert now_bytes[4096] < stopped_bytes[4096]
    assert (now_bytes[8192], now_bytes[12288]) == (stopped_bytes[8192], stopped_bytes[12288])


def test_a_clearing_holds_for_the_files_of_other_sizes(stopped):
    store, hashes = stopped
    store.begin(block_bytes=6000)
    store.core.state.pool_service.clear(hashes.namespace)
    store.restart(block_bytes=0)
    assert store.load(hashes).num_blocks == 0


def test_a_pipe_in_place_of_the_slots_turns_the_tier_off_in_words(stopped):
    store, hashes = stopped
    store.slots.unlink()
    os.mkfifo(store.slots, 0o600)
    store.begin(waits=False)
    assert "wanted a file of user" in wait_until(lambda: store.stats()["reason"])
    assert store.worker.save(hashes, range(12)).num_written == 12
    store.slots.unlink()


def test_too_small_a_capacity_for_two_blocks_turns_it_off_with_a_reason(start, cluster):
    store_settings = {"disk_capacity_bytes": 1 << 16, "block_bytes": 1 << 16, "capacity_bytes": 1 << 18}
    core = cluster.add("a", disk_path=start.path("a"), **store_settings)
    worker, hashes = cluster.worker("a"), cluster.hashes(3)
    assert worker.save(hashes, range(3)).num_written == 3
    assert "disk_capacity_bytes" in core.state.disk.why_off
    assert core.state.disk.is_off
    assert core.stats()["disk"]["reason"]
    assert worker.load(hashes, range(3, 6)).num_local == 3
    core.state.pool_service.clear(hashes.namespace)
    assert worker.load(hashes, range(3, 6)).num_blocks == 0


def test_no_threads_and_no_files_stay(start, cluster, num_fds):
    hashes = cluster.hashes(6)
    store = start()
    store.save(hashes)
    store.stop()
    store.worker.client.close(2.0)

    def threads():
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("raykv-disk")]

    wait_until(lambda: not threads())
    before = num_fds()
    for _ in range(3):
        core = cluster.add("a", **store.settings)
        worker = cluster.worker("a")
        wait_until(lambda core=core: not core.state.disk.is_off)
        assert worker.load(hashes, range(6)).num_disk == 6
        worker.client.close(2.0)
        cluster.stop_node("a")
        core.state.disk.stop()  # Once more does nothing.
        wait_until(lambda: not threads())
    assert num_fds() <= before + 2


def test_a_store_that_never_had_a_client_leaves_nothing(start, cluster):
    core = cluster.add("a", disk_path=start.path("a"), disk_capacity_bytes=1 << 20)
    assert core.state.disk.is_off
    cluster.stop_node("a")
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("raykv-disk")])


def test_a_disk_that_hangs_at_the_first_client_does_not_keep_the_store(start, cluster, monkeypatch):
    """Nothing waits on the control thread: the store serves, and its tier begins when the disk answers."""
    go, original = threading.Event(), module.Room

    def slow(*args):
        assert go.wait(30.0)
        return original(*args)

    monkeypatch.setattr(module, "Room", slow)
    try:
        core = cluster.add("a", disk_path=start.path("a"), disk_capacity_bytes=1 << 20, disk_timeout_s=0.2)
        worker, hashes = cluster.worker("a"), cluster.hashes(6)
        assert core.state.disk.is_off
        assert worker.save(hashes, range(6)).num_written == 6
        assert worker.load(hashes, range(10, 16)).num_local == 6
    finally:
        go.set()
    wait_until(lambda: not core.state.disk.is_off)
    more = cluster.hashes(6, seed=2)
    worker.save(more, range(20, 26))
    wait_until(lambda: core.state.disk.lookup(more) == 6)
    core.state.disk.pool.check_integrity()


def test_the_versions_are_a_file_of_the_folder_only_after_a_clearing(stopped):
    store, hashes = stopped
    assert not (store.folder / VERSIONS).exists()
    store.begin()
    store.core.state.pool_service.clear(hashes.namespace)
    assert (store.folder / VERSIONS).stat().st_mode & 0o777 == 0o600


def test_blocks_that_an_earlier_life_knew_with_another_size_are_misses(start, cluster):
    """A7: a block of 1,024 bytes is not served as one of 2,048, though both fit the slot."""
    store, hashes = start(), cluster.hashes(4)
    store.save(hashes)
    store.stop()
    core = cluster.add("a", **store.settings)
    core.state.pool_service.attach(hashes.namespace, 2048)
    disk = core.state.disk
    wait_until(lambda: not disk.is_off)
    read = disk.read(hashes, lambda ready, num_read: None)
    assert read.wait(clock.now_s() + SOON_S)
    assert (core.pool.lookup(hashes), read.num_blocks) == (0, 0)
    wait_until(lambda: disk.pool.lookup(hashes) == 0)
    core.pool.check_integrity()
    disk.pool.check_integrity()


def test_a_store_that_cannot_begin_lets_its_folder_go(start, cluster, monkeypatch):
    def refuse(control, path, host):
        raise OSError("no port is free")

    store, hashes = start(), cluster.hashes(6)
    store.save(hashes)
    store.stop()
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.node.dispatch.NodeControl.start", refuse)
        for _ in range(2):
            with pytest.raises(OSError, match="no port"):
                NodeCore("a", StoreConfig(**store.settings), "127.0.0.1", cluster.resolve, cluster.directory.address)
    store.begin()
    assert store.folder.name == "default-0"
    assert store.load(hashes).num_disk == 6


def test_a_small_first_client_keeps_no_larger_one_from_its_blocks_on_disk(stopped, cluster):
    """The memory is divided again for the larger blocks, as nothing was saved; the disk changes along with it."""
    store, hashes = stopped
    small = Namespace(model="small", shape=replace(SHAPE, num_layers=1))
    large = Namespace(model="large", shape=replace(SHAPE, num_layers=40))
    before = checksum(store.folder)
    core = cluster.add("a", **store.settings)
    disk = core.state.disk
    for space in (small, large):
        Client(core.control_path, space).close()
    slot_bytes = core.state.pool_service.slot_bytes
    wait_until(lambda: not disk.is_off)
    assert disk.stats()["num_other_bytes"] == store.slots.stat().st_size + store.index.stat().st_size
    cluster.stop_node("a")
    assert checksum(store.folder) == before
    # The other way round: the larger blocks are those on the disk.
    store.begin(block_bytes=slot_bytes)
    store.save(hashes)
    store.stop()
    core = cluster.add("a", **store.settings | {"block_bytes": 0})
    Client(core.control_path, small).close()
    Client(core.control_path, large).close()
    wait_until(lambda: core.state.disk.lookup(hashes) == 12)
    worker = cluster.worker("a", seed=1)
    assert worker.load(hashes[:6], range(6)).num_disk == 6
    core.pool.check_integrity()
    core.state.disk.pool.check_integrity()
    assert [thread.name for thread in threading.enumerate()].count("raykv-disk-watch") == 1

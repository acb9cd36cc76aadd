"""The disk tier through a whole node store: what was saved is found after a restart."""

import threading

import pytest

from kvstore.disk.slot_file import SlotFile

NUM_BLOCKS = 12


@pytest.fixture
def settings(tmp_path):
    return {"disk_path": str(tmp_path / "kv"), "disk_capacity_bytes": 1 << 20}


def disk_of(cluster, node_id="a"):
    return cluster.nodes[node_id].state.disk


def written(cluster, wait_until, num_blocks, node_id="a"):
    disk = disk_of(cluster, node_id)
    wait_until(lambda: disk.stats().get("num_written", 0) >= num_blocks)


def test_a_block_is_found_after_a_restart(cluster, settings, wait_until):
    cluster.add("a", **settings)
    worker, hashes = cluster.worker("a"), cluster.hashes(NUM_BLOCKS)
    before = [worker.block(at) for at in range(NUM_BLOCKS)]
    assert worker.save(hashes, range(NUM_BLOCKS)).num_written == NUM_BLOCKS
    written(cluster, wait_until, NUM_BLOCKS)
    cluster.stop_node("a")
    cluster.add("a", **settings)
    worker = cluster.worker("a", seed=1)
    wait_until(lambda: disk_of(cluster).num_restored == NUM_BLOCKS)
    match = worker.client.lookup(hashes)
    assert (match.num_local, match.num_disk, match.num_blocks) == (0, NUM_BLOCKS, NUM_BLOCKS)
    result = worker.load(hashes, range(NUM_BLOCKS))
    assert (result.num_blocks, result.num_disk, result.num_local) == (NUM_BLOCKS, NUM_BLOCKS, 0), result
    assert [worker.block(at) for at in range(NUM_BLOCKS)] == before


def test_another_node_reads_the_disk_through_this_node_memory(cluster, settings, wait_until):
    cluster.add("a", **settings)
    saver, hashes = cluster.worker("a"), cluster.hashes(NUM_BLOCKS)
    before = [saver.block(at) for at in range(NUM_BLOCKS)]
    saver.save(hashes, range(NUM_BLOCKS))
    written(cluster, wait_until, NUM_BLOCKS)
    cluster.stop_node("a")
    cluster.add("a", **settings)
    cluster.add("b", **settings)
    cluster.client("a")
    reader = cluster.worker("b", seed=1)
    wait_until(lambda: disk_of(cluster).num_restored == NUM_BLOCKS)
    wait_until(lambda: reader.client.lookup(hashes).num_blocks == NUM_BLOCKS)
    assert reader.client.lookup(hashes).nodes == (("a", NUM_BLOCKS),)
    result = reader.load(hashes, range(NUM_BLOCKS))
    assert (result.num_blocks, result.num_peer, result.num_disk) == (NUM_BLOCKS, NUM_BLOCKS, 0), result
    assert [reader.block(at) for at in range(NUM_BLOCKS)] == before


def test_faster_peers_are_asked_before_the_own_disk(cluster, settings, wait_until):
    cluster.add("a", **settings)
    cluster.add("b", **settings)
    saver, hashes = cluster.worker("a"), cluster.hashes(NUM_BLOCKS)
    saver.save(hashes, range(NUM_BLOCKS))
    written(cluster, wait_until, NUM_BLOCKS)
    cluster.stop_node("a")
    cluster.add("a", **settings)
    cluster.client("a")
    holder = cluster.worker("b", seed=2)
    wait_until(lambda: disk_of(cluster).num_restored == NUM_BLOCKS)
    wait_until(lambda: holder.client.lookup(hashes).num_blocks == NUM_BLOCKS)
    holder.load(hashes, range(NUM_BLOCKS))
    cluster.stop_node("a")
    cluster.add("a", **settings)
    reader = cluster.worker("a", seed=1)
    wait_until(lambda: disk_of(cluster).num_restored == NUM_BLOCKS)
    # As measured: the disk slow, the peers fast.
    disk_of(cluster).rate.note(1, 1.0)
    cluster.nodes["a"].state.fetcher.peers_rate.note(10**15, 1.0)
    near = reader.load(hashes[:4], range(4))
    assert (near.num_blocks, near.num_disk) == (4, 4), "nobody has just named a peer"
    wait_until(lambda: reader.client.lookup(hashes).nodes[:1] == (("b", NUM_BLOCKS),))
    far = reader.load(hashes, range(NUM_BLOCKS))
    assert (far.num_blocks, far.num_local, far.num_peer) == (NUM_BLOCKS, 4, NUM_BLOCKS - 4), far


@pytest.mark.usefixtures("in_one_turn")
def test_blocks_that_are_being_written_are_not_written_yet(cluster, settings, wait_until, monkeypatch):
    may_write, real = threading.Event(), SlotFile.write

    def slow(self, *args):
        assert may_write.wait(30)
        real(self, *args)

    monkeypatch.setattr(SlotFile, "write", slow)
    cluster.add("a", **settings)
    cluster.worker("a").save(cluster.hashes(NUM_BLOCKS), range(NUM_BLOCKS))
    try:
        wait_until(lambda: disk_of(cluster).stats()["num_queued"] < NUM_BLOCKS)
        assert disk_of(cluster).stats()["num_unwritten"] == NUM_BLOCKS
    finally:
        may_write.set()
    wait_until(lambda: disk_of(cluster).stats()["num_unwritten"] == 0)
    assert disk_of(cluster).stats()["num_written"] == NUM_BLOCKS


def test_a_long_chain_of_small_blocks_takes_several_calls(cluster, settings, wait_until):
    """One call of the system takes 1,024 buffers; each block has two."""
    num_blocks, sizes = 600, {"capacity_bytes": 4 << 20, "disk_capacity_bytes": 8 << 20}
    cluster.add("a", **settings | sizes)
    worker, hashes = cluster.worker("a", num_blocks), cluster.hashes(num_blocks)
    worker.save(hashes, range(num_blocks))
    written(cluster, wait_until, num_blocks)
    cluster.stop_node("a")
    cluster.add("a", **settings | sizes)
    reader = cluster.worker("a", num_blocks, seed=1)
    wait_until(lambda: disk_of(cluster).num_restored == num_blocks)
    result = reader.load(hashes, range(num_blocks))
    assert (result.num_blocks, result.num_disk) == (num_blocks, num_blocks), result
    assert reader.bytes() == worker.bytes()

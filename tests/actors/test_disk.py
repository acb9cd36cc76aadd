"""A disk tier on two nodes: blocks outlive their stores, and other nodes read them through the node's memory."""

from __future__ import annotations

import time

import pytest

import kvstore

pytestmark = [pytest.mark.ray]

NUM_BLOCKS = 200


@pytest.fixture(scope="module")
def workers(ray_cluster, node_ids, start_worker):
    return [start_worker(node_id) for node_id in node_ids]


@pytest.fixture
def start(tmp_path, workers, get, make_space):
    """Starts the same store again and again, with an engine on each node."""
    running, space = [], make_space()

    def run():
        store = kvstore.start("1MiB", name="on-disk", disk_path=str(tmp_path / "kv"), disk_capacity_bytes=32 << 20)
        running.append(store)
        get([worker.open.remote("disk", store, space, 256) for worker in workers])
        return store, space

    def end():
        get([worker.close.remote("disk") for worker in workers])
        running.pop().stop()

    run.end = end
    yield run
    if running:
        end()


def disks(store):
    return [node["disk"] for node in store.stats()["nodes"].values()]


def until(condition, timeout_s=30.0):
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "not in time"
        time.sleep(0.05)


def test_blocks_outlive_their_stores_and_reach_the_other_node(start, workers, get, chain_of):
    store, space = start()
    here, there = workers
    # The memory has room for half of them.
    chains = [chain_of(space, NUM_BLOCKS // 4, seed) for seed in range(4)]
    for number, chain in enumerate(chains, 1):
        assert get(there.do.remote("disk", "save", chain)).num_written == 50
        # Before the next ones take their memory.
        until(lambda number=number: sum(disk["num_written"] for disk in disks(store)) == 50 * number)
    assert get(here.ask.remote("disk", "lookup", chains[0])).num_blocks == 50, "the directory knows the disk's blocks"
    start.end()

    store, _ = start()
    until(lambda: sum(disk["num_restored"] for disk in disks(store)) == NUM_BLOCKS)
    until(lambda: get(here.ask.remote("disk", "lookup", chains[3])).num_blocks == 50)
    # Which node has the folder now is chance.
    ways = [get(worker.ask.remote("disk", "lookup", chains[0])) for worker in workers]
    assert sorted((way.num_local, way.num_disk) for way in ways) == [(0, 0), (0, 50)]
    holder, other = workers if ways[0].num_disk else workers[::-1]
    own = get(holder.do.remote("disk", "load", chains[0]))
    assert (own.num_blocks, own.num_disk, own.num_peer) == (50, 50, 0), own
    far = get(other.do.remote("disk", "load", chains[1]))
    assert (far.num_blocks, far.num_disk, far.num_peer) == (50, 0, 50), far
    again = get(holder.do.remote("disk", "load", chains[1]))
    assert (again.num_blocks, again.num_local) == (50, 50), "the other node's load has brought them into memory here"
    assert store.clear(space) >= 150
    assert [get(worker.ask.remote("disk", "lookup", chains[2])).num_blocks for worker in workers] == [0, 0]
    start.end()

    store, _ = start()
    assert [get(worker.ask.remote("disk", "lookup", chain)).num_blocks for worker in workers for chain in chains] == [
        0
    ] * 8
    assert [disk["num_restored"] for disk in disks(store)] == [0, 0]
    assert all(disk["num_damaged"] == 0 for disk in disks(store))

"""What a node store counts of its blocks and bytes, beside what its clients got."""

from __future__ import annotations

from collections import Counter

import pytest

import kvstore
from kvstore.node.traffic import REASONS, Traffic
from kvstore.rpc.messages import LoadReport
from tests.kvstore.conftest import SHAPE

ROOM = {"capacity_bytes": 1 << 18}


def traffic(core):
    return core.counts()["traffic"]


def none_of(counts):
    return {name: 0 for name in counts}


def test_a_save_and_a_load_on_one_node(cluster):
    core = cluster.add("a", **ROOM)
    worker, hashes = cluster.worker("a"), cluster.hashes(6)
    worker.client.save(hashes[:4], range(4)).result(10)
    result = worker.client.load(hashes, range(6)).result(10)
    told = traffic(core)
    assert told["stored_blocks"] == {"save": 4, "peer": 0, "disk": 0}
    assert told["in_bytes"] == none_of(told["in_bytes"]) | {"save": 4 * SHAPE.block_bytes}
    assert told["hit_blocks"] == {"memory": result.num_local, "disk": 0, "peer": 0}
    assert told["out_bytes"] == none_of(told["out_bytes"]) | {"load": 4 * SHAPE.block_bytes}
    assert told["miss_blocks"] == {"load": Counter(f.reason.value for f in result.failed), "handoff": {}}
    assert sum(told["miss_blocks"]["load"].values()) == 2


def test_blocks_of_a_peer_are_counted_on_both_sides(cluster):
    a, b = cluster.add("a", **ROOM), cluster.add("b", **ROOM)
    hashes = cluster.hashes(5)
    cluster.worker("a").client.save(hashes, range(5)).result(10)
    result = cluster.worker("b").client.load(hashes, range(5)).result(10)
    assert result.num_peer == 5
    assert traffic(a)["out_bytes"]["peer"] == traffic(b)["in_bytes"]["peer"] == result.num_bytes
    assert traffic(b)["stored_blocks"] == {"save": 0, "peer": 5, "disk": 0}
    assert traffic(b)["hit_blocks"] == {"memory": 0, "disk": 0, "peer": 5}
    assert traffic(b)["out_bytes"]["load"] == 5 * SHAPE.block_bytes


def test_blocks_of_the_disk_are_counted_where_they_come_in(cluster, tmp_path, wait_until):
    disk = {"disk_path": str(tmp_path / "kv"), "disk_capacity_bytes": 1 << 20}
    core, hashes = cluster.add("a", capacity_bytes=1 << 17, **disk), cluster.hashes(4)
    worker = cluster.worker("a")
    worker.client.save(hashes, range(4)).result(10)
    wait_until(lambda: core.counts()["disk"]["num_written"] == 4)
    core.pool.evict(4)
    result = worker.client.load(hashes, range(4)).result(10)
    told = traffic(core)
    assert result.num_disk == 4
    assert told["hit_blocks"] == {"memory": 0, "disk": 4, "peer": 0}
    assert told["stored_blocks"]["disk"] == 4
    assert told["in_bytes"]["disk"] == 4 * SHAPE.block_bytes
    assert told["out_bytes"]["disk"] == core.counts()["disk"]["num_written_bytes"] > 0


@pytest.mark.parametrize("reader", ["a", "b"])
def test_a_hand_off_is_counted_once(cluster, reader, wait_until):
    cores = {node: cluster.add(node, **ROOM) for node in ("a", "b")}
    source, target = cluster.worker("a"), cluster.worker(reader)
    ticket = source.client.publish([0, 1, 2], ttl_s=30.0)
    assert target.client.fetch(ticket, [5, 6, 7]).result(10).num_blocks == 3
    # The reader's word that it is done comes after its result.
    wait_until(lambda: traffic(cores["a"])["out_bytes"]["handoff"] == 3 * SHAPE.block_bytes)
    came = traffic(cores["b"])["in_bytes"]["handoff"]
    assert came == (3 * SHAPE.block_bytes if reader == "b" else 0)
    failed = target.client.fetch(ticket, [5, 6, 7]).result(10).failed
    assert traffic(cores[reader])["miss_blocks"]["handoff"] == Counter(each.reason.value for each in failed)


def test_a_load_of_a_drained_node_counts_as_that(cluster):
    core = cluster.add("a", **ROOM)
    worker = cluster.worker("a")
    core.begin_drain(0)
    failed = worker.client.load(cluster.hashes(3), range(3)).result(10).failed
    assert {each.reason.value for each in failed} == {"draining"}
    assert traffic(core)["miss_blocks"]["load"] == {"draining": 3}


def test_reasons_are_those_of_results_and_no_text_becomes_one():
    assert {reason.value for reason in kvstore.MissReason} >= REASONS
    counted = Traffic()
    for reason in ("timeout: after 3 s", "", "PoolExhausted: no room for 7", "busy", "no name at all"):
        counted.load_ended(LoadReport(reason=reason), 2, 100)
    assert counted.counts()["miss_blocks"]["load"] == {"timeout": 2, "not_found": 2, "other": 4, "busy": 2}


def test_loads_under_way_and_pins_are_told_with_their_age(cluster):
    core, hashes = cluster.add("a", **ROOM), cluster.hashes(3)
    worker = cluster.worker("a")
    worker.client.save(hashes, range(3)).result(10)
    with worker.client.lease(hashes):
        pins = core.counts()["pins"]
        assert pins["lease"]["num"] == 1
        assert pins["lease"]["oldest_s"] > 0
        assert pins["hard"] == pins["soft"] == {"num": 0, "oldest_s": 0.0}
    assert core.counts()["pins"]["lease"] == {"num": 0, "oldest_s": 0.0}
    assert core.counts()["queues"] == {"loads": 0, "threads": 0}

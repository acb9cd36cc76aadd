"""A directory of two shards on a real cluster of four nodes; and what is asked of shards, without a cluster."""

from __future__ import annotations

import os
import signal

import pytest
from two_nodes import HEAD, NODE

import kvstore
from kvstore.actors import finding
from kvstore.actors.calls import call, find_actor, what_is
from kvstore.actors.finding import find_shards, shard_name, store_stats
from kvstore.blocks.chain import BlockHashes
from kvstore.config import StoreConfig
from kvstore.errors import PeerLost, StoreNotRunning
from kvstore.tools.metrics import samples
from kvstore.tools.shard_metrics import SHARD_METRICS

NUM_NODES = 4


class Handle:
    """An actor's handle whose verbs are what they answer."""

    def __init__(self, **answers):
        self.__dict__.update(answers)


@pytest.fixture
def two_shards(monkeypatch):
    """Settings of a store with two shards; `handles` are its actors by name, and a test may change them."""
    config, handles = StoreConfig(name="s", num_directory_shards=2), dict[str, object]()

    def find(name, timeout_s=10.0):
        if name not in handles:
            raise StoreNotRunning(f"no {name}")
        return handles[name]

    monkeypatch.setattr(finding, "find_actor", find)
    monkeypatch.setattr(finding, "call", lambda what, method, *args, timeout_s: method(*args))
    return config, handles


def test_a_directory_of_one_shard_is_named_as_ever_and_shards_are_told_apart():
    assert [shard_name("s", number) for number in range(3)] == [
        "raykv/s/directory", "raykv/s/directory/1", "raykv/s/directory/2",
    ]  # fmt: skip
    assert [what_is(key) for key in ("", "/1", "ab")] == ["directory", "shard 1 of the directory", "store of node ab"]


def test_a_chain_is_located_by_the_shard_of_its_root_and_a_run_without_root_by_all(two_shards):
    config, handles = two_shards
    asked = list[int]()

    def locate_at(number):
        return lambda hashes: asked.append(number) or [("n", len(hashes) - number)]

    handles |= {shard_name("s", number): Handle(locate=locate_at(number)) for number in range(2)}
    chain = BlockHashes(b"n" * 32, b"n" * 32, 0, b"\1" + bytes(31) + b"b" * 64)
    assert finding.locate(config, chain, 1.0) == [("n", 2)]
    assert finding.locate(config, BlockHashes(b"n" * 32, chain[0], 1, chain.data[32:]), 1.0) == [("n", 2)]
    assert asked == [1, 0, 1]
    del handles[shard_name("s", 1)]
    with pytest.raises(StoreNotRunning):
        finding.locate(config, chain, 1.0)


def test_a_shard_that_is_away_does_not_hide_the_others(two_shards, monkeypatch):
    config, handles = two_shards
    handles[shard_name("s", 1)] = Handle(stats=PeerLost("gone"))
    assert find_shards(config) == [handles[shard_name("s", 1)]]
    handles["raykv/s/supervisor"] = Handle(problems={}, unfinished={})
    monkeypatch.setattr(finding, "ask_all", lambda methods, timeout_s: methods)
    monkeypatch.setattr(finding, "begin", lambda what, method: method)
    monkeypatch.setattr(finding, "answer", lambda what, ref, timeout_s: ref)
    stats = store_stats(config, {}, 1.0)
    assert stats["directory"] == [{"error": "no raykv/s/directory"}, {"error": "gone"}]


def test_counts_of_a_shard_are_metrics_with_its_number():
    fields = ("blocks", "bytes", "nodes", "batches", "locates", "walked", "resyncs", "gaps", "dropped")
    before = {"epoch": "e", "shard": 1, **{f"num_{field}": 1 for field in fields}}
    after = {**before, "num_blocks": 7, "num_gaps": 3}
    told = {sample.metric.name: (sample.tags, sample.value) for sample in samples(before, after, SHARD_METRICS)}
    assert told == {
        "raykv_directory_blocks": ({"shard": "1"}, 7),
        "raykv_directory_bytes": ({"shard": "1"}, 1),
        "raykv_directory_nodes": ({"shard": "1"}, 1),
        "raykv_directory_gaps": ({"shard": "1"}, 2),
    }


@pytest.fixture(scope="module")
def four_nodes(_two_nodes):
    """A Ray cluster of four nodes, in place of the two that other modules share, with a store of two shards."""
    import ray
    from ray.cluster_utils import Cluster

    _two_nodes.stop()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20, **HEAD})
    try:
        for _ in range(NUM_NODES - 1):
            cluster.add_node(wait=False, num_cpus=1, object_store_memory=80 << 20, **NODE)
        cluster.wait_for_nodes(timeout=60)
        ray.init(address=cluster.address, log_to_driver=False)
        store = kvstore.start("8MiB", name="sharded", num_directory_shards=2, timeout_s=120)
        yield store
        store.stop()
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.ray
def test_four_nodes_find_each_others_blocks_in_two_shards_also_after_one_was_killed(
    four_nodes, make_space, chain_of, open_engine, eventually
):
    store, space = four_nodes, make_space()
    nodes = store.node_ids()
    engines = [open_engine(store, space, node) for node in nodes]
    chains = [chain_of(space, 4, seed) for seed in range(2 * NUM_NODES)]
    for number, chain in enumerate(chains):
        engines[number % NUM_NODES].save(chain)

    def are_found():
        return all(store.locate(chain) == [(nodes[number % NUM_NODES], 4)] for number, chain in enumerate(chains))

    assert are_found(), "a save ends when its shard was told"
    numbers = {chain.root_key % 2 for chain in chains}
    counts = [shard["num_blocks"] for shard in store.stats()["directory"]]
    assert counts == [4 * sum(chain.root_key % 2 == number for chain in chains) for number in range(2)]
    assert [shard["num_nodes"] for shard in store.stats()["directory"]] == [NUM_NODES] * 2
    assert engines[1].load(chains[0]).num_peer == 4

    shard = find_actor(shard_name("sharded", 1))
    pid = call("shard", shard.__ray_call__, lambda self: os.getpid(), timeout_s=10)
    os.kill(pid, signal.SIGKILL)
    here = [(number, chain) for number, chain in enumerate(chains) if chain.root_key % 2 == 0]
    assert numbers == {0, 1}
    for number, chain in here:
        assert (nodes[number % NUM_NODES], 4) in store.locate(chain)

    def is_filled_again():
        found = [dict(store.locate(chain)) for chain in chains]
        return all(each.get(nodes[number % NUM_NODES]) == 4 for number, each in enumerate(found))

    eventually(is_filled_again, 30)
    assert store.clear(space) >= 4 * len(chains)
    eventually(lambda: all(store.locate(chain) == [] for chain in chains), 10)

"""The only node of a cluster, until another one joins it."""

from __future__ import annotations

import pytest
from two_nodes import HEAD, NODE

import kvstore

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def alone(_two_nodes):
    """A Ray cluster of one node, with a store, in place of the two that other modules share."""
    import ray
    from ray.cluster_utils import Cluster

    _two_nodes.stop()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 80 << 20, **HEAD})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        store = kvstore.start("8MiB", name="alone", timeout_s=60)
        yield cluster, store
        store.stop()
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_new_prompts_cost_no_question_until_another_node_joins_and_then_its_blocks_are_found(
    alone, make_space, chain_of, open_engine, eventually, get
):
    cluster, store = alone
    space, (node_id,) = make_space(), store.node_ids()
    engine = open_engine(store, space, node_id)
    client = engine.client
    client.map_presence()
    assert client.lookup(chain_of(space, 4, seed=1)).num_blocks == 0
    num_calls = engine.num_calls()
    for seed in range(2, 40):
        chain = chain_of(space, 4, seed)
        assert client.is_surely_absent(chain)
        if seed % 3 == 0:
            engine.save(chain)
            assert not client.is_surely_absent(chain)
            num_calls = engine.num_calls()
    assert engine.num_calls() == num_calls, "of those that are absent nobody was asked"

    cluster.add_node(num_cpus=1, object_store_memory=80 << 20, **NODE)
    joined = eventually(lambda: [node for node in store.node_ids() if node != node_id], 30)
    other = eventually(lambda: open_engine(store, space, joined[0]), 30)
    new = chain_of(space, 4, seed=100)
    other.save(new)
    assert not client.is_surely_absent(new), "it may be on the other node"
    assert client.lookup(new).num_blocks == 4
    assert not client.is_surely_absent(chain_of(space, 4, seed=101))
    assert client.is_surely_absent(new, remote=False)

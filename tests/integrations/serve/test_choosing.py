"""The replica with the soonest first token."""

from __future__ import annotations

from router_made import SHAPE

from kvstore.integrations.serve.choosing import ReplicaState, rank_replicas
from kvstore.integrations.serve.options import RouterOptions

#: A token is computed in a millisecond; a block, in 4, and fetched in 1.
OPTIONS = RouterOptions(
    tokenizer="x", prefill_tokens_per_s=1000.0, fetch_bytes_per_s=SHAPE.block_bytes / 1e-3,
    work_weight=1.0, evict_weight=2.0,
)  # fmt: skip


def state(replica, node_id, num_waiting_tokens=0, pressure=0.0):
    return ReplicaState(
        replica=replica, node_id=node_id, num_waiting_tokens=num_waiting_tokens, num_running=0, pressure=pressure
    )


def rank(states, on_nodes=(), routed=None, num_tokens=41):
    ranks = rank_replicas(states, on_nodes, routed or {}, shape=SHAPE, num_tokens=num_tokens, options=OPTIONS)
    return [(each.node_id, each.num_blocks, each.num_fetched) for each in ranks]


def test_a_replica_has_what_its_node_has_and_others_fetch_it():
    states = [state("a", "node 1"), state("b", "node 2"), state("c", "node 2")]

    assert rank(states, [("node 2", 10)]) == [("b", 10, 0), ("c", 10, 0), ("a", 0, 10)]


def test_of_replicas_of_one_node_the_one_that_was_sent_more_comes_first():
    states = [state("a", "node 1"), state("b", "node 1")]

    assert rank(states, [("node 1", 4)], {"b": 10}) == [("b", 10, 0), ("a", 4, 0)]


def test_what_is_in_an_engine_alone_is_fetched_by_nobody():
    states = [state("a", "node 1"), state("b", "node 2")]

    assert rank(states, [], {"a": 10}) == [("a", 10, 0), ("b", 0, 0)]


def test_a_long_queue_outweighs_a_prefix():
    def first(num_waiting_tokens):
        return rank([state("a", "node 1", num_waiting_tokens), state("b", "node 2")], [], {"a": 10})[0][0]

    # 40 of 41 tokens are cached at a. Computing them at b delays others as much as this request.
    assert first(79) == "a"
    assert first(81) == "b"


def test_equal_replicas_keep_their_order():
    assert [name for name, *_ in rank([state("b", "n"), state("a", "n")])] == ["b", "a"]


def test_blocks_of_a_node_without_a_replica_are_fetched():
    assert rank([state("a", "node 1")], [("node 9", 10)]) == [("a", 0, 10)]


def test_a_new_prompt_goes_where_it_pushes_out_what_is_worth_least_and_a_long_queue_outweighs_that():
    def first(num_waiting_tokens):
        return rank([state("a", "node 1", num_waiting_tokens), state("b", "node 1", pressure=0.5)])[0][0]

    assert first(0) == "a"
    # 40 tokens of new blocks, at half the pressure, with a weight of 2.
    assert first(39) == "a"
    assert first(41) == "b"


def test_blocks_that_a_replica_has_push_out_nothing():
    states = [state("a", "node 1", pressure=1.0), state("b", "node 1")]

    assert rank(states, [], {"a": 10}) == [("a", 10, 0), ("b", 0, 0)]

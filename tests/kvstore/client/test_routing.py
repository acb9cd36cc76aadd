"""The node with the soonest first token, from what nodes have and what waits there."""

from __future__ import annotations

import random

import pytest

from kvstore import KVShape
from kvstore.client.routing import NodeLoad, rank_nodes
from kvstore.errors import InvalidRequest

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=32, dtype="bfloat16", block_size=16)
#: A token is computed in a millisecond; a block, in 16, and fetched in 4.
SPEEDS = {"prefill_tokens_per_s": 1000.0, "fetch_bytes_per_s": SHAPE.block_bytes / 4e-3}


def rank(prefixes, *loads, num_tokens=161, **changes):
    return rank_nodes(prefixes, loads, shape=SHAPE, num_tokens=num_tokens, **{**SPEEDS, **changes})


def names(ranks):
    return [each.node_id for each in ranks]


def load(node_id, num_waiting_tokens=0, num_running=0):
    return NodeLoad(node_id=node_id, num_waiting_tokens=num_waiting_tokens, num_running=num_running)


def test_the_node_that_has_most_comes_first_when_all_are_idle():
    prefixes = [("b", 10), ("c", 4), ("a", 2)]
    ranks = rank(prefixes, load("a"), load("b"), load("c"), load("d"))
    assert names(ranks) == ["b", "c", "a", "d"]
    assert [(each.num_blocks, each.num_fetched) for each in ranks] == [(10, 0), (4, 6), (2, 8), (0, 10)]
    assert [round(each.seconds * 1e3) for each in ranks] == [1, 25, 33, 41]


def test_a_node_with_a_queue_loses_to_one_that_fetches():
    prefixes = [("b", 10)]
    assert names(rank(prefixes, load("b", 41), load("c"))) == ["c", "b"]
    assert names(rank(prefixes, load("b", 39), load("c"))) == ["b", "c"]


def test_running_requests_count_as_much_as_the_caller_says():
    prefixes = [("b", 10)]
    assert names(rank(prefixes, load("b", 0, 5), load("c"))) == ["b", "c"]
    assert names(rank(prefixes, load("b", 0, 5), load("c"), decode_tokens=10.0)) == ["c", "b"]


def test_what_is_slower_to_fetch_than_to_compute_is_computed():
    prefixes = [("b", 10)]
    slow = rank(prefixes, load("c"), fetch_bytes_per_s=SHAPE.block_bytes / 17e-3)[0]
    none = rank(prefixes, load("c"), fetch_bytes_per_s=0)[0]
    assert (slow.num_fetched, slow.seconds) == (none.num_fetched, none.seconds) == (0, 0.161)


def test_the_last_token_is_always_computed():
    (only,) = rank([("a", 10)], load("a"), num_tokens=160)
    assert only.compute_s == pytest.approx(1e-3)


def test_stale_nodes_are_not_chosen_and_unknown_ones_have_nothing():
    prefixes = [("gone", 10)]
    ranks = rank(prefixes, load("new"), fetch_bytes_per_s=0)
    assert [(each.node_id, each.num_blocks) for each in ranks] == [("new", 0)]
    assert rank(prefixes) == []


def test_equal_nodes_keep_their_order():
    assert names(rank([], *map(load, "dcab"))) == list("dcab")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 0}, {"num_tokens": 1.5}, {"prefill_tokens_per_s": 0}, {"prefill_tokens_per_s": float("nan")},
        {"prefill_tokens_per_s": "fast"}, {"fetch_bytes_per_s": -1}, {"decode_tokens": float("inf")},
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(changes):
    with pytest.raises(InvalidRequest):
        rank([], load("a"), **changes)


@pytest.mark.parametrize("prefixes", [[("a", -1)], [("a", 1.5)], [("a", "3")], [(3, 1)]])
def test_wrong_prefixes_are_refused(prefixes):
    with pytest.raises(InvalidRequest, match="prefixes"):
        rank(prefixes, load("a"))


def test_what_is_longer_than_the_prompt_is_not_fetched():
    (only,) = rank([("b", 100)], load("a"), num_tokens=40)
    assert only.num_fetched == 2


def test_no_node_takes_longer_than_without_a_fetch():
    rng = random.Random(1)
    for _ in range(300):
        prefixes = [(name, rng.randrange(12)) for name in "abc"]
        speeds = {"prefill_tokens_per_s": rng.uniform(1, 1e4), "fetch_bytes_per_s": rng.uniform(0, 1e7)}
        loads, num_tokens = [load(name) for name in "abcd"], rng.randrange(1, 200)
        without = rank(prefixes, *loads, num_tokens=num_tokens, **speeds | {"fetch_bytes_per_s": 0})
        alone = {each.node_id: each.seconds for each in without}
        ranks = rank(prefixes, *loads, num_tokens=num_tokens, **speeds)
        assert all(each.seconds <= alone[each.node_id] for each in ranks)


def test_wrong_loads_are_refused():
    with pytest.raises(InvalidRequest, match="NodeLoad"):
        rank([], "a")
    with pytest.raises(InvalidRequest, match="twice"):
        rank([], load("a"), load("a"))
    for bad in ({"node_id": 3}, {"node_id": "a", "num_running": -1}, {"node_id": "a", "num_waiting_tokens": 1.5}):
        with pytest.raises(InvalidRequest):
            NodeLoad(**bad)

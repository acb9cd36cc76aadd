"""Hand-offs between engines on a GPU, through its memory and not the store's; `pytest tests/vllm --device cuda`."""

from __future__ import annotations

import itertools
import json

import pytest

PREFILL = {"do_remote_decode": True}
_seeds = itertools.count(190_000, 1000)


@pytest.fixture(scope="module")
def staged(model, start_engine, connector, unit, device):
    """Two engines on two nodes, with blocks of unlike sizes, whose only way to pass anything on is a hand-off."""
    if device != "cuda":
        pytest.skip("stages are memory of GPUs; run with --device cuda")
    options = {"save": "none", "handoff_staging": 16 << 20, "handoff_ttl_s": 10.0}
    made = [
        start_engine(model, block_size=size, connector=connector(node, block_size=unit, **options))
        for node, size in enumerate((unit, 2 * unit))
    ]
    return [engine.wait_started() for engine in made]


@pytest.mark.parametrize("is_to_larger_blocks", [True, False])
def test_answers_are_the_same_and_the_arenas_are_not_used(
    staged, is_to_larger_blocks, plain, store, node_ids, pool_of, prompt_of, same, unit, is_clean
):
    source, target = staged if is_to_larger_blocks else staged[::-1]
    node = node_ids[0 if is_to_larger_blocks else 1]
    assert all(store.stats()["nodes"][each]["stages"] for each in node_ids)
    for length in (unit - 1, unit, 2 * unit + 1, 200, 1500):
        tokens, num_blocks = prompt_of(length, next(_seeds)), length // unit
        wanted = plain.run([("wanted", tokens, {})], cold=True)
        free, before = pool_of(node)["num_free"], target.stats()["worker"].get("num_fetched_peer_blocks", 0)
        begun = source.run([("prefill", tokens, {})], max_tokens=1, transfer=PREFILL)[0]
        assert store.stats()["nodes"][node]["num_handoff_slots"] == num_blocks
        assert pool_of(node)["num_free"] == free, "they are on the GPU"
        params = json.loads(json.dumps(begun["transfer"]))
        answer = target.run([("decode", tokens, {})], transfer=params)[0]
        same([answer], wanted)
        assert answer["num_cached"] == num_blocks * unit
        assert target.stats()["worker"].get("num_fetched_peer_blocks", 0) - before == num_blocks
    is_clean(*staged)


def test_where_the_stage_is_full_they_go_through_the_arena(
    staged, plain, prompt_of, same, unit, store, node_ids, is_clean
):
    source, target = staged
    size = store.stats()["nodes"][node_ids[0]]["stages"][0]["num_bytes"] // (4096 * unit)
    tokens = [prompt_of(3000, next(_seeds)) for _ in range(2 + size * unit // 3000)]
    wanted = plain.run([(f"wanted {at}", each, {}) for at, each in enumerate(tokens)], cold=True)
    begun = source.run([(f"prefill {at}", each, {}) for at, each in enumerate(tokens)], max_tokens=1, transfer=PREFILL)
    held = store.stats()["nodes"][node_ids[0]]["num_handoff_slots"]
    assert held == sum(len(each) // unit for each in tokens) > size, "more than the stage has room for"
    for each, answer, right in zip(tokens, begun, wanted, strict=True):
        same([target.run([("decode", each, {})], transfer=answer["transfer"])[0]], [right])
    assert target.stats()["worker"].get("num_failed_fetches", 0) == 0
    is_clean(*staged)

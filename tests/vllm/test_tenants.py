"""Engines of tenants of one store: quotas count for them, and private ones find nothing of each other."""

from __future__ import annotations

import pytest

BLOCK_BYTES = 4096


@pytest.fixture(scope="module")
def private(cluster, unit):
    """Another store on the same nodes, with private tenants."""
    import kvstore

    tenants = {"a": {"max_bytes": 4 * unit * BLOCK_BYTES}, "b": {}}
    store = kvstore.start(
        "32MiB", name="private", block_bytes=unit * BLOCK_BYTES, tenants=tenants, private_tenants=True
    )  # fmt: skip
    yield store
    store.stop()


@pytest.fixture(scope="module")
def engines(private, model, start_engine, connector, unit):
    of = {
        "a": {"tenant": "a"}, "b": {"tenant": "b"}, "shared": {}, "salted": {"tenant": "b", "salt": "secret"},
    }  # fmt: skip
    made = {
        name: start_engine(model, block_size=unit, connector=connector(0, store="private", portable=True, **options))
        for name, options in of.items()
    }
    return {name: engine.wait_started() for name, engine in made.items()}


def test_no_engine_of_another_tenant_or_salt_finds_the_same_prompt(engines, prompt_of, same, unit, plain):
    tokens = prompt_of(3 * unit + 1, seed=77)
    wanted = plain.run([("alone", tokens, {})], cold=True)
    order = ("b", "a", "shared", "salted")
    for name in order:
        answers = engines[name].run([("first", tokens, {})])
        same(answers, wanted)
        assert answers[0]["num_cached"] == 0, name
    for name in order:
        assert engines[name].reset()
        again = engines[name].run([("again", tokens, {})])
        same(again, wanted)
        assert again[0]["num_cached"] == 3 * unit, name


def test_an_engine_at_its_tenants_quota_stores_within_it_and_pushes_out_no_other(
    engines, private, prompt_of, unit, node_ids
):
    kept = prompt_of(6 * unit + 1, seed=5)
    engines["b"].run([("kept", kept, {})])
    for seed in range(8):
        engines["a"].run([(f"scan {seed}", prompt_of(3 * unit + 1, seed=100 + seed), {})])
    said = private.stats()["nodes"][node_ids[0]]
    mine = said["tenants"]["a"]
    assert 0 < mine["num_bytes"] <= 4 * said["slot_bytes"]
    assert mine["num_evicted_by_quota"] > 0
    assert engines["b"].reset()
    assert engines["b"].run([("kept again", kept, {})])[0]["num_cached"] == 6 * unit

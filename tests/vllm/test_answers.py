"""The answers are the same whether KV was computed, or came from the store, on this node or another."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def lengths(unit):
    """Shorter than a block, on a boundary, one past it; of either size."""
    return (5, unit - 1, unit, unit + 1, 2 * unit - 1, 2 * unit, 2 * unit + 1, 200)


@pytest.fixture(scope="module")
def engines(plain, first, second, model, start_engine, connector, unit):
    """No store; small blocks on one node, large ones on the other, small ones stored; large ones stored, in chunks."""
    chunks = start_engine(
        model, block_size=unit, connector=connector(0, block_size=2 * unit), max_num_batched_tokens=96, max_num_seqs=16
    )
    return {"plain": plain, "first": first, "second": second, "chunks": chunks.wait_started()}


@pytest.fixture(scope="module")
def wanted(engines, prompts):
    """What an engine without a store says."""
    return [engines["plain"].run([prompt], cold=True)[0] for prompt in prompts("first")]


@pytest.fixture(scope="module")
def full(lengths):
    """How many tokens of each prompt are in full blocks."""
    return lambda block_size: [count // block_size * block_size for count in lengths]


@pytest.fixture(scope="module")
def prompts(prompt_of, lengths):
    def make(name, seed=0):
        return [(f"{name} {count}", prompt_of(count, seed + count), {}) for count in lengths]

    return make


def one_by_one(engine, prompts, **options):
    return [engine.run([prompt], **options)[0] for prompt in prompts]


def cached(answers):
    return [answer["num_cached"] for answer in answers]


def test_cold_and_warm_and_the_engines_own_cache(engines, prompts, wanted, same, full, unit):
    engine = engines["first"]
    cold = one_by_one(engine, prompts("cold"))
    own = one_by_one(engine, prompts("own"))
    assert engine.reset()
    warm = one_by_one(engine, prompts("warm"))
    assert engine.reset()
    together = engine.run(prompts("together"))

    for answers in (cold, own, warm, together):
        same(answers, wanted)
    assert cached(cold) == [0] * len(wanted)
    assert cached(warm) == cached(together) == full(unit)


def test_engines_with_other_block_sizes_on_another_node_share(engines, prompts, wanted, same, full, unit):
    one_by_one(engines["first"], prompts("saved"))
    other = one_by_one(engines["second"], prompts("other"))
    same(other, wanted)
    assert cached(other) == full(unit)


def test_and_the_other_way_round(engines, prompts, same, full, unit):
    new = prompts("new", seed=1000)
    wanted = one_by_one(engines["plain"], new, cold=True)
    same(one_by_one(engines["second"], prompts("saved", seed=1000)), wanted)
    other = one_by_one(engines["first"], prompts("other", seed=1000))
    same(other, wanted)
    assert cached(other) == full(unit)


def test_stored_blocks_larger_than_the_engines_and_prompts_in_chunks(engines, prompts, wanted, same, full, unit):
    engine = engines["chunks"]
    cold = one_by_one(engine, prompts("cold"))
    assert engine.reset()
    warm = one_by_one(engine, prompts("warm"))
    same(cold, wanted)
    same(warm, wanted)
    assert cached(warm) == full(2 * unit)


def test_another_salt_finds_nothing(engines, prompts, wanted, same, full, unit):
    engine = engines["first"]
    one_by_one(engine, prompts("saved"))
    assert engine.reset()
    mine = [(name, tokens, {"salt": "tenant"}) for name, tokens, _ in prompts("mine")]
    answers = one_by_one(engine, mine)
    same(answers, wanted)
    assert cached(answers) == [0] * len(wanted)
    assert engine.reset()
    assert cached(one_by_one(engine, mine)) == full(unit)


def test_a_cleared_store_finds_nothing_on_any_node_and_fills_again(engines, prompts, wanted, same, full, unit):
    engine, other = engines["first"], engines["second"]
    one_by_one(engine, prompts("saved"))
    assert engine.reset(connector=True)
    assert other.reset()
    assert cached(one_by_one(other, prompts("other"), max_tokens=1)) == [0] * len(wanted)
    assert engine.reset()
    answers = one_by_one(engine, prompts("again"))
    same(answers, wanted)
    assert cached(answers) == full(unit)


def test_nothing_is_left_in_engine_or_store(engines, node_ids, pool_of):
    for name in ("first", "second", "chunks"):
        free, total = engines[name].blocks()
        assert free == total, name
        assert engines[name].tracked() == 0
    for node in node_ids:
        pool = pool_of(node)
        assert {key: pool[key] for key in ("num_pinned", "num_leases", "num_writing", "num_quarantined")} == {
            "num_pinned": 0, "num_leases": 0, "num_writing": 0, "num_quarantined": 0,
        }  # fmt: skip


def test_how_long_the_scheduler_was_kept_is_counted(engines, prompt_of):
    one_by_one(engines["first"], [(f"counted {at}", prompt_of(40, 1_000 + at), {}) for at in range(51)], max_tokens=1)
    stats = engines["first"].stats()["scheduler"]
    print({key: value for key, value in stats.items() if key.endswith(("_p99_ms", "_max_ms"))})
    for method in ("get_num_new_matched_tokens", "build_connector_meta", "request_finished", "update_connector_output"):
        assert stats[f"num_{method}"] > 50
        assert 0 < stats[f"{method}_p50_ms"] <= stats[f"{method}_p99_ms"] <= stats[f"{method}_max_ms"]

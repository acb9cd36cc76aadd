"""An engine of two pipeline stages, whose blocks are those of engines with one, and with two tensor-parallel workers.

They store blocks as vLLM's CPU attention orders them, so this is also about parts of such blocks.
"""

from __future__ import annotations

import itertools

import pytest
from asking import Grown, cached, check_cold_and_warm, decoded, fail_load_of, full, handed_off, one_by_one, reported

_seeds = itertools.count(300_000, 1000)


@pytest.fixture(scope="module")
def engines(plain, model, start_engine, connector, unit):
    def start(node, **more):
        return start_engine(model, block_size=unit, connector=connector(node, num_layer_groups=2), **more)

    workers = {"distributed_executor_backend": "mp"}
    made = {
        "stages": start(0, pipeline_parallel_size=2, **workers),
        "pair": start(1, tensor_parallel_size=2, **workers),
        "whole": start(1),
    }
    return {name: engine.wait_started() for name, engine in made.items()}


@pytest.fixture
def prompts(prompt_of, unit):
    """Shorter than a block, on a boundary, longer."""
    return [(f"{length} tokens", prompt_of(length, next(_seeds)), {}) for length in (5, 2 * unit, 200)]


@pytest.fixture
def wanted(plain, prompts):
    """What an engine of one worker without a store says."""
    return one_by_one(plain, prompts, cold=True)


def test_cold_and_warm_and_the_engines_own_cache(engines, prompts, wanted, same, unit, is_clean):
    check_cold_and_warm(engines["stages"], prompts, wanted, same, unit)
    is_clean(engines["stages"])


@pytest.mark.parametrize(
    ("source", "target"),
    [("stages", "whole"), ("whole", "stages"), ("stages", "pair"), ("pair", "stages"), ("pair", "whole")],
)
def test_stages_and_workers_share(source, target, engines, prompts, wanted, same, unit, is_clean):
    same(one_by_one(engines[source], prompts), wanted)
    answers = one_by_one(engines[target], prompts)
    same(answers, wanted)
    assert cached(answers) == full(prompts, unit)
    is_clean(engines[source], engines[target])


def test_many_at_once(engines, plain, prompt_of, same, unit, is_clean):
    many = [(f"prompt {i}", prompt_of(30 * i + 20, next(_seeds)), {}) for i in range(8)]
    wanted = plain.run(many, cold=True)
    same(engines["stages"].run(many), wanted)
    assert engines["stages"].reset()
    answers = engines["stages"].run(many)
    same(answers, wanted)
    assert cached(answers) == full(many, unit)
    is_clean(engines["stages"])


@pytest.mark.parametrize("stage", [0, 1])
def test_the_load_of_one_stage_fails(stage, engines, plain, prompt_of, same, is_clean):
    tokens = prompt_of(200, next(_seeds))
    wanted = plain.run([("wanted", tokens, {})], cold=True)
    engines["whole"].run([("saved", tokens, {})], max_tokens=1)
    answer = fail_load_of(stage, engines["stages"], tokens)
    same([answer], wanted)
    assert answer["num_cached"] == 0
    is_clean(engines["stages"])


def test_hand_off_to_itself(engines, prompts, wanted, same, unit, is_clean):
    engine = engines["stages"]
    fetched = Grown(engine, "num_fetched_local_blocks")
    for (_, tokens, _), answer in zip(prompts, wanted, strict=True):
        params = handed_off(engine, tokens)
        assert engine.reset()
        got = decoded(engine, tokens, params)
        same([got], [answer])
        assert got["num_cached"] == reported(params, len(tokens) // unit * unit)
    assert fetched.by_rank() == [sum(full(prompts, unit)) // unit] * 2
    is_clean(engine)


def test_a_ticket_of_two_stages_is_not_for_two_tensor_parallel_workers(engines, plain, prompt_of, same):
    tokens = prompt_of(200, next(_seeds))
    wanted = plain.run([("wanted", tokens, {})], cold=True)
    same([decoded(engines["pair"], tokens, handed_off(engines["stages"], tokens))], wanted)
    assert engines["pair"].stats()["scheduler"]["num_bad_tickets"] == 1

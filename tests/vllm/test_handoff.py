"""Prompts that one engine computed and another answers, by ticket: the same answers, whatever becomes of the ticket."""

from __future__ import annotations

import itertools
import json

import pytest
from asking import reported

PREFILL = {"do_remote_decode": True}
_seeds = itertools.count(90_000, 1000)


@pytest.fixture(scope="module")
def lengths(unit):
    """Shorter than a block, on a boundary, one past it; of either size."""
    return (5, unit - 1, unit, unit + 1, 2 * unit - 1, 2 * unit, 2 * unit + 1, 200)


@pytest.fixture(scope="module")
def brief(model, start_engine, connector, unit):
    """An engine on the first node that stores nothing, and whose tickets are good for a short time."""
    return start_engine(
        model, block_size=unit, connector=connector(0, portable=True, save="none", handoff_ttl_s=1.0)
    ).wait_started()


@pytest.fixture(scope="module")
def failing(model, start_engine, connector, unit):
    """An engine that ends a request with an error when its blocks do not come."""
    return start_engine(
        model, block_size=2 * unit, policy="fail", connector=connector(1, block_size=unit, portable=True, save="none")
    ).wait_started()


@pytest.fixture
def counts():
    """How much the counts of an engine's worker grow while something is done."""

    class Counts:
        def __init__(self, engine):
            self._engine, self._before = engine, engine.stats()

        def __getitem__(self, name):
            now, side = self._engine.stats(), "scheduler" if name == "num_bad_tickets" else "worker"
            return now[side].get(name, 0) - self._before[side].get(name, 0)

    return Counts


def prefill(engine, tokens, **options):
    """Return what the decode engine gets, as it would come over HTTP."""
    answer = engine.run([("prefill", tokens, {})], max_tokens=1, transfer=PREFILL, **options)[0]
    return answer, json.loads(json.dumps(answer["transfer"]))


def decode(engine, tokens, params, **options):
    return engine.run([("decode", tokens, {})], transfer=params, **options)[0]


@pytest.mark.parametrize("way", ["small to large blocks", "large to small blocks"])
def test_answers_are_the_same(way, first, second, plain, prompt_of, lengths, same, unit, counts, is_clean):
    source, target = (first, second) if way == "small to large blocks" else (second, first)
    for length in lengths:
        tokens = prompt_of(length, next(_seeds))
        wanted = plain.run([("wanted", tokens, {})], cold=True)
        begun, params = prefill(source, tokens)
        assert begun["tokens"] == wanted[0]["tokens"][:1]
        num_blocks = length // unit
        assert (params is None) == (num_blocks == 0)
        grown = counts(target)
        answer = decode(target, tokens, params)
        same([answer], wanted)
        assert answer["num_cached"] == reported(params, num_blocks * unit)
        assert grown["num_fetched_peer_blocks"] == num_blocks
        assert grown["num_loaded_peer_blocks"] == grown["num_loaded_local_blocks"] == 0
    is_clean(source, target)


def test_prompts_that_the_prefill_engine_has_itself_are_handed_off_too(
    first, second, plain, prompt_of, lengths, same, unit, is_clean
):
    for length in lengths[2:]:
        tokens = prompt_of(length, next(_seeds))
        wanted = plain.run([("wanted", tokens, {})], cold=True)
        first.run([("begun", tokens, {})])
        _, params = prefill(first, tokens)
        answer = decode(second, tokens, params)
        same([answer], wanted)
        assert answer["num_cached"] == length // unit * unit
        assert params is not None
    is_clean(first, second)


def test_on_one_node(brief, first, plain, prompt_of, same, unit, counts, is_clean):
    tokens = prompt_of(10 * unit + 3, next(_seeds))
    wanted = plain.run([("wanted", tokens, {})], cold=True)
    grown = counts(first)
    same([decode(first, tokens, prefill(brief, tokens)[1])], wanted)
    assert grown["num_fetched_local_blocks"] == 10
    is_clean(brief, first)


def test_many_at_once(first, second, plain, prompt_of, same, unit, counts, is_clean):
    prompts = [(f"prompt {i}", prompt_of(30 * i + 20, next(_seeds)), {}) for i in range(12)]
    wanted = plain.run(prompts, cold=True)
    begun = first.run(prompts, max_tokens=1, transfer=PREFILL)
    grown = counts(second)
    answers = second.run(
        [
            (name, tokens, {"transfer": answer["transfer"]})
            for (name, tokens, _), answer in zip(prompts, begun, strict=True)
        ]
    )
    same(answers, wanted)
    fetched = [len(tokens) // unit for _, tokens, _ in prompts]
    assert grown["num_fetched_peer_blocks"] == sum(fetched)
    assert [answer["num_cached"] for answer in answers] == [
        reported(prefilled["transfer"], num_blocks * unit) for prefilled, num_blocks in zip(begun, fetched, strict=True)
    ]
    is_clean(first, second)


def test_what_the_decode_engine_has_itself_stays_as_it_is(
    first, second, plain, prompt_of, same, unit, counts, is_clean
):
    tokens = prompt_of(300, next(_seeds))
    shared = 3 * 2 * unit  # in whole blocks of the decode engine
    begins = tokens[: shared + 1]
    wanted = plain.run([("whole", tokens, {}), ("begin", begins, {})], cold=True)
    same(second.run([("own", begins, {})]), wanted[1:])
    grown = counts(second)
    same([decode(second, tokens, prefill(first, tokens)[1])], wanted[:1])
    assert grown["num_fetched_peer_blocks"] == 300 // unit
    same(second.run([("own again", begins, {})]), wanted[1:])
    is_clean(first, second)


def test_a_ticket_is_good_for_one_request_and_then_the_store_is_asked(
    first, second, plain, prompt_of, same, unit, counts, is_clean
):
    tokens = prompt_of(200, next(_seeds))
    wanted = plain.run([("wanted", tokens, {})], cold=True)
    _, params = prefill(first, tokens)
    same([decode(second, tokens, params)], wanted)
    assert second.reset()
    grown = counts(second)
    again = decode(second, tokens, params)
    same([again], wanted)
    assert grown["num_failed_fetches_used"] == 1
    assert grown["num_loaded_peer_blocks"] + grown["num_loaded_local_blocks"] == 200 // unit  # `first` saved them
    is_clean(first, second)


def test_after_its_time_the_prompt_is_computed(brief, second, plain, prompt_of, same, counts, is_clean):
    tokens = prompt_of(200, next(_seeds))
    wanted = plain.run([("wanted", tokens, {})], cold=True)
    _, params = prefill(brief, tokens)
    is_clean(brief, limit_s=10)  # Its time is over.
    grown = counts(second)
    answer = decode(second, tokens, params)
    same([answer], wanted)
    assert answer["num_cached"] == 0
    assert grown["num_failed_fetches_expired"] == 1
    is_clean(second)


def test_a_ticket_for_another_prompt_is_not_used(first, second, plain, prompt_of, same, unit, counts, is_clean):
    one, other = prompt_of(200, next(_seeds)), prompt_of(200, next(_seeds))
    wanted = plain.run([("wanted", other, {})], cold=True)
    grown = counts(second)
    _, params = prefill(first, one)
    answer = decode(second, other, params)
    same([answer], wanted)
    assert answer["num_cached"] == 0
    assert grown["num_failed_fetches_not_found"] == 1
    same([decode(second, one, params)], plain.run([("wanted", one, {})], cold=True))  # It is still good.
    assert grown["num_fetched_peer_blocks"] == 200 // unit
    is_clean(first, second)


@pytest.mark.parametrize(
    "change",
    [{"raykv_ticket": None}, {"raykv_ticket": {"parts": []}}, {"raykv_ticket": "RKVH"}, "cut"],
)
def test_params_that_are_no_ticket_are_not_used(brief, second, plain, prompt_of, same, change, counts, is_clean):
    tokens = prompt_of(100, next(_seeds))
    wanted = plain.run([("wanted", tokens, {})], cold=True)
    _, params = prefill(brief, tokens)
    if change == "cut":
        params["raykv_ticket"]["parts"][0] = params["raykv_ticket"]["parts"][0][:-8]
    else:
        params |= change
    grown = counts(second)
    same([decode(second, tokens, params)], wanted)
    assert grown["num_bad_tickets"] == 1
    is_clean(brief, second)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_the_prefill_engine_dies_before_the_fetch(
    policy, model, start_engine, connector, second, failing, plain, prompt_of, same, unit, counts, is_clean
):
    engine = {"recompute": second, "fail": failing}[policy]
    victim = start_engine(model, block_size=unit, connector=connector(0, portable=True, save="none")).wait_started()
    tokens = prompt_of(200, next(_seeds))
    wanted = plain.run([("wanted", tokens, {})], cold=True)
    _, params = prefill(victim, tokens)
    _, late = prefill(victim, tokens)
    same([decode(engine, tokens, late)], wanted)
    assert engine.reset()
    victim.process.kill()
    victim.process.join(20)
    grown = counts(engine)
    answer = decode(engine, tokens, params)
    print(policy, answer["reason"], answer["num_cached"])
    if policy == "fail":
        assert (answer["reason"], answer["tokens"]) == ("error", [])
    else:
        same([answer], wanted)
    assert grown["num_failed_fetches_owner_gone"] == 1
    same([decode(engine, tokens, None)], wanted)
    is_clean(engine)


def test_prefill_requests_that_are_given_up_take_their_blocks_back(first, plain, prompt_of, same, counts, is_clean):
    tokens = prompt_of(500, next(_seeds))
    for num_steps in (0, 1, 2, 4):
        first.reset()
        grown = counts(first)
        first.add("gone", tokens, transfer=PREFILL, max_tokens=20)
        first.step(num_steps)
        if num_steps == 4:
            assert first.step_until("gone", "RUNNING")
        first.abort("gone")
        first.settle()
        if num_steps == 4:
            assert grown["num_withdrawn"] == 1
        is_clean(first, limit_s=5)  # Long before their time.
    same(first.run([("next", tokens, {})]), plain.run([("wanted", tokens, {})], cold=True))


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 6])
def test_decode_requests_that_are_given_up_leave_nothing(num_steps, brief, second, plain, prompt_of, same, is_clean):
    tokens = prompt_of(500, next(_seeds))
    _, params = prefill(brief, tokens)
    second.add("gone", tokens, transfer=params)
    second.step(num_steps)
    second.abort("gone")
    is_clean(brief, second)
    same(second.run([("next", tokens, {})]), plain.run([("wanted", tokens, {})], cold=True))


def test_prompts_in_chunks_that_are_preempted(model, start_engine, connector, plain, prompt_of, same, unit, is_clean):
    engine = start_engine(
        model,
        block_size=unit,
        connector=connector(0, portable=True, save="none"),
        num_gpu_blocks_override=768 // unit + 1,
        max_model_len=512,
        max_num_batched_tokens=64,
        max_num_seqs=16,
    ).wait_started()
    prompts = [(f"prompt {at}", prompt_of(100 + at, next(_seeds)), {}) for at in range(8)]
    begun = engine.run(prompts, max_tokens=60, transfer=PREFILL)
    same(begun, plain.run(prompts, max_tokens=60))
    assert engine.stats()["scheduler"]["num_preempted"] > 0
    passed_on = [
        (name, tokens, {"transfer": answer["transfer"]})
        for (name, tokens, _), answer in zip(prompts, begun, strict=True)
    ]
    assert engine.reset()
    answers = engine.run(passed_on)  # To itself: an engine with another max_model_len could compute other KV.
    same(answers, plain.run(prompts))
    assert [answer["num_cached"] for answer in answers] == [
        reported(more["transfer"], len(tokens) // unit * unit) for _, tokens, more in passed_on
    ]
    is_clean(engine)


def test_params_that_are_no_mapping_end_no_engine(first, second, plain, prompt_of, same, counts, is_clean):
    """What comes as `vllm_xargs` over HTTP is passed on as it is."""
    tokens = prompt_of(100, next(_seeds))
    wanted = plain.run([("wanted", tokens, {})], cold=True)
    grown, values = counts(second), ["abc", 5, ["do_remote_decode"]]
    for params in values:
        answer = decode(second, tokens, params)
        same([answer], wanted)
        assert answer["transfer"] is None
    assert grown["num_bad_tickets"] == len(values)
    assert second.reset()
    same([decode(second, tokens, prefill(first, tokens)[1])], wanted)
    is_clean(first, second)

"""Engines of two tensor-parallel workers: each has its part of every block, and nobody can tell from the answers."""

from __future__ import annotations

import itertools
import os
import signal

import pytest
from asking import Grown, cached, check_cold_and_warm, decoded, fail_load_of, full, handed_off, one_by_one, reported
from waiting import stop_process

_seeds = itertools.count(200_000, 1000)


@pytest.fixture(scope="module")
def engines(first, second, model, start_engine, connector, unit):
    """Two with two workers each, one on either node, and two with one each; all share."""

    def start(node, **more):
        return start_engine(
            model, block_size=unit, connector=connector(node, portable=True), tensor_parallel_size=2,
            distributed_executor_backend="mp", **more,
        )  # fmt: skip

    pair, failing = start(0), start(1, policy="fail")
    return {
        "pair": pair.wait_started(), "failing pair": failing.wait_started(), "first": first, "second": second,
    }  # fmt: skip


@pytest.fixture
def prompts(prompt_of, unit):
    """Shorter than a block, on a boundary, longer."""
    return [(f"{length} tokens", prompt_of(length, next(_seeds)), {}) for length in (5, 2 * unit, 200)]


@pytest.fixture
def wanted(plain, prompts):
    """What an engine of one worker without a store says."""
    return one_by_one(plain, prompts, cold=True)


@pytest.fixture
def tokens(prompt_of):
    return prompt_of(200, next(_seeds))


@pytest.fixture
def answer(plain, tokens):
    """What the engine without a store says to these tokens."""
    return plain.run([("wanted", tokens, {})], cold=True)


def test_cold_and_warm_and_the_engines_own_cache(engines, prompts, wanted, same, unit, is_clean):
    check_cold_and_warm(engines["pair"], prompts, wanted, same, unit)
    is_clean(engines["pair"])


@pytest.mark.parametrize(
    ("source", "target"), [("first", "pair"), ("second", "pair"), ("pair", "second"), ("pair", "failing pair")]
)
def test_one_and_two_workers_share(source, target, engines, prompts, wanted, same, unit, is_clean):
    same(one_by_one(engines[source], prompts), wanted)
    answers = one_by_one(engines[target], prompts)
    same(answers, wanted)
    assert cached(answers) == full(prompts, unit)
    is_clean(engines[source], engines[target])


def test_many_at_once(engines, plain, prompt_of, same, unit, is_clean):
    many = [(f"prompt {i}", prompt_of(30 * i + 20, next(_seeds)), {}) for i in range(8)]
    wanted = plain.run(many, cold=True)
    same(engines["second"].run(many), wanted)
    answers = engines["pair"].run(many)
    same(answers, wanted)
    assert cached(answers) == full(many, unit)
    is_clean(engines["pair"])


def test_a_cleared_store_finds_nothing_and_fills_again(engines, prompts, wanted, same, unit, is_clean):
    engine = engines["pair"]
    one_by_one(engine, prompts)
    assert engine.reset(connector=True)
    again = one_by_one(engine, prompts)
    assert cached(again) == [0] * len(prompts)
    assert engine.reset()
    warm = one_by_one(engine, prompts)
    same(again + warm, wanted * 2)
    assert cached(warm) == full(prompts, unit)
    is_clean(engine)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_the_load_of_one_rank_fails(policy, rank, engines, tokens, answer, same, is_clean):
    """Its blocks are those of a request that all ranks have to compute, or that ends."""
    name, source = {"recompute": ("pair", "second"), "fail": ("failing pair", "first")}[policy]
    engines[source].run([("saved", tokens, {})], max_tokens=1)
    got = fail_load_of(rank, engines[name], tokens)
    if policy == "fail":
        assert (got["reason"], got["tokens"]) == ("error", [])
    else:
        same([got], answer)
        assert got["num_cached"] == 0
    same(engines[name].run([("next", tokens, {})]), answer)
    is_clean(engines[name])


def test_blocks_stay_taken_until_the_slower_rank_is_through(engines, tokens, answer, same, store, node_ids, is_clean):
    """The request ends when the load of one rank failed; that of the other one still writes."""
    engine = engines["failing pair"]
    engines["first"].run([("saved", tokens, {})], max_tokens=1)
    mover = store.stats()["nodes"][node_ids[1]]["mover_pid"]
    engine.add("victim", tokens)
    engine.take_store(0)
    stop_process(mover)
    try:
        assert engine.step_until("victim", "FINISHED_ERROR")
        engine.step(5)
        free, total = engine.blocks()
        assert free < total
    finally:
        os.kill(mover, signal.SIGCONT)
        engine.give_store(0)
    engine.settle()
    assert engine.answer("victim")["reason"] == "error"
    same(engine.run([("next", tokens, {})]), answer)
    is_clean(engine)


@pytest.mark.parametrize(("source", "target"), [("pair", "failing pair"), ("failing pair", "pair")])
def test_hand_off_between_engines_of_two_workers(source, target, engines, prompts, wanted, same, unit, is_clean):
    fetched = Grown(engines[target], "num_fetched_peer_blocks")
    tickets, answers = [], []
    for _, tokens, _ in prompts:
        tickets.append(handed_off(engines[source], tokens))
        answers.append(decoded(engines[target], tokens, tickets[-1]))
    same(answers, wanted)
    assert cached(answers) == [reported(*each) for each in zip(tickets, full(prompts, unit), strict=True)]
    assert fetched.by_rank() == [sum(full(prompts, unit)) // unit] * 2
    is_clean(engines[source], engines[target])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_the_fetch_of_one_rank_fails(policy, rank, engines, tokens, answer, same, unit):
    source, target = {"recompute": ("failing pair", "pair"), "fail": ("pair", "failing pair")}[policy]
    engine = engines[target]
    used = handed_off(engines[source], tokens)
    same([decoded(engine, tokens, used)], answer)
    assert engine.reset()
    params = handed_off(engines[source], tokens)
    params["raykv_ticket"]["parts"][rank] = used["raykv_ticket"]["parts"][rank]
    failed = Grown(engine, "num_failed_fetches_used")
    got = decoded(engine, tokens, params)
    assert failed.by_rank() == [int(rank == 0), int(rank == 1)]
    if policy == "fail":
        assert (got["reason"], got["tokens"]) == ("error", [])
    else:
        same([got], answer)
        assert got["num_cached"] == 200 // unit * unit  # From the store, which has them too.
    same(engine.run([("next", tokens, {})]), answer)


def test_a_ticket_of_two_workers_is_not_for_one(engines, tokens, answer, same, unit):
    engine = engines["second"]
    before = engine.stats()["scheduler"].get("num_bad_tickets", 0)
    params = handed_off(engines["pair"], tokens)
    got = decoded(engine, tokens, params)
    same([got], answer)
    assert engine.stats()["scheduler"]["num_bad_tickets"] == before + 1
    assert got["num_cached"] == reported(params, 200 // unit * unit)  # From the store.

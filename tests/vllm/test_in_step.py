"""Loads that fail in the step that begins them, or outlast it: right answers or errors, and others are served."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time

import pytest

LOAD_TIMEOUT_S = 6.0
_seeds = itertools.count(120_000, 10)


@pytest.fixture(scope="module")
def engines(model, start_engine, connector, unit):
    """An engine on the second node for each failure policy."""
    options = connector(1, block_size=unit, portable=True, load_timeout_s=LOAD_TIMEOUT_S)
    made = {
        policy: start_engine(model, block_size=unit, policy=policy, connector=options)
        for policy in ("recompute", "fail")
    }
    return {policy: engine.wait_started() for policy, engine in made.items()}


@pytest.fixture
def check(same):
    """A request whose load failed is right, or has an error and no tokens; nothing of it stays."""

    def check(engine, policy, answer, wanted):
        if policy == "fail":
            assert (answer["reason"], answer["tokens"]) == ("error", [])
        else:
            same([answer], wanted)
        assert engine.tracked() == 0
        assert engine.blocks()[0] == engine.blocks()[1]

    return check


def count_failed(engine):
    return engine.stats()["worker"].get("num_failed_loads", 0)


def shares(first, engines, prompt_of):
    """Whether engines load what another one has just saved: a node that failed is left alone for some seconds."""
    tokens = prompt_of(300, next(_seeds))
    first.run([("save", tokens, {})], max_tokens=1)
    loads = [engine.run([("load", tokens, {})])[0] for engine in engines]
    return all(load["num_cached"] > 0 for load in loads)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_gives_the_same_answers_alone_and_beside_others(policy, engines, plain, prompt_of, same):
    engine, prompts = engines[policy], [prompt_of(700, next(_seeds)) for _ in range(3)]
    wanted = plain.run([(f"wanted {at}", tokens, {}) for at, tokens in enumerate(prompts)], cold=True)
    engine.run([(f"save {at}", tokens, {}) for at, tokens in enumerate(prompts)], max_tokens=1)
    engine.await_saves()
    for number in (1, 3):
        engine.reset()
        new = prompt_of(300, next(_seeds))
        asked = [(f"load {at}", tokens, {}) for at, tokens in enumerate(prompts[:number])]
        answers = engine.run([*asked, *([("new", new, {})] if number > 1 else [])])
        same(answers[:number], wanted[:number])
        assert all(answer["num_cached"] >= 640 for answer in answers[:number])
    assert count_failed(engine) == 0


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_that_hangs_keeps_nobody_and_ends_in_time(
    policy, engines, first, plain, store, node_ids, pool_of, prompt_of, same, check, eventually
):
    engine, tokens, others = engines[policy], prompt_of(1500, next(_seeds)), prompt_of(100, next(_seeds))
    eventually(lambda: shares(first, [engine], prompt_of), 60, 0.5)
    failed = count_failed(engine)
    wanted = plain.run([("wanted", tokens, {})], cold=True)
    wanted_of_others = plain.run([("others", others, {})], cold=True)
    first.run([("save", tokens, {})], max_tokens=1)
    mover = store.stats()["nodes"][node_ids[1]]["mover_pid"]
    os.kill(mover, signal.SIGSTOP)
    try:
        engine.add("hangs", tokens)
        assert engine.step_until("hangs", "WAITING_FOR_REMOTE_KVS")
        engine.add("others", others)
        begin_s = time.monotonic()
        while engine.step().get("others") and time.monotonic() < begin_s + LOAD_TIMEOUT_S:
            pass
        assert engine.states().get("hangs") == "WAITING_FOR_REMOTE_KVS", "others were computed before it ended"
        same([engine.answer("others")], wanted_of_others)
        engine.settle()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(mover, signal.SIGCONT)
    assert count_failed(engine) == failed + 1
    check(engine, policy, engine.answer("hangs"), wanted)
    eventually(lambda: not any(pool_of(node)["num_quarantined"] for node in node_ids), 30, 0.5)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("how", ["cleared", "killed"])
def test_blocks_that_go_between_the_answer_and_the_load(
    how, policy, engines, first, second, plain, store, node_ids, prompt_of, check, eventually
):
    engine, tokens = engines[policy], prompt_of(700, next(_seeds))
    failed, wanted = count_failed(engine), plain.run([("wanted", tokens, {})], cold=True)
    engine.run([("save", tokens, {})], max_tokens=1)
    engine.reset()
    num_lookups = engine.stats()["scheduler"]["num_lookup"]
    engine.add("goes", tokens)
    eventually(lambda: engine.stats()["scheduler"]["num_lookup"] > num_lookups, 10)
    if how == "cleared":
        first.reset(connector=True)
    else:
        os.kill(store.stats()["nodes"][node_ids[1]]["pid"], signal.SIGKILL)
    engine.settle()
    assert count_failed(engine) == failed + 1
    check(engine, policy, engine.answer("goes"), wanted)

    eventually(lambda: shares(first, [*engines.values(), second], prompt_of), 60, 0.5)

"""A prompt that surely is nowhere is computed in the first step there is; what is stored is found as ever."""

from __future__ import annotations

import itertools
import os
import signal
import time

import pytest
from waiting import stop_process

STANDS_STILL_S = 3.0
_seeds = itertools.count(150_000, 10)


@pytest.fixture(scope="module")
def engine(model, start_engine, connector, unit):
    """One that asks no other node."""
    return start_engine(model, block_size=unit, connector=connector(0, remote=False, portable=True)).wait_started()


def num_lookups(engine):
    return engine.stats()["scheduler"].get("num_lookup", 0)


def test_new_prompts_are_answered_after_one_step_and_without_a_question(engine, plain, prompt_of, unit, same, is_clean):
    prompts = []
    for at, count in enumerate((5, unit, 200, 900)):
        # Another chain of the store may share the counter of a prompt's first block: then the store is asked.
        for attempt in range(5):
            tokens, name, asked = prompt_of(count, next(_seeds)), f"new {at}, {attempt}", num_lookups(engine)
            engine.add(name, tokens, max_tokens=1)
            engine.step(1)
            answer = engine.answer(name)
            engine.settle()
            if num_lookups(engine) == asked:
                break
        assert num_lookups(engine) == asked, "no new prompt was answered without a question"
        assert answer is not None, "its first token came with the first step"
        assert answer["num_cached"] == 0
        same([answer], plain.run([("plain", tokens, {})], cold=True, max_tokens=1))
        prompts.append(tokens)
    asked = num_lookups(engine)
    engine.reset()
    for at, tokens in enumerate(prompts):
        (warm,) = engine.run([(f"warm {at}", tokens, {})], max_tokens=1)
        assert warm["num_cached"] == len(tokens) // unit * unit, "all of it was saved"
    assert num_lookups(engine) == asked + 3, "the shortest has no block that could be stored"
    is_clean(engine)


def test_together_and_beside_one_that_is_stored(engine, plain, prompt_of, same, is_clean):
    stored, new = prompt_of(300, next(_seeds)), [prompt_of(150, next(_seeds)) for _ in range(4)]
    engine.run([("save", stored, {})], max_tokens=1)
    engine.reset()
    asked = [("stored", stored, {}), *((f"new {at}", tokens, {}) for at, tokens in enumerate(new))]
    answers = engine.run(asked)
    same(answers, plain.run(asked, cold=True))
    assert answers[0]["num_cached"] >= 256
    assert [answer["num_cached"] for answer in answers[1:]] == [0] * 4
    is_clean(engine)


def test_the_schedulers_methods_do_not_wait_for_a_store_that_stands_still(
    engine, store, node_ids, plain, prompt_of, same, is_clean
):
    stored, new = prompt_of(300, next(_seeds)), prompt_of(100, next(_seeds))
    wanted = plain.run([("stored", stored, {}), ("new", new, {})], cold=True, max_tokens=1)
    engine.run([("save", stored, {})], max_tokens=1)
    engine.await_saves()
    engine.reset()
    pid = store.stats()["nodes"][node_ids[0]]["pid"]
    stop_process(pid)
    try:
        begin_s = time.monotonic()
        engine.add("stored", stored, max_tokens=1)
        engine.add("new", new, max_tokens=1)
        while time.monotonic() < begin_s + STANDS_STILL_S:
            engine.step(1)
        new_answer = engine.answer("new")
        assert new_answer is not None, "it was to end while the store stood still"
    finally:
        os.kill(pid, signal.SIGCONT)
    longest_ms = {name: ms for name, ms in engine.stats()["scheduler"].items() if name.endswith("_max_ms")}
    del longest_ms["lookup_max_ms"]  # Of the question itself, for which no method waits.
    assert {"get_num_new_matched_tokens_max_ms", "request_finished_max_ms"} <= longest_ms.keys()
    assert max(longest_ms.values()) < STANDS_STILL_S * 1e3 / 2, longest_ms
    engine.settle()
    same([engine.answer("stored"), new_answer], wanted)
    is_clean(engine)

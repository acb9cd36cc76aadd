"""Requests that are given up at any stage leave nothing behind, and those after them are right."""

from __future__ import annotations

import itertools
import os
import signal

import pytest

_seeds = itertools.count(70_000, 10)


@pytest.fixture
def saved(first, second, plain, prompt_of):
    """A prompt that the other node's engine can load, and its answer."""
    tokens = prompt_of(500, next(_seeds))
    first.run([("save", tokens, {})], max_tokens=1)
    second.reset()
    return tokens, plain.run([("wanted", tokens, {})], cold=True)


@pytest.fixture
def check(second, saved, same, node_ids, pool_of, eventually):
    """Nothing is left, and the prompt is answered right."""

    def run():
        tokens, wanted = saved
        second.settle()
        assert second.tracked() == 0
        free, total = second.blocks()
        assert free == total
        same(second.run([("next", tokens, {})]), wanted)

        def is_settled():
            keys = ("num_pinned", "num_leases", "num_writing", "num_quarantined")
            return not any(pool_of(node)[key] for node in node_ids for key in keys)

        eventually(is_settled, 20)

    return run


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 6])
def test_after_some_steps(second, saved, check, num_steps):
    second.add("gone", saved[0])
    second.step(num_steps)
    second.abort("gone")
    check()
    assert second.answer("gone") is None


def test_in_the_middle_of_a_load(second, saved, check, store, node_ids):
    mover = store.stats()["nodes"][node_ids[1]]["mover_pid"]
    os.kill(mover, signal.SIGSTOP)
    try:
        second.add("gone", saved[0])
        assert second.step_until("gone", "WAITING_FOR_REMOTE_KVS")
        second.step(3)
        second.abort("gone")
        # Its blocks stay where the load may still write.
        free, total = second.blocks()
        assert free < total
    finally:
        os.kill(mover, signal.SIGCONT)
    check()


def test_in_the_middle_of_a_prompt_in_chunks(plain, model, start_engine, connector, prompt_of, same, unit):
    engine = start_engine(
        model, block_size=unit, connector=connector(0), max_num_batched_tokens=64, max_num_seqs=16
    ).wait_started()
    tokens = prompt_of(300, next(_seeds))
    engine.add("gone", tokens)
    assert engine.step_until("gone", "RUNNING")
    engine.step()
    engine.abort("gone")
    engine.settle()
    assert engine.tracked() == 0
    assert engine.blocks()[0] == engine.blocks()[1]
    engine.reset()
    # What had been computed of it was stored, and is good.
    answers = engine.run([("next", tokens, {})])
    same(answers, plain.run([("wanted", tokens, {})], cold=True))
    assert 64 <= answers[0]["num_cached"] < 300


def test_while_its_blocks_are_saved(second, saved, check, prompt_of):
    second.add("gone", prompt_of(2000, next(_seeds)), max_tokens=20)
    assert second.step_until("gone", "RUNNING")
    second.abort("gone")
    check()

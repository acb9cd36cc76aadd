"""Requests that are given up at any stage leave nothing behind, and those after them are right."""

from __future__ import annotations

import itertools
import os
import signal

import pytest

_seeds = itertools.count(70_000, 10)


@pytest.fixture
def saved(sixteen, thirty_two, plain, prompt_of):
    """A prompt that the other node's engine can load, and its answer."""
    tokens = prompt_of(500, next(_seeds))
    sixteen.run([("save", tokens, {})], max_tokens=1)
    thirty_two.reset()
    return tokens, plain.run([("wanted", tokens, {})], cold=True)


@pytest.fixture
def check(thirty_two, saved, same, node_ids, pool_of, eventually):
    """Nothing is left, and the prompt is answered right."""

    def run():
        tokens, wanted = saved
        thirty_two.settle()
        assert thirty_two.tracked() == 0
        free, total = thirty_two.blocks()
        assert free == total
        same(thirty_two.run([("next", tokens, {})]), wanted)

        def is_settled():
            keys = ("num_pinned", "num_leases", "num_writing", "num_quarantined")
            return not any(pool_of(node)[key] for node in node_ids for key in keys)

        eventually(is_settled, 20)

    return run


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 6])
def test_after_some_steps(thirty_two, saved, check, num_steps):
    thirty_two.add("gone", saved[0])
    thirty_two.step(num_steps)
    thirty_two.abort("gone")
    check()
    assert thirty_two.answer("gone") is None


def test_in_the_middle_of_a_load(thirty_two, saved, check, store, node_ids):
    mover = store.stats()["nodes"][node_ids[1]]["mover_pid"]
    os.kill(mover, signal.SIGSTOP)
    try:
        thirty_two.add("gone", saved[0])
        assert thirty_two.step_until("gone", "WAITING_FOR_REMOTE_KVS")
        thirty_two.step(3)
        thirty_two.abort("gone")
        # Its blocks stay where the load may still write.
        free, total = thirty_two.blocks()
        assert free < total
    finally:
        os.kill(mover, signal.SIGCONT)
    check()


def test_in_the_middle_of_a_prompt_in_chunks(plain, model, start_engine, connector, prompt_of, same):
    engine = start_engine(
        model, block_size=16, connector=connector(0), max_num_batched_tokens=64, max_num_seqs=16
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


def test_while_its_blocks_are_saved(thirty_two, saved, check, prompt_of):
    thirty_two.add("gone", prompt_of(2000, next(_seeds)), max_tokens=20)
    assert thirty_two.step_until("gone", "RUNNING")
    thirty_two.abort("gone")
    check()

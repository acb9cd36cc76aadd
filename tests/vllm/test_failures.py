"""What dies in the middle of a load: the answer is right, or an error; what comes after is served."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal

import pytest

_seeds = itertools.count(80_000, 10)


@pytest.fixture(scope="module")
def failing(model, start_engine, connector, unit):
    """An engine that ends a request with an error when its load fails."""
    return start_engine(
        model, block_size=2 * unit, policy="fail", connector=connector(1, block_size=unit, portable=True)
    ).wait_started()


@pytest.fixture
def kill(store, node_ids):
    """Ends one of the processes of the store."""

    def end(victim):
        import ray

        if victim == "directory":
            ray.kill(ray.get_actor("raykv/default/directory", namespace="raykv"), no_restart=False)
            return
        node, key = {"source": (0, "pid"), "reader": (1, "pid"), "mover": (1, "mover_pid")}[victim]
        os.kill(store.stats()["nodes"][node_ids[node]][key], signal.SIGKILL)

    return end


@pytest.fixture
def serves_again(store, node_ids, first, second, failing, plain, prompt_of, same, eventually, unit):
    """Both nodes have a store again, all engines find it, and blocks go across."""

    def check():
        def is_shared():
            tokens = prompt_of(300, next(_seeds))
            first.run([("save", tokens, {})], max_tokens=1)
            wanted = plain.run([("wanted", tokens, {})], cold=True)
            answers = [engine.run([("load", tokens, {})])[0] for engine in (second, failing)]
            right = [answer for answer in answers if answer["reason"] != "error"]
            same(right, wanted * len(right))
            return all(answer["num_cached"] >= 300 // unit * unit for answer in answers)

        eventually(is_shared, 60, 0.5)
        for engine in (first, second, failing):
            engine.settle()
            free, total = engine.blocks()
            print(f"{free} of {total} blocks free, {engine.tracked()} requests tracked")
            assert free == total
            assert engine.tracked() == 0

        def is_settled():
            nodes = store.stats()["nodes"]
            pools = [nodes[node].get("pool") for node in node_ids]
            if not all(pools):
                return False
            counts = [
                {key: pool[key] for key in ("num_pinned", "num_leases", "num_writing", "num_quarantined")}
                for pool in pools
            ]
            print(counts)
            return not any(any(count.values()) for count in counts)

        eventually(is_settled, 30, 0.5)

    return check


@pytest.mark.parametrize("victim", ["mover", "directory", "source", "reader"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_one_dies_in_the_middle_of_a_load(
    victim, policy, first, second, failing, plain, store, node_ids, prompt_of, same, kill, serves_again
):
    engine = {"recompute": second, "fail": failing}[policy]
    tokens = prompt_of(1500, next(_seeds))
    wanted = plain.run([("wanted", tokens, {})], cold=True)
    first.run([("save", tokens, {})], max_tokens=1)
    mover = store.stats()["nodes"][node_ids[1]]["mover_pid"]
    os.kill(mover, signal.SIGSTOP)
    try:
        engine.add("victim", tokens)
        assert engine.step_until("victim", "WAITING_FOR_REMOTE_KVS")
        engine.step(2)
        kill(victim)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(mover, signal.SIGCONT)
    engine.settle()
    # At once too, whatever is away.
    answers = [engine.answer("victim"), *engine.run([("next", tokens, {})])]
    for answer in answers:
        print(victim, policy, answer["reason"], answer["num_cached"])
        if policy == "fail" and answer["reason"] == "error":
            assert answer["tokens"] == []
        else:
            same([answer], wanted)
    print(engine.stats()["worker"])
    assert engine.tracked() == 0
    assert engine.blocks()[0] == engine.blocks()[1]
    serves_again()

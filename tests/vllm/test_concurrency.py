"""Many requests at once: one fetch of what they share, and blocks that vLLM takes back in the middle."""

from __future__ import annotations

import time

import pytest

PREFIX = 2048
NUM_REQUESTS = 50


@pytest.fixture(scope="module")
def engines(plain, first, second, model, start_engine, connector, unit):
    small = start_engine(
        model,
        block_size=unit,
        connector=connector(0, save="all"),
        num_gpu_blocks_override=768 // unit + 1,
        max_model_len=512,
    )
    return {"plain": plain, "first": first, "second": second, "small": small.wait_started()}


def test_fifty_requests_share_a_prefix_that_another_node_has(engines, prompt_of, same, store, node_ids):
    prefix = prompt_of(PREFIX, 50_000)
    prompts = [(f"p{at}", prefix + prompt_of(20, 50_001 + at), {}) for at in range(NUM_REQUESTS)]
    engines["first"].run([("save", [*prefix, 1], {})], max_tokens=1)
    engines["second"].reset()
    before = store.stats()["nodes"][node_ids[1]]["nixl"]["num_bytes"]
    answers = engines["second"].run(prompts)
    after = store.stats()["nodes"][node_ids[1]]
    wanted = engines["plain"].run(prompts)

    same(answers, wanted)
    assert all(answer["num_cached"] >= PREFIX for answer in answers)
    # 2,048 tokens of 4 KiB crossed once, although fifty asked; each of them had all of it.
    assert after["nixl"]["num_bytes"] - before == PREFIX * 4096
    assert engines["second"].blocks()[0] == engines["second"].blocks()[1]


def test_what_the_store_answered_counts_however_late_the_engine_comes_to_it(engines, prompt_of, unit):
    """Steps longer than an answer stays young must not make requests ask again and again."""
    engine, tokens = engines["first"], prompt_of(10 * unit + 5, 70_000)
    engine.run([("save", tokens, {})], max_tokens=1)
    engine.reset()
    engine.add("late", tokens)
    for _ in range(2):
        time.sleep(1.2)
        states = engine.step()
    assert states["late"] != "WAITING"
    engine.settle()
    assert engine.answer("late")["num_cached"] == 10 * unit


def test_requests_that_are_preempted_go_on_right(engines, prompt_of, same, unit):
    prompts = [(f"p{at}", prompt_of(100 + at, 60_000 + at), {}) for at in range(8)]
    small = engines["small"]
    answers = small.run(prompts, max_tokens=60)
    same(answers, engines["plain"].run(prompts, max_tokens=60))
    assert small.stats()["scheduler"]["num_preempted"] > 0
    free, total = small.blocks()
    assert free == total
    assert small.tracked() == 0

    # Their answers are stored too: the next turn of each conversation begins with them.
    small.reset()
    turns = [
        (f"n{at}", tokens + answer["tokens"], {})
        for at, ((_, tokens, _), answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    again = [small.run([turn])[0] for turn in turns]
    same(again, [engines["plain"].run([turn], cold=True)[0] for turn in turns])
    # The last token of an answer was never computed.
    assert [answer["num_cached"] for answer in again] == [(len(turn[1]) - 1) // unit * unit for turn in turns]

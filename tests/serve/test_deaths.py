"""Parts of a running app die: clients that ask again are all answered."""

from __future__ import annotations

import asyncio

from running import PROMPT, kill, pids_of, wait_until


def test_a_killed_decode_replica_costs_retries_and_no_answer(app):
    prompts = [f"{number}: {PROMPT}" for number in range(12)]
    wanted = asyncio.run(app.stream_all(prompts, num_at_once=4))
    (decode,) = pids_of("Decode")

    async def run():
        asking = asyncio.create_task(app.stream_all(prompts, num_at_once=4))
        await asyncio.sleep(0)  # The requests are under way.
        kill(decode)
        return await asking

    answers = asyncio.run(run())
    again = [
        answer if isinstance(answer, str) and answer == right else app.text_in_the_end(prompt)
        for prompt, answer, right in zip(prompts, answers, wanted, strict=True)
    ]
    assert again == wanted
    assert decode not in pids_of("Decode")


def test_a_stream_that_is_cut_off_by_the_death_of_its_engine_ends_with_an_error(app):
    prompts = [f"{number} long: {PROMPT}" for number in range(4)]
    (decode,) = pids_of("Decode")
    begun = set()

    async def run():
        asking = asyncio.create_task(app.stream_all(prompts, 4, num_tokens=600, on_piece=begun.add))
        while len(begun) < len(prompts):  # One that has not begun is answered 500.
            await asyncio.sleep(0.01)
        kill(decode)
        return await asking

    answers = asyncio.run(asyncio.wait_for(run(), 120))
    assert [type(answer).__name__ for answer in answers] == ["APIError"] * 4, answers
    assert all("ask again" in str(answer) for answer in answers)
    assert [app.text_in_the_end(prompt) != "" for prompt in prompts] == [True] * 4


def test_a_killed_store_costs_no_answer(app):
    (node,) = app.store.stats()["nodes"].values()
    prompts = [f"{number}: {PROMPT}" for number in range(12)]
    wanted = asyncio.run(app.stream_all(prompts, num_at_once=4))
    kill(node["pid"])

    # Twice: while the store is away, and while its successor is found.
    assert asyncio.run(app.stream_all(prompts, num_at_once=4)) == wanted
    assert asyncio.run(app.stream_all([f"new {prompt}" for prompt in prompts], num_at_once=4)).count("") == 0

    def is_back():
        nodes = app.store.stats()["nodes"].values()
        return any(each.get("pid", node["pid"]) != node["pid"] and each["pool"] for each in nodes)

    wait_until(is_back, "engines use the new store", timeout_s=120)
    assert asyncio.run(app.stream_all(prompts, num_at_once=4)) == wanted

"""The router itself: what it asks, how long it waits, and what it does when nothing answers."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from router_fakes import SPACE, TEXT, Replica, ask, make_router, names

from kvstore.errors import ConfigError, StoreNotRunning
from kvstore.integrations.prompt_keys import text_hashes

WAIT_S = 20.0


async def route(router, request, until_known=True):
    """Return the ranks of a request, once some of it is known: a thread loads the tokenizer, and the store is asked."""
    async with asyncio.timeout(WAIT_S):
        while True:
            before = known(router)
            ranks = names(await router.choose_replicas(list(router.curr_replicas.values()), request))
            if not until_known or known(router) > before:
                return ranks
            await asyncio.sleep(0.01)


def known(router):
    return router.counts["by_store"] + router.counts["by_hints"]


def run(coroutine):
    return asyncio.run(coroutine)


def test_a_prompt_goes_to_the_node_that_has_it_and_the_hashes_are_those_of_an_engine():
    asked = []

    def locate(chain):
        asked.append(chain)
        return [("node 2", 10)]

    async def test():
        replicas = [Replica("a", "node 1"), Replica("b", "node 2")]
        router, first = make_router(replicas, locate), ask()
        assert await route(router, first) == [["b"], ["a"]]
        router.on_request_routed(first, replicas[1].replica_id, None)
        router.on_request_completed(replicas[1].replica_id, first.metadata.internal_request_id)
        assert await route(router, ask(cache_salt="s")) == [["b"], ["a"]]
        assert router.counts["by_store"] == 2

    run(test())
    tokens = list(map(ord, TEXT))
    assert asked[0] == SPACE.block_hashes(tokens)
    assert asked[1] == text_hashes(SPACE, tokens, "s") != asked[0]


def test_what_was_routed_to_a_replica_is_expected_there():
    async def test():
        replicas = [Replica(name, "node 1") for name in "abc"]
        router = make_router(replicas)
        first = ask()
        async with asyncio.timeout(WAIT_S):
            while router.counts["by_hints"] == 0:
                await route(router, first, until_known=False)
                router.on_request_routed(first, replicas[1].replica_id, None)
                await asyncio.sleep(0.01)
        assert (await route(router, ask(TEXT + "and more")))[0] == ["b"]
        router.on_replica_actor_died(replicas[1].replica_id)
        assert len(router.hints) == 0

    run(test())


def test_a_prompt_is_expected_where_it_goes_before_it_is_there_but_not_where_it_did_not_go():
    async def test():
        replicas = {name: Replica(name, "node 1") for name in "abc"}
        router = make_router(list(replicas.values()))
        await read(router)
        first, second = ask(), ask()
        chosen = (await route(router, first, until_known=False))[0][0]
        assert (await route(router, second, until_known=False))[0] == [chosen]
        assert router.counts["by_hints"] == 1
        other = next(name for name in "abc" if name != chosen)
        for request in (first, second):
            router.on_request_routed(request, replicas[other].replica_id, None)
        chain = SPACE.block_hashes(list(map(ord, TEXT)))
        assert router.hints.prefixes(chain, "abc", time.monotonic()) == {other: len(chain)}

    run(test())


def test_a_replica_that_ended_is_forgotten():
    async def test():
        replicas = [Replica(name, "node 1") for name in "ab"]
        router = make_router(replicas)
        router.hints.note(SPACE.block_hashes(range(8)), "a", 0.0)
        router.update_replicas(replicas[1:])
        assert len(router.hints) == 0

    run(test())


def test_a_long_queue_outweighs_a_prefix():
    async def test():
        replicas = [Replica("a", "node 1"), Replica("b", "node 2", queue_len=9)]
        router = make_router(replicas, lambda chain: [("node 2", 10)], fetch_bytes_per_s=0)
        assert await route(router, ask()) == [["a"], ["b"]]

    run(test())


def test_prompts_that_are_being_computed_count_until_they_end():
    async def test():
        replicas = [Replica("a", "node 1"), Replica("b", "node 1")]
        router = make_router(replicas, lambda chain: [("node 1", 2)], fetch_bytes_per_s=0)
        first = ask()
        chosen = (await route(router, first))[0][0]
        by_name = {each.replica_id.unique_id: each.replica_id for each in replicas}
        router.on_request_routed(first, by_name[chosen], None)
        other = "ab".replace(chosen, "")
        assert await route(router, ask("x" * 40)) == [[other], [chosen]]
        router.on_request_completed(by_name[chosen], first.metadata.internal_request_id)
        assert (await route(router, ask(TEXT)))[0] == [chosen]

    run(test())


def test_a_store_that_is_silent_holds_no_request_for_long_and_is_not_asked_again():
    gate, num_asked = threading.Event(), []

    def locate(chain):
        num_asked.append(1)
        return gate.wait(WAIT_S) and []

    async def test():
        router = make_router([Replica("a", "n"), Replica("b", "m")], locate, store_wait_s=0.05, store_pause_s=WAIT_S)
        async with asyncio.timeout(WAIT_S / 2):
            while not num_asked:  # Until the tokenizer is loaded.
                await route(router, ask(), until_known=False)
                await asyncio.sleep(0.01)
            for number in range(20):
                assert sorted(await route(router, ask(f"{number} {TEXT}"), until_known=False)) == [["a"], ["b"]]
        assert len(num_asked) == 1
        assert router.counts["by_load"] > 20

    try:
        run(test())
    finally:
        gate.set()


def test_long_prompts_hold_up_no_other_prompt():
    gate, held, long = threading.Event(), [], "x" * (1 << 18)

    def tokenize(text, add_special_tokens=True):
        if len(text) >= len(long):
            held.append(gate.wait(WAIT_S))
        return {"input_ids": list(map(ord, text[: len(TEXT)]))}

    async def test():
        replicas = [Replica("a", "node 1"), Replica("b", "node 2")]
        router = make_router(replicas, lambda _: [("node 2", 10)], read_tokens=tokenize, tokenize_wait_s=WAIT_S)
        await route(router, ask())
        num_unread = router.counts["unread"]
        waiting = [asyncio.create_task(route(router, ask(long), until_known=False)) for _ in range(8)]
        await asyncio.sleep(0)
        for _ in range(3):
            await route(router, ask())
        assert not held
        gate.set()
        await asyncio.gather(*waiting)
        # So many were read in turn; the others were routed at once, and counted.
        assert (len(held), router.counts["unread"] - num_unread) == (4, 4)

    try:
        run(test())
    finally:
        gate.set()


async def read(router):
    """Return once the router can read prompts."""
    async with asyncio.timeout(WAIT_S):
        while len(await route(router, ask("once, and never again"), until_known=False)) == 1:
            await asyncio.sleep(0.01)


def test_a_prompt_that_nobody_has_goes_where_least_is_left_to_compute():
    async def test():
        replicas = [Replica("a", "node 1"), Replica("b", "node 1")]
        router = make_router(replicas, evict_weight=0)
        await read(router)
        # One long prompt at a, and two short ones at b.
        for text, replica in (("l" * 400, 0), ("s" * 40, 1), ("t" * 40, 1)):
            request = ask(text)
            await route(router, request, until_known=False)
            router.on_request_routed(request, replicas[replica].replica_id, None)
            router.on_new_queue_len_info(replicas[replica].replica_id, 1 + replica)
        assert await route(router, ask("new" * 20), until_known=False) == [["b"], ["a"]]

    run(test())


def test_of_two_idle_replicas_a_new_prompt_goes_to_the_one_that_was_sent_less_unless_a_store_keeps_all():
    async def chosen(locate):
        router = make_router(replicas, locate, store_wait_s=WAIT_S)
        await read(router)
        request = ask("l" * 400)
        await route(router, request, until_known=False)
        router.on_request_routed(request, replicas[0].replica_id, None)
        router.on_request_completed(replicas[0].replica_id, request.metadata.internal_request_id)
        return (await route(router, ask("n" * 40), until_known=False))[0][0]

    async def test():
        assert {await chosen(None) for _ in range(20)} == {"b"}
        assert {await chosen(lambda chain: []) for _ in range(20)} == {"a", "b"}

    replicas = [Replica("a", "node 1"), Replica("b", "node 1")]
    run(test())


def test_what_an_engines_cache_does_not_hold_any_more_is_not_expected_there():
    async def test():
        replicas = [Replica("a", "node 1"), Replica("b", "node 1")]
        router = make_router(replicas, cache_tokens=48)
        await read(router)
        for text in (TEXT, "other" * 8):  # Ten blocks each, of which twelve have a place.
            request = ask(text)
            await route(router, request, until_known=False)
            router.on_request_routed(request, replicas[0].replica_id, None)
        chain = text_hashes(SPACE, list(map(ord, TEXT)))
        assert router.hints.prefixes(chain, ["a"], 0.0) == {"a": 2}

    run(test())


def test_how_much_a_cache_holds_is_learned_with_the_namespace():
    async def test():
        router = make_router([Replica("a", "node 1"), Replica("b", "node 1")], space=None, learned=(SPACE, 48))
        async with asyncio.timeout(WAIT_S):
            while router.hints.limit_blocks is None:
                await route(router, ask(), until_known=False)
                await asyncio.sleep(0.01)
        assert (router.space, router.hints.limit_blocks) == (SPACE, 48 // SPACE.shape.block_size)

    run(test())


def test_a_store_that_does_not_run_costs_nothing_but_the_prefix():
    def locate(chain):
        raise StoreNotRunning("none here")

    async def test():
        router = make_router([Replica("a", "n"), Replica("b", "m")], locate)
        async with asyncio.timeout(WAIT_S):
            for _ in range(20):
                assert await route(router, ask(), until_known=False)
                await asyncio.sleep(0.005)

    run(test())


@pytest.mark.parametrize("request_", [ask(["one", "two"]), ask(None), ask(TEXT, truncate_prompt_tokens=3), None])
def test_a_request_whose_prompt_cannot_be_read_is_routed_by_load(request_):
    async def test():
        router = make_router([Replica("a", "n"), Replica("b", "m")], lambda chain: [("n", 10)])
        await route(router, ask())
        (pair,) = await route(router, request_, until_known=False)
        assert sorted(pair) == ["a", "b"]

    run(test())


def test_a_request_of_an_adapter_is_routed_by_ray():
    async def test():
        router = make_router([Replica("a", "n"), Replica("b", "m")], lambda chain: [("n", 10)])
        await route(router, ask())
        request = ask()
        request.metadata.multiplexed_model_id = "an adapter"
        assert len(await route(router, request, until_known=False)) == 1

    run(test())


def test_a_setting_that_cannot_work_is_refused():
    async def test():
        with pytest.raises(ConfigError, match="'speed'"):
            make_router([Replica("a", "n")], speed=3)

    run(test())

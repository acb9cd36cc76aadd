"""Whatever becomes of the store, the tokens are right, it is said once, and the store is tried again."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from kvstore.errors import ConfigError, StoreNotRunning
from kvstore.integrations.transformers import PrefixCachedModel

GREEDY = {"max_new_tokens": 8, "do_sample": False}
LOGGER = "kvstore.integrations.transformers.link"


class AtToken(BaseStreamer):
    """Does something when a new token comes: 1 is the first."""

    def __init__(self, number, what):
        self.number, self.what, self.num_put = number, what, -1

    def put(self, value):
        self.num_put += 1
        if self.num_put == self.number:
            self.what()

    def end(self):
        pass


def warnings_in(caplog):
    return [record for record in caplog.records if record.name == LOGGER and record.levelno >= logging.WARNING]


def test_a_store_that_stopped_costs_nothing_but_the_cache_and_is_found_again(build, tokens, wrap, store, caplog):
    model, prompt = build(), tokens(50)
    alone = model.generate(prompt, **GREEDY)
    cached = wrap(model, retry_s=0.2)
    cached.generate(prompt, **GREEDY)
    store.cluster.stop_node("a")

    for _ in range(3):
        assert torch.equal(cached.generate(prompt, **GREEDY), alone)

    assert cached.stats.num_loaded_tokens == 0
    assert cached.stats.num_store_failures >= 1
    assert cached.stats.num_store_failures + cached.stats.num_bypassed == 6  # A load and a save each.
    assert len(warnings_in(caplog)) == 1

    store.cluster.add("a", capacity_bytes=4 << 20, block_bytes=1 << 15)
    time.sleep(0.25)
    for _ in range(2):
        assert torch.equal(cached.generate(prompt, **GREEDY), alone)
    assert cached.stats.num_loaded_tokens == 48
    assert len(warnings_in(caplog)) == 1


def test_a_store_that_stops_between_two_loads_of_one_prompt(build, tokens, wrap, store, caplog):
    model, prompt = build(), tokens(200)
    alone = model.generate(prompt, **GREEDY)
    cached = wrap(model, staging_bytes=1)  # A block at a time.
    cached.generate(prompt, **GREEDY)
    client = cached._link._staging._client
    real_load, num_loads = client.load, 0

    def load(*args, **options):
        nonlocal num_loads
        num_loads += 1
        if num_loads == 4:
            store.cluster.stop_node("a")
        return real_load(*args, **options)

    client.load = load
    assert torch.equal(cached.generate(prompt, **GREEDY), alone)

    assert num_loads >= 4
    assert cached.stats.num_loaded_tokens == 0
    assert cached.stats.num_store_failures == 1
    assert cached.stats.num_bypassed == 1  # The save behind it.
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_store_that_stops_while_tokens_are_generated(build, tokens, wrap, store, number):
    model, prompt = build(), tokens(50)
    cached = wrap(model, save_generated=True)
    stop = AtToken(number, lambda: store.cluster.stop_node("a"))
    answer = cached.generate(prompt, streamer=stop, **GREEDY)
    assert torch.equal(answer, model.generate(prompt, **GREEDY))
    assert torch.equal(cached.generate(prompt, **GREEDY), answer)
    assert cached.stats.num_store_failures == 1


def test_a_peer_that_is_lost_means_computing(build, tokens, wrap, stores):
    model, prompt = build(), tokens(50)
    wrap(model).generate(prompt, **GREEDY)
    elsewhere = wrap(model, stores["b"], load_timeout_s=2.0)
    stores["a"].cluster.kill_mover("b")

    assert torch.equal(elsewhere.generate(prompt, **GREEDY), model.generate(prompt, **GREEDY))

    assert elsewhere.stats.num_loaded_tokens == 0
    assert elsewhere.stats.num_store_failures == 0  # Its own store answers: these are misses.
    assert elsewhere.stats.num_saved_blocks == 3


def test_blocks_that_are_cleared_between_load_and_save_are_saved_again(build, tokens, wrap, store):
    model, start = build(), tokens(50)
    prompt = torch.cat([start, tokens(50, 1)], 1)
    cached = wrap(model)
    cached.generate(start, **GREEDY)
    core = store.cluster.nodes["a"]
    clear = AtToken(1, lambda: core.clear(cached.space.digest))

    answer = cached.generate(prompt, streamer=clear, **GREEDY)
    again = cached.generate(prompt, **GREEDY)

    assert cached.stats.num_loaded_tokens == 48 + 96
    assert cached.stats.num_saved_blocks == 3 + 6
    assert torch.equal(answer, model.generate(prompt, **GREEDY))
    assert torch.equal(again, answer)


def test_a_store_without_room_keeps_what_fits(build, tokens, cluster_class, wrap):
    cluster = cluster_class()
    try:
        cluster.add("small", capacity_bytes=1 << 16, block_bytes=1 << 14)  # four blocks
        from_store = type("Small", (), {"client": lambda self, space: cluster.client("small", space)})()
        model, prompt = build(), tokens(200)
        with PrefixCachedModel(model, from_store) as cached:
            answers = [cached.generate(prompt, **GREEDY) for _ in range(2)]
            assert all(torch.equal(answer, model.generate(prompt, **GREEDY)) for answer in answers)
            assert cached.stats.num_refused_blocks > 0
            assert cached.stats.num_store_failures == 0
            assert cached.stats.num_loaded_tokens > 0
    finally:
        cluster.stop()


def test_a_store_that_is_not_there_or_too_small_is_said_at_once(build, cluster_class, store, wrap):
    store.cluster.stop_node("a")
    with pytest.raises(StoreNotRunning):
        wrap(build())
    cluster = cluster_class()
    try:
        cluster.add("tiny")
        tiny = type("Tiny", (), {"client": lambda self, space: cluster.client("tiny", space)})()
        # The first blocks decide how large slots are.
        with PrefixCachedModel(build(), tiny, block_size=1), pytest.raises(ConfigError, match="block_bytes"):
            PrefixCachedModel(build(), tiny)
    finally:
        cluster.stop()


def test_no_memory_for_loaded_kv_means_computing(build, tokens, wrap, caplog):
    model, prompt = build(), tokens(200)
    alone = model.generate(prompt, **GREEDY)
    cached = wrap(model, retry_s=0.0)
    cached.generate(prompt, **GREEDY)
    real = cached._empty_planes

    def short_of_memory(*_):
        raise torch.OutOfMemoryError("no memory for KV")

    cached._empty_planes = short_of_memory
    assert torch.equal(cached.generate(prompt, **GREEDY), alone)
    assert cached.stats.num_store_failures == 1
    assert len(warnings_in(caplog)) == 1
    cached._empty_planes = real
    assert torch.equal(cached.generate(prompt, **GREEDY), alone)
    assert cached.stats.num_loaded_tokens == 192


def test_nothing_is_left_pinned_or_open(build, tokens, wrap, store):
    cached = wrap(build(), save_generated=True)
    for _ in range(3):
        cached.generate(tokens(100), **(GREEDY | {"max_new_tokens": 30}))
    core = store.cluster.nodes["a"]
    before = core.pool.stats()
    cached.close()
    core.pool.check_integrity()
    assert (before.num_pinned, before.num_writing) == (0, 0)

"""Whatever becomes of the store, the tokens are right, it is said once, and the store is tried again."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from kvstore.errors import ConfigError, StoreNotRunning, StoreUnavailable
from kvstore.integrations.transformers import PrefixCachedModel
from kvstore.integrations.transformers.cache.columns import CACHE_NAME

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
    cached = wrap(model, staging_bytes=2 * 12288)  # A block at a time.
    cached.generate(prompt, **GREEDY)
    client = cached.link.staging._client
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
    clear = AtToken(1, lambda: core.state.pool_service.clear(cached.space.digest))

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
        from_store = type("Small", (), {"client": lambda self, space, tenant: cluster.client("small", space)})()
        model, prompt = build(), tokens(200)
        with PrefixCachedModel(model, from_store) as cached:
            answers = [cached.generate(prompt, **GREEDY) for _ in range(2)]
            assert all(torch.equal(answer, model.generate(prompt, **GREEDY)) for answer in answers)
            assert cached.stats.num_refused_blocks > 0
            assert cached.stats.num_store_failures == 0
            assert cached.stats.num_loaded_tokens > 0
    finally:
        cluster.stop()


def test_a_store_that_is_not_there_or_too_small_is_said_at_once(build, tokens, cluster_class, store, wrap):
    store.cluster.stop_node("a")
    with pytest.raises(StoreNotRunning):
        wrap(build())
    cluster = cluster_class()
    try:
        cluster.add("tiny")
        tiny = type("Tiny", (), {"client": lambda self, space, tenant: cluster.client("tiny", space)})()
        with PrefixCachedModel(build(), tiny, block_size=1) as cached:
            # The first blocks decide how large slots are, once one of them is saved.
            cached.generate(tokens(4), **GREEDY)
            with pytest.raises(ConfigError, match="block_bytes"):
                PrefixCachedModel(build(), tiny)
    finally:
        cluster.stop()


def test_no_memory_for_loaded_kv_means_computing(build, tokens, wrap, caplog):
    model, prompt = build(), tokens(200)
    alone = model.generate(prompt, **GREEDY)
    cached = wrap(model, retry_s=0.0)
    cached.generate(prompt, **GREEDY)
    real = cached.empty_planes

    def short_of_memory(*_):
        raise torch.OutOfMemoryError("no memory for KV")

    cached.empty_planes = short_of_memory
    assert torch.equal(cached.generate(prompt, **GREEDY), alone)
    assert cached.stats.num_store_failures == 1
    assert len(warnings_in(caplog)) == 1
    cached.empty_planes = real
    assert torch.equal(cached.generate(prompt, **GREEDY), alone)
    assert cached.stats.num_loaded_tokens == 192


def test_nothing_is_left_pinned_or_open(build, tokens, wrap, store):
    cached = wrap(build(), save_generated=True)
    for _ in range(3):
        cached.generate(tokens(100), **(GREEDY | {"max_new_tokens": 30}))
    core = store.cluster.nodes["a"]
    before = core.pool.stats()
    cached.close()
    with pytest.raises(StoreUnavailable, match="a closed one"), cached:
        pass
    core.pool.check_integrity()
    assert (before.num_pinned, before.num_writing) == (0, 0)


class Interrupted:
    """A lock behind whose acquisition a Ctrl-C comes, once."""

    def __init__(self, lock):
        self.lock, self.num_left = lock, 1

    def acquire(self, *args, **kwargs):
        taken = self.lock.acquire(*args, **kwargs)
        self.num_left -= 1
        if self.num_left == 0:
            raise KeyboardInterrupt
        return taken

    def release(self):
        self.lock.release()

    __enter__ = acquire

    def __exit__(self, *_):
        self.release()


@pytest.fixture
def in_time():
    """Whether something ends in another thread before too long."""

    def check(act):
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        thread.join(4)
        return not thread.is_alive()

    return check


@pytest.mark.parametrize("when", ["a load", "closing"])
def test_an_interrupt_behind_a_lock_does_not_keep_it(build, tokens, wrap, in_time, when):
    cached, prompt = wrap(build(), retry_s=10.0), tokens(50)
    link = cached.link
    link._lock = Interrupted(link._lock)
    try:
        with pytest.raises(KeyboardInterrupt):
            link.use(lambda staging: None, None) if when == "a load" else cached.close()
        if when == "a load":
            assert in_time(lambda: cached.generate(prompt, **GREEDY))
            assert (cached.stats.num_bypassed, cached.stats.num_saved_blocks) == (0, 3)
        assert in_time(cached.close)
        assert link.staging is None
    finally:
        link._lock = threading.RLock()  # So that nothing waits for it in vain.


def test_a_signal_handler_does_not_use_the_buffer_under_what_it_interrupted(build, tokens, wrap):
    cached = wrap(build())
    link, seen = cached.link, []

    def use(staging):
        seen.append(link.use(lambda staging: "used", "bypassed"))
        cached.close()
        seen.append(staging is link.staging)
        return "outer"

    assert link.use(use, None) == "outer"
    assert seen == ["bypassed", True]
    assert link.staging is None, "it is given back when nothing uses it any more"


def test_closing_does_not_wait_for_ever(build, tokens, wrap):
    cached = wrap(build(), retry_s=0.1)
    link, began, may_end = cached.link, threading.Event(), threading.Event()

    def use(staging):
        began.set()
        assert may_end.wait(20)

    user = threading.Thread(target=link.use, args=(use, None))
    user.start()
    assert began.wait(10)
    closing = threading.Thread(target=cached.close, daemon=True)
    closing.start()
    closing.join(5)
    is_closed = not closing.is_alive()
    may_end.set()
    user.join(10)
    closing.join(10)
    assert is_closed
    assert link.staging is None


_INTERRUPTS = {}
"""Whether interrupts come; empty while models are wrapped."""


@pytest.mark.parametrize("is_before", [True, False])
def test_an_interrupt_leaves_no_hook_on_the_model(build, tokens, wrap, monkeypatch, is_before):
    model, prompt = build(), tokens(50)
    hook = model.register_forward_pre_hook
    own = hook(lambda *_: None)

    def register(*args, **kwargs):
        handle = hook(*args, **kwargs)
        if is_before and _INTERRUPTS:
            raise KeyboardInterrupt
        return handle

    monkeypatch.setattr(model, "register_forward_pre_hook", register)
    # Afterwards: what a model runs must not change while it is wrapped.
    cached = wrap(model, model_id="hooked")
    monkeypatch.setitem(_INTERRUPTS, "on", True)
    if is_before:
        with pytest.raises(KeyboardInterrupt):
            cached.generate(prompt, **GREEDY)
    else:
        cached.generate(prompt, **GREEDY)
    assert list(model._forward_pre_hooks) == [own.id]
    assert not model._forward_pre_hooks_with_kwargs


def test_the_cache_of_a_call_is_freed_with_it(build, tokens, wrap):
    cached = wrap(build())
    gc.collect()
    gc.disable()
    try:
        output = cached.generate(tokens(50), return_dict_in_generate=True, **GREEDY)
        cache = weakref.ref(output[CACHE_NAME])
        del output
        assert cache() is None
    finally:
        gc.enable()

"""What tests ask of engines, one prompt after the other, and of each of their workers."""

from __future__ import annotations

import json
import time


def one_by_one(engine, prompts, **options):
    return [engine.run([prompt], **options)[0] for prompt in prompts]


def cached(answers):
    return [answer["num_cached"] for answer in answers]


def full(prompts, size):
    """How many tokens of each prompt are in full blocks."""
    return [len(tokens) // size * size for _, tokens, _ in prompts]


class Grown:
    """How much a count of each worker of an engine grows from now on."""

    def __init__(self, engine, name):
        self._engine, self._name = engine, name
        self._before = self._now()

    def _now(self):
        return [rank.get(self._name, 0) for rank in self._engine.rank_stats()]

    def by_rank(self):
        return [now - before for now, before in zip(self._now(), self._before, strict=True)]


def check_cold_and_warm(engine, prompts, wanted, same, unit):
    """New prompts are computed, then in the engine's cache, then in the store, one by one and at once."""
    saved = Grown(engine, "num_saved_blocks")
    cold, own = one_by_one(engine, prompts), one_by_one(engine, prompts)
    assert engine.reset()
    warm = one_by_one(engine, prompts)
    assert engine.reset()
    together = engine.run(prompts)
    for answers in (cold, own, warm, together):
        same(answers, wanted)
    assert cached(cold) == [0] * len(prompts)
    assert cached(warm) == cached(together) == full(prompts, unit)
    assert saved.by_rank() == [sum(full(prompts, unit)) // unit] * 2


def handed_off(engine, tokens):
    """Prefill, and return what the decode engine gets, as it would come over HTTP."""
    answer = engine.run([("prefill", tokens, {})], max_tokens=1, transfer={"do_remote_decode": True})[0]
    return json.loads(json.dumps(answer["transfer"]))


def reported(params, num_fetched):
    """Return the cached tokens of an answer whose blocks were fetched: newer vLLMs say what the prefill engine had."""
    return (params or {}).get("remote_prefill_cached_tokens", num_fetched)


def decoded(engine, tokens, params):
    return engine.run([("decode", tokens, {})], transfer=params)[0]


def fail_load_of(rank, engine, tokens, limit_s=30.0):
    """Run a prompt that is stored, while one worker has no store: its load fails, that of the others does not."""
    failed, deadline_s = Grown(engine, "num_failed_loads"), time.monotonic() + limit_s
    engine.add("victim", tokens)
    engine.take_store(rank)
    try:
        while not any(failed.by_rank()):
            assert time.monotonic() < deadline_s
            engine.step()
    finally:
        engine.give_store(rank)
    engine.settle()
    assert failed.by_rank() == [int(each == rank) for each in range(len(failed.by_rank()))]
    return engine.answer("victim")

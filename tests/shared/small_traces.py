"""Small traces for tests of the replay: from lists of ids, and drawn at random as a tree of prompts."""

from __future__ import annotations

import random

from kvstore.replay.traces import Chains, Request, Trace


def trace_of(*prompts, times_s=None, block_tokens=4):
    """A trace whose requests have these ids, a second apart if no times are given."""
    chains = Chains()
    requests = [
        Request(float(time_s), block_tokens * len(ids), 1, chains.blocks_of(ids))
        for time_s, ids in zip(times_s or range(len(prompts)), prompts, strict=True)
    ]
    return Trace("small", "test", block_tokens, requests, chains.digests())


def random_prompts(seed, num_requests, num_ids=3, most=4):
    """Prompts of few ids, so that they share prefixes."""
    draw = random.Random(seed)
    return [[draw.randrange(num_ids) for _ in range(draw.randint(1, most))] for _ in range(num_requests)]

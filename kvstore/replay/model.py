"""Say what a replay cannot measure, as it moves no bytes: a modelled time to first token. And spread arrivals.

The model is plain: tokens that were not there are computed at one rate, bytes of blocks that were there are loaded at
another, one after the other, and nobody waits for another request. It compares policies. It predicts no engine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.replay.traces import Request, Trace

#: Assumptions, not measurements: a model of 8 billion parameters on one large GPU, and blocks from the same host.
PREFILL_TOKENS_PER_S, LOAD_GB_PER_S = 10_000.0, 10.0
#: Bytes of KV of a token in such a model: 32 layers of 8 heads of 128, K and V, two bytes each.
TOKEN_BYTES = 32 * 8 * 128 * 2 * 2
#: No rate is higher, and none lower than its inverse: times stay numbers.
_MOST = 1e15


@dataclass(frozen=True, slots=True)
class Rates:
    """What the modelled time to first token is made of; GB are 10^9 bytes."""

    prefill_tokens_per_s: float
    load_gb_per_s: float
    block_bytes: int

    def __post_init__(self) -> None:
        for option, value in (
            ("--prefill-tokens-per-s", self.prefill_tokens_per_s),
            ("--load-gb-per-s", self.load_gb_per_s),
            ("--block-bytes", self.block_bytes),
        ):
            if not 1 / _MOST <= value <= _MOST:
                bounds = f"from {1 / _MOST:g} to {_MOST:g}"
                raise InvalidRequest(f"{option}: wanted a number {bounds}, got {value}; leave it out for the default")


def first_token_s(trace: Trace, hits: Sequence[int], rates: Rates) -> list[float]:
    """Return the modelled time to first token of each request. One token at least is computed."""
    load_s = rates.block_bytes / (rates.load_gb_per_s * 1e9)
    return [
        max(1, request.input_tokens - num_hits * trace.block_tokens) / rates.prefill_tokens_per_s + num_hits * load_s
        for request, num_hits in zip(trace.requests, hits, strict=True)
    ]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile; of two neighbours the one between them."""
    return float(np.percentile(values, percent))


def spread(trace: Trace, jitter_s: float, seed: int) -> Trace:
    """Return the trace with up to `jitter_s` added to the time of each request, and in the order of these times.

    A trace whose times were rounded down to a grid gets arrivals between its points.
    """
    if not 0 <= jitter_s < float("inf"):
        raise InvalidRequest(f"--jitter-s: wanted a number of seconds, 0 or more, got {jitter_s}; 0 keeps all times")
    if not jitter_s:
        return trace
    generator = random.Random(seed)
    requests = [_later(request, generator.random() * jitter_s) for request in trace.requests]
    return replace(trace, requests=sorted(requests, key=lambda request: request.time_s))


def _later(request: Request, delay_s: float) -> Request:
    return replace(request, time_s=request.time_s + delay_s)

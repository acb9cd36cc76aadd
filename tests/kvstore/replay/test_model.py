"""The modelled time to first token, percentiles, and spread arrivals."""

from __future__ import annotations

import pytest
from small_traces import trace_of

from kvstore.errors import InvalidRequest
from kvstore.replay.model import Rates, first_token_s, percentile, spread


def test_what_is_there_is_loaded_and_the_rest_computed():
    trace = trace_of([1, 2, 3], [1, 2, 3], block_tokens=100)
    rates = Rates(prefill_tokens_per_s=1000.0, load_gb_per_s=2.0, block_bytes=1_000_000)
    assert first_token_s(trace, [0, 2], rates) == pytest.approx([0.3, 0.1 + 2 * 0.0005])


def test_one_token_at_least_is_computed():
    trace = trace_of([1, 2], block_tokens=100)
    assert first_token_s(trace, [2], Rates(1000.0, 1e6, 1)) == pytest.approx([0.001])


@pytest.mark.parametrize(
    ("rates", "option"),
    [
        ((0.0, 1.0, 1), "--prefill-tokens-per-s"),
        ((float("nan"), 1.0, 1), "--prefill-tokens-per-s"),
        ((1.0, -1.0, 1), "--load-gb-per-s"),
        ((1.0, float("inf"), 1), "--load-gb-per-s"),
        ((1.0, 1.0, 0), "--block-bytes"),
    ],
)
def test_rates_that_are_none_are_refused(rates, option):
    with pytest.raises(InvalidRequest, match=f"^{option}: wanted a number from 1e-15 to 1e\\+15, got"):
        Rates(*rates)


def test_percentiles():
    assert [percentile([3.0, 1.0, 2.0], percent) for percent in (0, 50, 100)] == [1.0, 2.0, 3.0]


def test_without_jitter_nothing_changes():
    trace = trace_of([1], [2])
    assert spread(trace, 0.0, 1) is trace


def test_arrivals_are_spread_within_the_jitter_and_stay_in_order_of_time():
    trace = trace_of(*([n] for n in range(40)), times_s=[3 * (n // 10) for n in range(40)])
    found = spread(trace, 3.0, 1)
    times_s = [request.time_s for request in found.requests]
    assert times_s == sorted(times_s)
    assert len(set(times_s)) == 40
    assert [int(time_s // 3) for time_s in times_s] == [n // 10 for n in range(40)]
    assert sorted(request.blocks[0] for request in found.requests) == list(range(40))


def test_the_same_seed_spreads_alike():
    trace = trace_of([1], [2], [3])
    one, same, other = ([each.time_s for each in spread(trace, 9.0, seed).requests] for seed in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize("jitter_s", [-1.0, float("nan"), float("inf")])
def test_a_jitter_that_is_no_time_is_refused(jitter_s):
    with pytest.raises(InvalidRequest, match="--jitter-s: wanted a number of seconds"):
        spread(trace_of([1]), jitter_s, 0)

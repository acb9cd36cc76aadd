"""Counts of reuses and time at risk, and hazards, beside the plainest computation of each."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest

from kvstore.pool.eviction.reuse import (
    EDGES_S,
    NUM_BUCKETS,
    NUM_CLASSES,
    WIDTHS_S,
    ReuseCounts,
    bucket_of,
    falling_rates,
    roughly,
)


def naive_bucket(age_s):
    return next((i for i in range(NUM_BUCKETS) if EDGES_S[i] <= age_s < EDGES_S[i + 1]), NUM_BUCKETS)


def naive_falling(counts, times_s):
    """The isotonic fit by its formula: the least, over beginnings, of the greatest mean, over ends."""
    size = range(len(counts))
    mean = {(i, j): sum(counts[i : j + 1]) / sum(times_s[i : j + 1]) for i in size for j in size[i:]}
    return [min(max(mean[i, j] for j in size[at:]) for i in size[: at + 1]) for at in size]


def test_buckets_are_a_third_of_an_octave_up_to_twelve_days():
    assert EDGES_S[:2].tolist() == [0.0, 1.0]
    assert EDGES_S[4] == 2.0
    assert 12 * 86400 < EDGES_S[-1] == 1 << 20 < 12.2 * 86400
    ages_s = np.array([0.0, 0.999, 1.0, 1.3, 2.0, 100.0, (1 << 20) - 0.1, 1 << 20, math.inf])
    assert bucket_of(ages_s).tolist() == [naive_bucket(age_s) for age_s in ages_s]
    assert bucket_of(ages_s).tolist()[-2:] == [NUM_BUCKETS] * 2


@pytest.mark.parametrize("seed", range(20))
def test_pooling_is_the_isotonic_fit(seed):
    rng = random.Random(seed)
    counts = [rng.choice([0.0, rng.random(), 10 * rng.random()]) for _ in range(12)]
    times_s = [rng.uniform(0.1, 5) for _ in range(12)]
    rates = falling_rates(counts, times_s)
    assert rates == pytest.approx(naive_falling(counts, times_s))
    assert all(one >= other for one, other in pairwise(rates))
    assert sum(rate * time_s for rate, time_s in zip(rates, times_s, strict=True)) == pytest.approx(sum(counts))


def test_a_falling_sequence_stays_as_it_is():
    assert falling_rates([4.0, 2.0, 2.0, 0.0], [1.0, 1.0, 2.0, 3.0]) == [4.0, 2.0, 1.0, 0.0]


def test_without_observations_hazards_fall_with_age_and_are_the_same_for_all_classes():
    hazards = ReuseCounts().hazards()
    assert len(hazards) == NUM_CLASSES
    assert all(one == hazards[0] and len(one) == NUM_BUCKETS for one in hazards)
    assert all(one >= other for one, other in pairwise(hazards[0]))
    assert hazards[0][0] > 1000 * hazards[0][-1] > 0


def test_counts_are_those_of_one_age_after_the_other():
    rng, counts = random.Random(5), ReuseCounts()
    reuses, at_risk_s = counts.reuses.copy(), counts.at_risk_s.copy()
    classes = [rng.randrange(NUM_CLASSES) for _ in range(300)]
    ages_s = [math.exp(rng.uniform(-1, 10)) for _ in classes]
    buckets = [naive_bucket(age_s) for age_s in ages_s]
    for kind, age_s, bucket in zip(classes, ages_s, buckets, strict=True):
        reuses[kind, bucket] += 1
        at_risk_s[kind, bucket] += age_s - EDGES_S[bucket]
    # As a pool passes them: classes are bytes.
    as_bytes = np.array(classes, np.uint8)
    counts.ended(as_bytes, np.array(ages_s), np.array(buckets))
    assert np.allclose(counts.reuses, reuses)
    assert np.allclose(counts.at_risk_s, at_risk_s)
    counts.passed(as_bytes[:100], 7)
    counts.passed(as_bytes[:50], np.array(buckets[:50]))
    for kind in classes[:100]:
        at_risk_s[kind, 7] += WIDTHS_S[7]
    for kind, bucket in zip(classes[:50], buckets[:50], strict=True):
        at_risk_s[kind, bucket] += WIDTHS_S[bucket]
    assert np.allclose(counts.at_risk_s, at_risk_s)
    counts.fade(0.5)
    assert np.allclose(counts.reuses, 0.5 * reuses)
    assert np.allclose(counts.at_risk_s, 0.5 * at_risk_s)
    rates = naive_falling(reuses[2].tolist(), at_risk_s[2].tolist())
    assert counts.hazards()[2] == pytest.approx([roughly(rate) for rate in rates])


def test_rates_that_hardly_differ_are_equal():
    assert roughly(1.0) == roughly(1.15) == roughly(0.85) == 1.0
    assert roughly(1.5) == pytest.approx(2**0.5)
    assert 0.0 < roughly(0.0) <= 1e-11
    rates = [10.0**-i * (1 + i % 3) for i in range(20)]
    assert sorted(map(roughly, sorted(rates))) == list(map(roughly, sorted(rates)))


def test_the_best_horizon_is_the_shortest_so_that_hazards_are_all_that_counts():
    """P(reuse) per expected second of keeping, at the best horizon, is the hazard where that does not rise."""
    rng = random.Random(2)
    hazards = falling_rates([rng.random() for _ in range(NUM_BUCKETS)], WIDTHS_S.tolist())
    for begin in range(NUM_BUCKETS):
        kept, reused, held_s, best = 1.0, 0.0, 0.0, 0.0
        for hazard, width_s in zip(hazards[begin:], WIDTHS_S[begin:], strict=True):
            left = kept * math.exp(-hazard * width_s)
            reused += kept - left
            held_s += (kept - left) / hazard if hazard else kept * width_s
            best, kept = max(best, reused / held_s), left
        assert best == pytest.approx(hazards[begin])

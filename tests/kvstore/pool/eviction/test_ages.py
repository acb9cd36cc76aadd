"""Time at risk, counted bucket by bucket, beside a list of all uses."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.pool.eviction.ages import AgeQueues
from kvstore.pool.eviction.reuse import EDGES_S, NUM_BUCKETS, NUM_CLASSES, WIDTHS_S, ReuseCounts, bucket_of


class Blocks:
    """Rows with uses, and all ages that ever were: (class, begin, end or None)."""

    def __init__(self, num_rows):
        self.number, self.uses = np.zeros(num_rows, np.uint32), np.zeros(num_rows, np.uint8)
        self.began_s = np.zeros(num_rows)
        self.counts = ReuseCounts()
        self.before = self.counts.at_risk_s.copy(), self.counts.reuses.copy()
        self.queues = AgeQueues(self.counts, self.number, self.uses)
        self.ages, self.num_uses = {}, 0

    def use(self, rows, now_s):
        rows = np.array(rows, np.int32)
        self.queues.advance(now_s)
        again = rows[self.uses[rows] > 0]
        ages_s = now_s - self.began_s[again]
        buckets = bucket_of(ages_s)
        again, ages_s, buckets = (
            again[buckets < NUM_BUCKETS],
            ages_s[buckets < NUM_BUCKETS],
            buckets[buckets < NUM_BUCKETS],
        )
        if len(again):
            self.queues.end(self.uses[again] - 1, self.began_s[again], ages_s, buckets)
        self.num_uses += 1
        for row in rows:
            if self.uses[row]:
                self.ages[row][-1][2] = now_s
            self.uses[row] = min(self.uses[row] + 1, NUM_CLASSES)
            self.ages.setdefault(row, []).append([self.uses[row] - 1, now_s, None])
        self.began_s[rows], self.number[rows] = now_s, self.num_uses
        self.queues.begin(rows, self.num_uses, now_s)

    def expected(self, now_s):
        """Per class and bucket the seconds of all ages, in whole buckets where they go on."""
        at_risk_s, reuses = np.zeros((2, NUM_CLASSES, NUM_BUCKETS))
        for kind, begin_s, end_s in (age for ages in self.ages.values() for age in ages):
            length_s = (now_s if end_s is None else end_s) - begin_s
            for bucket in range(NUM_BUCKETS):
                spent_s = min(length_s - EDGES_S[bucket], WIDTHS_S[bucket])
                if spent_s >= WIDTHS_S[bucket] or (end_s is not None and spent_s >= 0):
                    at_risk_s[kind, bucket] += spent_s
                    reuses[kind, bucket] += end_s is not None and spent_s < WIDTHS_S[bucket]
        return at_risk_s, reuses


@pytest.mark.parametrize("seed", range(4))
def test_what_is_counted_is_what_passed(seed):
    rng, blocks, now_s = random.Random(seed), Blocks(60), 0.0
    for _ in range(1500):
        now_s += rng.choice([0.0, 0.1, 1.0, 1.0, 5.0, rng.expovariate(0.05)])
        blocks.use(rng.sample(range(60 if rng.random() < 0.3 else 12), rng.randrange(1, 8)), now_s)
    for _ in range(NUM_BUCKETS):
        blocks.queues.advance(now_s)
    at_risk_s, reuses = blocks.expected(now_s)
    assert np.allclose(blocks.counts.reuses - blocks.before[1], reuses)
    counted_s = blocks.counts.at_risk_s - blocks.before[0]
    # What is on its way from one bucket to the next may be missing, and no more.
    assert (counted_s <= at_risk_s + 1e-6).all()
    assert counted_s.sum() > 0.97 * at_risk_s.sum()
    assert blocks.queues.num_ages() < 4 * 60, "ages that ended are forgotten"


def test_time_counts_while_it_passes_and_not_when_an_age_ends():
    blocks = Blocks(10)
    blocks.use(range(10), 0.0)
    blocks.queues.advance(100.0)
    counted_s = (blocks.counts.at_risk_s - blocks.before[0])[0]
    assert counted_s.sum() == pytest.approx(10 * EDGES_S[bucket_of(np.array([100.0]))[0]], rel=0.3)
    assert counted_s[0] == 10 * WIDTHS_S[0]


def test_after_the_last_edge_neither_time_nor_reuses_count():
    blocks = Blocks(3)
    blocks.use([0, 1, 2], 0.0)
    for _ in range(3):
        blocks.queues.advance(2e6)
    assert blocks.queues.num_ages() == 0
    assert (blocks.counts.at_risk_s - blocks.before[0]).sum() == pytest.approx(3 * EDGES_S[-1])
    blocks.use([0, 1], 4e6)
    assert (blocks.counts.reuses == blocks.before[1]).all()


def test_one_look_counts_no_more_than_some_thousand_ages():
    blocks, size = Blocks(30_000), 1000
    for begin in range(0, 30_000, size):
        blocks.use(range(begin, begin + size), 0.0)
    blocks.queues.advance(1.3)
    first_s = (blocks.counts.at_risk_s - blocks.before[0])[0, 0]
    assert size <= first_s < 10_000
    for _ in range(5):
        blocks.queues.advance(1.3)
    assert (blocks.counts.at_risk_s - blocks.before[0])[0, 0] == 30_000

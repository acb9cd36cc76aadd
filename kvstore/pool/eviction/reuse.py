"""Count how soon blocks are used again, and estimate from that how likely their next use is. No locking here.

Each use of a block starts an age. A block that was used once, twice, three times or more often is of class 0 to 3, and
ages fall into buckets. Per class and bucket there are two counts: how many ages a reuse ended, and for how many seconds
ages passed there. Their quotient is the hazard: reuses per second of a block of that class and age.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer]

#: By the number of uses so far: 1, 2, 3, and more.
NUM_CLASSES = 4
#: Buckets of a third of an octave: the first is of 0 to 1 s, the last ends after about 12 days.
NUM_BUCKETS = 61
EDGES_S: Floats = np.array([0.0, *(2.0 ** (i / 3) for i in range(NUM_BUCKETS))])
WIDTHS_S: Floats = np.diff(EDGES_S)
#: Once in thousands of years.
_LEAST_RATE = 1e-12
_NUM_CELLS = NUM_CLASSES * NUM_BUCKETS
#: What is assumed before anything is counted, as if it had been seen for so many seconds: the older, the less likely.
_PRIOR_S, _PRIOR_REUSES, _PRIOR_AGE_S = 1e3, 0.01, 10.0


def bucket_of(ages_s: Floats) -> npt.NDArray[np.intp]:
    """Return the bucket of each age; `NUM_BUCKETS` for an age beyond the last edge."""
    return np.searchsorted(EDGES_S[1:], ages_s, "right")


class ReuseCounts:
    """Reuses and time at risk per class and bucket.

    Attributes:
        reuses: shape (classes, buckets).
        at_risk_s: likewise.
    """

    def __init__(self) -> None:
        self.at_risk_s: Floats = np.full((NUM_CLASSES, NUM_BUCKETS), _PRIOR_S)
        prior = _PRIOR_S * _PRIOR_REUSES / (EDGES_S[:-1] + _PRIOR_AGE_S)
        self.reuses: Floats = np.tile(prior, (NUM_CLASSES, 1))
        # The same memory, one cell after the other.
        self._at_risk_s, self._reuses = self.at_risk_s.reshape(-1), self.reuses.reshape(-1)

    def ended(self, classes: Ints, ages_s: Floats, buckets: Ints) -> None:
        """Count reuses that ended these ages, with the time that each had spent in its bucket."""
        cells = _cells(classes, buckets)
        self._reuses += np.bincount(cells, minlength=_NUM_CELLS)
        self._at_risk_s += np.bincount(cells, ages_s - EDGES_S[buckets], _NUM_CELLS)

    def passed(self, classes: Ints, buckets: Ints | int) -> None:
        """Count for each of some ages the whole time of a bucket, which passed without a reuse."""
        if isinstance(buckets, int):
            self.at_risk_s[:, buckets] += np.bincount(classes, minlength=NUM_CLASSES) * WIDTHS_S[buckets]
        else:
            cells = _cells(classes, buckets)
            self._at_risk_s += np.bincount(cells, WIDTHS_S[buckets], _NUM_CELLS)

    def fade(self, factor: float) -> None:
        """Let what was counted until now weigh less than what comes."""
        self.reuses *= factor
        self.at_risk_s *= factor

    def hazards(self) -> list[list[float]]:
        """Return the reuses per second of each class and bucket, roughly; in no class do they rise with age."""
        pairs = zip(self.reuses.tolist(), self.at_risk_s.tolist(), strict=True)
        return [[roughly(rate) for rate in falling_rates(reuses, at_risk_s)] for reuses, at_risk_s in pairs]


def _cells(classes: Ints, buckets: Ints) -> Ints:
    return classes.astype(np.intp) * NUM_BUCKETS + buckets


def roughly(rate: float) -> float:
    """Return the nearest half octave: rates that differ by less are equal, as they come from few observations."""
    return math.exp2(round(2 * math.log2(max(rate, _LEAST_RATE))) / 2)


def falling_rates(counts: list[float], times_s: list[float]) -> list[float]:
    """Return counts per time, with neighbours pooled until no rate is above the one before it.

    This is the isotonic fit: of all sequences that do not rise, the most likely one.
    """
    pooled: list[tuple[float, float, int]] = []
    for count, time_s in zip(counts, times_s, strict=True):
        number = 1
        while pooled and count * pooled[-1][1] > pooled[-1][0] * time_s:
            count_before, time_before_s, number_before = pooled.pop()
            count, time_s, number = count + count_before, time_s + time_before_s, number + number_before
        pooled.append((count, time_s, number))
    return [rate for count, time_s, number in pooled for rate in [count / time_s] * number]

"""Count the time at risk of blocks while it passes: their ages go from bucket to bucket. No locking here.

An age that is counted only when it ends is counted too late: the blocks that are never used again would be missing for
hours, and all others would look too likely to be.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.pool.eviction.reuse import EDGES_S, NUM_BUCKETS, WIDTHS_S, Floats, Ints, ReuseCounts

#: A bucket is looked at when its oldest ages are over by this share of its width, so that many are counted at once.
_SLACK = 0.25
_LEAST_SLACK_S = 0.25
#: The most ages that one look at a bucket counts; the others wait for the next call.
_MOST_AT_ONCE = 8192

_ENDS_S: list[float] = EDGES_S[1:].tolist()
_DUE_S = [end + max(_LEAST_SLACK_S, _SLACK * width) for end, width in zip(_ENDS_S, WIDTHS_S.tolist(), strict=True)]
_NEVER_S = float("inf")


@dataclass(slots=True)
class _Ages:
    """Ages in one bucket: the row of each block, and the number of the use that began the age.

    `last_s` is when the last of them began.
    """

    last_s: float
    rows: npt.NDArray[np.int32]
    numbers: npt.NDArray[np.uint32]


class AgeQueues:
    """The ages of blocks by bucket, in the order in which they began.

    An age goes on as long as its block's last use has its number.

    Args:
        counts: what passes is counted there.
        number: number of the last use of the block of each row.
        classes: class of each row, an array of uses so far.
    """

    def __init__(self, counts: ReuseCounts, number: npt.NDArray[np.uint32], uses: npt.NDArray[np.uint8]) -> None:
        self._counts, self._number, self._uses = counts, number, uses
        self._queues: list[deque[_Ages]] = [deque() for _ in range(NUM_BUCKETS)]
        # When the ages began that left a bucket last: of later ones its time is not counted yet.
        self._left_s = np.full(NUM_BUCKETS, -_NEVER_S)
        self._due_s = _NEVER_S

    def begin(self, rows: npt.NDArray[np.int32], number: int, now_s: float) -> None:
        """Begin ages of blocks that are used now, under the number of this use."""
        self._queues[0].append(_Ages(now_s, rows, np.full(len(rows), number, np.uint32)))
        self._due_s = min(self._due_s, now_s + _DUE_S[0])

    def end(self, classes: Ints, began_s: Floats, ages_s: Floats, buckets: Ints) -> None:
        """Count ages that a reuse ends now, and the bucket before the last if the age had not left it yet."""
        self._counts.ended(classes, ages_s, buckets)
        before = buckets - 1
        is_late = (before >= 0) & (began_s > self._left_s[before])
        if is_late.any():
            self._counts.passed(classes[is_late], before[is_late])

    def advance(self, now_s: float) -> None:
        """Count what passed until now. Mostly nothing is due, and the work of one call is bounded."""
        if now_s < self._due_s:
            return
        due_s = _NEVER_S
        for bucket, queue in enumerate(self._queues):
            if queue and queue[0].last_s + _DUE_S[bucket] <= now_s:
                self._pass(bucket, now_s - _ENDS_S[bucket])
            if queue:
                due_s = min(due_s, queue[0].last_s + _DUE_S[bucket])
        self._due_s = due_s

    def _pass(self, bucket: int, until_s: float) -> None:
        """Move the ages on that began until then."""
        queue, over, num_over = self._queues[bucket], list[_Ages](), 0
        while queue and queue[0].last_s <= until_s and num_over < _MOST_AT_ONCE:
            over.append(queue.popleft())
            num_over += len(over[-1].rows)
        last_s = over[-1].last_s
        rows, numbers = over[0].rows, over[0].numbers
        if len(over) > 1:
            rows, numbers = np.concatenate([each.rows for each in over]), np.concatenate([a.numbers for a in over])
        goes_on = self._number[rows] == numbers
        rows, numbers = rows[goes_on], numbers[goes_on]
        self._left_s[bucket] = last_s
        if len(rows):
            self._counts.passed(self._uses[rows] - 1, bucket)
            if bucket + 1 < NUM_BUCKETS:
                self._queues[bucket + 1].append(_Ages(last_s, rows, numbers))

    def num_ages(self) -> int:
        """Return how many ages are kept, those included that ended since they were counted last."""
        return sum(len(ages.rows) for queue in self._queues for ages in queue)

"""Evict first what is least likely to be used again soon, as learned from earlier uses. No locking here.

Blocks are in classes, by the number of their uses so far. For each class `ReuseCounts` estimates the hazard by age: the
reuses per second of a block that was last used that long ago. The block with the least hazard goes first. Hazards do
not rise with age, so the oldest block of a class is its least, and only the oldest of each class are compared: each
class is a list in the order of touches, as the one list of LRU is. docs/eviction.md describes it, and
docs/adr/0029-learned-reuse.md has the reasons.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.blocks.indexes import ints_in
from kvstore.pool.eviction.ages import AgeQueues
from kvstore.pool.eviction.block_uses import BlockUses
from kvstore.pool.eviction.ghosts import Rows
from kvstore.pool.eviction.policy import History
from kvstore.pool.eviction.reuse import EDGES_S, NUM_BUCKETS, NUM_CLASSES, ReuseCounts, bucket_of
from kvstore.pool.eviction.touch_log import TouchLog
from kvstore.pool.slot_lists import SlotList
from kvstore.runtime import clock

#: A second touch within this time is of the same prompt: a retry, a pin after a load, a lease for a peer.
USE_GAP_S = 1.0
#: A save that finds its blocks here is of the prompt that loaded them, if that was within this time.
SAVE_GAP_S = 60.0
#: Evicted blocks that are remembered: with fewer, a small pool would learn only of reuses that LRU serves anyway.
_GHOSTS_PER_SLOT, _FEWEST_GHOSTS = 4, 1 << 16
#: Until so many calls found blocks that are used again, LRU decides: estimates from fewer may be worse.
_FEWEST_REUSES = 400
#: Calls with uses between two estimates, and between two times that the counts fade, by this factor.
_ESTIMATE_EVERY, _FADE_EVERY, _FADE = 200, 4000, 0.7
_MAX_NUMBER = (1 << 32) - 1

_EDGES: list[float] = EDGES_S.tolist()


def ghosts_for(num_blocks: int) -> int:
    """Return how many evicted blocks are remembered where so many are kept."""
    return max(_GHOSTS_PER_SLOT * num_blocks, _FEWEST_GHOSTS) if num_blocks else 0


class LearnedReuse:
    """The slots of a pool by how likely their blocks are used again; see `EvictionPolicy`.

    Args:
        num_slots: of the pool.
        now_s: the clock by which ages count, in seconds.
        num_ghosts: how many evicted blocks are remembered; four per slot, and 65,536 at least, when None.
        fewest_reuses: how many calls have to find blocks that are used again before anything but LRU decides.
    """

    def __init__(
        self,
        num_slots: int,
        now_s: Callable[[], float] = clock.now_s,
        *,
        num_ghosts: int | None = None,
        fewest_reuses: int = _FEWEST_REUSES,
    ) -> None:
        self._now_s, self._fewest_reuses = now_s, fewest_reuses
        if num_ghosts is None:
            num_ghosts = ghosts_for(num_slots)
        #: Last touch of each slot; a slot with 0 is not in the order.
        self.stamp = array("q", bytes(8 * num_slots))
        #: When that was, and the class of each slot then, which says in whose log it is.
        self._touched_s, self._class = array("d", bytes(8 * num_slots)), array("B", bytes(num_slots))
        # The same memory, for all slots of a chain at once.
        self._stamps, self._classes = np.frombuffer(self.stamp, np.int64), np.frombuffer(self._class, np.uint8)
        self._times_s = np.frombuffer(self._touched_s, np.float64)
        # What `blocks` knows of each slot's block. A touch that is no use asks only this, in slices.
        self._used_s = np.full(num_slots, -np.inf)
        self._num_touches = 0
        self._logs = tuple(TouchLog(self.stamp) for _ in range(NUM_CLASSES))
        #: How often a slot came back to a place that its log had passed.
        self._num_put_back = 0
        self.blocks = BlockUses(num_slots, num_ghosts)
        self.counts = ReuseCounts()
        self.ages = AgeQueues(self.counts, self.blocks.number, self.blocks.uses)
        self._number = self._num_uses = self.num_reuses = 0
        #: Per class and bucket; None while LRU decides.
        self.hazards: list[list[float]] | None = None

    def claimed(self, slots: SlotList, hashes: Sequence[bytes]) -> None:
        """Note the first use of new blocks, and the reuse of blocks that were evicted not too long ago."""
        now_s, rows = self._now_s(), self.blocks.claimed(slots, hashes)
        self.ages.advance(now_s)
        self._use(rows, USE_GAP_S, now_s)
        self._note(slots, rows)

    def touched(self, slots: SlotList, *, is_use: bool) -> int:
        """Make the slots of a chain the most recent of their classes; blocks that are used change their class."""
        self._num_touches = stamp = self._num_touches + 1
        if not len(slots):
            return stamp
        index, now_s, gap_s = slots.index, self._now_s(), USE_GAP_S if is_use else SAVE_GAP_S
        self.ages.advance(now_s)
        if now_s - np.minimum.reduce(self._used_s[index]) >= gap_s:  # Otherwise none of them is used.
            rows = self.blocks.rows_of(slots)
            self._use(rows, gap_s, now_s)
            self._note(slots, rows)
        self._stamps[index], self._times_s[index] = stamp, now_s
        classes, numbers = self._classes[index], ints_in(slots.packed)
        packed = classes.tobytes()
        if packed == packed[:1] * len(packed):  # Much faster than with NumPy.
            self._logs[packed[0]].add(stamp, numbers)
        else:
            for number, log in enumerate(self._logs):
                if len(mine := numbers[classes == number]):
                    log.add(stamp, mine)
        return stamp

    def _note(self, slots: SlotList, rows: Rows) -> None:
        """Keep the class of slots, and when each was used, as `blocks` has them."""
        self._used_s[slots.index], self._classes[slots.index] = self.blocks.times_s[rows], self.blocks.uses[rows] - 1

    def _use(self, rows: Rows, gap_s: float, now_s: float) -> None:
        """Note a use of blocks, except of those whose last use is less than `gap_s` ago."""
        blocks = self.blocks
        ages_s = now_s - blocks.times_s[rows]
        is_used = ages_s >= gap_s
        if not is_used.all():
            rows, ages_s = rows[is_used], ages_s[is_used]
            if not len(rows):
                return
        uses = blocks.uses[rows]
        self._count_reuses(rows, uses, ages_s)
        self._number = number = self._number % _MAX_NUMBER + 1
        blocks.uses[rows] = np.minimum(uses + 1, NUM_CLASSES)
        blocks.times_s[rows], blocks.number[rows] = now_s, number
        self.ages.begin(rows, number, now_s)
        self._num_uses += 1
        if self._num_uses % _FADE_EVERY == 0:
            self.counts.fade(_FADE)
        if self._num_uses % _ESTIMATE_EVERY == 0 and self.num_reuses >= self._fewest_reuses:
            self.hazards = self.counts.hazards()

    def _count_reuses(self, rows: Rows, uses: npt.NDArray[np.uint8], ages_s: npt.NDArray[np.float64]) -> None:
        buckets = bucket_of(ages_s)
        is_counted = buckets < NUM_BUCKETS  # Not for a first use, whose age is infinite.
        if not is_counted.all():
            rows, uses, ages_s, buckets = rows[is_counted], uses[is_counted], ages_s[is_counted], buckets[is_counted]
            if not len(rows):
                return
        # However many blocks a prompt has, it is one observation.
        self.num_reuses += 1
        self.ages.end(uses - 1, self.blocks.times_s[rows], ages_s, buckets)

    def released(self, slots: Iterable[int], stamp: int) -> None:
        """Let slots come up again whose place was passed; a slot with a later touch has another place."""
        logs = self._logs
        for log in logs:
            if stamp <= log.passed:
                break
        else:  # As after nearly every lease, so without a generator.
            return
        for slot in slots:
            self._num_put_back += logs[self._class[slot]].put_back(slot)

    #: Written blocks come up in the same way as released ones.
    stored = released

    def evicted(self, slots: SlotList, hashes: Sequence[bytes]) -> None:
        """Remember blocks that are not here any more: when they come back, it was a reuse."""
        self.blocks.evicted(slots, hashes)

    def freed(self, slots: SlotList) -> None:
        """Take slots out of the order."""
        self._stamps[slots.index] = 0
        self.blocks.forget(slots)

    def victims(self) -> Iterator[int]:
        """Take slots out of the order, least hazard first; slots that are not yielded stay in it."""
        now_s = self._now_s()
        while (log := self._least_likely(now_s)) is not None:
            first, slot = log.oldest()
            touched, num_put_back = first, self._num_put_back
            # What was touched together is equally likely, so look at the other classes only after that, or when a slot
            # came back: it may be the parent of the one that has just gone, and of any class.
            while touched == first and num_put_back == self._num_put_back:
                log.pop()
                yield slot
                touched, slot = log.oldest()

    def _least_likely(self, now_s: float) -> TouchLog | None:
        """Return the log whose oldest slot has the least hazard, of equal ones the one touched first."""
        least, chosen = (float("inf"), 0), None
        for number, log in enumerate(self._logs):
            touched, slot = log.oldest()
            if touched:
                hazard = 0.0
                if self.hazards is not None:
                    # Since the last touch, which may be a save shortly after the use: so ages only fall along a log.
                    age_s = now_s - self._touched_s[slot]
                    bucket = max(bisect_right(_EDGES, age_s) - 1, 0)
                    # Of such ages nothing is known, so those blocks go first, in the order of LRU.
                    hazard = self.hazards[number][bucket] if bucket < NUM_BUCKETS else 0.0
                if (hazard, touched) < least:
                    least, chosen = (hazard, touched), log
        return chosen

    def history(self, slots: npt.NDArray[np.intp]) -> History:
        """Return the uses of blocks, and when each was used and touched last."""
        rows = self.blocks.rows_at(slots)
        return self.blocks.uses[rows], self.blocks.times_s[rows], self._times_s[slots]

    def recall_uses(self, slots: SlotList, uses: npt.NDArray[np.uint8]) -> None:
        """Take over the uses of blocks; the touch that follows puts each into the log of its class."""
        rows = self.blocks.rows_of(slots)
        self.blocks.uses[rows] = np.maximum(uses, 1)
        self._note(slots, rows)

    def recall_times(
        self, slots: SlotList, used_s: npt.NDArray[np.float64], touched_s: npt.NDArray[np.float64]
    ) -> None:
        """Take over the times of blocks as far as they are known. Of their ages until now nothing is counted."""
        rows, is_known = self.blocks.rows_of(slots), np.isfinite(used_s) & np.isfinite(touched_s)
        times_s, now_s = self._times_s[slots.index], self._now_s()
        times_s = np.where(is_known, np.minimum(touched_s, now_s), times_s)
        self._times_s[slots.index] = times_s
        self.blocks.times_s[rows[is_known]] = np.minimum(used_s[is_known], now_s)
        self._note(slots, rows)

    def check(self, evictable: set[int]) -> None:
        """Assert that every evictable slot has a place, and that logs and blocks are consistent."""
        placed = set[int]()
        for number, log in enumerate(self._logs):
            mine = log.check()
            placed |= {slot for slot in mine if self._class[slot] == number}
        self.blocks.check()
        slots = np.flatnonzero(self._stamps)
        uses, used_s, _ = self.history(slots)
        assert (self._used_s[slots] == used_s).all(), "times of uses"
        assert (self._classes[slots] == uses - 1).all(), "classes"
        assert evictable <= placed, f"slots {sorted(evictable - placed)} could be evicted but never come up"

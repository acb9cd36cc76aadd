"""Keep blocks of one claim together. So a chain is found in a few comparisons instead of one per block.

A request mostly asks for the same hashes that an earlier one stored. Then one comparison of bytes replaces as many
look-ups in the index as there are blocks. No locking here: the pool holds its lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstore.blocks.chain import HASH_BYTES
from kvstore.pool.slot_lists import NO_SLOTS, SlotList

_WORDS = HASH_BYTES // 8
#: Hashes or slots compared at first, and the growth factor after each comparison of equal ones.
_FIRST_STRETCH, _GROWTH = 16, 8


@dataclass(slots=True, eq=False)
class Run:
    """Blocks of one claim.

    Args:
        data: their hashes, back to back.
        slots: slot of each.
        whole: the same slots as a `SlotList`.
        num_ready: this many leading blocks are ready in these slots; it may be too low, never too high.
        num_lost: how many blocks are not in these slots any more.
        is_in_parts: whether ranks write its blocks in parts, which keep places in it.
    """

    data: bytes
    slots: list[int]
    whole: SlotList
    num_ready: int = 0
    num_lost: int = 0
    is_in_parts: bool = False

    def num_shared(self, place: int, data: bytes, at: int) -> int:
        """Return how many ready blocks from `place` on have the hashes in `data` from `at` on; the first has."""
        most = min(self.num_ready - place, len(data) // HASH_BYTES - at)
        if most <= 1:
            return 1
        # Neither comparison reads much more than the shared blocks, however long the run is. So the cost of a message
        # is bounded by its length, in any order of its hashes: a view copies nothing, its comparison ends at the first
        # difference, and the search for that place uses growing stretches.
        ours = memoryview(self.data)
        if data.startswith(ours[place * HASH_BYTES : (place + most) * HASH_BYTES], at * HASH_BYTES):
            return most
        count, stretch = 1, _FIRST_STRETCH
        while True:
            end = min(count + stretch, most)
            begin, their_begin = (place + count) * HASH_BYTES, (at + count) * HASH_BYTES
            if not data.startswith(ours[begin : (place + end) * HASH_BYTES], their_begin):
                break
            count, stretch = end, stretch * _GROWTH
        own_words = np.frombuffer(self.data, np.uint64, (end - count) * _WORDS, begin)
        words = np.frombuffer(data, np.uint64, (end - count) * _WORDS, their_begin)
        return count + int((own_words != words).argmax()) // _WORDS

    def published(self, slots: list[int]) -> None:
        """Count blocks that became ready, if they directly follow the first `num_ready` ones."""
        end = self.num_ready + len(slots)
        if self.slots[self.num_ready : end] == slots:
            self.num_ready = end

    def lost(self, place: int) -> bool:
        """Note that a ready block is not here any more; return `is_thin`."""
        if place < self.num_ready:
            self.num_ready = place
        self.num_lost += 1
        return self.is_thin

    @property
    def is_thin(self) -> bool:
        """Whether few of many blocks are left, so that the run should be shortened."""
        count = len(self.slots)
        return count < 2 * self.num_lost < 2 * count and not self.is_in_parts


class Segment(NamedTuple):
    """Consecutive blocks of a claim. They begin at `place` in its run, and at `at` in a list of slots."""

    run: Run
    place: int
    at: int
    length: int


#: For a slot that was never claimed for a block with a name.
NO_RUN = Run(b"", [], NO_SLOTS)


class RunColumns:
    """The claim of each slot: `run` has its blocks, `place` is the slot's position among them."""

    def __init__(self, num_slots: int) -> None:
        self.run = [NO_RUN] * num_slots
        self.place = [0] * num_slots
        #: Runs to be shortened, see `shorten`.
        self.thin = set[Run]()

    def listed(self, slots: list[int]) -> SlotList:
        """Return slots as a `SlotList`, without a copy if they are exactly one claim."""
        run = self.run[slots[0]] if slots else NO_RUN
        return run.whole if run.slots == slots else SlotList.of(slots)

    def segments(self, slots: Sequence[int | None]) -> list[Segment]:
        """Return the stretches of slots that are neighbours in one claim, in order; skips None."""
        found, at = list[Segment](), 0
        while at < len(slots):
            slot, count = slots[at], 1
            if slot is not None:
                run, place = self.run[slot], self.place[slot]
                count = self.num_of_claim(run, place, slots, at)
                found.append(Segment(run, place, at, count))
            at += count
        return found

    def num_of_claim(self, run: Run, place: int, slots: Sequence[int | None], at: int) -> int:
        """Return how many slots from `at` on are of one claim now, from `place` on; the first is.

        Equal numbers do not suffice: the same slot may have been claimed anew since. Growing stretches, so that the
        cost is bounded by the result.
        """
        most, count, stretch = min(len(run.slots) - place, len(slots) - at), 1, _FIRST_STRETCH
        while count < most:
            end = min(count + stretch, most)
            ours = run.slots[place + count : place + end]
            if ours != slots[at + count : at + end] or self._runs_of(ours).count(run) < len(ours):
                break
            count, stretch = end, stretch * _GROWTH
        while count < most and (slot := run.slots[place + count]) == slots[at + count] and self.run[slot] is run:
            count += 1
        return count

    def _runs_of(self, slots: list[int]) -> list[Run]:
        """Return the claim of each slot; they ascend, as the slots of one claim do."""
        first, last = slots[0], slots[-1]
        if last - first == len(slots) - 1:
            return self.run[first : last + 1]
        return list(map(self.run.__getitem__, slots))

    def look_at(self, run: Run) -> None:
        """Have a run shortened soon if few of its blocks are left."""
        if run.is_thin:
            self.thin.add(run)

    def shorten(self, block_hash: Sequence[bytes], is_here: Callable[[int], bool]) -> None:
        """Give the remaining blocks of each thin run a run of their own: few must not keep the memory of many.

        `is_here` tells whether a slot's block is ready or being written. An evicted one keeps its hash for a while.
        """
        thin, self.thin = self.thin, set()
        for run in thin:
            if run.is_thin and (
                left := [at for at, slot in enumerate(run.slots) if self.run[slot] is run and is_here(slot)]
            ):
                slots = [run.slots[place] for place in left]
                data = b"".join([block_hash[slot] for slot in slots])
                # The first ones are still ready, all of them.
                short = Run(data, slots, SlotList.of(slots, ascending=True), bisect_left(left, run.num_ready))
                for place, slot in enumerate(slots):
                    self.run[slot], self.place[slot] = short, place

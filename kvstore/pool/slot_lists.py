"""Blocks that were claimed together, so that a chain is found in a few comparisons instead of one for each block.

What a request asks for is mostly what an earlier one stored, hash for hash: then one comparison of bytes says
for all of it what as many look-ups in the index would have said. A run knows of its first `num_ready` blocks
that they are ready; what it does not know is looked up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.blocks.chain import HASH_BYTES
from kvstore.blocks.indexes import PackedInts

_WORDS = HASH_BYTES // 8
#: So many slots are compared at once.
_STRETCH = 256
#: So many hashes are compared at first, and so many times as many each time they were the same.
_FIRST_STRETCH, _GROWTH = 16, 8


@dataclass(slots=True, eq=False)
class SlotList:
    """Slots in the order of a chain, ready to be looked at all at once. Nobody changes one.

    Args:
        index: takes their items out of a column: a slice where they are neighbours, an array else.
        packed: the same for the wire.
        is_distinct: none of them is there twice.
    """

    index: slice | npt.NDArray[np.intp]
    packed: PackedInts
    is_distinct: bool

    @classmethod
    def of(cls, slots: list[int], *, ascending: bool = False) -> SlotList:
        """Return slots in this form; with `ascending` each is known to be greater than the one before."""
        count = len(slots)
        if slots and slots[-1] - slots[0] == count - 1:
            neighbours = range(slots[0], slots[0] + count)
            if ascending or slots == list(neighbours):  # To pack a range takes a fraction of what a list does.
                return cls(slice(neighbours.start, neighbours.stop), PackedInts.of(neighbours), True)
        return cls(np.array(slots, np.intp), PackedInts.of(slots), ascending or len(set(slots)) == count)

    def __len__(self) -> int:
        return len(self.packed)

    def __iter__(self) -> Iterator[int]:
        return iter(self.packed)

    def part(self, begin: int, end: int) -> SlotList:
        """Return some of them that follow each other."""
        if begin == 0 and end == len(self):
            return self
        packed = PackedInts(self.packed.packed[4 * begin : 4 * end])
        if isinstance(self.index, slice):
            first = self.index.start
            return SlotList(slice(first + begin, first + end), packed, True)
        return SlotList(self.index[begin:end], packed, self.is_distinct)


def join(pieces: list[SlotList]) -> SlotList:
    """Return the slots of several lists in one."""
    if len(pieces) == 1:
        return pieces[0]
    packed = PackedInts(b"".join([piece.packed.packed for piece in pieces]))
    index = np.array(packed, np.intp)
    return SlotList(index, packed, len(np.unique(index)) == len(index))


@dataclass(slots=True, eq=False)
class Run:
    """Blocks of one claim.

    Args:
        data: their hashes, back to back.
        slots: slot of each.
        whole: the same.
        num_ready: so many from the front are ready, in these slots; never too many.
    """

    data: bytes
    slots: list[int]
    whole: SlotList
    num_ready: int = 0

    def num_shared(self, place: int, data: bytes, at: int) -> int:
        """Return how many blocks from `place` on are ready and the same as those of other hashes from `at` on.

        Args:
            place: of a block that is ready and is the one at `at`.
            data: hashes back to back.
            at: index of a block in them.
        """
        most = min(self.num_ready - place, len(data) // HASH_BYTES - at)
        if most <= 1:
            return 1
        # Neither compares much more than what is shared, however long the rest of the run is, so that a message costs
        # no more than its length whatever its order: a view is no copy, its comparison ends with the first
        # difference, and the place of that is looked for in stretches that grow.
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

    def num_same(self, place: int, slots: Sequence[int | None], at: int) -> int:
        """Return how many slots from `at` on are those from `place` on here; they are the same there."""
        most, count = min(len(self.slots) - place, len(slots) - at), 1
        while count < most:
            end = min(count + _STRETCH, most)
            if self.slots[place + count : place + end] != slots[at + count : at + end]:
                break
            count = end
        while count < most and self.slots[place + count] == slots[at + count]:
            count += 1
        return count

    def published(self, slots: list[int]) -> None:
        """Note that blocks of it became ready, if they follow those of which it is known."""
        end = self.num_ready + len(slots)
        if self.slots[self.num_ready : end] == slots:
            self.num_ready = end

    def lost(self, place: int) -> None:
        """Note that a block is not ready any more."""
        if place < self.num_ready:
            self.num_ready = place


class Segment(NamedTuple):
    """Some blocks of a claim that follow each other: from `place` on there, from `at` on in a list of slots."""

    run: Run
    place: int
    at: int
    length: int

"""Keep blocks of one claim together. So a chain is found in a few comparisons instead of one per block.

A request mostly asks for the same hashes that an earlier one stored. Then one comparison of bytes replaces as many
look-ups in the index as there are blocks. The first `num_ready` blocks of a run are known to be ready; all others
are looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.blocks.chain import HASH_BYTES
from kvstore.blocks.indexes import INT_BYTES, PackedInts

_WORDS = HASH_BYTES // 8
#: Hashes compared at first, and the growth factor after each comparison of equal hashes.
_FIRST_STRETCH, _GROWTH = 16, 8


@dataclass(slots=True, eq=False)
class SlotList:
    """Slots in chain order, in a form that indexes a whole column at once. Never changed.

    Args:
        index: index into a column: a slice if the slots are neighbours, otherwise an array.
        packed: the same slots, packed for messages.
        is_distinct: whether no slot is there twice.
    """

    index: slice | npt.NDArray[np.intp]
    packed: PackedInts
    is_distinct: bool

    @classmethod
    def of(cls, slots: list[int], *, ascending: bool = False) -> SlotList:
        """Return slots in this form; `ascending` promises that each is greater than the one before."""
        count = len(slots)
        if slots and slots[-1] - slots[0] == count - 1:
            neighbours = range(slots[0], slots[0] + count)
            if ascending or slots == list(neighbours):  # Packing a range is much faster than packing a list.
                return cls(slice(neighbours.start, neighbours.stop), PackedInts.of(neighbours), True)
        return cls(np.array(slots, np.intp), PackedInts.of(slots), ascending or len(set(slots)) == count)

    def __len__(self) -> int:
        return len(self.packed.packed) // INT_BYTES  # Directly: every lease asks a dozen times.

    def __iter__(self) -> Iterator[int]:
        return iter(self.packed)

    def part(self, begin: int, end: int) -> SlotList:
        """Return the slots from `begin` to `end`."""
        if begin == 0 and end == len(self):
            return self
        packed = PackedInts(self.packed.packed[INT_BYTES * begin : INT_BYTES * end])
        if isinstance(self.index, slice):
            first = self.index.start
            return SlotList(slice(first + begin, first + end), packed, True)
        index = self.index[begin:end]
        # A view would keep the whole array for as long as a reader of these few.
        return SlotList(index if 2 * len(index) > len(self) else index.copy(), packed, self.is_distinct)


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
        """Return how many ready blocks from `place` on have the same hashes as `data` from `at` on.

        Args:
            place: of a ready block with the same hash as the one at `at`.
            data: hashes back to back.
            at: index of a hash in `data`.
        """
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

"""Hold the slots of a chain in the forms that columns and messages take. A list never changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.blocks.indexes import INT_BYTES, ints_in, pack_ints


@dataclass(slots=True, eq=False)
class SlotList:
    """Slots in chain order, in a form that indexes a whole column at once. Never changed.

    Args:
        index: index into a column: a slice if the slots are neighbours, otherwise an array.
        packed: the same slots as bytes, from `pack_ints`.
        is_distinct: whether no slot is there twice.
    """

    index: slice | npt.NDArray[np.intp]
    packed: bytes
    is_distinct: bool

    @classmethod
    def of(cls, slots: list[int], *, ascending: bool = False) -> SlotList:
        """Return slots in this form; `ascending` promises that each is greater than the one before."""
        count = len(slots)
        if slots and slots[-1] - slots[0] == count - 1:
            neighbours = range(slots[0], slots[0] + count)
            if ascending or slots == list(neighbours):  # Packing a range is much faster than packing a list.
                return cls(slice(neighbours.start, neighbours.stop), pack_ints(neighbours), True)
        return cls(np.array(slots, np.intp), pack_ints(slots), ascending or len(set(slots)) == count)

    def __len__(self) -> int:
        return len(self.packed) // INT_BYTES

    def __iter__(self) -> Iterator[int]:
        return iter(ints_in(self.packed).tolist())

    def part(self, begin: int, end: int) -> SlotList:
        """Return the slots from `begin` to `end`."""
        if begin == 0 and end == len(self):
            return self
        packed = self.packed[INT_BYTES * begin : INT_BYTES * end]
        if isinstance(self.index, slice):
            first = self.index.start
            return SlotList(slice(first + begin, first + end), packed, True)
        index = self.index[begin:end]
        # A view would keep the whole array for as long as a reader of these few.
        return SlotList(index if 2 * len(index) > len(self) else index.copy(), packed, self.is_distinct)


NO_SLOTS = SlotList.of([])


def join(pieces: list[SlotList]) -> SlotList:
    """Return the slots of several lists in one."""
    if len(pieces) == 1:
        return pieces[0]
    packed = b"".join([piece.packed for piece in pieces])
    index = ints_in(packed).astype(np.intp)
    return SlotList(index, packed, len(np.unique(index)) == len(index))

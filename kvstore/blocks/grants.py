"""What a pool hands out: grants of pinned blocks, tickets for blocks to write, and its counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from kvstore.blocks.codec import U32, U64, Epoch, IndexArray, Record, ints_in
from kvstore.errors import ProtocolError


class PinKind(Enum):
    """How strongly blocks are held.

    LEASE: read now, until a deadline. HARD: never evicted, counted against a quota of its own. SOFT: a
    preference, evicted last, when nothing else is left.
    """

    LEASE = 0
    HARD = 1
    SOFT = 2


class PackedInts(Sequence[int]):
    """Small integers as the wire has them: an immutable sequence, equal to a tuple of the same integers.

    Two thousand slots are one bytes object on their way from the pool to an index array of the engine.

    Args:
        packed: little-endian int32, back to back.
    """

    __slots__ = ("packed",)

    def __init__(self, packed: bytes = b"") -> None:
        self.packed = packed

    @classmethod
    def of(cls, values: Sequence[int] | npt.NDArray[np.intp]) -> PackedInts:
        """Return the same integers packed; what is packed already is not copied."""
        if isinstance(values, PackedInts):
            return values
        if isinstance(values, range):
            values = np.arange(values.start, values.stop, values.step, dtype="<i4")
        return cls(np.asarray(values, dtype="<i4").tobytes())

    def __len__(self) -> int:
        return len(self.packed) // 4

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return tuple(self)[index] if isinstance(index, slice) else int(self._array()[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self._array().tolist())

    def __contains__(self, value: object) -> bool:
        return value in self._array().tolist()

    def __add__(self, other: Iterable[int]) -> tuple[int, ...]:
        return (*self, *other)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedInts):
            return self.packed == other.packed
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        found = self._array()
        return np.array(found, dtype, copy=copy)

    def _array(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.packed, "<i4")


class Grant(Record, frozen=True):
    """Pinned blocks: a prefix of what was asked for.

    Args:
        lease_id: names the pin to `release`; 0 when nothing was pinned.
        packed_slots: slot of each pinned block, in chain order, as `PackedInts` packs them.
        generations: the life of each slot, little-endian uint32.
        num_refused: readable blocks behind them that the budget of pins had no room for.
        epoch: the life of the pool; leases of another one are void.
    """

    lease_id: U64 = 0
    packed_slots: bytes = b""
    generations: bytes = b""
    num_refused: U32 = 0
    epoch: Epoch = bytes(8)

    @property
    def slots(self) -> PackedInts:
        """The slots, one by one.

        Raises:
            ProtocolError: these are no whole integers.
        """
        ints_in(self.packed_slots)
        return PackedInts(self.packed_slots)


class StoreTicket(Record, frozen=True, kw_only=True):
    """What `prepare_store` claimed.

    Args:
        write_id: names the write to `complete_store` and `abort_store`; 0 when there is nothing to write.
        packed_indexes: positions in the chain that the caller has to write, ascending, as `PackedInts` packs them.
        packed_slots: slot of each of them.
        num_resident: blocks that were there already, or are just being written by somebody else.
        num_refused: blocks at the end of the chain for which no slot could be had.
        num_awaited: how many of the resident ones are still being written by somebody else, who may yet give
            them up; `Pool.watch` tells how that ended.
        num_clears: how often the namespace had been cleared, or another that shares its counter. Where that is
            another count than the caller named, nothing was claimed.
        generations: the life of each slot, little-endian uint32; `complete_store` can be given them back.
        epoch: the life of the pool; tickets of another one are void.
    """

    write_id: U64
    packed_indexes: bytes = b""
    packed_slots: bytes = b""
    num_resident: U32 = 0
    num_refused: U32 = 0
    num_awaited: U32 = 0
    num_clears: U64 = 0
    generations: bytes = b""
    epoch: Epoch = bytes(8)

    @property
    def indexes(self) -> PackedInts:
        """The positions, one by one."""
        return PackedInts(self.packed_indexes)

    @property
    def slots(self) -> PackedInts:
        """The slots, one by one."""
        return PackedInts(self.packed_slots)

    def arrays(self) -> tuple[IndexArray, IndexArray]:
        """Return (positions, slots) of a ticket that another process made.

        Raises:
            ProtocolError: these are not as many.
        """
        if len(self.packed_indexes) != len(self.packed_slots):
            raise ProtocolError(
                f"wanted as many slots as positions, got {len(self.packed_slots)} bytes of them and "
                f"{len(self.packed_indexes)}"
            )
        return ints_in(self.packed_indexes), ints_in(self.packed_slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Counts of one snapshot, taken under the lock; the five slot counts add up to `num_slots`."""

    num_slots: int
    num_free: int
    num_writing: int
    num_idle: int
    num_pinned: int
    num_quarantined: int
    num_leases: int
    num_writes: int
    num_evicted: int
    num_published: int
    num_hard_pinned: int = 0
    num_soft_pinned: int = 0
    #: Of `num_leases`, how many are soft pins.
    num_soft_pins: int = 0

"""Lists of block positions and slots: little-endian int32, back to back, in messages and in memory.

Computations use NumPy arrays; kernels take them as int64, see kvstore.kernels.merging.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.bounds import clip
from kvstore.errors import ProtocolError

IndexArray = npt.NDArray[np.int32]
_WIRE = np.dtype("<i4")
#: Bytes of a packed integer.
INT_BYTES = 4
_BROKEN = "run one version of raykv everywhere, and make a new client"


def pack_ints(values: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Return small integers as little-endian int32 bytes."""
    if isinstance(values, range):
        values = np.arange(values.start, values.stop, values.step, _WIRE)
    return np.asarray(values, _WIRE).tobytes()


def ints_in(packed: object) -> IndexArray:
    """Return the integers that `pack_ints` packed, as an array over the same memory.

    Raises:
        ProtocolError: the bytes are not whole integers.
    """
    if not isinstance(packed, bytes) or len(packed) % INT_BYTES:
        raise ProtocolError(f"wanted whole int32 values, got {clip(packed)}")
    return np.frombuffer(packed, _WIRE)


def checked_slots(slots: IndexArray, num_blocks: int, num_slots: int, *, is_whole: bool = False) -> IndexArray:
    """Return a store's slots after a check. Without it, a copy would go to any place that they name.

    Args:
        slots: from the store's answer.
        num_blocks: the most blocks that were asked for.
        num_slots: size of the memory that holds the slots.
        is_whole: require one slot per block, all different, because they are written.

    Raises:
        ProtocolError: there are too many slots, too few, or one is out of range or named twice.
    """
    if len(slots) > num_blocks or (is_whole and len(slots) < num_blocks):
        raise ProtocolError(f"wanted slots for {num_blocks} blocks, got {len(slots)} of them; {_BROKEN}")
    check_below("slots", slots, num_slots)
    ordered = np.sort(slots) if is_whole else slots[:0]  # For few slots much faster than `np.unique`.
    if (ordered[1:] == ordered[:-1]).any():
        raise ProtocolError(f"wanted a slot of its own for each block, got one for several; {_BROKEN}")
    return slots


def check_below(name: str, values: IndexArray, end: int) -> None:
    """Check that all integers are in [0, end).

    Raises:
        ProtocolError: one is not.
    """
    # As uint32, negative integers are the largest ones.
    if len(values) and int(np.maximum.reduce(values.view(np.uint32))) >= end:
        raise ProtocolError(f"wanted {name} from 0 to {end - 1}, got {values.min()} to {values.max()}; {_BROKEN}")

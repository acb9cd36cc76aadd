"""Lists of positions and slots that come from outside."""

import numpy as np
import pytest

from kvstore.blocks.grants import Grant
from kvstore.blocks.indexes import check_below, checked_slots, ints_in, pack_ints
from kvstore.errors import ProtocolError


def ints(*values: int):
    return ints_in(pack_ints(values))


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 5, 6, 7, 8 + 2])
def test_parts_of_an_integer_are_refused(num_bytes):
    with pytest.raises(ProtocolError, match="wanted whole int32 values"):
        ints_in(bytes(num_bytes))


@pytest.mark.parametrize("values", [(0, 8), (8,), (0, -1), (-(1 << 31),), ((1 << 31) - 1, 0)])
def test_integers_out_of_a_range_are_refused(values):
    check_below("slots", ints(*range(8)), 8)
    check_below("slots", ints(), 0)
    with pytest.raises(ProtocolError, match=f"wanted slots from 0 to 7, got {min(values)} to {max(values)}"):
        check_below("slots", ints(*values), 8)


def test_slots_are_no_more_than_blocks_and_where_they_are_written_as_many_and_different():
    assert checked_slots(ints(3, 3), 2, 8).tolist() == [3, 3]
    assert checked_slots(ints(3), 2, 8).tolist() == [3]
    assert checked_slots(ints(7, 0), 2, 8, is_whole=True).tolist() == [7, 0]
    with pytest.raises(ProtocolError, match="slots for 2 blocks, got 3"):
        checked_slots(ints(1, 2, 3), 2, 8)
    with pytest.raises(ProtocolError, match="slots for 2 blocks, got 1"):
        checked_slots(ints(1), 2, 8, is_whole=True)
    with pytest.raises(ProtocolError, match="a slot of its own"):
        checked_slots(ints(3, 3), 2, 8, is_whole=True)
    assert np.array_equal(checked_slots(ints(), 0, 0, is_whole=True), ints())


@pytest.mark.parametrize("count", [0, 1, 2, 511, 512, 513, 5000])
@pytest.mark.parametrize("wrong", [None, -1, 5000, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("where", [0, -1])
def test_packed_slots_are_checked_alike_whether_they_are_few_or_many(count, wrong, where):
    slots = np.arange(count, dtype=np.int32)
    if wrong is not None and count:
        slots[where] = wrong
    packed = pack_ints(slots)
    if wrong is None or not count:
        Grant(packed_slots=packed).slots_of(count, 5000)
    else:
        with pytest.raises(ProtocolError, match="slots"):
            Grant(packed_slots=packed).slots_of(count, 5000)
    for broken, num_blocks in ((packed + b"x", count + 1), (packed, count - 1)):
        with pytest.raises(ProtocolError):
            Grant(packed_slots=broken).slots_of(num_blocks, 1 << 31)

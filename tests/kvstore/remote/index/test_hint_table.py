"""The table under an index: how many places one look-up may take."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from kvstore.remote.index import hint_table
from kvstore.remote.index.hint_table import HintTable


def num_lines(table, keys):
    """Count the lines of code that a look-up of these keys runs: about seven for each place of the slowest key."""
    ran = []

    def see(frame, event, _):
        if event == "line":
            ran.append(frame.f_lineno)
        return see if frame.f_code.co_filename == hint_table.__file__ else None

    before = sys.gettrace()
    sys.settrace(see)
    try:
        table.bits(keys)
    finally:
        sys.settrace(before)
    return len(ran)


@pytest.mark.parametrize("distance", [1, 3, 1 << 20, 1 << 32, 1 << 44])
@pytest.mark.parametrize("secret", [14391838931264968185, 15119197035373920126, 7])
def test_keys_at_equal_distances_take_no_long_ways(distance, secret):
    table, count = HintTable(1 << 16, 1, secret), 45_000
    keys = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(distance)
    for start in range(0, count, 5000):
        table.add(keys[start : start + 5000], np.ones((1, 1), np.uint64))
    assert table.num_used == count
    assert 20 < num_lines(table, keys) < 1000
    assert 20 < num_lines(table, keys[-1] + keys[:5000]) < 1000

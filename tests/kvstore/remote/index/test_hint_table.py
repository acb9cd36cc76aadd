"""The table under an index: how many places one look-up may take."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.remote.index.hint_table import HintTable


def num_rounds(table, keys):
    """Count the places at which the slowest of these keys is looked for."""
    (place, step), left, rounds = table._start(keys), np.arange(len(keys)), 0
    while len(left):
        rounds += 1
        goes_on = (table._keys[place] != keys[left]) & (table._keys[place] != 0)
        left, step = left[goes_on], step[goes_on]
        place = (place[goes_on] + step) & (table.num_places - 1)
    return rounds


@pytest.mark.parametrize("distance", [1, 3, 1 << 20, 1 << 32, 1 << 44])
@pytest.mark.parametrize("secret", [14391838931264968185, 15119197035373920126, 7])
def test_keys_at_equal_distances_take_no_long_ways(distance, secret):
    table, count = HintTable(1 << 16, 1, secret), 45_000
    keys = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(distance)
    for start in range(0, count, 5000):
        table.add(keys[start : start + 5000], np.ones((1, 1), np.uint64))
    assert table.num_used == count
    assert num_rounds(table, keys) < 150
    assert num_rounds(table, keys[-1] + keys[:5000]) < 150

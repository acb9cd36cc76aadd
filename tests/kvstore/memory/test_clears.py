"""Counts of clearings, in memory of one life of a store."""

from __future__ import annotations

import os

from kvstore.memory.clears import ClearCounts
from kvstore.memory.presence import PresenceTable

SPACE = bytes(32)


def test_counts_of_two_lives_have_nothing_in_common_unless_the_second_goes_on():
    tables = [PresenceTable(os.urandom(8), 1 << 20) for _ in range(2)]
    first, second = (table.clears for table in tables)
    seen = {first.get(SPACE)}
    for _ in range(3):
        first.add(SPACE)
        seen.add(first.get(SPACE))
    assert len(seen) == 4
    assert not seen & {second.get(SPACE) + number for number in range(-9, 9)}
    last = first.get(SPACE)
    second.continue_from(first.copy())
    assert second.get(SPACE) == last
    for table in tables:
        table.close()


def test_a_row_of_another_length_is_not_taken_over():
    counts = ClearCounts()
    counts.add(SPACE)
    counts.continue_from(bytes(8))
    assert counts.get(SPACE) == 1

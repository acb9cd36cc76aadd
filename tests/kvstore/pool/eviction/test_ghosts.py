"""The table of ghosts beside a dictionary, in sizes where ghosts meet."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.pool.eviction.ghosts import NONE, GhostTable, keys_of


def keys(*numbers):
    return np.array(numbers, np.uint64)


def rows(*numbers):
    return np.array(numbers, np.int32)


def test_what_was_put_is_taken_once():
    table = GhostTable(1000)
    assert table.put(keys(5, 6, 1 << 63), rows(1, 2, 3)).tolist() == []
    assert table.take(keys(1 << 63, 7, 5)).tolist() == [3, NONE, 1]
    assert table.take(keys(1 << 63, 6, 5)).tolist() == [NONE, 2, NONE]
    assert table.rows().tolist() == []


def test_a_key_is_of_a_hash_and_not_of_its_neighbours():
    hashes = [bytes([number]) * 32 for number in range(4)]
    assert keys_of(hashes).tolist() == [int.from_bytes(bytes([number]) * 8, "little") for number in range(4)]


def test_at_least_as_many_as_were_asked_for_are_remembered_nearly_all():
    table, count = GhostTable(4000), 4000
    chosen = np.random.default_rng(1).integers(0, 1 << 63, count).astype(np.uint64)
    for begin in range(0, count, 40):
        table.put(chosen[begin : begin + 40], np.arange(begin, begin + 40, dtype=np.int32))
    assert np.count_nonzero(table.take(chosen) != NONE) > 0.9 * count
    assert count < table.num_places < 2 * count


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_ghosts", [1, 12, 64])
def test_each_row_is_in_one_place_however_many_meet(seed, num_ghosts):
    """Rows go in and out, and none is lost or there twice: not with equal keys, not with many at once in one set."""
    rng, table = random.Random(seed), GhostTable(num_ghosts)
    outside, inside = set(range(200)), {}
    for _ in range(300):
        if rng.random() < 0.5:
            chosen = rng.sample(sorted(outside), min(len(outside), rng.randrange(1, 30)))
            names = [rng.randrange(60) for _ in chosen]
            displaced = table.put(keys(*names), rows(*chosen)).tolist()
            outside -= set(chosen)
            inside |= dict(zip(chosen, names, strict=True))
            assert len(set(displaced)) == len(displaced)
            for row in displaced:
                del inside[row]
            outside |= set(displaced)
        else:
            names = [rng.randrange(60) for _ in range(rng.randrange(1, 20))]
            taken = table.take(keys(*names)).tolist()
            for name, row in zip(names, taken, strict=True):
                if row != NONE:
                    assert inside.pop(row) == name, "a row of another key, or taken twice"
                    outside.add(row)
            # Of two equal keys in one call one may have found nothing, and the other places were not looked at.
        found = table.rows().tolist()
        assert sorted(found) + sorted(outside) == sorted(inside) + sorted(set(range(200)) - set(inside))


def test_of_two_blocks_with_one_key_both_are_not_the_same_ghost():
    table = GhostTable(100)
    table.put(keys(9), rows(4))
    assert sorted(table.take(keys(9, 9)).tolist()) == [NONE, 4]


def test_the_oldest_of_a_set_gives_way():
    table = GhostTable(1)
    assert table.num_places == 8
    table.put(keys(*range(8)), rows(*range(8)))
    assert table.put(keys(100, 101), rows(10, 11)).tolist() == [0, 1]
    assert table.take(keys(*range(8))).tolist() == [NONE, NONE, 2, 3, 4, 5, 6, 7]

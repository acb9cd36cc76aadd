import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kernels.merging import merge_runs

PLACES, LENGTHS, GROUPS = st.integers(-2, 6), st.integers(1, 3), st.integers(0, 1)


def merged(items):
    """One by one: (target, source, length) of items (target, source, length, groups)."""
    runs, follows = [], None
    for target, source, length, groups in items:
        if (target, source, groups) == follows:
            runs[-1][2] += length
        else:
            runs.append([target, source, length])
        follows = (target + length, source + length, groups)
    return runs


def columns(found):
    return [list(row) for row in zip(*(column.tolist() for column in found), strict=True)]


def ints(values, dtype=np.int64):
    return np.array(list(values), dtype)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(PLACES, PLACES, LENGTHS, st.tuples(GROUPS, GROUPS)), max_size=12), st.integers(0, 2))
def test_runs_are_those_found_one_by_one(items, num_groups):
    items = [(*item[:3], item[3][:num_groups]) for item in items]
    groups = [ints(item[3][at] for item in items) for at in range(num_groups)]
    found = merge_runs(*(ints(item[at] for item in items) for at in range(3)), *groups)
    assert columns(found) == merged(items)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(PLACES, PLACES), max_size=12), LENGTHS, st.sampled_from([np.int32, np.int64]))
def test_one_length_for_all_is_the_same(places, length, dtype):
    sides = [ints((pair[at] for pair in places), dtype) for at in range(2)]
    found = merge_runs(*sides, length)
    assert columns(found) == merged([(*pair, length, ()) for pair in places])
    assert columns(found) == columns(merge_runs(*sides, np.full(len(places), length)))
    assert found[0].dtype == found[1].dtype == dtype


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=8), st.data())
def test_long_stretches_become_one_run_each(stretches, data):
    """Items that follow each other, which random ones seldom do."""
    items, at = [], 0
    for count in stretches:
        at += data.draw(st.integers(1, 3))
        for _ in range(count):
            length = data.draw(LENGTHS)
            items.append((at, at + 100, length, ()))
            at += length
    found = merge_runs(*(ints(item[side] for item in items) for side in range(3)))
    assert columns(found) == merged(items)
    assert len(found[0]) == len(stretches)

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvstore.segments import plan_chunks, plan_segments


@given(st.integers(0, 5000), st.integers(1, 600))
def test_chunks_cover_everything_once_and_none_is_too_long(num_blocks, chunk_blocks):
    ends = plan_chunks(num_blocks, chunk_blocks)
    sizes = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    assert sum(sizes) == num_blocks
    assert all(0 < size <= chunk_blocks for size in sizes)


def test_the_first_and_last_chunks_are_short():
    ends = plan_chunks(64, 16)
    assert ends[0] == 4
    assert ends[-1] - ends[-2] <= 6
    assert max(b - a for a, b in pairwise(ends)) == 16
    assert plan_chunks(1, 16) == [1]
    assert plan_chunks(3, 1) == [1, 2, 3]


@given(st.integers(0, 5000), st.integers(1, 600))
def test_segments_hold_every_chunk_once_and_grow(num_blocks, chunk_blocks):
    ends = plan_chunks(num_blocks, chunk_blocks)
    segments = plan_segments(ends)
    assert [end for segment in segments for end in segment] == ends
    assert all(segments)
    sizes = [b - a for a, b in pairwise([0, *(segment[-1] for segment in segments)])]
    assert all(size >= 64 * 4**i for i, size in enumerate(sizes[:-1]))


def test_a_read_of_a_few_blocks_is_one_segment():
    assert plan_segments(plan_chunks(32, 4)) == [plan_chunks(32, 4)]
    assert plan_segments([]) == []

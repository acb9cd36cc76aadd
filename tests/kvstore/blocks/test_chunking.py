from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvstore.blocks.chunking import plan_chunks, plan_segments, plan_stage_chunks


@given(st.integers(0, 5000), st.integers(1, 600))
def test_chunks_cover_everything_once_and_none_is_too_long(num_blocks, chunk_blocks):
    ends = plan_chunks(num_blocks, chunk_blocks)
    sizes = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    assert sum(sizes) == num_blocks
    assert all(0 < size <= chunk_blocks for size in sizes)


def test_the_first_and_last_chunks_are_short():
    ends = plan_chunks(64, 16)
    sizes = [b - a for a, b in pairwise([0, *ends])]
    assert sizes[:3] == [4, 8, 16]
    assert sizes[-1] == 1
    assert max(sizes) == 16
    assert plan_chunks(1, 16) == [1]
    assert plan_chunks(3, 1) == [1, 2, 3]


@given(st.integers(0, 5000), st.integers(1, 600))
def test_copying_a_chunk_is_no_longer_than_reading_the_next_ones(num_blocks, chunk_blocks):
    ends = [0, *plan_chunks(num_blocks, chunk_blocks)]
    assert all(b - a <= num_blocks - b + 1 for a, b in pairwise(ends[:-1]))


def test_what_is_no_longer_than_the_first_chunk_is_not_divided():
    assert plan_chunks(4, 16) == [4]
    assert plan_chunks(5, 16) == [3, 4, 5]
    assert plan_chunks(16, 16) == [4, 10, 13, 15, 16]


@given(st.integers(1, 5000), st.integers(1, 600))
def test_chunks_between_stages_are_full_but_for_a_short_last_one(num_blocks, chunk_blocks):
    ends = plan_stage_chunks(num_blocks, chunk_blocks)
    sizes = [b - a for a, b in pairwise([0, *ends])]
    assert sum(sizes) == num_blocks
    assert all(0 < size <= chunk_blocks for size in sizes)
    assert sizes[-1] <= max(1, chunk_blocks // 4)
    assert all(size == chunk_blocks for size in sizes[:-2])


@given(st.integers(0, 5000), st.integers(1, 600))
def test_segments_hold_every_chunk_once_and_grow(num_blocks, chunk_blocks):
    ends = plan_chunks(num_blocks, chunk_blocks)
    segments = plan_segments(ends)
    assert [end for segment in segments for end in segment] == ends
    assert all(segments)
    sizes = [b - a for a, b in pairwise([0, *(segment[-1] for segment in segments)])]
    assert all(size >= 128 * 16**i for i, size in enumerate(sizes[:-1]))


def test_a_read_of_a_few_blocks_is_one_segment():
    assert plan_segments(plan_chunks(32, 4)) == [plan_chunks(32, 4)]
    assert plan_segments([]) == []

"""Tokens fill pages: the tail of the last one first. Empty requests touch no neighbour."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import InvalidRequest, PoolExhausted
from kvstore.kernels.index import split_evenly
from kvstore.paged.allocator import PageAllocator
from kvstore.paged.sequence import SequencePages, extend_all, fill_page_table
from kvstore.paged.units import last_page_tokens, pages_for, slots_of

SIZES = (1, 4, 16, 256)


@pytest.mark.parametrize("page_size", SIZES)
def test_the_last_page_has_one_token_at_least(page_size):
    """B4: 0 tokens in the last page only for an empty sequence, and page_size on a boundary."""
    for num_tokens in {0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size}:
        wanted = 0 if num_tokens == 0 else (num_tokens - 1) % page_size + 1
        assert last_page_tokens(num_tokens, page_size) == wanted
        sequence = SequencePages(PageAllocator(4, page_size))
        sequence.extend(num_tokens)
        assert sequence.last_tokens == wanted
        assert sequence.num_pages == pages_for(num_tokens, page_size) == -(-num_tokens // page_size)


def test_an_extension_fills_the_last_page_first():
    allocator = PageAllocator(10, 4)
    sequence = SequencePages(allocator)
    assert sequence.extend(3).tolist() == [0, 1, 2]
    assert sequence.extend(7).tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert sequence.pages.tolist() == [0, 1, 2]
    assert sequence.extend(0).tolist() == []
    assert allocator.num_free == 7


def test_decode_takes_a_page_only_at_a_boundary():
    allocator = PageAllocator(10, 4)
    sequence = SequencePages(allocator)
    free = [(sequence.extend(1).tolist(), allocator.num_free)[1] for _ in range(9)]
    assert free == [9, 9, 9, 9, 8, 8, 8, 8, 7]


@pytest.mark.parametrize("lengths", [[3, 0], [0, 3], [0, 0], [0], [], [5, 0, 0, 2]])
def test_an_empty_request_touches_no_neighbour(lengths):
    """B5: each request of a batch gets as many slots as it asked for, all different."""
    allocator = PageAllocator(10, 4)
    sequences = [SequencePages(allocator) for _ in lengths]
    slots = extend_all(sequences, lengths)
    assert [len(each) for each in slots] == lengths
    every = [slot for each in slots for slot in each.tolist()]
    assert len(set(every)) == sum(lengths)


@pytest.mark.parametrize("lengths", [[3, 0], [0, 3], [0, 0], [0]])
def test_an_empty_request_has_no_last_slot(lengths):
    """B6: -1, never the slot of another request."""
    sequences = [SequencePages(PageAllocator(10, 4)) for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        slots = sequence.extend(length)
        assert sequence.last_slot == (slots[-1] if length else -1)


def test_a_batch_is_extended_whole_or_not_at_all():
    allocator = PageAllocator(3, 4)
    sequences = [SequencePages(allocator), SequencePages(allocator)]
    with pytest.raises(PoolExhausted):
        extend_all(sequences, [8, 5])
    with pytest.raises(InvalidRequest):
        extend_all(sequences, [1])
    with pytest.raises(InvalidRequest):
        extend_all([sequences[0], sequences[0]], [1, 1])
    with pytest.raises(InvalidRequest):
        extend_all(sequences, [1, -1])
    with pytest.raises(InvalidRequest, match="one allocator"):
        extend_all([sequences[0], SequencePages(PageAllocator(3, 4))], [1, 1])
    assert allocator.num_free == 3
    assert [each.num_tokens for each in sequences] == [0, 0]


@pytest.mark.parametrize("page_size", SIZES)
def test_nothing_is_written_behind_the_pages(page_size):
    """B7: a table is written in pages; guard words around the rows stay."""
    allocator = PageAllocator(40, page_size)
    lengths = [0, 1, page_size, page_size + 1, 3 * page_size - 1]
    sequences = [SequencePages(allocator) for _ in lengths]
    extend_all(sequences, lengths)
    guarded = np.full((8, 9), 77, np.int32)
    fill_page_table(sequences, guarded[1:6, 1:8])
    assert (np.delete(guarded, range(1, 6), 0) == 77).all()
    assert (guarded[:, [0, 8]] == 77).all()
    for row, sequence in zip(guarded[1:6, 1:8], sequences, strict=True):
        assert row.tolist() == [*sequence.pages.tolist(), *[-1] * (7 - sequence.num_pages)]


def test_a_batch_of_steps_is_a_multiple_of_a_step():
    """B9: both numbers are named."""
    with pytest.raises(ValueError, match="multiple of 2 sequences, got 5"):
        split_evenly(5, 2)


def test_arguments_are_only_read():
    """B10: what a helper returns is new, and what it got is as before."""
    pages = np.array([3, 1, -1], np.int32)
    slots = slots_of(pages, 4, 0, 12)
    slots[:] = 0
    assert pages.tolist() == [3, 1, -1]
    sequence = SequencePages(PageAllocator(4, 4), pages[:2])
    with pytest.raises(ValueError, match="read-only"):
        sequence.pages[0] = 5
    sequence.extend(4)
    assert pages.tolist() == [3, 1, -1]


def test_a_table_that_is_too_small_is_not_written():
    """B11: as many pages as the row has, and not one more."""
    allocator = PageAllocator(10, 4)
    sequence = SequencePages(allocator)
    sequence.extend(12)
    table = np.full((1, 3), 77, np.int32)
    fill_page_table([sequence], table)
    assert table.tolist() == [[0, 1, 2]]
    sequence.extend(1)
    for bad in (table, np.zeros((0, 9), np.int32), np.zeros((1, 9), np.int64), np.zeros(9, np.int32)):
        before = bad.copy()
        with pytest.raises(InvalidRequest):
            fill_page_table([sequence], bad)
        assert (bad == before).all()


def test_slots_of_a_missing_page_are_minus_1():
    assert slots_of(np.array([2, -1, 0], np.int32), 2, 0, 6).tolist() == [4, 5, -1, -1, 0, 1]


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 5, 6])
def test_rejected_tokens_give_their_pages_back(num_accepted):
    allocator = PageAllocator(10, 4)
    sequence = SequencePages(allocator)
    sequence.extend(3)
    slots = sequence.prepare_step(6)
    assert (slots.tolist(), sequence.num_tokens, allocator.num_free) == ([3, 4, 5, 6, 7, 8], 3, 7)
    with pytest.raises(InvalidRequest, match="incomplete step"):
        sequence.extend(1)
    with pytest.raises(InvalidRequest):
        sequence.complete_step(7)
    sequence.complete_step(num_accepted)
    assert sequence.num_tokens == 3 + num_accepted
    assert allocator.num_free == 10 - pages_for(3 + num_accepted, 4)
    allocator.check_integrity()


def test_a_released_sequence_takes_nothing():
    allocator = PageAllocator(4, 4)
    sequence = SequencePages(allocator)
    sequence.extend(5)
    assert (sequence.release(), sequence.release(), allocator.num_free) == (2, 0, 4)
    with pytest.raises(InvalidRequest, match="released"):
        sequence.extend(1)
    with pytest.raises(InvalidRequest):
        sequence.slots(0, 1)


@pytest.mark.parametrize("count", [-1, 1.5, "1", True, None])
def test_what_is_no_count_is_refused(count):
    allocator = PageAllocator(4, 4)
    sequence = SequencePages(allocator)
    for call in (sequence.extend, sequence.prepare_step, sequence.complete_step, allocator.alloc):
        with pytest.raises(InvalidRequest):
            call(count)
    assert allocator.num_free == 4

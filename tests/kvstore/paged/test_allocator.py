"""Pages are the unit of ownership: taken whole, freed whole, and bad calls change nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.errors import ConfigError, InvalidRequest, PoolExhausted
from kvstore.paged.allocator import PageAllocator


def test_page_0_is_a_page_like_any_other():
    """B8: the first page survives a round trip; nothing stands for "invalid" but -1."""
    allocator = PageAllocator(2, 4)
    assert allocator.alloc(1).tolist() == [0]
    assert allocator.num_refs(0) == 1
    assert allocator.free([0]) == 1
    assert sorted(allocator.alloc(2).tolist()) == [0, 1]


def test_nothing_is_taken_when_too_few_are_free():
    allocator = PageAllocator(3, 4)
    allocator.alloc(2)
    with pytest.raises(PoolExhausted, match="wanted 2 pages, 1 of 3 are free"):
        allocator.alloc(2)
    assert allocator.num_free == 1
    assert allocator.alloc(0).tolist() == []


@pytest.mark.parametrize(
    "slots", [[1, 2, 3], [0], [0, 1, 2], [4, 5, 6, 7, 0], [0, 1, 2, 4], [0, 0, 1, 2, 3], [-1], [40]]
)
def test_a_part_of_a_page_is_not_freed(slots):
    """B1: slots 1..3 of a page of 4 are refused before anything changes; so is what is no whole page."""
    allocator = PageAllocator(10, 4)
    allocator.alloc(2)
    with pytest.raises(InvalidRequest):
        allocator.free_slots(slots)
    assert allocator.num_free == 8
    assert allocator.free_slots([7, 4, 6, 5]) == 1
    assert allocator.num_free == 9


@pytest.mark.parametrize("pages", [[0, 0], [2], [-1], [3], [1 << 40], [0.5], [[0]], "ab", [True], None])
def test_a_bad_free_changes_nothing(pages):
    allocator = PageAllocator(3, 4)
    allocator.alloc(2)
    with pytest.raises(InvalidRequest):
        allocator.free(pages)
    with pytest.raises(InvalidRequest):
        allocator.share(pages)
    assert allocator.num_free == 1
    allocator.check_integrity()


def test_no_pages_are_no_error():
    allocator = PageAllocator(3, 4)
    allocator.share([])
    assert allocator.free([]) == allocator.free_slots([]) == 0


def test_a_second_free_is_refused():
    allocator = PageAllocator(3, 4)
    pages = allocator.alloc(2)
    assert allocator.free(pages) == 2
    with pytest.raises(InvalidRequest, match="which is free"):
        allocator.free(pages)
    assert allocator.num_free == 3


def test_a_shared_page_is_freed_by_its_last_owner():
    """B3: the first of two owners gives a page back, and the other still has it."""
    allocator = PageAllocator(2, 4)
    pages = allocator.alloc(1)
    allocator.share(pages)
    assert allocator.free(pages) == 0
    assert (allocator.num_refs(int(pages[0])), allocator.num_free) == (1, 1)
    assert allocator.free(pages) == 1
    assert allocator.num_free == 2


@pytest.mark.parametrize(
    ("num_pages", "page_size"), [(0, 4), (-1, 4), (4, 0), (4, 257), (1 << 31, 4), (4, 2.0), (True, 4)]
)
def test_sizes_out_of_range_are_refused(num_pages, page_size):
    with pytest.raises(ConfigError):
        PageAllocator(num_pages, page_size)


def test_pages_stay_whole_for_ever():
    """B2: after any order of calls, each page that comes out is one whole page that nobody has."""
    rng = random.Random(0)
    allocator, held = PageAllocator(50, 4), {}
    for step in range(10_000):
        act = rng.random()
        if act < 0.5:
            count = rng.randint(0, 5)
            if count <= allocator.num_free:
                for page in allocator.alloc(count).tolist():
                    assert held.setdefault(page, 0) == 0
                    held[page] = 1
        elif act < 0.6 and any(held.values()):
            page = rng.choice([page for page, refs in held.items() if refs])
            allocator.share([page])
            held[page] += 1
        else:
            some = [page for page, refs in held.items() if refs and rng.random() < 0.2]
            slots = (np.array(some, np.int64)[:, None] * 4 + np.arange(4)).ravel()
            allocator.free_slots(rng.sample(slots.tolist(), len(slots)))
            for page in some:
                held[page] -= 1
        assert allocator.num_free == 50 - sum(refs > 0 for refs in held.values())
        if step % 100 == 0:
            allocator.check_integrity()

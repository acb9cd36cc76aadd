import random

import pytest
import torch

from kvstore.kernels.launch import _COPY, Tables, divisor_of, launches, moved
from kvstore.kernels.plan import plan_copy
from kvstore.kernels.spans import block_spans
from kvstore.kernels.stored import StoredBlock


def quotient(dividend, divisor):
    """As pack.cu has it, in 32 bits."""
    total = ((dividend * divisor.multiplier) >> 32) + dividend
    assert total < 2**32
    return total >> divisor.shift


@pytest.mark.parametrize("value", [1, 2, 3, 5, 16, 72, 255, 256, 257, 1152, 77_777, 2**16, 2**30, 2**31 - 1])
def test_a_divisor_divides(value):
    rng = random.Random(value)
    divisor = divisor_of(value)
    edges = [value * times + by for times in (0, 1, 2, 2**31 // value - 1) for by in (-1, 0, 1)]
    for dividend in [*edges, 2**31 - 1, *(rng.randrange(2**31) for _ in range(500))]:
        if 0 <= dividend < 2**31:
            assert quotient(dividend, divisor) == dividend // value


def test_threads_are_as_many_as_words_and_whole_warps():
    """Whatever the shape, at most a tenth of the threads of full blocks has nothing to copy."""
    for layers, heads, dim, planes in ((32, 8, 128, 2), (80, 1, 128, 2), (61, 1, 576, 1)):
        for size in (16, 64):
            stored = StoredBlock(block_dims=(1, heads, layers, planes, size, dim), dtype="bfloat16")
            views = [torch.empty(4, heads, planes, size, dim, dtype=torch.bfloat16) for _ in range(layers)]
            plan = plan_copy(views, stored)
            spans = block_spans(plan.paging, range(3), range(3), 3)
            slots = torch.empty(3, stored.block_bytes, dtype=torch.uint8)
            [launch] = launches(plan, [Tables(0, 0)], spans, 0, slots, to_slots=True)
            words = 3 * stored.block_bytes // 16
            assert launch.num_threads % 32 == 0
            per_thread = int(launch.name.split(", ")[2])
            assert launch.num_ctas * launch.num_threads * per_thread * 0.85 <= words


NEXT_GROUP, STRIP = 14, 21
"""Of the values of `struct Copy`: from one group of planes in a strip to its next, and how many are in it."""


@pytest.mark.parametrize(
    ("to_slots", "blocks", "dim", "strip", "next_group"),
    [
        (False, [4, 5, 9, 15], 128, 1, 1),  # one of three
        (False, [4, 5, 9, 20], 128, 6, 1),  # fewer than one of four
        (False, [4, 9, 5, 15], 128, 6, 1),  # written in the order of the slots, whatever lies together
        (False, [15, 9, 5, 4], 128, 6, 1),
        (False, [4], 128, 1, 1),
        (False, [4, 5, 9, 15], 1008, 1, 1),
        (False, [4, 5, 9, 15], 1024, 4, 2),  # a plane of a block is long: two strips, 0 2 4 and 1 3 5
        (False, [4, 5, 9, 20], 1024, 6, 1),
        (False, [4, 5, 9, 15], 2048, 4, 1),  # longer still: 0 1 2 3 and 4 5
        (False, [4, 9, 5, 15], 64, 1, 1),  # a thread has four planes
        (True, [4, 5, 9, 15], 64, 2, 1),
        (True, [4, 5, 9, 15], 128, 6, 1),
        (True, [4, 5, 9, 15], 1024, 6, 1),
    ],
)
def test_strips_are_narrow_where_what_is_written_lies_together(to_slots, blocks, dim, strip, next_group):
    stored = StoredBlock(block_dims=(1, 1, 3, 2, 16, dim), dtype="bfloat16")
    views = [torch.empty(30, 1, 2, 16, dim, dtype=torch.bfloat16) for _ in range(3)]
    plan = plan_copy(views, stored)
    spans = block_spans(plan.paging, blocks, range(len(blocks)), len(blocks))
    slots = torch.empty(len(blocks), stored.block_bytes, dtype=torch.uint8)
    [launch] = launches(plan, [Tables(0, 0)], spans, 0, slots, to_slots=to_slots)
    values = _COPY.unpack(bytes(launch.args[0]))
    assert (values[STRIP], values[NEXT_GROUP]) == (strip, next_group)


@pytest.mark.parametrize("to_slots", [True, False])
def test_a_launch_that_is_moved_is_the_one_for_where_it_was_moved_to(to_slots):
    stored = StoredBlock(block_dims=(1, 2, 3, 2, 16, 8), dtype="bfloat16")
    plan = plan_copy([torch.empty(30, 2, 2, 16, 8, dtype=torch.bfloat16) for _ in range(3)], stored)
    spans, slots = (
        block_spans(plan.paging, range(4), range(4), 4),
        torch.empty(20, stored.block_bytes, dtype=torch.uint8),
    )

    def at(address, first_slot):
        [launch] = launches(plan, [Tables(0, 0)], spans, address, slots, to_slots=to_slots, first_slot=first_slot)
        return launch

    here, there = at(4096, 0), at(65536, -7)
    before = bytes(here.args[0])
    found = moved(here, 65536 - 4096, 7 * stored.block_bytes)
    assert (found.name, found.num_ctas, found.num_threads) == (there.name, there.num_ctas, there.num_threads)
    assert bytes(found.args[0]) == bytes(there.args[0]) != before
    assert bytes(here.args[0]) == before, "it may be moved again"


def test_too_large_a_copy_is_refused(monkeypatch):
    monkeypatch.setattr("kvstore.kernels.launch._MAX_INDEX", 520)
    stored = StoredBlock(block_dims=(1, 1, 1, 1, 1, 16), dtype="uint8")
    plan = plan_copy([torch.empty(600, 1, 1, 1, 16, dtype=torch.uint8)], stored)
    slots = torch.empty(600, 16, dtype=torch.uint8)
    for count in (520, 521):
        spans = block_spans(plan.paging, range(count), range(count), count)
        work = launches(plan, [Tables(0, 0)], spans, 0, slots, to_slots=True)
        if count == 520:
            assert len(list(work)) == 1
        else:
            with pytest.raises(ValueError, match="smaller pieces"):
                list(work)

import itertools
import random
from itertools import pairwise

import pytest
import torch

from kvstore.kernels.launch import check_slots, check_window
from kvstore.kernels.plan import overlaps_at, overlaps_itself, plan_copy
from kvstore.kernels.spans import Paging, block_spans
from kvstore.kernels.stored import Side, StoredBlock

STORED = StoredBlock(block_dims=(2, 4, 3, 2, 8, 16), dtype="bfloat16")


def views(count=6, dims=(5, 4, 2, 8, 16), dtype=torch.bfloat16):
    return [torch.zeros(dims, dtype=dtype) for _ in range(count)]


def test_the_bytes_of_a_block_follow_its_dims():
    assert STORED.head_bytes == 3 * 2 * 8 * 16 * 2
    assert STORED.block_bytes == 2 * 4 * 3 * 2 * 8 * 16 * 2
    plan = plan_copy(views(), STORED)
    row = 8 * 16 * 2
    wanted = [g * 4 * STORED.head_bytes + (i * 2 + p) * row for g in range(2) for i in range(3) for p in range(2)]
    assert plan.sections[0].slot_offsets.tolist() == wanted


def test_sides_lie_behind_the_planes_of_their_head():
    sides = (Side(num_planes=2, dim=1, dtype="float32"), Side(num_planes=1, dim=5, dtype="uint8"))
    stored = StoredBlock(block_dims=(1, 2, 1, 2, 2, 8), dtype="uint8", sides=sides)
    assert [stored.section_offset(index) for index in range(3)] == [0, 32, 48]
    assert stored.head_bytes == 64
    scales = [torch.zeros(3, 2, 2, 2, 1)], [torch.zeros(3, 2, 1, 2, 5, dtype=torch.uint8)]
    plan = plan_copy([torch.zeros(3, 2, 2, 2, 8, dtype=torch.uint8)], stored, sides=scales)
    assert [section.slot_offsets.tolist() for section in plan.sections] == [[0, 16], [32, 40], [48]]
    assert [section.align_bytes for section in plan.sections] == [8, 4, 1]


def test_sides_without_heads_lie_behind_all_heads_of_their_group_and_those_without_tokens_have_one_row():
    sides = (
        Side(num_planes=1, dim=1, dtype="float32", per_head=False),
        Side(num_planes=1, dim=3, dtype="float32", per_token=False),
        Side(num_planes=1, dim=1, dtype="float16", per_head=False, per_token=False),
    )
    stored = StoredBlock(block_dims=(2, 2, 1, 1, 4, 8), dtype="uint8", sides=sides)
    # Head 0: 32 bytes of planes and 12 of the second side; head 1; then 16 of the first and 2 of the third.
    assert stored.head_bytes == 48
    assert [stored.section_offset(index) for index in range(4)] == [0, 96, 32, 112]
    assert (stored.group_bytes, stored.block_bytes) == (128, 256)
    planes = [torch.zeros(3, 2, 1, 4, 8, dtype=torch.uint8) for _ in range(2)]
    given = (
        [torch.zeros(3, 1, 1, 4, 1) for _ in range(2)],
        [torch.zeros(3, 2, 1, 1, 3) for _ in range(2)],
        [torch.zeros(3, 1, 1, 1, 1, dtype=torch.float16) for _ in range(2)],
    )
    plan = plan_copy(planes, stored, sides=given)
    assert [section.slot_offsets.tolist() for section in plan.sections] == [[0, 128], [96, 224], [32, 160], [112, 240]]
    assert [section.num_heads for section in plan.sections] == [2, 1, 2, 1]
    assert [section.slot_token_stride for section in plan.sections] == [8, 4, 0, 0]
    assert plan.whole_blocks
    assert stored.runs(range(2), range(2)) == [(0, 256)]


SCALED = StoredBlock(block_dims=(1, 2, 2, 1, 4, 8), dtype="uint8", sides=(Side(num_planes=1, dim=1, dtype="float32"),))


def test_a_rank_has_its_sides_in_its_own_run():
    """A part with its scales is as one run as one without, whatever the split: two ranks' runs are four ranks' runs."""
    assert SCALED.head_bytes == 2 * 4 * 8 + 2 * 4 * 4
    whole = SCALED.runs(range(2), range(2))
    halves = [SCALED.runs(range(2), range(at, at + 1)) for at in range(2)]
    assert whole == [(0, 2 * SCALED.head_bytes)]
    assert halves == [[(0, SCALED.head_bytes)], [(SCALED.head_bytes, SCALED.head_bytes)]]


def shared(**kind):
    """A plan of four blocks of four tokens with a side of this kind."""
    stored = StoredBlock(
        block_dims=(1, 2, 1, 1, 4, 8), dtype="uint8", sides=(Side(num_planes=1, dim=1, dtype="float32", **kind),)
    )

    def plan(size=4, **held):
        heads = len(held.get("heads", range(2)))
        cache = torch.zeros(4, heads, 1, size, 8, dtype=torch.uint8)
        rows = torch.zeros(
            4, heads if kind.get("per_head", True) else 1, 1, size if kind.get("per_token", True) else 1, 1
        )
        return plan_copy([cache], stored, sides=[[rows]], **held)

    return plan


def test_what_tokens_or_heads_share_is_copied_for_all_of_them_or_not_at_all():
    plan = shared(per_token=False)()
    whole = block_spans(plan.paging, [0, 1], [2, 1], 3, skip_prefix_tokens=4)
    check_window(plan, whole, 3, 0, None, 0, None)
    for options in ({"skip_prefix_tokens": 5}, {"num_tokens": 7}):
        spans = block_spans(plan.paging, [0, 1], [2, 1], 3, **options)
        with pytest.raises(ValueError, match=r"wanted whole blocks of 4 tokens.*, got a span of 3"):
            check_window(plan, spans, 3, 0, None, 0, None)
    with pytest.raises(ValueError, match=r"wanted engine blocks of the stored size.*, got 8 and 4 tokens"):
        shared(per_token=False)(size=8)
    with pytest.raises(ValueError, match=r"wanted all 2 heads.*, got 1"):
        shared(per_head=False)(heads=range(1))
    assert shared(per_head=False)(size=8).sections[1].num_heads == 1


def test_a_part_is_one_run_and_unlike_splits_share_a_block():
    two = [STORED.runs(*STORED.part(rank, 2)) for rank in range(2)]
    four = [STORED.runs(*STORED.part(rank, 4)) for rank in range(4)]
    assert all(len(runs) == 2 for runs in two + four)  # one in each of two layer groups
    for group in range(2):
        assert two[0][group][1] == four[0][group][1] + four[1][group][1]
        assert four[1][group][0] == four[0][group][0] + four[0][group][1]
    [whole_first] = STORED.runs(*STORED.part(0, 1, 0, 2))
    [whole_second] = STORED.runs(*STORED.part(0, 1, 1, 2))
    assert whole_second == (whole_first[1], whole_first[1])
    covered = sorted(run for rank in range(4) for pp in range(2) for run in STORED.runs(*STORED.part(rank, 4, pp, 2)))
    assert sum(size for _, size in covered) == STORED.block_bytes
    assert all(at + size == after for (at, size), (after, _) in pairwise(covered))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: STORED.part(0, 3), "divide the 4 KV heads of a block, got tp_size=3"),
        (lambda: STORED.part(0, 1, 0, 3), "divide the 2 layer groups of a block, got pp_size=3"),
        (lambda: STORED.part(2, 2), "got tp 2 of 2"),
        (lambda: STORED.runs(range(1, 4), range(4)), "whole groups of 3 layers"),
        (lambda: StoredBlock(block_dims=(1, 1, 1, 1, 0, 1), dtype="uint8"), "sizes"),
        (lambda: StoredBlock(block_dims=(1, 1, 1, 1, 1, 1), dtype="int3"), "int3"),
        (lambda: plan_copy(views(5), STORED), "wanted 6 views for 6 layers"),
        (lambda: plan_copy([], STORED), r"\[B, H, P, T, D\]"),
        (lambda: plan_copy(views(dims=(5, 4, 2, 12, 16)), STORED), "got 12 and 8 tokens"),
        (lambda: plan_copy(views(dims=(5, 3, 2, 8, 16)), STORED), r"wanted every view as \[5, 4, 2, 8, 16\]"),
        (lambda: plan_copy(views(dtype=torch.float16), STORED), "float16"),
        (lambda: plan_copy([*views(5), torch.zeros(5, 4, 2, 16, 8, dtype=torch.bfloat16).mT], STORED), "strides"),
        (lambda: plan_copy(views()[:1] * 6, STORED), "one address"),
        (lambda: plan_copy([v[:1].expand(5, 4, 2, 8, 16) for v in views()], STORED), "do not overlap"),
        (lambda: plan_copy(views(), STORED, heads=range(2, 6)), "heads as a range within the 4"),
        (lambda: plan_copy(views(), STORED, layers=range(0)), "layers as a range within the 6"),
        (lambda: plan_copy(views(), STORED, sides=[views()]), "wanted 0 side tensors"),
        (lambda: plan_copy([*views(5), views(1)[0].to("meta")], STORED), "meta"),
    ],
)
def test_what_does_not_fit_is_refused_when_it_is_registered(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_slots_that_cannot_be_reached_are_refused():
    plan = plan_copy(views(), STORED)
    good = torch.zeros(3, STORED.block_bytes, dtype=torch.uint8)
    check_slots(plan, good)
    for slots, message in (
        (good.view(-1), "uint8"),
        (good.view(torch.int8), "uint8"),
        (good[:, : STORED.block_bytes - 8].contiguous(), "at least"),
        (good[:, ::2], "contiguous"),
        (good.to("meta"), "got meta"),
    ):
        with pytest.raises(ValueError, match=message):
            check_slots(plan, slots)


def test_spans_of_another_layout_are_refused():
    plan = plan_copy(views(), STORED)
    other = Paging(engine_block_size=8, stored_block_size=8, num_blocks=4)
    spans = block_spans(other, [0], [0], 3)
    with pytest.raises(ValueError, match="num_blocks=4"):
        check_window(plan, spans, 3, 0, None, 0, None)
    good = block_spans(plan.paging, [0], [2], 3)
    check_window(plan, good, 3, 0, None, 0, None)
    check_window(plan, good, 1, 0, 1, 2, 7)
    with pytest.raises(ValueError, match="max_ctas"):
        check_window(plan, good, 3, 0, None, 0, 0)
    for begin, end in ((-1, 1), (0, 2), (1, 0)):
        with pytest.raises(ValueError, match="wanted 0 <= begin <= end <= 1 spans"):
            check_window(plan, good, 3, begin, end, 0, None)
    for num_slots, first in ((2, 0), (3, 3)):
        with pytest.raises(ValueError, match="got spans in slots 2 to 2"):
            check_window(plan, good, num_slots, 0, None, first, None)


def test_offsets_are_64_bits_wide():
    # A view of more than 2**31 elements that takes no memory: only addresses are worked out.
    big = torch.empty_strided((5, 4, 2, 8, 16), (2**33, 2**31, 2**30, 16, 1), dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match="one address"):
        plan_copy([big] * 6, STORED)
    plan = plan_copy([big], StoredBlock(block_dims=(1, 4, 1, 2, 8, 16), dtype="bfloat16"))
    section = plan.sections[0]
    assert section.engine_block_stride == 2**34
    assert section.engine_head_stride == 2**32
    assert section.engine_bases.tolist()[1] - section.engine_bases.tolist()[0] == 2**31


def test_tensors_share_memory_exactly_where_one_of_their_bytes_is_the_same():
    draw, num_shared = random.Random(1), 0
    for _ in range(300):
        sizes, strides, extent = [], [], 1
        for _ in range(draw.randint(1, 4)):  # Each stride is beyond the dims before it: none overlaps itself.
            sizes.append(draw.randint(1, 4))
            strides.append(extent + draw.choice([0, 0, 1, 3]))
            extent = strides[-1] * (sizes[-1] - 1) + extent
        order = draw.sample(range(len(sizes)), len(sizes))
        tensor = torch.empty(extent, dtype=torch.int16).as_strided(
            [sizes[i] for i in order], [strides[i] for i in order]
        )  # fmt: skip
        assert not overlaps_itself(tensor)
        places = itertools.product(*map(range, sizes))
        first = {2 * sum(i * s for i, s in zip(place, strides, strict=True)) + b for place in places for b in (0, 1)}
        for distance in range(-2 * extent - 2, 2 * extent + 3):
            shared = bool(first & {byte + distance for byte in first})
            assert overlaps_at(tensor, distance) is shared, (sizes, strides, distance)
            num_shared += shared
    assert num_shared > 1000

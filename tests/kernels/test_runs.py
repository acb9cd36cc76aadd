"""Copies run by run, done on the CPU with memmove, against the token oracle: all bytes, guards included."""

import ctypes

import numpy as np
import pytest
import torch

from copy_case import CROSS, DTYPES, ORDERS, Case
from kvstore.kernels.merging import merge_runs
from kvstore.kernels.plan import plan_copy
from kvstore.kernels.runs import RunTable
from kvstore.kernels.spans import block_spans
from kvstore.kernels.stored import StoredBlock


def copied(case, to_slots, slots_per_piece=None):
    """Copy the runs of a case one by one; returns engines and buffer."""
    engines, buffer = [engine.on("cpu") for engine in case.engines], case.buffer.clone()
    plan, slots = case.plan(engines), case.slots_of(buffer)
    table, used = RunTable(plan, slots_per_piece), case.slot_ids >= 0
    slot_ids, count = case.slot_ids, case.num_slots
    real = slot_ids[used]
    case.slot_ids, case.num_slots = np.where(used, np.cumsum(used) - 1, -1), len(real)
    spans = case.spans(plan.paging)
    case.slot_ids, case.num_slots = slot_ids, count
    engine, host, lengths = table.runs(spans, slots, real)
    for at, place, length in zip(engine.tolist(), host.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(*((place, at) if to_slots else (at, place)), length)
    if slots_per_piece:
        first = (host - slots.data_ptr()) // slots.stride(0) // slots_per_piece
        last = (host + lengths - 1 - slots.data_ptr()) // slots.stride(0) // slots_per_piece
        assert (first == last).all()
    return engines, buffer


def assert_equal(case, got, to_slots):
    engines, buffer, _ = case.expected(to_slots)
    assert torch.equal(got[1], buffer)
    assert all(torch.equal(mine.raw, want.raw) for mine, want in zip(got[0], engines, strict=True))


@pytest.mark.parametrize("to_slots", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_random_copies(seed, to_slots):
    case = Case(seed)
    assert_equal(case, copied(case, to_slots, [None, 1, 2][seed % 3]), to_slots)


@pytest.mark.parametrize("to_slots", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_rows_that_all_heads_or_all_tokens_share(seed, to_slots):
    case = Case(6000 + seed, shared=True)
    assert_equal(case, copied(case, to_slots, [None, 2][seed % 2]), to_slots)


@pytest.mark.parametrize("to_slots", [True, False])
@pytest.mark.parametrize("order", ORDERS + CROSS)
def test_every_layout(order, to_slots):
    for dtype in DTYPES:
        for token_mode in (True, False):
            case = Case(len(order) * 5 + to_slots, order, dtype, token_mode)
            assert_equal(case, copied(case, to_slots), to_slots)


def plan_of(axes, num_blocks=6):
    """A plan of a cross-layer cache of 3 layers, 4 heads, 8 tokens, rows of 16 bfloat16."""
    sizes = {"B": num_blocks, "H": 4, "L": 3, "P": 2, "T": 8, "D": 16}
    cache = torch.zeros([sizes[axis] for axis in axes], dtype=torch.bfloat16)
    rest = axes.replace("L", "")
    views = [layer.permute([rest.index(axis) for axis in "BHPTD"]) for layer in cache.unbind(axes.index("L"))]
    return plan_copy(views, StoredBlock(block_dims=(1, 4, 3, 2, 8, 16), dtype="bfloat16"))


@pytest.mark.parametrize(
    ("axes", "rows_per_run"),
    [("BHLPTD", 4 * 3 * 2 * 8), ("LBHPTD", 2 * 8), ("LPBHTD", 8), ("LPBTHD", 1)],
)
def test_runs_are_as_long_as_both_sides_allow(axes, rows_per_run):
    assert RunTable(plan_of(axes)).mean_run_bytes == rows_per_run * 16 * 2


def test_neighbouring_blocks_in_neighbouring_slots_are_one_run_but_not_across_pieces():
    plan = plan_of("BHLPTD")
    slots = torch.zeros(8, plan.stored.block_bytes, dtype=torch.uint8)
    spans = block_spans(plan.paging, [1, 2, 3, 4], range(4), 4)
    ids = np.array([2, 3, 4, 5])
    _, host, lengths = RunTable(plan).runs(spans, slots, ids)
    assert lengths.tolist() == [4 * plan.stored.block_bytes]
    _, host, lengths = RunTable(plan, slots_per_piece=3).runs(spans, slots, ids)
    assert lengths.tolist() == [plan.stored.block_bytes, 3 * plan.stored.block_bytes]
    assert (host - slots.data_ptr()).tolist() == [2 * plan.stored.block_bytes, 3 * plan.stored.block_bytes]


def test_nothing_has_no_runs():
    plan = plan_of("BHLPTD")
    spans = block_spans(plan.paging, [], [], 0)
    assert [len(side) for side in RunTable(plan).runs(spans, torch.zeros(2, 8), np.empty(0, np.int64))] == [0, 0, 0]


def test_runs_of_two_pieces_stay_apart():
    at, size = np.array([0, 8, 16, 24]), np.full(4, 8)
    assert merge_runs(at, at + 100, size, np.array([0, 0, 1, 1]))[2].tolist() == [16, 16]
    assert merge_runs(at, at + 100, size)[2].tolist() == [32]

"""The compiled copies in host memory beside the oracle: random engines, slots, parts, side tensors and runs."""

import mmap
import threading

import numpy as np
import pytest
import torch

from copy_case import CROSS, ORDERS, Case, random_bytes
from kvstore.kernels import host_copy
from kvstore.kernels.plan import plan_copy
from kvstore.kernels.stored import Side, StoredBlock

BLOCKS, SLOTS, HEADS, LAYERS, TOKENS = 6, 5, 3, 2, 4


def copy(case, engines, buffer, to_slots, num_threads=1):
    """Copy the run of a case, all spans of one kind at once."""
    plan, slots = case.plan(engines), case.slots_of(buffer)
    rows = case.spans(plan.paging).rows
    for place in {tuple(row[2:]) for row in rows.tolist()}:
        chosen = rows[(rows[:, 2:] == place).all(1)]
        blocks, ids = (np.ascontiguousarray(chosen[:, column]) for column in (0, 1))
        tables = host_copy.fragments_of(plan, *place)
        if to_slots:
            host_copy.pack(tables, blocks, slots, ids, num_threads)
        else:
            host_copy.unpack(tables, slots, ids, blocks, num_threads)


def check(case, to_slots, num_threads=1):
    """The same bytes as the oracle, and not one other byte in either memory; returns how many tokens moved."""
    wanted, wanted_buffer, pairs = case.expected(to_slots)
    engines, buffer = [engine.on("cpu") for engine in case.engines], case.buffer.clone()
    copy(case, engines, buffer, to_slots, num_threads)
    assert torch.equal(buffer, wanted_buffer)
    for got, engine in zip(engines, wanted, strict=True):
        assert torch.equal(got.raw, engine.raw)
    return len(pairs)


@pytest.mark.parametrize("to_slots", [True, False])
@pytest.mark.parametrize("seed", range(100))
def test_copies_equal_the_oracle_and_touch_nothing_else(seed, to_slots):
    check(Case(seed, token_mode=False), to_slots)


@pytest.mark.parametrize("to_slots", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_rows_that_all_heads_or_all_tokens_share(seed, to_slots):
    check(Case(6000 + seed, shared=True), to_slots)


@pytest.mark.parametrize("to_slots", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_single_tokens_anywhere(seed, to_slots):
    check(Case(500 + seed, token_mode=True), to_slots)


@pytest.mark.parametrize("num_threads", [2, 3, 8])
@pytest.mark.parametrize("to_slots", [True, False])
def test_threads_that_share_a_copy_leave_nothing_out(monkeypatch, to_slots, num_threads):
    monkeypatch.setattr(host_copy, "_LEAST_BYTES_PER_THREAD", 1)
    assert max(check(Case(900 + seed, token_mode=False), to_slots, num_threads) for seed in range(20)) > 0


def test_a_copy_that_cannot_start_all_its_threads_does_with_fewer(monkeypatch):
    monkeypatch.setattr(host_copy, "_LEAST_BYTES_PER_THREAD", 1)
    start, started = threading.Thread.start, []

    def start_one(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    cache, slots = torch.zeros(8, 1, 1, 1, 64, dtype=torch.uint8), torch.ones(8, 64, dtype=torch.uint8)
    tables = host_copy.fragments_of(plan_of([cache], (1, 1, 1, 1, 1, 64), "uint8"))
    ids = np.arange(8)
    host_copy.unpack(tables, slots, ids, ids, 4)
    assert started != []
    assert bool((cache == 1).all())


@pytest.mark.parametrize("order", ORDERS + CROSS)
def test_every_order_of_dims_and_form(order):
    moved = [check(Case(seed, order, "bfloat16", False), to_slots) for seed in range(3) for to_slots in (True, False)]
    assert max(moved) > 0


def plan_of(views, dims, dtype="float32", **part):
    return plan_copy(views, StoredBlock(block_dims=dims, dtype=dtype), **part)


def test_runs_are_as_long_as_both_sides_allow():
    dims, row = (1, HEADS, LAYERS, 2, TOKENS, 8), 8 * 4

    def lengths(views, *place, **part):
        (table,) = host_copy.fragments_of(plan_of(views, dims, **part), *place)
        return table.lengths.tolist()

    stored = torch.zeros(BLOCKS, HEADS, LAYERS, 2, TOKENS, 8)
    views = [stored[:, :, layer] for layer in range(LAYERS)]
    assert lengths(views) == [stored[0].numel() * 4]
    one_rank = torch.zeros(BLOCKS, 1, LAYERS, 2, TOKENS, 8)
    assert lengths([one_rank[:, :, i] for i in range(LAYERS)], heads=range(1, 2)) == [one_rank[0].numel() * 4]
    heads_inside = torch.zeros(LAYERS, BLOCKS, 2, TOKENS, HEADS, 8).permute(0, 1, 4, 2, 3, 5)
    assert set(lengths(list(heads_inside))) == {row}
    tokens_inside = torch.zeros(LAYERS, BLOCKS, 2, HEADS, TOKENS, 8).permute(0, 1, 3, 2, 4, 5)
    assert set(lengths(list(tokens_inside))) == {TOKENS * row}
    assert set(lengths(list(tokens_inside), 1, 0, 3)) == {3 * row}
    twice = torch.zeros(LAYERS, BLOCKS, 2, HEADS, 2 * TOKENS, 8).permute(0, 1, 3, 2, 4, 5)
    assert lengths(list(twice), TOKENS) == [TOKENS * row] * HEADS * LAYERS * 2
    assert lengths(list(twice), TOKENS, 0, 0) == []


def test_offsets_beyond_32_bits():
    """Block ids whose bytes lie beyond 4 GiB, in a mapping of which only what is used takes memory."""
    block_bytes, far = 1 << 20, (5 << 30) >> 20
    memory = mmap.mmap(-1, (far + 1) * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    cache = torch.frombuffer(memory, dtype=torch.uint8).view(far + 1, 1, 1, 1, block_bytes)
    slots = random_bytes(2 * block_bytes, np.random.default_rng(3)).view(2, block_bytes)
    tables = host_copy.fragments_of(plan_of([cache], (1, 1, 1, 1, 1, block_bytes), "uint8"))
    host_copy.unpack(tables, slots, np.array([0, 1]), np.array([far, 0]))
    assert torch.equal(cache[far].flatten(), slots[0])
    assert torch.equal(cache[0].flatten(), slots[1])
    assert not cache[1].any()
    back = torch.zeros_like(slots)
    host_copy.pack(tables, np.array([far]), back, np.array([1]))
    assert torch.equal(back[1], slots[0])
    del cache, tables


def test_bad_arguments_are_refused_before_anything_is_written():
    rng = np.random.default_rng(1)
    engine = random_bytes(BLOCKS * HEADS * LAYERS * 2 * TOKENS * 8 * 2, rng).view(torch.bfloat16)
    whole = engine.view(BLOCKS, HEADS, LAYERS, 2, TOKENS, 8)
    plan = plan_of([whole[:, :, i] for i in range(LAYERS)], (1, HEADS, LAYERS, 2, TOKENS, 8), "bfloat16")
    tables, slots = host_copy.fragments_of(plan), random_bytes(SLOTS * plan.stored.block_bytes, rng).view(SLOTS, -1)
    before = engine.clone(), slots.clone()
    good = np.array([0, 1])
    for ids in (
        np.array([0, BLOCKS]),
        np.array([1, 1]),
        np.array([[0, 1]]),
        np.array([0]),
        np.array([0, 1], dtype=np.int32),
    ):
        with pytest.raises(ValueError, match="wanted"):
            host_copy.unpack(tables, slots, good, ids)
        with pytest.raises(ValueError, match="wanted"):
            host_copy.pack(tables, good, slots, ids)
    for bad in (slots[:, ::2], slots[:, :-100], slots.view(torch.int16), slots.flatten()):
        with pytest.raises(ValueError, match="wanted"):
            host_copy.unpack(tables, bad, good, good)
    assert torch.equal(engine.view(torch.int16), before[0].view(torch.int16))
    assert torch.equal(slots, before[1])
    shared = StoredBlock(
        block_dims=(1, 1, 1, 1, TOKENS, 8),
        dtype="uint8",
        sides=(Side(num_planes=1, dim=1, dtype="uint8", per_token=False),),
    )
    views = torch.zeros(2, 1, 1, TOKENS, 8, dtype=torch.uint8), torch.zeros(2, 1, 1, 1, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"wanted whole blocks of {TOKENS} tokens.*, got 2 tokens"):
        host_copy.fragments_of(plan_copy(views[:1], shared, sides=[views[1:]]), 0, 0, 2)
    for place in ((-1, 0, 1), (0, -1, 1), (1, 0, TOKENS), (0, 1, TOKENS), (0, 0, -1)):
        with pytest.raises(ValueError, match="wanted tokens within"):
            host_copy.fragments_of(plan, *place)

"""pack.cu, executed on the CPU, against the token oracle: all bytes, guards included, on every commit."""

import math
import mmap
import os

import numpy as np
import pytest
import torch

from copy_case import CROSS, DTYPES, GUARD, ORDERS, Case, ElevenPlanes, random_bytes
from kvstore.kernels.launch import Style, Tables, launches
from kvstore.kernels.module import ACROSS, INSIDE
from kvstore.kernels.plan import plan_copy
from kvstore.kernels.reference import torch_dtype
from kvstore.kernels.spans import block_spans
from kvstore.kernels.stored import StoredBlock


def run_on_cpu(shim, case, to_slots, **options):
    engines, buffer = [engine.on("cpu") for engine in case.engines], case.buffer.clone()
    plan = case.plan(engines)
    spans = case.spans(plan.paging)
    tables = [Tables(s.engine_bases.ctypes.data, s.slot_offsets.ctypes.data) for s in plan.sections]
    slots = case.slots_of(buffer)
    raws = [engine.raw for engine in engines]
    if to_slots:
        shim.allow(*raws, writable=[slots])
    else:
        shim.allow(slots, writable=raws)
    done = launches(plan, tables, spans, spans.rows.ctypes.data, slots, to_slots=to_slots, **options)
    stores = [(launch, shim.run(launch)) for launch in done]
    return engines, buffer, stores


def assert_equal(case, got_engines, got_buffer, to_slots):
    engines, buffer, _ = case.expected(to_slots)
    assert torch.equal(got_buffer, buffer)
    assert all(torch.equal(got.raw, want.raw) for got, want in zip(got_engines, engines, strict=True))


@pytest.mark.parametrize("to_slots", [True, False])
@pytest.mark.parametrize("seed", range(120))
def test_random_copies(shim, seed, to_slots):
    """Scenario 16, too: all bytes of both sides are compared, the guards around them and the source as well."""
    case = Case(seed)
    engines, buffer, _ = run_on_cpu(shim, case, to_slots)
    assert_equal(case, engines, buffer, to_slots)


@pytest.mark.parametrize("to_slots", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_rows_that_all_heads_or_all_tokens_share(shim, seed, to_slots):
    case = Case(6000 + seed, shared=True)
    engines, buffer, _ = run_on_cpu(shim, case, to_slots)
    assert_equal(case, engines, buffer, to_slots)


@pytest.mark.parametrize("to_slots", [True, False])
@pytest.mark.parametrize("order", ORDERS + CROSS)
@pytest.mark.parametrize("token_mode", [True, False])
def test_every_layout(shim, order, token_mode, to_slots):
    for dtype in DTYPES:
        case = Case(len(order) * 7 + to_slots, order, dtype, token_mode)
        engines, buffer, _ = run_on_cpu(shim, case, to_slots)
        assert_equal(case, engines, buffer, to_slots)


@pytest.mark.parametrize("to_slots", [True, False])
@pytest.mark.parametrize("threads", [ACROSS, INSIDE], ids=["across", "inside"])
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "neighbours"])
@pytest.mark.parametrize("strip", [1, 2, 3, 4, 7, 11, 1000, None])
def test_strips_of_any_width_copy_every_plane_once(shim, monkeypatch, strip, apart, threads, to_slots):
    """Where threads take four planes, eleven are three groups: the last group and the last strip have fewer."""
    monkeypatch.setattr("kvstore.kernels.launch.style_of", lambda *_: Style(threads, strip, apart))
    case = ElevenPlanes(dim=8)
    engine, slots = case.engine.clone(), case.slots.clone()
    plan = case.plan(engine)
    spans = case.spans(plan.paging)
    [table] = [Tables(s.engine_bases.ctypes.data, s.slot_offsets.ctypes.data) for s in plan.sections]
    shim.allow(engine if to_slots else slots, writable=[slots if to_slots else engine])
    [launch] = launches(plan, [table], spans, spans.rows.ctypes.data, slots, to_slots=to_slots)
    assert shim.run(launch) == 3 * case.stored.block_bytes // 8, "words, each once"
    want_engine, want_slots = case.expected(to_slots)
    assert torch.equal(engine, want_engine)
    assert torch.equal(slots, want_slots)


@pytest.mark.parametrize("to_slots", [True, False])
@pytest.mark.parametrize(("stored_tokens", "page_tokens"), [(64, 1), (64, 16), (64, 64), (16, 64), (256, 32)])
@pytest.mark.parametrize(
    ("num_layers", "heads", "planes", "dim", "dtype"),
    [
        (1, 2, 2, 8, "bfloat16"),
        (32, 2, 2, 8, "float8_e4m3fn"),
        (61, 1, 2, 8, "uint8"),
        (5, 1, 1, 576, "uint8"),
        (3, 1, 1, 656, "uint8"),
    ],
    ids=["1-bf16", "32-fp8", "61-int8", "5-mla-576", "3-mla-656"],
)
def test_a_copy_is_what_torch_gathers(
    shim, num_layers, heads, planes, dim, dtype, stored_tokens, page_tokens, to_slots
):
    """Scenario 16: many layers, long latent rows, and pages of an engine in any order, one of them missing."""
    rng = np.random.default_rng(num_layers + stored_tokens + page_tokens)
    stored = StoredBlock(block_dims=(1, heads, num_layers, planes, stored_tokens, dim), dtype=dtype)
    num_tokens = 2 * max(stored_tokens, page_tokens) - 1
    num_pages, num_slots = num_tokens // page_tokens + 4, num_tokens // stored_tokens + 3
    raw = random_bytes(num_pages * (stored.block_bytes // stored_tokens * page_tokens) + 2 * GUARD, rng)
    buffer = random_bytes(num_slots * stored.block_bytes + 2 * GUARD, rng)
    pages = rng.permutation(num_pages)[: -(-num_tokens // page_tokens)]
    pages[rng.integers(len(pages))] = -1
    slot_ids = rng.permutation(num_slots)[: -(-num_tokens // stored_tokens)]

    def views(raw, buffer):
        element = torch_dtype(dtype)
        engine = raw[GUARD:-GUARD].view(element).view(num_layers, num_pages, heads, planes, page_tokens, dim)
        return engine, buffer[GUARD:-GUARD].view(num_slots, stored.block_bytes)

    want_raw, want_buffer = raw.clone(), buffer.clone()
    want_engine, want_slots = views(want_raw, want_buffer)
    there = want_slots.view(want_engine.dtype).view(num_slots, heads, num_layers, planes, stored_tokens, dim)
    at = np.arange(num_tokens)[pages[np.arange(num_tokens) // page_tokens] >= 0]
    page, row = torch.from_numpy(pages[at // page_tokens]), torch.from_numpy(at % page_tokens)
    slot, place = torch.from_numpy(slot_ids[at // stored_tokens]), torch.from_numpy(at % stored_tokens)
    # [tokens, layers, heads, planes, dim]; as bytes, because torch indexes no floats of eight bits.
    engine_bytes, there_bytes = want_engine.view(torch.uint8), there.view(torch.uint8)
    if to_slots:
        there_bytes[slot, :, :, :, place] = engine_bytes[:, page, :, :, row].transpose(1, 2)
    else:
        engine_bytes[:, page, :, :, row] = there_bytes[slot, :, :, :, place].transpose(1, 2)

    engine, slots = views(raw, buffer)
    plan = plan_copy(list(engine), stored)
    spans = block_spans(plan.paging, pages, slot_ids, num_slots, num_tokens=num_tokens)
    [table] = [Tables(s.engine_bases.ctypes.data, s.slot_offsets.ctypes.data) for s in plan.sections]
    shim.allow(raw if to_slots else buffer, writable=[slots if to_slots else engine.view(torch.uint8)])
    for launch in launches(plan, [table], spans, spans.rows.ctypes.data, slots, to_slots=to_slots):
        shim.run(launch)
    assert torch.equal(raw, want_raw)
    assert torch.equal(buffer, want_buffer)


@pytest.mark.parametrize("max_ctas", [1, 2, 7])
@pytest.mark.parametrize("to_slots", [True, False])
def test_a_small_grid_copies_the_same(shim, max_ctas, to_slots):
    for seed in range(8):
        case = Case(1000 + seed)
        engines, buffer, stores = run_on_cpu(shim, case, to_slots, max_ctas=max_ctas)
        assert_equal(case, engines, buffer, to_slots)
        assert all(launch.num_ctas <= max_ctas for launch, _ in stores)


def test_the_grid_shrinks_with_the_skip_and_stores_only_what_moves(shim):
    skipped, whole = 0, 0
    for seed in range(40):
        case = Case(2000 + seed)
        _, _, stores = run_on_cpu(shim, case, to_slots=False)
        pairs = case.expected(False)[2]
        per_token = len(case.layers) * len(case.heads) * sum(t.num_planes * t.row_bytes for t in case.stored.tensors)
        width = {"uint4": 16, "unsigned long long": 8, "unsigned int": 4, "unsigned short": 2, "unsigned char": 1}
        moved = sum(count * width[launch.name.split("<")[1].split(",")[0]] for launch, count in stores)
        assert moved == len(pairs) * per_token
        if not pairs:
            assert stores == []  # a grid of no thread blocks is an error in CUDA
        full, case.skip = case.skip, 0
        _, _, all_stores = run_on_cpu(shim, case, to_slots=False)
        if full:
            skipped += sum(launch.num_ctas for launch, _ in stores)
            whole += sum(launch.num_ctas for launch, _ in all_stores)
    assert skipped < whole


@pytest.mark.parametrize("seed", range(6))
def test_a_window_of_slots_copies_a_part_of_the_list(shim, seed):
    case = Case(3000 + seed, token_mode=False)
    case.slot_ids = np.arange(len(case.slot_ids))
    engines, buffer = [engine.on("cpu") for engine in case.engines], case.buffer.clone()
    plan = case.plan(engines)
    spans = case.spans(plan.paging)
    tables = [Tables(s.engine_bases.ctypes.data, s.slot_offsets.ctypes.data) for s in plan.sections]
    slots = case.slots_of(buffer)
    shim.allow(*[engine.raw for engine in engines], writable=[slots])
    for slot in range(case.num_slots):
        at = np.flatnonzero(spans.rows[:, 1] == slot)
        if len(at):
            window = {"begin": int(at[0]), "end": int(at[-1]) + 1, "first_slot": slot}
            for launch in launches(
                plan, tables, spans, spans.rows.ctypes.data, slots[slot : slot + 1], to_slots=True, **window
            ):
                shim.run(launch)
    assert_equal(case, engines, buffer, True)


@pytest.mark.parametrize("to_slots", [True, False])
def test_offsets_beyond_two_to_the_31_elements(shim, to_slots):
    # Address space without memory behind it: only the pages that are touched exist.
    size = 9 << 30
    file = os.memfd_create("sparse")
    os.ftruncate(file, size)
    space = mmap.mmap(file, size)
    os.close(file)
    raw = torch.frombuffer(space, dtype=torch.uint8)
    stored = StoredBlock(block_dims=(1, 2, 1, 2, 4, 16), dtype="bfloat16")
    view = raw.view(torch.bfloat16).as_strided((2, 2, 2, 4, 16), ((1 << 31) + 8, 1 << 30, 1 << 29, 16, 1))
    slots = raw[(9 << 30) - (1 << 20) :][: 4 * stored.block_bytes].view(4, -1)
    source, target = (view[1], slots[3]) if to_slots else (slots[3], view[1])
    source.copy_(torch.from_numpy(np.random.default_rng(1).integers(0, 100, source.shape)))
    plan = plan_copy([view], stored)
    spans = block_spans(plan.paging, [1], [3], 4)
    [table] = [Tables(s.engine_bases.ctypes.data, s.slot_offsets.ctypes.data) for s in plan.sections]
    shim.allow(view[1].as_strided((1,), (1,)), writable=[raw])
    [launch] = launches(plan, [table], spans, spans.rows.ctypes.data, slots, to_slots=to_slots)
    shim.run(launch)
    moved = target if not to_slots else slots[3].view(torch.bfloat16).view(2, 2, 4, 16)
    wanted = source if to_slots else slots[3].view(torch.bfloat16).view(2, 2, 4, 16)
    assert torch.equal(moved.view(torch.int16), wanted.view(torch.int16))
    assert int(moved.view(torch.int16).count_nonzero()) > 0


def test_words_are_as_wide_as_both_sides_allow(shim):
    seen = set()
    for seed in range(60):
        case = Case(4000 + seed)
        engines, _, stores = run_on_cpu(shim, case, to_slots=True)
        if stores:
            launch = stores[0][0]
            row_bytes = case.plan(engines).sections[0].row_bytes
            seen.add(launch.name.split(",")[0])
            if "uint4" in launch.name:
                assert math.gcd(row_bytes, 16) == 16
    assert len(seen) == 5


@pytest.mark.parametrize("to_slots", [True, False])
@pytest.mark.parametrize("blocks", [(2, 0), (0, 2), (0, 11)], ids=["descending", "together", "apart"])
@pytest.mark.parametrize(("size", "dim"), [(4, 40), (4, 560), (16, 560), (16, 2080)])
def test_short_and_long_and_very_long_spans(shim, size, dim, blocks, to_slots):
    """Each is dealt out in its own way, and in its own order; none of them fills its tiles."""
    stored = StoredBlock(block_dims=(1, 2, 2, 2, size, dim), dtype="bfloat16")
    engine = torch.randint(0, 99, (2, 12, 2, 2, size, dim)).to(torch.bfloat16)
    slots = torch.randint(0, 99, (2, stored.block_bytes), dtype=torch.uint8)
    plan = plan_copy(list(engine), stored)
    spans = block_spans(plan.paging, blocks, [1, 0], 2, num_tokens=2 * size - 1, skip_prefix_tokens=1)
    [table] = [Tables(s.engine_bases.ctypes.data, s.slot_offsets.ctypes.data) for s in plan.sections]
    want_engine, want_slots = engine.clone(), slots.clone()
    held = want_slots.view(torch.bfloat16).view(2, 2, 2, 2, size, dim)  # [slot, head, layer, plane, token, dim]
    for block, slot, tokens in ((blocks[0], 1, slice(1, size)), (blocks[1], 0, slice(0, size - 1))):
        there, here = held[slot][..., tokens, :], want_engine[:, block][..., tokens, :].transpose(0, 1)
        (there if to_slots else here).copy_(here if to_slots else there)
    shim.allow(*((engine,) if to_slots else (slots,)), writable=[slots if to_slots else engine])
    [launch] = launches(plan, [table], spans, spans.rows.ctypes.data, slots, to_slots=to_slots)
    shim.run(launch)
    assert torch.equal(engine.view(torch.int16), want_engine.view(torch.int16))
    assert torch.equal(slots, want_slots)


def test_the_shim_sees_a_copy_that_is_out_of_bounds(shim):
    case = next(c for c in map(Case, range(5000, 5050)) if len(c.expected(True)[2]) > 20)
    plan = case.plan(case.engines)
    spans, slots = case.spans(plan.paging), case.slots_of(case.buffer)
    tables = [Tables(s.engine_bases.ctypes.data, s.slot_offsets.ctypes.data) for s in plan.sections]
    first = next(iter(launches(plan, tables, spans, spans.rows.ctypes.data, slots, to_slots=True)))
    raws = [engine.raw for engine in case.engines]
    for readable, writable in ((raws, slots[: int(spans.rows[:, 1].max())]), (raws[1:], slots)):
        shim.allow(*readable, writable=[writable])
        with pytest.raises(AssertionError, match="out of bounds"):
            shim.run(first)

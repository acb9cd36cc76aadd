"""Copies of random jobs between random engines and the arena, beside the oracle, byte for byte everywhere.

Both directions, unlike block sizes, TP and PP parts, any strides; not one byte besides the job's may change.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.blocks.part import Part
from kvstore.blocks.shape import KVShape, SideTensor
from kvstore.engine.copier import engine_pages, ordered
from kvstore.engine.detect import detect_layout
from kvstore.engine.host_copier import HostCopier
from kvstore.engine.layout import canonical_views
from kvstore.engine.registered import register_cache
from kvstore.engine.side_tensors import detect_sides, side_views
from kvstore.kernels import host_copy
from kvstore.kernels import reference_tokens as oracle
from kvstore.kernels.reference import torch_dtype
from kvstore.memory.arena import create_arena
from kvstore.runtime.cores import num_copy_threads

NUM_BLOCKS, NUM_SLOTS, GUARD, ARENA_BYTES = 13, 9, 64, 1 << 20
FORMS = {
    "layers": ["BPTHD", "PBTHD", "BPHTD"],
    "pairs": ["BTHD", "BHTD"],
    "cross": ["BHLPTD", "BLPTHD", "LBPTHD", "LPBTHD"],
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Engine:
    """How the tensors of an engine lie in one flat allocation."""

    form: str
    axes: str
    memory: str
    sizes: dict[str, int]
    dtype: torch.dtype

    @property
    def num_tensors(self) -> int:
        return {"layers": 1, "pairs": 2, "cross": 0}[self.form] * self.sizes["L"] or 1

    @property
    def tensor_bytes(self) -> int:
        return int(np.prod([self.sizes[axis] for axis in self.axes])) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_tensors * (self.tensor_bytes + GUARD) + GUARD

    def caches(self, raw):
        tensors = []
        for index in range(self.num_tensors):
            begin = GUARD + index * (self.tensor_bytes + GUARD)
            flat = raw[begin : begin + self.tensor_bytes].view(self.dtype)
            flat = flat.view([self.sizes[axis] for axis in self.memory])
            tensors.append(flat.permute([self.memory.index(axis) for axis in self.axes]))
        if self.form == "cross":
            return tensors[0]
        return tensors if self.form == "layers" else list(zip(tensors[::2], tensors[1::2], strict=True))


@st.composite
def cases(draw):
    """(engines of caches and of each side tensor, shape, part, start, number of blocks, ids, indexes, slots, skip)"""
    stored, engine_size = draw(st.sampled_from([(4, 4), (4, 8), (2, 8), (8, 4), (8, 2), (4, 1), (3, 6)]))
    tp_size, pp_size = draw(st.sampled_from([1, 1, 2, 4])), draw(st.sampled_from([1, 1, 2]))
    part = Part(draw(st.integers(0, tp_size - 1)), tp_size, draw(st.integers(0, pp_size - 1)), pp_size)
    groups = pp_size * draw(st.integers(1, 2))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    sides = [
        SideTensor(
            name=f"side {index}",
            dtype=draw(st.sampled_from(["float32", "float16", "uint8"])),
            dim=draw(st.integers(1, 3)),
            per_head=tp_size > 1 or draw(st.booleans()),
            per_token=stored != engine_size or draw(st.booleans()),
        )
        for index in range(draw(st.sampled_from([0, 0, 1, 2, 3])))
    ]
    shape = KVShape(
        num_layers=groups * draw(st.integers(1, 2)),
        num_kv_heads=tp_size * draw(st.integers(1, 2)),
        head_dim=draw(st.sampled_from([1, 3, 8])),
        dtype=dtype,
        block_size=stored,
        num_layer_groups=groups,
        sides=sides,
    )
    form = draw(st.sampled_from(sorted(FORMS)))
    axes = draw(st.sampled_from(FORMS[form]))
    held = part.held(shape)
    sizes = {"B": NUM_BLOCKS, "L": held.num_layers, "P": 2, "T": engine_size, "H": held.num_kv_heads, "D": held.row_dim}
    memory = "".join(draw(st.permutations(axes[:-1]))) + "D" if draw(st.booleans()) else axes
    engines = [Engine(form, axes, memory, sizes, DTYPES[dtype])]
    for side in sides:
        form, axes = draw(st.sampled_from([("layers", "BTHD"), ("layers", "BHTD"), ("cross", "LBTHD")]))
        held_by = sizes | {"D": side.dim} | ({} if side.per_head else {"H": 1}) | ({} if side.per_token else {"T": 1})
        memory = "".join(draw(st.permutations(axes)))
        engines.append(Engine(form, axes, memory, held_by, torch_dtype(side.dtype)))

    start, most = draw(st.integers(0, 5)), (NUM_BLOCKS - 1) * engine_size // stored
    count = draw(st.integers(0, min(most, NUM_SLOTS)))
    num_ids = -(-(start * stored % engine_size + count * stored) // engine_size) if count else 0
    ids = draw(st.permutations(range(NUM_BLOCKS)))[:num_ids]
    indexes = sorted(draw(st.sets(st.integers(0, max(0, count - 1)), max_size=count))) if count else []
    slots = draw(st.permutations(range(NUM_SLOTS)))[: len(indexes)]
    skip = draw(st.integers(0, count * stored + 2))
    if not all(side.per_token for side in sides):
        skip = skip // stored * stored
    return engines, shape, part, start, count, ids, indexes, slots, skip


@pytest.fixture(scope="module")
def slab():
    made = create_arena(ARENA_BYTES)
    yield made
    made.close()


def token_pairs(engine, shape, start, ids, indexes, slots, skip):
    """(flat token of the engine, slot, token of its block), from what a job means alone."""
    stored, size = shape.block_size, engine.sizes["T"]
    for index, slot in zip(indexes, slots, strict=True):
        for token in range(stored):
            place = start * stored % size + index * stored + token
            if index * stored + token >= skip:
                yield ids[place // size] * size + place % size, slot, token


@settings(max_examples=150, deadline=None)
@given(case=cases(), to_slots=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_copies_equal_the_oracle_and_touch_nothing_else(slab, case, to_slots, seed):
    engines, shape, part, start, count, ids, indexes, slots, skip = case
    engine = engines[0]
    rng = np.random.default_rng(seed)
    slot_bytes = shape.block_bytes + 32
    assert NUM_SLOTS * slot_bytes + GUARD < ARENA_BYTES
    memory = slab.bytes_view()
    memory[:] = rng.integers(0, 256, ARENA_BYTES, dtype=np.uint8)
    raws = [torch.from_numpy(rng.integers(0, 256, each.num_bytes, dtype=np.uint8)) for each in engines]
    wanted, wanted_memory = [raw.clone() for raw in raws], torch.from_numpy(memory.copy())

    caches, *others = (each.caches(raw) for each, raw in zip(engines, raws, strict=True))
    names = [side.name for side in shape.sides]
    layout, sides = detect_sides(
        caches,
        dict(zip(names, others, strict=True)),
        shape,
        detect_layout(caches, shape, engine.axes, part),
        {name: each.axes for name, each in zip(names, engines[1:], strict=True)},
    )
    assert (layout.block_size, layout.num_blocks) == (engine.sizes["T"], NUM_BLOCKS)
    copier = HostCopier(register_cache(caches, layout, shape, sides), slab, slot_bytes, NUM_SLOTS)
    pages = engine_pages(ids, layout, shape.block_size, start, count)
    numbers = np.array(indexes, np.int64), np.array(slots, np.int64)

    skip = 0 if to_slots else skip
    pairs = list(token_pairs(engine, shape, start, ids, indexes, slots, skip))
    wanted_caches, *wanted_sides = (each.caches(raw) for each, raw in zip(engines, wanted, strict=True))
    views = [canonical_views(wanted_caches, layout, shape), *side_views(wanted_sides, layout, shape)]
    whole = wanted_memory[: NUM_SLOTS * slot_bytes].view(NUM_SLOTS, slot_bytes)
    stored = shape.stored_block
    if to_slots:
        oracle.pack_tokens(views, whole, stored, pairs, *part.ranges(shape))
        copier.into_slots(pages, *numbers)
    else:
        oracle.unpack_tokens(whole, views, stored, pairs, *part.ranges(shape))
        copier.out_of_slots(pages, *numbers, skip)
    assert all(torch.equal(raw, want) for raw, want in zip(raws, wanted, strict=True))
    assert np.array_equal(memory, wanted_memory.numpy())
    copier.close()


@pytest.mark.parametrize("sizes", [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_ranks_write_one_run_each_and_together_the_whole_slot(slab, sizes):
    tp_size, pp_size = sizes
    shape = KVShape(num_layers=4, num_kv_heads=4, head_dim=8, dtype="float32", block_size=4, num_layer_groups=2)
    stored = shape.stored_block
    memory, written = slab.bytes_view(), []
    for pp_rank in range(pp_size):
        for tp_rank in range(tp_size):
            part = Part(tp_rank, tp_size, pp_rank, pp_size)
            held = part.held(shape)
            caches = [torch.ones(2, 3, 4, held.num_kv_heads, 8) for _ in range(held.num_layers)]
            layout = detect_layout(caches, shape, "PBTHD", part)
            copier = HostCopier(register_cache(caches, layout, shape), slab, shape.block_bytes, 2)
            memory[:] = 0
            copier.into_slots(engine_pages([1], layout, 4, 0, 1), np.array([0]), np.array([1]))
            places = np.flatnonzero(memory.view(np.float32)) * 4 - shape.block_bytes
            runs = [(int(run[0]), len(run) * 4) for run in np.split(places, np.flatnonzero(np.diff(places) > 4) + 1)]
            assert runs == stored.runs(*part.ranges(shape))
            # One run unless both kinds of ranks divide a block, then one for each layer group.
            assert len(runs) == (held.num_layer_groups if tp_size > 1 else 1)
            written += runs
            copier.close()
    written.sort()
    assert all(begin + num_bytes == after for (begin, num_bytes), (after, _) in pairwise(written))
    assert written[0][0] == 0
    assert sum(num_bytes for _, num_bytes in written) == shape.block_bytes


@pytest.mark.parametrize("num_threads", [0, 3])
def test_a_job_names_how_many_threads_share_what_it_copies_out(slab, monkeypatch, num_threads):
    shape = KVShape(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_size=4)
    caches = [torch.zeros(2, 3, 4, 2, 8) for _ in range(2)]
    layout = detect_layout(caches, shape, "PBTHD", Part(0, 1, 0, 1))
    copier, shared = HostCopier(register_cache(caches, layout, shape), slab, shape.block_bytes, 2), []
    unpack = host_copy.unpack
    monkeypatch.setattr(host_copy, "unpack", lambda *args: (shared.append(args[-1]), unpack(*args))[1])
    slab.bytes_view()[:] = 7
    pages = ordered(engine_pages([1], layout, 4, 0, 1), copier, num_threads)
    copier.out_of_slots(pages, np.array([0]), np.array([1]))
    assert shared == [num_threads or num_copy_threads()]
    assert all((cache[:, 1].contiguous().view(torch.uint8) == 7).all() for cache in caches)
    assert not any(cache[:, [0, 2]].any() for cache in caches)
    copier.close()

import itertools
import mmap

import numpy as np
import pytest
import torch

from kvstore.kernels import host_copy, reference

BLOCKS, SLOTS, GROUPS, HEADS, LAYERS, TOKENS = 6, 5, 2, 3, 2, 4
ORDERS = ["BPTHD", "BPHTD", "PBTHD", "BHPTD", "HBPTD", "BPTDH"]
GUARD = 64


def random_bytes(count, seed):
    # All bit patterns, among them signalling NaNs of every float dtype.
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))


class Case:
    """Engine views in one guarded allocation, and slots in another, all bytes random."""

    def __init__(self, rng, order=None, separate=None, dtype=None):
        self.dtype = getattr(torch, dtype or rng.choice(["float16", "float32", "int8", "float8_e4m3fn"]))
        order = order or str(rng.choice(ORDERS))
        separate = bool(rng.integers(2)) if separate is None else separate
        dim = int(rng.choice([1, 3, 8, 40, 80]))
        self.planes, width = int(rng.integers(1, 3)), self.dtype.itemsize
        held, num_views = (1, self.planes) if separate else (self.planes, 1)
        sizes = {"B": BLOCKS, "P": held, "T": TOKENS, "H": HEADS, "D": dim}
        self.dims = (GROUPS, HEADS, LAYERS, self.planes, TOKENS, dim)
        padding = int(rng.choice([0, 0, 3]))
        shape = [sizes[axis] for axis in order]
        shape[-1] += padding
        view_bytes = int(np.prod(shape)) * width
        num_views *= GROUPS * LAYERS
        self.engine = random_bytes(num_views * (view_bytes + GUARD) + GUARD, int(rng.integers(1 << 30)))
        self.views = []
        for index in range(num_views):
            start = GUARD + index * (view_bytes + GUARD)
            raw = self.engine[start : start + view_bytes].view(self.dtype).view(shape)
            view = raw[..., : shape[-1] - padding]
            self.views.append(view.permute([order.index(axis) for axis in "BHPTD"]))
        block_bytes = int(np.prod(self.dims)) * width
        self.slot_bytes = block_bytes + int(rng.choice([0, 8, 64])) * width
        self.buffer = random_bytes(SLOTS * self.slot_bytes + 2 * GUARD, int(rng.integers(1 << 30)))
        self.slots = self.buffer[GUARD : GUARD + SLOTS * self.slot_bytes].view(SLOTS, self.slot_bytes)

    def oracle(self):
        """The same bytes again, for the reference to work on."""
        engine, buffer = self.engine.clone(), self.buffer.clone()
        views = [
            torch.empty(0, dtype=self.dtype)
            .set_(engine.untyped_storage())
            .as_strided(view.shape, view.stride(), view.storage_offset())
            for view in self.views
        ]
        whole = buffer[GUARD : GUARD + SLOTS * self.slot_bytes]
        slots = reference.slot_tensor(whole, self.slot_bytes, SLOTS, self.dims, self.dtype)
        return engine, views, buffer, slots


def ids_of(rng):
    count = int(rng.integers(0, SLOTS + 1))
    blocks, slots = rng.permutation(BLOCKS)[:count], rng.permutation(SLOTS)[:count]
    negative = rng.random((2, count)) < 0.15
    return np.where(negative[0], -1, blocks).astype(np.int64), np.where(negative[1], -1, slots).astype(np.int64)


@pytest.mark.parametrize("seed", range(60))
def test_pack_equals_the_oracle_and_touches_nothing_else(seed):
    rng = np.random.default_rng(seed)
    case = Case(rng)
    blocks, slots = ids_of(rng)
    engine, views, buffer, oracle_slots = case.oracle()
    reference.pack_blocks(views, torch.from_numpy(blocks), oracle_slots, torch.from_numpy(slots))
    host_copy.pack(host_copy.fragments_of(case.views, case.dims), blocks, case.slots, slots)
    assert torch.equal(case.buffer, buffer)
    assert torch.equal(case.engine, engine)


@pytest.mark.parametrize("seed", range(60))
def test_unpack_equals_the_oracle_and_touches_nothing_else(seed):
    rng = np.random.default_rng(1000 + seed)
    case = Case(rng)
    blocks, slots = ids_of(rng)
    first_token = int(rng.integers(0, TOKENS + 1))
    engine, views, buffer, oracle_slots = case.oracle()
    reference.unpack_blocks(oracle_slots, torch.from_numpy(slots[:1]), views, torch.from_numpy(blocks[:1]), first_token)
    reference.unpack_blocks(oracle_slots, torch.from_numpy(slots[1:]), views, torch.from_numpy(blocks[1:]))
    host_copy.unpack(host_copy.fragments_of(case.views, case.dims, first_token), case.slots, slots[:1], blocks[:1])
    host_copy.unpack(host_copy.fragments_of(case.views, case.dims), case.slots, slots[1:], blocks[1:])
    assert torch.equal(case.engine, engine)
    assert torch.equal(case.buffer, buffer)


@pytest.mark.parametrize(("order", "separate"), list(itertools.product(ORDERS, [False, True])))
def test_every_order_of_dims_and_form(order, separate):
    case = Case(np.random.default_rng(7), order, separate, "float16")
    everything = np.arange(SLOTS, dtype=np.int64)
    fragments = host_copy.fragments_of(case.views, case.dims)
    host_copy.pack(fragments, everything, case.slots, everything)
    packed = case.buffer.clone()
    engine = case.engine.clone()
    for view in case.views:
        view[:SLOTS].view(torch.uint8).fill_(0xA5) if view.stride(4) == 1 else view[:SLOTS].fill_(1.0)
    assert not torch.equal(case.engine, engine)
    host_copy.unpack(fragments, case.slots, everything, everything)
    assert torch.equal(case.engine, engine)
    assert torch.equal(case.buffer, packed)


def test_runs_are_as_long_as_both_sides_allow():
    dims = (1, HEADS, LAYERS, 2, TOKENS, 8)
    stored = torch.zeros(BLOCKS, HEADS, LAYERS, 2, TOKENS, 8)
    views = [stored[:, :, layer] for layer in range(LAYERS)]
    assert host_copy.fragments_of(views, dims).lengths.tolist() == [stored[0].numel() * 4]
    heads_inside = torch.zeros(LAYERS, BLOCKS, 2, TOKENS, HEADS, 8).permute(0, 1, 4, 2, 3, 5)
    assert set(host_copy.fragments_of(list(heads_inside), dims).lengths.tolist()) == {8 * 4}
    tokens_inside = torch.zeros(LAYERS, BLOCKS, 2, HEADS, TOKENS, 8).permute(0, 1, 3, 2, 4, 5)
    assert set(host_copy.fragments_of(list(tokens_inside), dims).lengths.tolist()) == {TOKENS * 8 * 4}


def test_offsets_beyond_32_bits():
    """Block ids whose bytes lie beyond 4 GiB, in a mapping of which only what is used takes memory."""
    block_bytes, far = 1 << 20, (5 << 30) >> 20
    memory = mmap.mmap(-1, (far + 1) * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    cache = torch.frombuffer(memory, dtype=torch.uint8).view(far + 1, 1, 1, 1, block_bytes)
    slots = random_bytes(2 * block_bytes, 3).view(2, block_bytes)
    fragments = host_copy.fragments_of([cache], (1, 1, 1, 1, 1, block_bytes))
    host_copy.unpack(fragments, slots, np.array([0, 1]), np.array([far, 0]))
    assert torch.equal(cache[far].flatten(), slots[0])
    assert torch.equal(cache[0].flatten(), slots[1])
    assert not cache[1].any()
    back = torch.zeros_like(slots)
    host_copy.pack(fragments, np.array([far]), back, np.array([1]))
    assert torch.equal(back[1], slots[0])
    del cache, fragments


def test_bad_arguments_are_refused_before_anything_is_written():
    case = Case(np.random.default_rng(1), "BPHTD", False, "float16")
    fragments = host_copy.fragments_of(case.views, case.dims)
    engine, buffer = case.engine.clone(), case.buffer.clone()
    good = np.array([0, 1])
    for ids in (
        np.array([0, BLOCKS]),
        np.array([1, 1]),
        np.array([[0, 1]]),
        np.array([0]),
        np.array([0, 1], dtype=np.int32),
    ):
        with pytest.raises(ValueError, match="wanted"):
            host_copy.unpack(fragments, case.slots, good, ids)
        with pytest.raises(ValueError, match="wanted"):
            host_copy.pack(fragments, good, case.slots, ids)
    for slots in (case.slots[:, ::2], case.slots[:, :-100], case.slots.view(torch.int16), case.slots.flatten()):
        with pytest.raises(ValueError, match="wanted"):
            host_copy.unpack(fragments, slots, good, good)
    assert torch.equal(case.engine, engine)
    assert torch.equal(case.buffer, buffer)
    for first_token in (-1, TOKENS + 1):
        with pytest.raises(ValueError, match="wanted"):
            host_copy.fragments_of(case.views, case.dims, first_token)
    with pytest.raises(ValueError, match="wanted"):
        host_copy.fragments_of(case.views[:-1], case.dims)
    with pytest.raises(ValueError, match="wanted"):
        host_copy.fragments_of(
            [*case.views[:-1], case.views[-1].transpose(1, 3).contiguous().transpose(1, 3)], case.dims
        )

import itertools
import mmap

import numpy as np
import pytest
import torch

from kvstore.kernels import reference

BLOCKS, SLOTS, GROUPS, HEADS, LAYERS, TOKENS, DIM = 6, 5, 2, 3, 2, 4, 8
DTYPES = ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
SIZES = {"B": BLOCKS, "P": 2, "T": TOKENS, "H": HEADS, "D": DIM}
# name -> (order of the engine's memory, elements of padding after the inner-most dim)
MEMORIES = {
    "nhd": ("BPTHD", 0),
    "hnd": ("BPHTD", 0),
    "planes outside": ("PBTHD", 0),
    "stored order": ("BHPTD", 0),
    "heads outside": ("HBPTD", 0),
    "rows not dense": ("BPTDH", 0),
    "padded": ("BPTHD", 3),
}


def random_bytes(*dims, seed=0):
    # All bit patterns, among them signalling NaNs of every float dtype.
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, dims, dtype=torch.uint8, generator=generator)


def make_views(memory, dtype, seed, planes=2, padding=0):
    """Engine caches of all layers as [B, H, P, T, D] views over random bytes."""
    sizes = SIZES | {"P": planes}
    element = reference.torch_dtype(dtype)
    views = []
    for layer in range(GROUPS * LAYERS):
        dims = [sizes[axis] for axis in memory]
        dims[-1] += padding
        raw = random_bytes(*dims[:-1], dims[-1] * element.itemsize, seed=seed + layer).view(element)
        tensor = raw[..., : dims[-1] - padding]
        views.append(tensor.permute([memory.index(axis) for axis in "BHPTD"]))
    return views


def make_slots(dtype, seed, planes=2, padding_bytes=0):
    element = reference.torch_dtype(dtype)
    dims = (GROUPS, HEADS, LAYERS, planes, TOKENS, DIM)
    slot_bytes = int(np.prod(dims)) * element.itemsize + padding_bytes
    buffer = random_bytes(SLOTS * slot_bytes, seed=seed)
    return buffer, reference.slot_tensor(buffer, slot_bytes, SLOTS, dims, dtype)


def raw(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().copy()


def storage(tensor):
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return whole.numpy().copy()


def naive_pack(views, block_ids, slots, slot_ids):
    """The slots' bytes after packing, by plain loops over rows of bytes."""
    held, expected = [raw(view) for view in views], raw(slots)
    for block, slot in zip(block_ids, slot_ids, strict=True):
        for g, h, i, p, t in itertools.product(*map(range, slots.shape[1:6])):
            expected[slot, g, h, i, p, t] = held[g * LAYERS + i][block, h, p, t]
    return expected


def naive_unpack(slots, slot_ids, views, block_ids, first_token):
    held, expected = raw(slots), [raw(view) for view in views]
    for pair, (slot, block) in enumerate(zip(slot_ids, block_ids, strict=True)):
        for g, h, i, p, t in itertools.product(*map(range, slots.shape[1:6])):
            if pair or t >= first_token:
                expected[g * LAYERS + i][block, h, p, t] = held[slot, g, h, i, p, t]
    return expected


def ids(*values):
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("planes", [1, 2])
def test_pack_and_unpack_against_plain_loops(dtype, name, planes):
    memory, padding = MEMORIES[name]
    views = make_views(memory, dtype, 10, planes, padding)
    buffer, slots = make_slots(dtype, 50, planes, padding_bytes=12)
    block_ids, slot_ids = [5, 0, 3], [1, 4, 0]
    sources = [storage(view) for view in views]
    expected = naive_pack(views, block_ids, slots, slot_ids)
    gaps = buffer.view(SLOTS, -1)[:, -12:].clone()
    reference.pack_blocks(views, ids(*block_ids), slots, ids(*slot_ids))
    assert np.array_equal(raw(slots), expected)
    assert torch.equal(buffer.view(SLOTS, -1)[:, -12:], gaps)
    assert all(np.array_equal(storage(view), before) for view, before in zip(views, sources, strict=True))

    targets = make_views(memory, dtype, 90, planes, padding)
    poison = [storage(view) for view in targets]
    wanted = naive_unpack(slots, slot_ids, targets, block_ids, 0)
    reference.unpack_blocks(slots, ids(*slot_ids), targets, ids(*block_ids))
    for target, view, before, source in zip(targets, wanted, poison, views, strict=True):
        assert np.array_equal(raw(target), view)
        assert np.array_equal(raw(target[block_ids]), raw(source[block_ids]))
        changed = (storage(target) != before).sum()
        assert changed <= len(block_ids) * target[0].numel() * target.element_size()
    assert np.array_equal(raw(slots), expected)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("first_token", range(TOKENS + 1))
@pytest.mark.parametrize("count", [1, 3])
def test_first_token_is_exact(dtype, name, first_token, count):
    memory, padding = MEMORIES[name]
    targets = make_views(memory, dtype, 3, padding=padding)
    _, slots = make_slots(dtype, 70)
    slot_ids, block_ids = [2, 0, 3][:count], [4, 1, 0][:count]
    wanted = naive_unpack(slots, slot_ids, targets, block_ids, first_token)
    reference.unpack_blocks(slots, ids(*slot_ids), targets, ids(*block_ids), first_token)
    for target, view in zip(targets, wanted, strict=True):
        assert np.array_equal(raw(target), view)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5, 6, 12])
@pytest.mark.parametrize("slot_padding", [0, 4, 8])
def test_odd_rows(dtype, dim, slot_padding):
    width = reference.torch_dtype(dtype).itemsize
    engine = [random_bytes(4, 2, 3, 3, dim * width, seed=i).view(reference.torch_dtype(dtype)) for i in range(4)]
    views = [tensor.permute(0, 3, 1, 2, 4) for tensor in engine]
    slot_bytes = 4 * 3 * 2 * 3 * dim * width + slot_padding
    buffer = random_bytes(3 * slot_bytes + 4, seed=9)[4:]
    slots = reference.slot_tensor(buffer, slot_bytes, 3, (2, 3, 2, 2, 3, dim), dtype)
    expected = naive_pack(views, [3, 0], slots, [0, 2])
    reference.pack_blocks(views, ids(3, 0), slots, ids(0, 2))
    assert np.array_equal(raw(slots), expected)
    wanted = naive_unpack(slots, [2, 1], views, [1, 2], 2)
    reference.unpack_blocks(slots, ids(2, 1), views, ids(1, 2), 2)
    assert all(np.array_equal(raw(view), want) for view, want in zip(views, wanted, strict=True))


def test_padding_of_an_engine_is_not_touched():
    whole = [random_bytes(BLOCKS, 2, TOKENS, HEADS, DIM + 5, seed=i) for i in range(GROUPS * LAYERS)]
    targets = [tensor[..., 2 : DIM + 2].permute(0, 3, 1, 2, 4) for tensor in whole]
    before = [tensor.clone() for tensor in whole]
    _, slots = make_slots("uint8", 8)
    reference.unpack_blocks(slots, ids(0, 1), targets, ids(5, 2), 1)
    for tensor, old in zip(whole, before, strict=True):
        assert torch.equal(tensor[..., :2], old[..., :2])
        assert torch.equal(tensor[..., DIM + 2 :], old[..., DIM + 2 :])
        assert torch.equal(tensor[[0, 1, 3, 4]], old[[0, 1, 3, 4]])


@pytest.mark.parametrize("dtype", ["float16", "float8_e5m2"])
@pytest.mark.parametrize("first_token", [0, 2])
def test_one_view_per_plane(dtype, first_token):
    views = make_views("BPTHD", dtype, 10)
    planes = [view[:, :, p : p + 1].clone() for view in views for p in range(2)]
    (_, by_layer), (_, by_plane) = make_slots(dtype, 50), make_slots(dtype, 50)
    reference.pack_blocks(views, ids(3, 1), by_layer, ids(0, 4))
    reference.pack_blocks(planes, ids(3, 1), by_plane, ids(0, 4))
    assert np.array_equal(raw(by_layer), raw(by_plane))
    reference.unpack_blocks(by_layer, ids(1, 4), views, ids(0, 2), first_token)
    reference.unpack_blocks(by_plane, ids(1, 4), planes, ids(0, 2), first_token)
    for at, view in enumerate(views):
        assert np.array_equal(raw(view), raw(torch.cat(planes[2 * at : 2 * at + 2], dim=2)))


def test_negative_ids_touch_nothing():
    views = make_views("BPTHD", "float16", 1)
    _, slots = make_slots("float16", 2)
    expected = naive_pack(views, [3], slots, [2])
    reference.pack_blocks(views, ids(-1, 3, 0), slots, ids(1, 2, -1))
    assert np.array_equal(raw(slots), expected)
    wanted = naive_unpack(slots, [0, 1], views, [3, 4], 0)
    reference.unpack_blocks(slots, ids(2, 0, 1), views, ids(-1, 3, 4), 3)
    assert all(np.array_equal(raw(view), want) for view, want in zip(views, wanted, strict=True))


def test_nothing_to_copy():
    views = make_views("BPTHD", "float16", 1)
    buffer, slots = make_slots("float16", 2)
    before, engine = buffer.clone(), [storage(view) for view in views]
    reference.pack_blocks(views, ids(), slots, ids())
    reference.unpack_blocks(slots, ids(), views, ids(), 2)
    reference.pack_blocks(views, ids(-1), slots, ids(-1))
    reference.unpack_blocks(slots, ids(-1), views, ids(-1), 2)
    assert torch.equal(buffer, before)
    assert all(np.array_equal(storage(view), old) for view, old in zip(views, engine, strict=True))


def test_bad_calls_change_nothing():
    views = make_views("BPTHD", "float16", 1)
    buffer, slots = make_slots("float16", 2)
    before, engine = buffer.clone(), [storage(view) for view in views]
    one = ids(0)
    for bad_views, block_ids, bad_slots, slot_ids in [
        (views, ids(BLOCKS), slots, one),
        (views, one, slots, ids(SLOTS)),
        (views, ids(0, 1), slots, one),
        (views, one.int(), slots, one),
        (views, one.view(1, 1), slots, one.view(1, 1)),
        (views[:3], one, slots, one),
        ([], one, slots, one),
        ([*views, views[0]], one, slots, one),
        ([*views[:3], views[0][:, :, :, :2]], one, slots, one),
        ([*views[:3], views[0].to(torch.bfloat16)], one, slots, one),
        (views, one, slots[0], one),
        (views, one, slots[..., :4], one),
    ]:
        with pytest.raises(ValueError, match="wanted"):
            reference.pack_blocks(bad_views, block_ids, bad_slots, slot_ids)
        with pytest.raises(ValueError, match="wanted"):
            reference.unpack_blocks(bad_slots, slot_ids, bad_views, block_ids)
    for first_token in (-1, TOKENS + 1):
        with pytest.raises(ValueError, match="first_token"):
            reference.unpack_blocks(slots, one, views, one, first_token)
    with pytest.raises(ValueError, match="at most once"):
        reference.pack_blocks(views, ids(0, 1), slots, ids(3, 3))
    with pytest.raises(ValueError, match="at most once"):
        reference.unpack_blocks(slots, ids(0, 1), views, ids(3, 3))
    assert torch.equal(buffer, before)
    assert all(np.array_equal(storage(view), old) for view, old in zip(views, engine, strict=True))


def test_one_block_may_go_to_many_slots():
    views = make_views("BPHTD", "bfloat16", 1)
    _, slots = make_slots("bfloat16", 2)
    reference.pack_blocks(views, ids(3, 3), slots, ids(0, 4))
    assert np.array_equal(raw(slots[0]), raw(slots[4]))


def test_torch_dtype():
    assert [str(reference.torch_dtype(name)) for name in DTYPES] == [f"torch.{name}" for name in DTYPES]
    with pytest.raises(ValueError, match="float64"):
        reference.torch_dtype("float64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_slot_tensor_shares_the_buffer(dtype):
    width = reference.torch_dtype(dtype).itemsize
    with mmap.mmap(-1, 4096) as area:
        view = memoryview(area)
        slots = reference.slot_tensor(view, 64, 3, (1, 1, 1, 1, 3, 2), dtype)
        assert tuple(slots.shape) == (3, 1, 1, 1, 1, 3, 2)
        assert slots.dtype == reference.torch_dtype(dtype)
        view[64 + width : 64 + 2 * width] = b"\x11" * width
        assert raw(slots[1]).flatten().tolist() == [0] * width + [0x11] * width + [0] * 4 * width
        raw_view = slots.view(torch.uint8) if width == 1 else slots.view({2: torch.int16, 4: torch.int32}[width])
        raw_view[2, 0, 0, 0, 0, 2, 1] = 1
        assert view[128 + 5 * width] == 1
        del slots, raw_view
        view.release()


def test_slot_tensor_inside_a_tensor():
    whole = torch.zeros(200, dtype=torch.uint8)
    slots = reference.slot_tensor(whole[8:], 24, 4, (1, 1, 1, 2, 2, 2), torch.float16)
    slots[1, 0, 0, 0, 0, 0, 0] = 1.0
    assert whole.nonzero().flatten().tolist() == [8 + 24 + 1]
    assert tuple(reference.slot_tensor(whole, 24, 0, (1, 2), "int8").shape) == (0, 1, 2)


@pytest.mark.parametrize(
    ("buffer", "slot_bytes", "num_slots", "dims", "dtype"),
    [
        (torch.zeros(64, dtype=torch.uint8), 15, 1, (8,), "float16"),
        (torch.zeros(64, dtype=torch.uint8), 17, 1, (8,), "float16"),
        (torch.zeros(64, dtype=torch.uint8), 16, 5, (8,), "float16"),
        (torch.zeros(64, dtype=torch.uint8), 16, -1, (8,), "float16"),
        (torch.zeros(64, dtype=torch.uint8), 16, 1, (0,), "float16"),
        (torch.zeros(64, dtype=torch.uint8)[1:], 16, 1, (8,), "float16"),
        (torch.zeros(64, dtype=torch.int8), 16, 1, (8,), "float16"),
        (torch.zeros(8, 8, dtype=torch.uint8), 16, 1, (8,), "float16"),
        (torch.zeros(128, dtype=torch.uint8)[::2], 16, 1, (8,), "float16"),
        (memoryview(bytes(64)), 16, 1, (8,), "float16"),
        (bytearray(), 16, 1, (8,), "float16"),
        (torch.zeros(64, dtype=torch.uint8), 16, 1, (8,), "float64"),
    ],
)
def test_slot_tensor_refuses(buffer, slot_bytes, num_slots, dims, dtype):
    with pytest.raises(ValueError, match="wanted"):
        reference.slot_tensor(buffer, slot_bytes, num_slots, dims, dtype)


def test_last_slot_needs_no_padding():
    slots = reference.slot_tensor(torch.zeros(24 + 16, dtype=torch.uint8), 24, 2, (8,), "float16")
    assert tuple(slots.shape) == (2, 8)

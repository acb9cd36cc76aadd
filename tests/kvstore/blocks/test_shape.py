import json
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from kvstore.blocks.shape import BLOCK_ORDER_VERSION, ELEMENT_BYTES, KVShape, Planes, SideTensor
from kvstore.errors import ConfigError


def shape(**changes):
    base = {"num_layers": 6, "num_kv_heads": 4, "head_dim": 8, "dtype": "bfloat16", "block_size": 16}
    return KVShape(**(base | changes))


@pytest.mark.parametrize(
    ("planes", "num_planes", "row_dim"),
    [(Planes.KV_SPLIT, 2, 8), (Planes.KV_PACKED, 1, 16), (Planes.SINGLE, 1, 8)],
)
@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_sizes(planes, num_planes, row_dim, dtype):
    got = shape(planes=planes, dtype=dtype, num_layer_groups=3)
    assert (got.num_planes, got.row_dim) == (num_planes, row_dim)
    assert got.block_dims == (3, 4, 2, num_planes, 16, row_dim)
    elements = 1
    for size in got.block_dims:
        elements *= size
    assert got.block_bytes == elements * got.element_bytes


def test_split_and_packed_hold_the_same_bytes():
    assert shape(planes="kv").block_bytes == shape(planes="packed").block_bytes


@pytest.mark.parametrize("plane", Planes)
def test_planes_are_coerced_from_text(plane):
    assert shape(planes=plane.value).planes is plane
    assert shape(planes=plane.value) == shape(planes=plane)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 0},
        {"num_layers": -1},
        {"num_kv_heads": 0},
        {"head_dim": 0},
        {"block_size": 0},
        {"num_layer_groups": 0},
        {"num_layer_groups": 4},
        {"num_layer_groups": 7},
        {"num_layers": 6.0},
        {"num_layers": "6"},
        {"num_layers": True},
        {"num_layers": None},
        {"dtype": "float64"},
        {"dtype": "torch.float16"},
        {"dtype": None},
        {"dtype": ["float16"]},
        {"planes": "mla"},
        {"planes": None},
        {"planes": 2},
        {"num_layers": 10**30},
        {"num_layers": 10**5000},
        {"num_kv_heads": 10**30},
        {"head_dim": 10**30},
        {"block_size": 10**30},
        {"block_size": 1 << 23},
        {"num_layer_groups": 10**5000},
    ],
)
def test_bad_values_are_refused(changes):
    with pytest.raises(ConfigError) as caught:
        shape(**changes)
    message = str(caught.value)
    assert next(iter(changes)) in message
    assert "wanted" in message
    assert "got" in message
    assert "; " in message


def test_a_block_has_at_most_what_a_message_can_say():
    most = {"num_layers": 1, "num_kv_heads": 1, "dtype": "uint8", "planes": "single", "block_size": 1}
    assert shape(**most, head_dim=(1 << 32) - 1).block_bytes == (1 << 32) - 1
    with pytest.raises(ConfigError, match="got 4294967296 bytes from num_layers=1,"):
        shape(**most, head_dim=1 << 32)
    with pytest.raises(ConfigError, match="and 1 sides"):
        shape(sides=[SideTensor(name="scale", dtype="float32", dim=10**30)])


def test_frozen_and_keyword_only():
    with pytest.raises(FrozenInstanceError):
        shape().num_layers = 3
    with pytest.raises(TypeError):
        KVShape(6, 4, 8, "bfloat16")
    assert not hasattr(shape(), "__dict__")


def test_canonical_is_fixed():
    assert shape(num_layer_groups=2).canonical() == (
        b'{"block_order_version":1,"block_size":16,"dtype":"bfloat16","head_dim":8,"num_kv_heads":4,'
        b'"num_layer_groups":2,"num_layers":6,"planes":"kv"}'
    )


def test_canonical_names_every_field_and_the_order():
    decoded = json.loads(shape().canonical())
    assert decoded.pop("block_order_version") == BLOCK_ORDER_VERSION == 1
    assert set(decoded) == {field.name for field in fields(KVShape) if field.init} - {"sides"}


SCALES = SideTensor(name="k_scale", dtype="float32"), SideTensor(name="a_zero", dtype="uint8", dim=3, per_token=False)


def test_side_tensors_are_part_of_what_is_hashed_only_where_there_are_any():
    assert shape(sides=[]).canonical() == shape().canonical()
    assert shape(sides=SCALES[:1]).canonical() == shape().canonical()[:-1] + (
        b',"sides":[{"dim":1,"dtype":"float32","name":"k_scale","per_head":true,"per_token":true}]}'
    )


def test_the_order_in_which_side_tensors_are_given_does_not_matter():
    one, other = shape(sides=SCALES), shape(sides=list(SCALES[::-1]))
    assert one == other
    assert hash(one) == hash(other)
    assert [side.name for side in one.sides] == ["a_zero", "k_scale"]
    assert one.canonical() == other.canonical()


@pytest.mark.parametrize(
    "changes", [{"name": "x"}, {"dtype": "float16"}, {"dim": 2}, {"per_head": False}, {"per_token": False}]
)
def test_canonical_differs_by_every_field_of_a_side_tensor(changes):
    changed = shape(sides=[replace(SCALES[0], **changes)])
    assert changed.canonical() != shape(sides=SCALES[:1]).canonical()
    assert changed.canonical() != shape().canonical()


def test_a_block_grows_by_its_side_tensors():
    whole = shape().block_bytes
    # For each of 4 heads: 6 layers, 16 tokens, 4 bytes.
    assert shape(sides=SCALES[:1]).block_bytes == whole + 4 * 6 * 16 * 4
    # And for each head of each of 2 groups 3 layers of 3 bytes, filled up to 16.
    assert shape(sides=SCALES, num_layer_groups=2).block_bytes == whole + 4 * 6 * 16 * 4 + 2 * 4 * 16
    for_all = SideTensor(name="scale", dtype="float16", per_head=False)
    assert shape(sides=[for_all]).block_bytes == whole + 6 * 16 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "wanted name"),
        ({"name": 3}, "wanted name"),
        ({"dtype": "float64"}, "wanted dtype"),
        ({"dim": 0}, "wanted dim"),
        ({"dim": True}, "wanted dim"),
        ({"per_head": 1}, "wanted per_head"),
        ({"per_token": "token"}, "wanted per_token"),
    ],
)
def test_bad_side_tensors_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(SCALES[0], **changes)


@pytest.mark.parametrize("sides", [SCALES[0], {"k_scale": SCALES[0]}, ["k_scale"], None, SCALES[:1] * 2])
def test_bad_lists_of_side_tensors_are_refused(sides):
    with pytest.raises(ConfigError, match="wanted sides"):
        shape(sides=sides)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 12},
        {"num_kv_heads": 8},
        {"head_dim": 16},
        {"dtype": "float16"},
        {"block_size": 32},
        {"planes": "packed"},
        {"planes": "single"},
        {"num_layer_groups": 2},
    ],
)
def test_canonical_differs_by_every_field(changes):
    assert replace(shape(), **changes).canonical() != shape().canonical()


def test_survives_pickling():
    assert pickle.loads(pickle.dumps(shape(planes="packed"))) == shape(planes="packed")


def test_imports_no_torch():
    code = "import sys, kvstore.blocks.shape, kvstore.blocks.hashing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0

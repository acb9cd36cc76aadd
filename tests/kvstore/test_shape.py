import json
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from kvstore.errors import ConfigError
from kvstore.shape import BLOCK_ORDER_VERSION, ELEMENT_BYTES, KVShape, Planes


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
    assert got.token_bytes * got.block_size == got.block_bytes


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
    assert set(decoded) == {field.name for field in fields(KVShape)}


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
    code = "import sys, kvstore.shape, kvstore.hashing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0

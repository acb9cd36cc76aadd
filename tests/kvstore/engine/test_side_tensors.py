"""Which tensors are taken as the side tensors of a cache, and which are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from inner_parts import parts_of

from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape, SideTensor
from kvstore.client.client import Client
from kvstore.engine.detect import detect_layout
from kvstore.engine.side_tensors import detect_sides
from kvstore.errors import LayoutMismatch

K_SCALE, V_SCALE = (SideTensor(name=name, dtype="float32") for name in ("k_scale", "v_scale"))
BASE = KVShape(num_layers=4, num_kv_heads=4, head_dim=8, dtype="float8_e4m3fn", block_size=8)
SCALED = replace(BASE, sides=(K_SCALE, V_SCALE))


@pytest.fixture(scope="module")
def node(cluster_class):
    made = cluster_class()
    made.add("a", mover=False, capacity_bytes=1 << 20)
    yield made
    made.stop()


def engine(blocks=9, size=8, heads=4):
    """Caches of all layers, and their scales, by layer."""
    caches = [torch.zeros(2, blocks, size, heads, 8, dtype=torch.float8_e4m3fn) for _ in range(4)]
    return caches, {name: [torch.zeros(blocks, size, heads) for _ in range(4)] for name in ("k_scale", "v_scale")}


def detected(caches, sides, shape=SCALED, axes=None):
    """The axes that are found for side tensors."""
    layout = detect_layout(caches, shape, "PBTHD")
    return [found.axes for found in detect_sides(caches, sides, shape, layout, axes)[0].sides]


@pytest.mark.parametrize(
    ("side", "dims", "axes"),
    [
        (K_SCALE, (9, 8, 4), "BTH"),
        (K_SCALE, (9, 4, 8), "BHT"),
        (K_SCALE, (9, 8, 4, 1), "BTHD"),
        (K_SCALE, (4, 9, 8, 4), "LBTH"),
        (K_SCALE, (9, 4, 4, 8), None),
        (replace(K_SCALE, dim=2), (9, 8, 4, 2), "BTHD"),
        (replace(K_SCALE, dim=2), (9, 8, 4), None),
        (replace(K_SCALE, per_head=False), (9, 8), "BT"),
        (replace(K_SCALE, per_head=False, dim=5), (9, 8, 5), "BTD"),
        (replace(K_SCALE, per_token=False), (9, 4), "BH"),
        (replace(K_SCALE, per_token=False, per_head=False), (9,), "B"),
        (replace(K_SCALE, per_token=False, per_head=False, dim=3), (4, 9, 3), "LBD"),
    ],
)
def test_dims_of_side_tensors_are_found_from_their_sizes(side, dims, axes):
    shape = replace(BASE, sides=[side])
    cross = axes is not None and "L" in axes
    rows = torch.zeros(dims) if cross else [torch.zeros(dims) for _ in range(4)]
    caches = engine()[0]
    if axes is None:
        with pytest.raises(LayoutMismatch, match=r"side_caches\['k_scale'\]: wanted per_layer tensors with B=9"):
            detected(caches, {"k_scale": rows}, shape)
    else:
        assert detected(caches, {"k_scale": rows}, shape) == [axes]


def test_sizes_that_leave_a_choice_need_the_axes():
    caches, sides = engine(size=4)
    with pytest.raises(LayoutMismatch, match=r"side_caches\['k_scale'\].*got 2: BHT, BTH.*side_axes="):
        detected(caches, sides)
    assert detected(caches, sides, axes={"k_scale": "BHT", "v_scale": "BTH"}) == ["BHT", "BTH"]


def test_fingerprints_tell_side_tensors_apart():
    caches, sides = engine(size=4)
    layout = detect_layout(caches, SCALED, "PBTHD")
    one, _ = detect_sides(caches, sides, SCALED, layout, {"k_scale": "BTH", "v_scale": "BTH"})
    other, _ = detect_sides(caches, sides, SCALED, layout, {"k_scale": "BTH", "v_scale": "BHT"})
    assert len({layout.fingerprint, one.fingerprint, other.fingerprint}) == 3


def changed(**changes):
    """Scales with some of them changed; None leaves one out."""
    sides = engine()[1] | changes
    return {name: tensors for name, tensors in sides.items() if tensors is not None}


def layers(*dims, dtype=torch.float32, device="cpu"):
    return [torch.zeros(dims, dtype=dtype, device=device) for _ in range(4)]


ONE = layers(9, 8, 4)


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        (None, r"wanted \['k_scale', 'v_scale'\].*got \[\]"),
        (changed(v_scale=None), r"got \['k_scale'\]"),
        (changed(q_scale=ONE), r"got \['k_scale', 'v_scale', 'q_scale'\]"),
        ([ONE, ONE], "wanted a dict by name, got list"),
        (changed(k_scale=ONE[:3]), r"'k_scale'.*wanted 4 per_layer tensors for 4 layers, got 3"),
        (changed(k_scale=layers(9, 8, 2)), r"'k_scale'.*B=9, D=1, H=4, T=8.*got \[9, 8, 2\]"),
        (changed(k_scale=layers(7, 8, 4)), r"'k_scale'.*B=9.*got \[7, 8, 4\]"),
        (changed(k_scale=layers(9, 4, 4)), r"'k_scale'.*T=8.*got \[9, 4, 4\]"),
        (changed(k_scale=layers(9, 8, 4, dtype=torch.float16)), r"'k_scale'.*wanted float32.*got torch.float16"),
        (changed(k_scale=layers(9, 8, 4, device="meta")), r"'k_scale'.*wanted tensors on cpu.*got meta"),
        (changed(k_scale=[*ONE[:3], torch.zeros(9, 4, 8).mT]), r"'k_scale'.*strides"),
        (changed(k_scale=[torch.zeros(9, 8, 1).expand(9, 8, 4) for _ in range(4)]), "do not overlap"),
        (changed(k_scale=list(zip(ONE, layers(9, 8, 4), strict=True))), r"'k_scale'.*wanted one tensor per layer"),
        (changed(k_scale="float32"), r"'k_scale'.*wanted one tensor"),
        (changed(k_scale=ONE, v_scale=ONE), "in memory of their own"),
    ],
)
def test_side_tensors_that_do_not_fit_are_refused_and_nothing_changes(node, sides, message):
    caches, good = engine()
    client = Client(node.nodes["a"].control_path, Namespace(model="refused", shape=SCALED))
    node.clients.append(client)
    client.register_kv_caches(caches, "PBTHD", side_caches=good)
    before = parts_of(client).copier
    with pytest.raises(LayoutMismatch, match=message):
        client.register_kv_caches(caches, "PBTHD", side_caches=sides)
    assert parts_of(client).copier is before


def test_side_tensors_of_a_shape_without_any_are_refused():
    caches, sides = engine()
    with pytest.raises(LayoutMismatch, match=r"wanted \[\] as in KVShape.sides"):
        detected(caches, sides, BASE)


def test_axes_of_what_is_no_side_tensor_are_refused():
    caches, sides = engine()
    with pytest.raises(LayoutMismatch, match=r"side_axes: wanted names of .*got \['scale'\]"):
        detected(caches, sides, axes={"scale": "BTH"})


def test_dicts_that_order_layers_unlike_are_refused():
    caches, sides = engine()
    names = ["layer.0", "layer.1", "layer.2", "layer.3"]
    named = dict(zip(names, caches, strict=True))
    right = {name: dict(zip(names, tensors, strict=True)) for name, tensors in sides.items()}
    assert detected(named, right) == ["BTH", "BTH"]
    wrong = right | {"v_scale": dict(reversed(right["v_scale"].items()))}
    with pytest.raises(LayoutMismatch, match=r"'v_scale'.*order of the caches"):
        detected(named, wrong)

import hashlib
from dataclasses import replace

import pytest
import torch

from kvstore.blocks.part import Part, as_part
from kvstore.blocks.shape import KVShape
from kvstore.engine.detect import detect_layout
from kvstore.engine.layout import CacheForm, canonical_views, same_layout
from kvstore.errors import ConfigError, LayoutMismatch

BLOCKS, LAYERS, TOKENS, HEADS, DIM = 7, 3, 16, 5, 8
SIZES = {"B": BLOCKS, "L": LAYERS, "P": 2, "T": TOKENS, "H": HEADS, "D": DIM}


def shape(**changes):
    base = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": DIM, "dtype": "float32"}
    return KVShape(**(base | {"block_size": TOKENS} | changes))


def mla(**changes):
    return shape(num_kv_heads=1, planes="single", **changes)


def numbered(axes, memory=None, sizes=None, base=0, dtype=torch.float32):
    """A tensor with logical dims `axes`, laid out in memory as `memory`, all elements distinct."""
    sizes = SIZES | (sizes or {})
    memory = memory or axes
    count = 1
    for axis in memory:
        count *= sizes[axis]
    flat = torch.arange(base, base + count, dtype=torch.float32).to(dtype).reshape([sizes[a] for a in memory])
    return flat.permute([memory.index(axis) for axis in axes])


def layers(axes, memory=None, sizes=None):
    return [numbered(axes, memory, sizes, base=100_000 * layer) for layer in range(LAYERS)]


def element(caches, axes, layer, plane, at):
    """Read one element with nothing but plain indexing."""
    tensor = caches if isinstance(caches, torch.Tensor) else caches[layer]
    if isinstance(tensor, tuple):
        tensor = tensor[plane]
    index = at | {"L": layer, "P": plane}
    return tensor[tuple(index[axis] for axis in axes)]


def check_views(caches, axes, found, stored):
    views = canonical_views(caches, found, stored)
    per_layer = len(views) // stored.num_layers
    spots = [
        {"B": b, "T": t, "H": h, "D": d}
        for b in (0, found.num_blocks - 1)
        for t in (0, min(3, found.block_size - 1), found.block_size - 1)
        for h in (0, stored.num_kv_heads - 1)
        for d in (0, stored.row_dim - 1)
    ]
    for layer in range(stored.num_layers):
        for plane in range(stored.num_planes):
            view, p = (views[2 * layer + plane], 0) if per_layer == 2 else (views[layer], plane)
            for at in spots:
                got = view[at["B"], at["H"], p, at["T"], at["D"]]
                wanted = element(caches, axes, layer, plane, at)
                assert got.data_ptr() == wanted.data_ptr()
                assert got.item() == wanted.item()


PER_LAYER = [
    ("BPTHD", None),
    ("BPHTD", None),
    ("PBTHD", None),
    ("PBHTD", None),
    ("BPTHD", "BPHTD"),
    ("PBTHD", "BPHTD"),
    ("BPTHD", "HBPTD"),
    ("BPTHD", "PBTDH"),
]


@pytest.mark.parametrize(("axes", "memory"), PER_LAYER)
@pytest.mark.parametrize("as_dict", [False, True])
def test_per_layer(axes, memory, as_dict):
    tensors = layers(axes, memory)
    caches = {f"layer.{9 - i}": tensor for i, tensor in enumerate(tensors)} if as_dict else tensors
    found = detect_layout(caches, shape())
    assert (found.axes, found.form, found.num_blocks, found.block_size) == (
        axes,
        CacheForm.PER_LAYER,
        BLOCKS,
        TOKENS,
    )
    assert not found.cross_layer
    assert found.tensor_shape == tuple(tensors[0].shape)
    assert found.stride_bytes == tuple(4 * stride for stride in tensors[0].stride())
    assert detect_layout(caches, shape(), axes=axes) == found
    check_views(tensors, axes, found, shape())


@pytest.mark.parametrize("axes", ["BTHD", "BHTD"])
def test_pairs(axes):
    pairs = [(numbered(axes, base=1000 * layer), numbered(axes, base=7000 * layer + 9)) for layer in range(LAYERS)]
    for caches in (pairs, dict(enumerate(pairs)), [list(pair) for pair in pairs]):
        found = detect_layout(caches, shape())
        assert (found.axes, found.form) == (axes, CacheForm.KV_PAIR)
        assert len(canonical_views(caches, found, shape())) == 2 * LAYERS
    check_views(pairs, axes, found, shape())


CROSS_LAYER = [
    "BHLPTD",
    "BLPTHD",
    "LBPTHD",
    "LPBTHD",
    "BHPLTD",
    "BLPHTD",
    "PLBTHD",
    "PBLTHD",
    "BPLHTD",
    "LBPHTD",
]


@pytest.mark.parametrize("axes", CROSS_LAYER)
@pytest.mark.parametrize("memory", [None, "BHLPTD", "LBHPTD"])
def test_cross_layer(axes, memory):
    caches = numbered(axes, memory)
    found = detect_layout(caches, shape())
    assert (found.axes, found.form, found.num_blocks) == (axes, CacheForm.CROSS_LAYER, BLOCKS)
    assert found.cross_layer
    check_views(caches, axes, found, shape())


def test_an_order_that_no_engine_uses_must_be_named():
    caches = numbered("TBHPLD")
    with pytest.raises(LayoutMismatch, match="BHLPTD"):
        detect_layout(caches, shape())
    found = detect_layout(caches, shape(), axes="TBHPLD")
    check_views(caches, "TBHPLD", found, shape())


@pytest.mark.parametrize("axes", ["BHTD", "BTHD", "BPHTD", "PBTHD"])
def test_packed(axes):
    stored = shape(planes="packed")
    caches = layers(axes, sizes={"P": 1, "D": 2 * DIM})
    found = detect_layout(caches, stored)
    assert found.axes == axes
    check_views(caches, axes, found, stored)


def test_packed_rows_given_as_split_are_explained():
    with pytest.raises(LayoutMismatch, match="planes='packed'"):
        detect_layout(layers("BHTD", sizes={"D": 2 * DIM}), shape())


@pytest.mark.parametrize("axes", ["BTD", "BTHD", "BPTHD", "BHTD"])
def test_latent(axes):
    caches = layers(axes, sizes={"P": 1, "H": 1})
    found = detect_layout(caches, mla())
    check_views(caches, found.axes, found, mla())
    view = canonical_views(caches, found, mla())[0]
    assert tuple(view.shape) == (BLOCKS, 1, 1, TOKENS, DIM)


@pytest.mark.parametrize("axes", ["LBTD", "BLTD"])
def test_latent_cross_layer(axes):
    caches = numbered(axes)
    found = detect_layout(caches, mla())
    assert found.axes == axes
    check_views(caches, axes, found, mla())


def test_dims_of_size_one_leave_no_choice():
    caches = layers("BPTHD", sizes={"P": 1, "H": 1, "B": 1})
    assert detect_layout(caches, mla()).num_blocks == 1
    assert detect_layout(layers("BTD"), mla(), axes="BTD").axes == "BTD"


def test_one_layer_in_one_tensor():
    stored = shape(num_layers=1)
    assert detect_layout(numbered("BPTHD"), stored).axes == "BPTHD"
    assert detect_layout(numbered("LBPTHD", sizes={"L": 1}), stored).num_blocks == BLOCKS
    assert detect_layout([numbered("BPTHD")], stored).form is CacheForm.PER_LAYER


def test_equal_tokens_and_heads_are_ambiguous():
    stored, caches = shape(num_kv_heads=TOKENS), layers("BPTHD", sizes={"H": TOKENS})
    with pytest.raises(LayoutMismatch, match="axes=") as caught:
        detect_layout(caches, stored)
    assert "BPHTD" in str(caught.value)
    assert "BPTHD" in str(caught.value)
    for axes in ("BPHTD", "BPTHD"):
        found = detect_layout(caches, stored, axes=axes)
        assert found.axes == axes
        check_views(caches, axes, found, stored)


def test_two_blocks_and_two_planes_are_ambiguous():
    with pytest.raises(LayoutMismatch, match="BPTHD, PBTHD"):
        detect_layout(layers("BPTHD", sizes={"B": 2}), shape())


def test_as_many_blocks_as_layers_are_ambiguous():
    with pytest.raises(LayoutMismatch, match="BLPTHD, LBPTHD"):
        detect_layout(numbered("BLPTHD", sizes={"B": LAYERS}), shape())


def test_two_heads_before_layers_are_ambiguous():
    with pytest.raises(LayoutMismatch, match=r"BHLPTD, BPLHTD|BHLPTD"):
        detect_layout(numbered("BLPHTD", sizes={"L": 2, "H": 2}), shape(num_layers=2, num_kv_heads=2))


@pytest.mark.parametrize(
    "axes",
    ["BPTH", "BPHTD", "BPTDH", "BTHD", "BBTHD", "BXTHD", "", "LBPTHD", "bpthd", "PBTHD"],
)
def test_wrong_axes_are_refused(axes):
    with pytest.raises(LayoutMismatch, match="wanted"):
        detect_layout(layers("BPTHD"), shape(), axes=axes)


@pytest.mark.parametrize(
    "changes",
    [{"head_dim": 9}, {"num_kv_heads": 6}, {"planes": "packed"}, {"planes": "single"}],
)
def test_sizes_that_do_not_fit(changes):
    with pytest.raises(LayoutMismatch) as caught:
        detect_layout(layers("BPTHD"), shape(**changes))
    message = str(caught.value)
    assert "BPTHD" in message
    assert str([BLOCKS, 2, TOKENS, HEADS, DIM]) in message
    assert "D=" in message


@pytest.mark.parametrize("stored_tokens", [8, 32, 48, 1])
@pytest.mark.parametrize("axes", [None, "BPTHD"])
def test_engine_blocks_may_be_multiples_or_divisors_of_stored_ones(stored_tokens, axes):
    stored = shape(block_size=stored_tokens)
    found = detect_layout(layers("BPTHD"), stored, axes=axes)
    assert (found.axes, found.block_size, found.num_blocks) == ("BPTHD", TOKENS, BLOCKS)
    check_views(layers("BPTHD"), "BPTHD", found, stored)
    assert found.fingerprint == detect_layout(layers("BPTHD"), shape()).fingerprint


@pytest.mark.parametrize("stored_tokens", [64, 256])
@pytest.mark.parametrize("page_tokens", [1, 16, 32, 64])
def test_pages_of_usual_engines_fit_usual_stored_blocks(page_tokens, stored_tokens):
    """Scenario 15: a stored block is as many whole pages as there are tokens in it."""
    stored = shape(block_size=stored_tokens)
    caches = layers("BPTHD", sizes={"T": page_tokens, "B": 4})
    found = detect_layout(caches, stored)
    assert (found.axes, found.block_size, found.num_blocks) == ("BPTHD", page_tokens, 4)
    check_views(caches, "BPTHD", found, stored)


@pytest.mark.parametrize(("stored_tokens", "page_tokens", "to_use"), [(64, 48, 16), (64, 24, 8), (256, 96, 32)])
def test_pages_that_do_not_fit_a_stored_block_are_refused_with_both_sizes(stored_tokens, page_tokens, to_use):
    """Scenario 15: at registration, before anything is copied."""
    caches = layers("BPTHD", sizes={"T": page_tokens})
    with pytest.raises(LayoutMismatch, match=rf"block_size={to_use}\)") as caught:
        detect_layout(caches, shape(block_size=stored_tokens))
    assert f"the stored {stored_tokens} tokens, got blocks of {page_tokens}" in str(caught.value)


@pytest.mark.parametrize(("stored_tokens", "to_use"), [(24, 8), (15, 1), (12, 4)])
@pytest.mark.parametrize("axes", [None, "BPTHD"])
def test_block_sizes_of_which_neither_divides_the_other_are_refused_with_the_one_to_use(stored_tokens, to_use, axes):
    with pytest.raises(LayoutMismatch, match=rf"block_size={to_use}\)") as caught:
        detect_layout(layers("BPTHD"), shape(block_size=stored_tokens), axes=axes)
    assert f"the stored {stored_tokens} tokens, got blocks of 16" in str(caught.value)


def test_the_stored_block_size_is_read_where_another_could_be():
    # Two dims of 2: as planes and layers of blocks of 16 tokens, not as tokens behind 16 of something else.
    sizes = {"L": 2, "H": 2, "T": 16, "B": 2}
    found = detect_layout(numbered("BHLPTD", sizes=sizes), shape(num_layers=2, num_kv_heads=2), axes="BHLPTD")
    assert found.block_size == 16
    # With heads as many as the engine's tokens nothing tells them apart, whatever the stored block size is.
    for tokens in (4, 8, 16):
        with pytest.raises(LayoutMismatch, match="BPHTD, BPTHD"):
            detect_layout(layers("BPTHD", sizes={"H": 8, "T": 8}), shape(num_kv_heads=8, block_size=tokens))


@pytest.mark.parametrize("part", [Part(0, 5, 0, 1), Part(3, 5, 0, 1), Part(0, 1, 2, 3), Part(4, 5, 1, 3)])
@pytest.mark.parametrize("axes", ["BPTHD", "PBTHD", "BPHTD"])
def test_parts(part, axes):
    stored = shape(num_layer_groups=3)
    sizes = SIZES | {"H": HEADS // part.tp_size}
    caches = [numbered(axes, sizes=sizes, base=1000 * layer) for layer in range(LAYERS // part.pp_size)]
    found = detect_layout(caches, stored, part=part)
    assert (found.axes, found.part, found.num_layers) == (axes, part, LAYERS // part.pp_size)
    views = canonical_views(caches, found, stored)
    assert [tuple(view.shape) for view in views] == [(BLOCKS, sizes["H"], 2, TOKENS, DIM)] * found.num_layers
    with pytest.raises(LayoutMismatch, match="wanted"):
        detect_layout(layers(axes), stored, part=part)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ((0, 2, 0, 1), "the 5 KV heads of a block, got tp_size=2"),
        ((9, 10, 0, 1), "the 5 KV heads of a block, got tp_size=10.*same part"),
        ((0, 1, 0, 3), "the 1 layer groups of a block, got pp_size=3.*num_layer_groups=.*multiple of 3"),
    ],
)
def test_parts_that_blocks_do_not_have(part, words):
    with pytest.raises(LayoutMismatch, match=words):
        detect_layout(layers("BPTHD"), shape(), part=Part(*part))


def test_bad_parts():
    for bad in (
        (1, 1, 0, 1),
        (-1, 1, 0, 1),
        (0, 0, 0, 1),
        (0, 1, 2, 2),
        (0, 1.0, 0, 1),
        (False, 1, 0, 1),
        (0, 10**5000, 0, 1),
        (0, 32, 0, 33),
    ):
        with pytest.raises(ConfigError, match="Part"):
            Part(*bad)
        with pytest.raises(ConfigError, match="Part"):
            as_part(bad)
    for bad in ((0, 1), "0101", 3, (0, 1, 0, 1, 0)):
        with pytest.raises(ConfigError, match=r"wanted \(tp_rank, tp_size, pp_rank, pp_size\)"):
            as_part(bad)
    assert as_part(None) == as_part([0, 1, 0, 1]) == Part(0, 1, 0, 1)
    assert [as_part((tp, 2, pp, 3)).index for pp in range(3) for tp in range(2)] == list(range(6))
    assert as_part((1, 2, 0, 3)).num_parts == 6


def strided_apart(tensor):
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def overlapping_layers():
    """Layers of one tensor of which each begins with the last block of the one before."""
    one = numbered("BPTHD")
    whole = torch.zeros(LAYERS * BLOCKS, *one.shape[1:], dtype=one.dtype)
    return [whole[at : at + BLOCKS] for at in range(0, LAYERS * (BLOCKS - 1), BLOCKS - 1)]


@pytest.mark.parametrize(
    ("caches", "word"),
    [
        ([], "tensor"),
        ({}, "tensor"),
        (layers("BPTHD")[:2], "3 layers"),
        ([numbered("LBPTHD")], "by itself"),
        ([*layers("BPTHD")[:2], (numbered("BTHD"), numbered("BTHD"))], "one form"),
        ([(numbered("BTHD"),)] * 3, "one form"),
        (["a", "b", "c"], "torch tensors"),
        ([None] * 3, "torch tensors"),
        ([*layers("BPTHD")[:2], numbered("BPTHD").half()], "as the first"),
        ([*layers("BPTHD")[:2], numbered("BPTHD", sizes={"B": 8})], "as the first"),
        ([*layers("BPTHD")[:2], numbered("BPTHD", "BPHTD")], "as the first"),
        ([*layers("BPTHD")[:2], strided_apart(numbered("BPTHD"))], "as the first"),
        ([*layers("BPTHD")[:2], torch.empty(BLOCKS, 2, TOKENS, HEADS, DIM, device="meta")], "as the first"),
        ([numbered("BPTHD")] * 3, "memory of their own"),
        (overlapping_layers(), "share some"),
        ([numbered("BPTHD").half() for _ in range(3)], "float16"),
        ([numbered("BPTHD").int() for _ in range(3)], "int32"),
        (numbered("BLPTHD")[:, :, :1].expand(-1, -1, 2, -1, -1, -1), "overlap"),
        (torch.zeros(400_000).as_strided((7, 3, 2, 16, 5, 8), (1280, 8960, 640, 40, 8, 2)), "overlap"),
    ],
)
def test_unusable_caches(caches, word):
    with pytest.raises(LayoutMismatch, match=word):
        detect_layout(caches, shape())


def test_pairs_need_split_planes():
    pairs = [(numbered("BTHD", sizes={"D": 16}), numbered("BTHD", sizes={"D": 16})) for _ in range(LAYERS)]
    with pytest.raises(LayoutMismatch, match="pairs"):
        detect_layout(pairs, shape(planes="packed"))


def test_k_and_v_in_one_place_are_refused():
    caches = [(tensor, tensor) for tensor in (numbered("BTHD") for _ in range(LAYERS))]
    with pytest.raises(LayoutMismatch, match="memory of their own"):
        detect_layout(caches, shape())


def test_fingerprint():
    def fingerprint(axes, memory=None, blocks=BLOCKS, stored=None):
        return detect_layout(layers(axes, memory, {"B": blocks}), stored or shape()).fingerprint

    base = fingerprint("BPTHD")
    assert len(base) == 16
    assert int(base, 16) >= 0
    assert base == fingerprint("BPTHD")
    for axes, memory in PER_LAYER:
        assert fingerprint(axes, memory) == fingerprint(axes, memory, blocks=BLOCKS + 4)
    assert len({fingerprint(axes, memory) for axes, memory in PER_LAYER}) == len(PER_LAYER)
    found = detect_layout(layers("BPTHD"), shape())
    assert replace(found, part=Part(0, 1, 0, 1)).fingerprint == base
    assert replace(found, part=Part(0, 2, 0, 1)).fingerprint != base
    assert replace(found, dtype="int8").fingerprint != base
    assert replace(found, num_layers=4).fingerprint != base
    padded = [torch.zeros(BLOCKS, 2, TOKENS, HEADS, DIM + 2)[..., :DIM] for _ in range(LAYERS)]
    assert detect_layout(padded, shape()).fingerprint != base


def test_fixed_fingerprint():
    text = (
        '{"axes":"BPTHD","dtype":"float32","form":"per_layer",'
        '"gaps":[["D",4],["H",0],["T",0],["P",0],["B",0]],'
        '"num_layers":3,"part":[0,1,0,1],"sizes":[2,16,5,8]}'
    )
    wanted = hashlib.sha256(b"raykv/layout/1" + text.encode()).hexdigest()[:16]
    assert detect_layout(layers("BPTHD"), shape()).fingerprint == wanted == "cb2cf721077fa579"


def test_same_layout():
    caches = layers("BPTHD")
    found = detect_layout(caches, shape())
    same_layout(caches, found)
    same_layout(layers("BPTHD"), found)
    for other in (
        layers("BPTHD", "BPHTD"),
        layers("BPTHD", sizes={"B": 9}),
        [tensor.half() for tensor in caches],
        caches[:2],
        [*caches, numbered("BPTHD")],
        [*caches[:2], numbered("BPTHD", "BPHTD")],
        caches[0],
        [(tensor[:, 0], tensor[:, 1]) for tensor in caches],
    ):
        with pytest.raises(LayoutMismatch, match="as registered"):
            same_layout(other, found)
        with pytest.raises(LayoutMismatch, match="as registered"):
            canonical_views(other, found, shape())


def test_views_need_the_shape_of_the_layout():
    caches = layers("BPTHD")
    found = detect_layout(caches, shape())
    for other in (shape(head_dim=4), shape(num_layers=2), shape(dtype="bfloat16"), shape(planes="single")):
        with pytest.raises(LayoutMismatch, match="layout was detected"):
            canonical_views(caches, found, other)


def test_packed_cross_layer_by_logical_order():
    stored, sizes = shape(planes="packed"), {"D": 2 * DIM}
    for memory in ("LBHTD", "LBTHD", "LHBTD", "BLHTD", "BLTHD"):
        caches = numbered("LBHTD", memory, sizes)
        found = detect_layout(caches, stored)
        assert found.axes == "LBHTD"
        check_views(caches, "LBHTD", found, stored)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
def test_every_dtype(dtype):
    stored = shape(dtype=dtype)
    caches = [torch.zeros(BLOCKS, 2, TOKENS, HEADS, DIM).to(getattr(torch, dtype)) for _ in range(LAYERS)]
    found = detect_layout(caches, stored)
    assert found.dtype == dtype
    assert canonical_views(caches, found, stored)[0].dtype == getattr(torch, dtype)

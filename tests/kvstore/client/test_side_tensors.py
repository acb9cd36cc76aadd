"""Caches with scales beside them, behind save, load, publish and fetch, on two nodes of one process."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from inner_parts import parts_of

from kvstore.blocks.hashing import Namespace
from kvstore.blocks.part import Part
from kvstore.blocks.shape import KVShape, SideTensor
from kvstore.client.client import Client
from kvstore.engine import cuda_copier
from kvstore.errors import InvalidRequest, KVStoreError, LayoutMismatch
from kvstore.kernels import host_copy
from kvstore.kernels.reference import torch_dtype

TOKENS, POISON = 4, 0x5A
K_SCALE, V_SCALE = (SideTensor(name=name, dtype="float32") for name in ("k_scale", "v_scale"))
BASE = KVShape(num_layers=4, num_kv_heads=4, head_dim=8, dtype="float8_e4m3fn", block_size=TOKENS, num_layer_groups=2)
SCALED = replace(BASE, sides=(K_SCALE, V_SCALE))
#: Groups of a row have a scale each, and a zero point is for all heads.
GROUPED = replace(
    BASE,
    sides=(
        SideTensor(name="scale", dtype="float16", dim=2),
        SideTensor(name="zero", dtype="int8", per_head=False),
    ),
)
WHOLE = replace(
    BASE,
    sides=(
        SideTensor(name="amax", dtype="float32", per_token=False),
        SideTensor(name="step", dtype="float16", dim=3, per_token=False, per_head=False),
    ),
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
_seeds = itertools.count()


@pytest.fixture(scope="module")
def two_nodes(cluster_class):
    made = cluster_class()
    for node_id in "ab":
        made.add(node_id, capacity_bytes=1 << 20, block_bytes=4096)
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def _small_rings(monkeypatch):
    """Many clients on one GPU, and chunks of a few blocks."""
    monkeypatch.setattr(cuda_copier, "CHUNK_BYTES", 1 << 14)


class Model:
    """What a model computes for one chain, as bytes by layer, (plane of KV,) token and head."""

    def __init__(self, shape, num_blocks):
        rng = np.random.default_rng(next(_seeds))
        self.shape, self.space = shape, Namespace(model="scaled", shape=shape)
        self.tokens = tokens = rng.integers(0, 1 << 32, num_blocks * TOKENS, dtype=np.uint32)
        self.hashes = self.space.block_hashes(tokens)

        def drawn(*dims):
            return torch.from_numpy(rng.integers(0, 256, dims, dtype=np.uint8))

        self.kv = drawn(shape.num_layers, 2, len(tokens), shape.num_kv_heads, shape.head_dim)
        self.sides = {}
        for side in shape.sides:
            heads = shape.num_kv_heads if side.per_head else 1
            width = side.dim * torch_dtype(side.dtype).itemsize
            rows = drawn(shape.num_layers, len(tokens) if side.per_token else num_blocks, heads, width)
            self.sides[side.name] = rows if side.per_token else rows.repeat_interleave(TOKENS, 1)


class Rank:
    """One rank of an engine, its scales in tensors of their own or in the padding behind every row of its cache."""

    def __init__(self, cluster, node_id, model, part=(0, 1, 0, 1), size=TOKENS, inline=False, device="cpu", blocks=40):
        shape = model.shape
        self.client = Client(cluster.nodes[node_id].control_path, model.space, part)
        cluster.clients.append(self.client)
        self.layers, self.heads = Part(*part).ranges(shape)
        self.size, self.model = size, model
        num_heads, dim = len(self.heads), shape.head_dim
        padding = 4 if inline else 0
        dims = (len(self.layers), 2, blocks, size, num_heads, dim + padding)
        self.raws = [torch.full(dims, POISON, dtype=torch.uint8, device=device)]
        kv = self.raws[0][..., :dim].view(torch_dtype(shape.dtype))
        #: By layer, block, token, head, byte.
        self.views = {"kv": self.raws[0][..., :dim]}
        sides = {}
        for plane, side in enumerate(shape.sides):
            heads, tokens = num_heads if side.per_head else 1, size if side.per_token else 1
            if inline:
                raw = self.raws[0][:, plane, ..., dim:]
            else:
                width = side.dim * torch_dtype(side.dtype).itemsize
                raw = torch.full((len(self.layers), blocks, tokens, heads, width), POISON, dtype=torch.uint8)
                raw = raw.to(device)
                self.raws.append(raw)
            self.views[side.name] = raw
            rows = raw.view(torch_dtype(side.dtype))
            rows = rows if side.per_token else rows[:, :, 0]
            rows = rows if side.per_head else rows.squeeze(-2)
            sides[side.name] = list(rows.squeeze(-1) if side.dim == 1 else rows)
        self.layout = self.client.register_kv_caches(list(kv), "PBTHD", side_caches=sides, side_axes=self.axes(sides))
        self.ids = np.random.default_rng(size).permutation(blocks).tolist()

    def axes(self, sides):
        """The axes of every side tensor: four heads and four tokens cannot be told apart."""
        return {
            side.name: "B" + "T" * side.per_token + "H" * side.per_head + "D" * (side.dim > 1)
            for side in self.model.shape.sides
        }

    def blocks(self, begin, end):
        """The engine blocks that hold the tokens [begin, end) of the chain."""
        return self.ids[begin // self.size : -(-end // self.size)]

    def put(self, views, first, end):
        """Write what the model computed for tokens [first, end)."""
        heads = slice(self.heads.start, self.heads.stop)
        for token in range(first, end):
            block, at = self.ids[token // self.size], token % self.size
            for index, layer in enumerate(self.layers):
                views["kv"][index, :, block, at] = self.model.kv[layer, :, token, heads]
                for name, rows in self.model.sides.items():
                    target, held = views[name][index, block], rows[layer, token]
                    target[at % len(target)] = held[heads] if len(held) > 1 else held

    def fill(self):
        """Write all of the model."""
        self.put(self.views, 0, self.model.kv.shape[2])

    def poison(self):
        for raw in self.raws:
            raw.fill_(POISON)

    def check(self, first, end):
        """Every byte of caches and sides: tokens [first, end) are the model's, all others poison."""
        got = [raw.clone() for raw in self.raws]
        self.poison()
        self.put(self.views, first, end)
        assert all(torch.equal(mine, raw) for mine, raw in zip(got, self.raws, strict=True))

    def save(self):
        """Start to save all of the chain."""
        self.fill()
        return self.client.save(self.model.hashes, self.blocks(0, self.model.kv.shape[2]))

    def load(self, first=0, end=None, skip=0):
        """Load blocks [first, end) over poison, and check every byte."""
        self.poison()
        hashes = self.model.hashes[first:end]
        begin, stop = first * TOKENS, (first + len(hashes)) * TOKENS
        result = self.client.load(hashes, self.blocks(begin, stop), skip).result(30)
        assert result.num_blocks == len(hashes)
        self.check(begin + skip, stop)


def ranks(cluster, node_id, model, tp_size=1, pp_size=1, **options):
    return [
        Rank(cluster, node_id, model, (tp, tp_size, pp, pp_size), **options)
        for pp in range(pp_size)
        for tp in range(tp_size)
    ]


def save_all(engines):
    for job in [rank.save() for rank in engines]:
        result = job.result(30)
        assert (result.num_blocks, result.num_refused) == (len(engines[0].model.hashes), 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("writer", "reader"), [((1, 1), (4, 1)), ((2, 1), (4, 1)), ((4, 1), (2, 2)), ((2, 2), (1, 1)), ((1, 2), (2, 1))]
)
def test_what_ranks_save_other_ranks_load_with_their_own_scales(two_nodes, writer, reader, device):
    model = Model(SCALED, 6)
    save_all(ranks(two_nodes, "a", model, *writer, device=device))
    for rank in ranks(two_nodes, "b", model, *reader, device=device):
        rank.load()
        rank.load(1, 5, skip=6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize(("saver", "loader"), [(4, 4), (4, 8), (8, 2), (1, 4), (4, 1)])
def test_engines_of_other_block_sizes_share_rows_of_tokens(two_nodes, saver, loader, inline, device):
    model = Model(SCALED, 6)
    save_all([Rank(two_nodes, "a", model, size=saver, inline=inline, device=device)])
    rank = Rank(two_nodes, "b", model, size=loader, inline=not inline, device=device)
    for skip in (0, 3, 9, 24):
        rank.load(skip=skip)
    rank.load(1, 4, skip=1)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_many_elements_and_rows_for_all_heads(two_nodes, device):
    model = Model(GROUPED, 6)
    save_all(ranks(two_nodes, "a", model, pp_size=2, device=device))
    Rank(two_nodes, "b", model, size=2, device=device).load(skip=5)
    with pytest.raises(LayoutMismatch, match=r"wanted tp_size=1, because .*'zero'.* all 4 heads, got tp_size=2"):
        Client(two_nodes.nodes["a"].control_path, model.space, (0, 2, 0, 1))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_for_whole_blocks_come_back_and_are_not_skipped_in_part(two_nodes, device):
    model = Model(WHOLE, 6)
    save_all([Rank(two_nodes, "a", model, device=device)])
    rank = Rank(two_nodes, "b", model, device=device)
    rank.load(skip=8)
    rank.load(2, 5, skip=4)
    rank.load(skip=6 * TOKENS)  # Nothing is left to load.
    rank.poison()
    with pytest.raises(InvalidRequest, match=r"wanted whole blocks of 4 tokens, because .*'amax'.*, got 7; skip 4"):
        rank.client.load(model.hashes, rank.blocks(0, 24), 7)
    rank.check(0, 0)
    with pytest.raises(LayoutMismatch, match=r"wanted engine blocks of the stored 4 tokens.*'amax'.*got blocks of 8"):
        Rank(two_nodes, "b", model, size=8, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_hand_off_takes_scales_along(two_nodes, device):
    model = Model(SCALED, 6)
    one = Rank(two_nodes, "a", model, device=device)
    one.fill()
    ticket = one.client.publish(one.blocks(0, 24))
    other = Rank(two_nodes, "b", model, inline=True, device=device)
    assert other.client.fetch(ticket, other.blocks(0, 24)).result(30).num_blocks == 6
    other.check(0, 24)


def test_no_block_is_found_whose_scales_were_not_copied(two_nodes, monkeypatch):
    model = Model(SCALED, 6)
    rank, launch = Rank(two_nodes, "a", model), host_copy._launch
    calls = []

    def fail_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("no copy of the scales")
        launch(*args)

    monkeypatch.setattr(host_copy, "_launch", fail_second)
    with pytest.raises((MemoryError, KVStoreError)):
        rank.save().result(30)
    assert len(calls) == 2
    assert rank.client.lookup(model.hashes).num_blocks == 0
    monkeypatch.undo()
    save_all([rank])
    rank.load()


def test_shapes_that_differ_in_sides_alone_do_not_share_blocks(two_nodes):
    plain, scaled = Model(BASE, 4), Model(SCALED, 4)
    one, other = Rank(two_nodes, "a", plain), Rank(two_nodes, "a", scaled)
    save_all([one])
    assert one.client.lookup(plain.hashes).num_blocks == 4
    assert other.client.lookup(scaled.space.block_hashes(plain.tokens)).num_blocks == 0


def test_tensors_that_changed_after_they_were_registered_are_refused(two_nodes):
    model = Model(SCALED, 2)
    rank = Rank(two_nodes, "a", model)
    scales = parts_of(rank.client).copier.cache.sides[0]
    scales[1] = scales[1][:-1]
    with pytest.raises(LayoutMismatch, match="as registered"):
        rank.save()

"""Engines that divide and page the same KV in unlike ways, behind save and load, on two nodes of one process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from inner_parts import parts_of

from kvstore.blocks.hashing import Namespace
from kvstore.blocks.part import Part
from kvstore.blocks.shape import KVShape
from kvstore.client.client import Client
from kvstore.errors import InvalidRequest

SHAPE = KVShape(num_layers=4, num_kv_heads=4, head_dim=8, dtype="float32", block_size=4, num_layer_groups=2)
SPACE = Namespace(model="parts", shape=SHAPE)
_seeds = itertools.count()


class Model:
    """What a model computes for one chain: bytes by layer, plane, token and head, and the chain's hashes."""

    def __init__(self, num_blocks: int):
        rng = np.random.default_rng(next(_seeds))
        tokens = rng.integers(0, 1 << 32, num_blocks * SHAPE.block_size, dtype=np.uint32)
        self.hashes = SPACE.block_hashes(tokens)
        dims = (SHAPE.num_layers, 2, len(tokens), SHAPE.num_kv_heads, SHAPE.head_dim)
        self.kv = torch.from_numpy(rng.standard_normal(dims, dtype=np.float32))


class Rank:
    """One rank of an engine: its share of layers and heads, in blocks of its own size and order."""

    def __init__(self, cluster, node_id, part=(0, 1, 0, 1), block_size=4, axes="PBTHD", num_blocks=40):
        self.client = Client(cluster.nodes[node_id].control_path, SPACE, part)
        cluster.clients.append(self.client)
        self.layers, self.heads = Part(*part).ranges(SHAPE)
        self.size = block_size
        dims = {"P": 2, "B": num_blocks, "T": block_size, "H": len(self.heads), "D": SHAPE.head_dim}
        self.caches = [torch.zeros([dims[axis] for axis in axes]) for _ in self.layers]
        layout = self.client.register_kv_caches(self.caches, axes)
        assert layout.block_size == block_size
        # One view of each layer by plane, block, token and head, whatever the order in memory.
        self.views = [cache.permute([axes.index(axis) for axis in "PBTHD"]) for cache in self.caches]
        self.ids = np.random.default_rng(block_size).permutation(num_blocks).tolist()

    def places(self, first, end):
        """(block, token in it) of the tokens [first, end) of a chain, and the blocks' ids from there on."""
        blocks = self.ids[first // self.size : -(-end // self.size)]
        return [(self.ids[token // self.size], token % self.size) for token in range(first, end)], blocks

    def fill(self, model):
        for layer, view in zip(self.layers, self.views, strict=True):
            for token, (block, at) in enumerate(self.places(0, model.kv.shape[2])[0]):
                view[:, block, at] = model.kv[layer, :, token, self.heads.start : self.heads.stop]

    def poison(self):
        for cache in self.caches:
            cache.fill_(-7.0)

    def save(self, model, first=0, end=None):
        """Start saving blocks [first, end) of the chain; the cache holds all of it."""
        self.fill(model)
        hashes = model.hashes[first:end]
        tokens = first * SHAPE.block_size, (first + len(hashes)) * SHAPE.block_size
        return self.client.save(hashes, self.places(*tokens)[1])

    def load(self, model, first=0, end=None, skip=0):
        """Load blocks [first, end) into a poisoned cache, and check every byte of it."""
        self.poison()
        hashes = model.hashes[first:end]
        begin, stop = first * SHAPE.block_size, (first + len(hashes)) * SHAPE.block_size
        result = self.client.load(hashes, self.places(begin, stop)[1], skip).result(10)
        usable = begin + result.num_blocks * SHAPE.block_size
        if not result.failed:
            wanted = [torch.full_like(view, -7.0) for view in self.views]
            for layer, view in zip(self.layers, wanted, strict=True):
                for token, (block, at) in enumerate(self.places(0, usable)[0]):
                    if token >= begin + skip:
                        view[:, block, at] = model.kv[layer, :, token, self.heads.start : self.heads.stop]
            assert all(torch.equal(got, view) for got, view in zip(self.views, wanted, strict=True))
        return result


def ranks(cluster, node_id, tp_size=1, pp_size=1, **options):
    return [
        Rank(cluster, node_id, (tp, tp_size, pp, pp_size), **options) for pp in range(pp_size) for tp in range(tp_size)
    ]


def save_all(engines, model, first=0, end=None):
    jobs = [rank.save(model, first, end) for rank in engines]
    return [job.result(10) for job in jobs]


def fail_a_copy(rank, model, monkeypatch):
    """Have one rank's save fail while it copies, after its slots were claimed or joined."""

    def fail(pages, indexes, slots):
        raise RuntimeError("the copy failed")

    with monkeypatch.context() as patch:
        patch.setattr(parts_of(rank.client).copier, "into_slots", fail)
        with pytest.raises(RuntimeError, match="the copy failed"):
            rank.save(model).result(5)


SPLITS = {"whole": (1, 1), "tp2": (2, 1), "tp4": (4, 1), "pp2": (1, 2), "tp2 pp2": (2, 2)}


@pytest.fixture(scope="module")
def two_nodes(cluster_class):
    made = cluster_class()
    made.add("a", capacity_bytes=1 << 20)
    made.add("b", capacity_bytes=1 << 20)
    yield made
    made.stop()


@pytest.mark.parametrize("reader", SPLITS)
@pytest.mark.parametrize("writer", SPLITS)
def test_what_ranks_save_other_ranks_load_on_another_node(two_nodes, writer, reader):
    model = Model(10)
    writers = ranks(two_nodes, "a", *SPLITS[writer], axes="PBTHD")
    for result in save_all(writers, model):
        assert (result.num_blocks, result.num_written, result.num_refused) == (10, 10, 0)
    readers = ranks(two_nodes, "b", *SPLITS[reader], axes="BPHTD")
    results = [rank.load(model) for rank in readers]
    assert [result.num_blocks for result in results] == [10] * len(readers)
    # Whole blocks crossed between the nodes, once for all ranks of the node.
    assert sum(result.num_bytes for result in results) == 10 * SHAPE.block_bytes


@pytest.mark.parametrize(("writer", "reader"), [(4, 8), (8, 4), (2, 8), (8, 2), (16, 1), (1, 16)])
@pytest.mark.parametrize("skip", [0, 4, 7, 9])
def test_engine_blocks_of_other_sizes(two_nodes, writer, reader, skip):
    model = Model(10)
    save_all(ranks(two_nodes, "a", block_size=writer), model)
    assert ranks(two_nodes, "b", block_size=reader, axes="BPHTD")[0].load(model, skip=skip).num_blocks == 10


@pytest.mark.parametrize("first", [0, 1, 2, 5])
def test_a_job_that_begins_inside_an_engine_block(two_nodes, first):
    model, more = Model(10), 3
    (engine,) = ranks(two_nodes, "a", block_size=16)
    if first:
        save_all([engine], model, 0, first)
    (saved,) = save_all([engine], model, first, first + more)
    assert (saved.num_blocks, saved.num_written) == (more, more)
    (reader,) = ranks(two_nodes, "b", block_size=16, tp_size=1)
    for skip in (0, 3, 5):
        assert reader.load(model, first, first + more, skip).num_blocks == more


def test_a_save_of_a_block_that_engine_blocks_hold_in_part_stores_full_blocks_only(two_nodes):
    model = Model(5)
    (engine,) = ranks(two_nodes, "a", block_size=8)
    # Five stored blocks end in the middle of the third engine block.
    assert save_all([engine], model)[0].num_written == 5
    (reader,) = ranks(two_nodes, "b", block_size=8)
    assert reader.load(model).num_blocks == 5
    with pytest.raises(InvalidRequest, match=r"wanted 3 engine blocks, got 2; .* 8 tokens .* 5 stored blocks of 4"):
        engine.client.save(model.hashes, [0, 1])


def test_failures_name_all_engine_blocks_of_a_stored_block(two_nodes):
    model = Model(4)
    save_all(ranks(two_nodes, "a"), model, 0, 3)
    (small,) = ranks(two_nodes, "b", block_size=2)
    result = small.load(model)
    assert [failure.block_ids for failure in result.failed] == [tuple(small.ids[6:8])]
    (large,) = ranks(two_nodes, "b", block_size=16)
    assert large.load(model).failed_block_ids == {large.ids[0]}


def test_a_block_is_found_when_its_last_part_is_there(cluster, wait_until):
    core = cluster.add("a", capacity_bytes=1 << 20)
    model = Model(6)
    first, second = ranks(cluster, "a", tp_size=2)
    job = first.save(model)
    wait_until(lambda: core.state.pool_service.is_attached and core.pool.stats().num_writing == 6)
    assert not job.done()
    assert first.client.lookup(model.hashes).num_blocks == 0
    assert second.load(model).num_blocks == 0
    assert second.save(model).result(5).num_written == 6
    assert (job.result(5).num_blocks, job.result(5).num_written) == (6, 6)
    assert first.client.lookup(model.hashes).num_blocks == 6


def test_a_rank_whose_copy_fails_ends_the_block_for_all(cluster, wait_until, monkeypatch):
    core = cluster.add("a", capacity_bytes=1 << 20)
    model = Model(6)
    first, second = ranks(cluster, "a", tp_size=2)

    job = first.save(model)
    # Its blocks are those that the other rank joins. One that comes after the failure is the next test's.
    wait_until(lambda: core.state.pool_service.is_attached and core.pool.stats().num_writing == 6)
    fail_a_copy(second, model, monkeypatch)
    assert (job.result(5).num_blocks, job.result(5).num_written) == (0, 0)
    wait_until(lambda: core.pool.stats().num_writing == core.pool.stats().num_writes == 0)
    assert first.client.lookup(model.hashes).num_blocks == 0
    # Nothing is left in the way of another try.
    assert [result.num_written for result in save_all([first, second], model)] == [6, 6]
    assert [rank.load(model).num_blocks for rank in (first, second)] == [6, 6]


def test_a_rank_that_comes_after_the_failure_keeps_its_parts_for_the_others_next_try(cluster, monkeypatch):
    core = cluster.add("a", capacity_bytes=1 << 20, transfer_timeout_s=0.2)
    model = Model(6)
    first, second = ranks(cluster, "a", tp_size=2)
    fail_a_copy(second, model, monkeypatch)
    assert first.save(model).result(5).num_blocks == 0
    # Its parts are written; a rank may come for the others for as long as a lease lasts.
    assert (core.pool.stats().num_writing, core.pool.stats().num_writes) == (6, 0)
    assert second.save(model).result(5).num_blocks == 6
    assert [rank.load(model).num_blocks for rank in (first, second)] == [6, 6]
    assert (core.pool.stats().num_writing, core.pool.stats().num_writes) == (0, 0)


def test_a_rank_that_never_comes_holds_nobody_up_for_long(cluster):
    cluster.add("a", capacity_bytes=1 << 20, transfer_timeout_s=0.2)
    model = Model(3)
    first, _ = ranks(cluster, "a", tp_size=2)
    result = first.save(model).result(5)
    assert (result.num_blocks, result.num_written) == (0, 0)
    assert first.client.lookup(model.hashes).num_blocks == 0


def test_ranks_with_the_same_heads_save_once(cluster):
    cluster.add("a", capacity_bytes=1 << 20)
    model = Model(5)
    engines = [Rank(cluster, "a", (tp, 2, 0, 1)) for tp in (0, 0, 1, 1)]
    results = save_all(engines, model)
    assert [result.num_blocks for result in results] == [5] * 4
    assert sum(result.num_written for result in results) == 2 * 5
    assert [rank.load(model).num_blocks for rank in engines] == [5] * 4


def test_an_engine_without_parts_and_one_with_save_the_same_chain(cluster):
    cluster.add("a", capacity_bytes=1 << 20)
    model = Model(5)
    engines = [Rank(cluster, "a"), *ranks(cluster, "a", tp_size=2)]
    results = save_all(engines, model)
    assert [result.num_blocks for result in results] == [5] * 3
    assert [rank.load(model).num_blocks for rank in engines] == [5] * 3

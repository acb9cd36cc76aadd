"""Ranks in processes of their own: two of one engine save on one node, the ranks of another load on the other."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from typing import Any

import numpy as np
import pytest

import kvstore

pytestmark = [pytest.mark.ray]

NUM_BLOCKS, POISON = 12, 0x5A5A
SHAPE = kvstore.KVShape(num_layers=4, num_kv_heads=4, head_dim=32, dtype="bfloat16", block_size=16, num_layer_groups=2)
SCALED = dataclasses.replace(SHAPE, sides=[kvstore.SideTensor(name="scale", dtype="float32")])


class Rank:
    """One rank of an engine: its heads of its layers, in blocks of its own size and order of dims; scales if any."""

    def __init__(self, store: Any, space: Any, part: Any, block_size: int, axes: str) -> None:
        import torch

        from kvstore.part import as_part

        self.space, self.size = space, block_size
        self.client = store.client(space, part=part)
        self.layers, self.heads = as_part(part).ranges(space.shape)
        num_blocks = 4 * NUM_BLOCKS * space.shape.block_size // block_size
        dims = {"P": 2, "B": num_blocks, "T": block_size, "H": len(self.heads), "D": space.shape.head_dim}
        caches = [torch.zeros([dims[axis] for axis in axes], dtype=torch.bfloat16) for _ in self.layers]
        sides = {
            side.name: [torch.zeros(num_blocks, block_size, len(self.heads)) for _ in self.layers]
            for side in space.shape.sides
        }
        axes_of_sides = dict.fromkeys(sides, "BTH")
        self.client.register_kv_caches(caches, axes, side_caches=sides, side_axes=axes_of_sides)
        # By plane, block, token and head, whatever the order in memory; scales have one plane.
        views = [cache.view(torch.int16).permute([axes.index(axis) for axis in "PBTHD"]) for cache in caches]
        flat = [rows.view(torch.int16) for tensors in sides.values() for rows in tensors]
        scales = [rows.view(1, num_blocks, block_size, len(self.heads), 2) for rows in flat]
        self.bits = [view.numpy() for view in [*views, *scales]]
        self.ids = np.random.default_rng(block_size).permutation(num_blocks).tolist()

    def node_id(self) -> str:
        return self.client.node_id

    def engine_blocks(self, hashes: Any) -> list[int]:
        return self.ids[: -(-len(hashes) * self.space.shape.block_size // self.size)]

    def stamped(self, hashes: Any, skip: int = 0) -> list[np.ndarray]:
        """What this rank's caches hold with these blocks in them, poison elsewhere; bits depend on the hash alone."""
        shape, found = self.space.shape, [np.full_like(bits, POISON) for bits in self.bits]
        kinds = [(2, shape.head_dim), *[(1, 2) for _ in shape.sides]]
        for index, block_hash in enumerate(hashes):
            rng, whole = np.random.default_rng(list(block_hash[:8])), []
            for planes, dim in kinds:
                dims = (shape.num_layers, planes, shape.block_size, shape.num_kv_heads, dim)
                drawn = rng.integers(-(2**15), 2**15, dims, np.int16)
                whole += [drawn[layer] for layer in self.layers]
            for at in range(shape.block_size):
                token = index * shape.block_size + at
                if token >= skip:
                    for bits, drawn in zip(found, whole, strict=True):
                        own = drawn[:, at, self.heads.start : self.heads.stop]
                        bits[:, self.ids[token // self.size], token % self.size] = own
        return found

    def fill(self, found: list[np.ndarray]) -> None:
        for bits, wanted in zip(self.bits, found, strict=True):
            bits[:] = wanted

    def save(self, hashes: Any) -> Any:
        self.fill(self.stamped(hashes))
        return self.client.save(hashes, self.engine_blocks(hashes)).result(30)

    def save_and_hang(self, hashes: Any) -> None:
        """Claim slots, and be stuck in the copy into them."""

        def hang(*args: Any) -> None:
            time.sleep(120)

        self.client._copier.into_slots = hang
        self.client.save(hashes, self.engine_blocks(hashes)).result(None)

    def load(self, hashes: Any, skip: int = 0) -> Any:
        """Load over poison; every bit of the caches is as it should be, also where nothing is loaded."""
        self.fill([np.full_like(bits, POISON) for bits in self.bits])
        result = self.client.load(hashes, self.engine_blocks(hashes), skip).result(30)
        if result.num_blocks == len(hashes):
            for bits, wanted in zip(self.bits, self.stamped(hashes, skip), strict=True):
                assert np.array_equal(bits, wanted)
        return result


@pytest.fixture(scope="module")
def store(ray_cluster):
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    made = kvstore.start("8MiB", name="parts", block_bytes=SCALED.block_bytes)
    yield made
    made.stop()
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def space():
    return kvstore.Namespace(model="parts", shape=SHAPE)


@pytest.fixture(scope="module")
def engine(store, space, node_ids, start_worker, get):
    """Makes the ranks of one engine on node 0 or 1, each in a process of its own; processes are used again."""
    processes: dict[int, list[Any]] = {0: [], 1: []}
    num_engines = iter(range(100))

    class Ranks:
        def __init__(
            self, node: int, tp_size: int = 1, pp_size: int = 1, block_size: int = 16, axes: str = "PBTHD", space=space
        ):
            self.key = f"engine {next(num_engines)}"
            parts = [(tp, tp_size, pp, pp_size) for pp in range(pp_size) for tp in range(tp_size)]
            while len(processes[node]) < len(parts):
                processes[node].append(start_worker(node_ids[node]))
            self.workers = processes[node][: len(parts)]
            self.pids = get([worker.pid.remote() for worker in self.workers])
            get([
                worker.put.remote(self.key, Rank, store, space, part, block_size, axes)
                for worker, part in zip(self.workers, parts, strict=True)
            ])  # fmt: skip
            assert self.all("node_id") == [node_ids[node]] * len(parts)

        def start(self, rank: int, verb: str, *args: Any) -> Any:
            return self.workers[rank].do.remote(self.key, verb, *args)

        def all(self, verb: str, *args: Any) -> Any:
            return get([self.start(rank, verb, *args) for rank in range(len(self.workers))])

        def kill(self, rank: int) -> None:
            worker = self.workers[rank]
            [mine.remove(worker) for mine in processes.values() if worker in mine]
            os.kill(self.pids[rank], signal.SIGKILL)

        def close(self) -> None:
            get([worker.close.remote(self.key) for worker in self.workers])

    return Ranks


@pytest.fixture
def writers(engine):
    made = engine(0, tp_size=2)
    yield made
    made.close()


READERS = {
    "tp4": {"tp_size": 4, "axes": "BPHTD"},
    "pp2": {"pp_size": 2, "axes": "BPTHD"},
    "tp2 pp2, blocks of 32": {"tp_size": 2, "pp_size": 2, "block_size": 32},
    "one rank, blocks of 8": {"block_size": 8, "axes": "BPHTD"},
}


@pytest.mark.parametrize("reader", READERS)
def test_what_two_ranks_save_any_split_loads_on_another_node(writers, engine, space, chain_of, reader):
    chain = chain_of(space, NUM_BLOCKS, seed=sorted(READERS).index(reader))
    results = writers.all("save", chain)
    assert results == [kvstore.SaveResult(num_blocks=NUM_BLOCKS, num_written=NUM_BLOCKS, num_refused=0)] * 2
    readers = engine(1, **READERS[reader])
    results = readers.all("load", chain)
    assert [result.num_blocks for result in results] == [NUM_BLOCKS] * len(results)
    # Over NIXL, whole blocks, once for all ranks of the node.
    assert sum(result.num_bytes for result in results) == NUM_BLOCKS * space.shape.block_bytes
    assert [result.num_blocks for result in readers.all("load", chain, 21)] == [NUM_BLOCKS] * len(results)
    readers.close()


def test_ranks_of_unlike_splits_and_block_sizes_share_scales_over_the_network(engine, chain_of):
    space = kvstore.Namespace(model="parts", shape=SCALED)
    chain = chain_of(space, NUM_BLOCKS, seed=40)
    there = engine(0, tp_size=2, space=space)
    here = engine(1, tp_size=4, block_size=8, axes="BPHTD", space=space)
    assert [result.num_written for result in there.all("save", chain)] == [NUM_BLOCKS] * 2
    results = here.all("load", chain)
    assert [result.num_blocks for result in results] == [NUM_BLOCKS] * 4
    assert sum(result.num_bytes for result in results) == NUM_BLOCKS * SCALED.block_bytes
    assert [result.num_blocks for result in here.all("load", chain, 21)] == [NUM_BLOCKS] * 4
    there.close()
    here.close()


@pytest.mark.parametrize(("writer", "reader"), [(16, 32), (32, 16), (64, 8)])
def test_engine_blocks_of_other_sizes_on_both_nodes(engine, space, chain_of, writer, reader):
    chain = chain_of(space, NUM_BLOCKS - 1, seed=50 + writer)
    there, here = engine(0, block_size=writer, axes="PBTHD"), engine(1, block_size=reader, axes="BPHTD")
    assert there.all("save", chain)[0].num_written == NUM_BLOCKS - 1
    result = here.all("load", chain)[0]
    assert (result.num_blocks, result.num_bytes) == (NUM_BLOCKS - 1, (NUM_BLOCKS - 1) * space.shape.block_bytes)
    assert here.all("load", chain, 37)[0].num_blocks == NUM_BLOCKS - 1
    there.close()
    here.close()


def test_a_rank_that_dies_in_its_copy_ends_the_blocks_for_all(
    engine, store, space, node_ids, chain_of, get, eventually
):
    chain, writers = chain_of(space, NUM_BLOCKS, seed=90), engine(0, tp_size=2)

    def stats() -> Any:
        return store.stats()["nodes"][node_ids[0]]

    num_waits = stats()["calls"].get("AWAIT_STORE", 0)
    writers.start(1, "save_and_hang", chain)
    eventually(lambda: stats()["pool"]["num_writing"] == NUM_BLOCKS, 20)
    saved = writers.start(0, "save", chain)
    # The living rank has written its part and waits for the other.
    eventually(lambda: stats()["calls"].get("AWAIT_STORE", 0) > num_waits, 20)
    assert stats()["pool"]["num_writing"] == NUM_BLOCKS
    assert store.locate(chain) == []
    writers.kill(1)
    result = get(saved)
    assert (result.num_blocks, result.num_written) == (0, 0)
    eventually(lambda: stats()["pool"]["num_writing"] == 0, 5)
    assert store.locate(chain) == []
    # The slots are free again, and the next pair of ranks stores the same chain.
    again = engine(0, tp_size=2)
    assert [result.num_written for result in again.all("save", chain)] == [NUM_BLOCKS] * 2
    assert dict(store.locate(chain)) == {node_ids[0]: NUM_BLOCKS}

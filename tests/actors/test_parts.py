"""Ranks in processes of their own: two of one engine save on one node, the ranks of another load on the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from ranks import NUM_BLOCKS, RankProcess

import kvstore

pytestmark = [pytest.mark.ray]

SHAPE = kvstore.KVShape(num_layers=4, num_kv_heads=4, head_dim=32, dtype="bfloat16", block_size=16, num_layer_groups=2)
SCALED = dataclasses.replace(SHAPE, sides=[kvstore.SideTensor(name="scale", dtype="float32")])


@pytest.fixture(scope="module")
def store(ray_cluster):
    made = kvstore.start("8MiB", name="parts", block_bytes=SCALED.block_bytes)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def space():
    return kvstore.Namespace(model="parts", shape=SHAPE)


@pytest.fixture(scope="module")
def engine(store, space, node_ids, get):
    """Makes the ranks of one engine on node 0 or 1, each in a process of its own; processes are used again."""
    processes: dict[int, list[RankProcess]] = {0: [], 1: []}
    num_engines = iter(range(100))
    handles = [kvstore.node_store(node_id, name="parts") for node_id in node_ids]
    paths = [str(path) for path in get([handle.control_path.remote() for handle in handles])]

    class Ranks:
        def __init__(
            self, node: int, tp_size: int = 1, pp_size: int = 1, block_size: int = 16, axes: str = "PBTHD", space=space
        ):
            self.key = f"engine {next(num_engines)}"
            parts = [(tp, tp_size, pp, pp_size) for pp in range(pp_size) for tp in range(tp_size)]
            while len(processes[node]) < len(parts):
                processes[node].append(RankProcess())
            self.processes = processes[node][: len(parts)]
            opened = [
                process.begin(self.key, "open", paths[node], space, part, block_size, axes)
                for process, part in zip(self.processes, parts, strict=True)
            ]
            assert [answer() for answer in opened] == [node_ids[node]] * len(parts)

        def start(self, rank: int, verb: str, *args: Any) -> Callable[[], Any]:
            return self.processes[rank].begin(self.key, verb, *args)

        def all(self, verb: str, *args: Any) -> list[Any]:
            begun = [self.start(rank, verb, *args) for rank in range(len(self.processes))]
            return [answer() for answer in begun]

        def kill(self, rank: int) -> None:
            process = self.processes[rank]
            [mine.remove(process) for mine in processes.values() if process in mine]
            process.kill()

        def close(self) -> None:
            self.all("close")

    yield Ranks
    for process in [*processes[0], *processes[1]]:
        process.kill()


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


def test_a_rank_that_dies_in_its_copy_ends_the_blocks_for_all(engine, store, space, node_ids, chain_of, eventually):
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
    result = saved()
    assert (result.num_blocks, result.num_written) == (0, 0)
    eventually(lambda: stats()["pool"]["num_writing"] == 0, 5)
    assert store.locate(chain) == []
    # The slots are free again, and the next pair of ranks stores the same chain.
    again = engine(0, tp_size=2)
    assert [result.num_written for result in again.all("save", chain)] == [NUM_BLOCKS] * 2
    assert dict(store.locate(chain)) == {node_ids[0]: NUM_BLOCKS}

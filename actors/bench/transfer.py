"""Benchmark: bytes from one node to another, by memcpy, raw NIXL, our load, and Ray's object store.

A load ends with the bytes in the engine's memory, a raw READ with the bytes in the slab. "nixl_copied" is a READ and a
copy by hand, as far as a load goes: it shows the speed left on a machine with few cores that copies as well.

All ways take turns in each round of one run, so that noise affects all alike. Data is drawn again for each round;
destinations are poisoned before and compared after. The figure is the median.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from kvstore.actors.bench.cluster import on_node, two_nodes
from kvstore.actors.bench.raw_end import POISON, RawEnd, random_bytes
from kvstore.actors.calls import answer, call
from kvstore.actors.cluster import Store
from kvstore.actors.starting import start
from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
from kvstore.config import StoreConfig
from kvstore.errors import InvalidRequest, KVStoreError

_TIMEOUT_S = 120.0
#: Ray's minimum is 75 MiB.
_LEAST_STORE_BYTES = 80 << 20
#: Shapes whose blocks have a round size: bytes -> (layers, KV heads, head dim), 16 tokens, bfloat16.
SHAPES = {
    64 << 10: (16, 1, 64),
    512 << 10: (32, 4, 64),
    2 << 20: (32, 8, 128),
}


def shape_of(block_bytes: int) -> KVShape:
    """Return a shape whose block has exactly `block_bytes`."""
    layers, heads, dim = SHAPES[block_bytes]
    shape = KVShape(num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype="bfloat16", block_size=16)
    assert shape.block_bytes == block_bytes
    return shape


class Worker:
    """A worker with an engine cache whose blocks are contiguous, on one node."""

    def __init__(self, store: Store, space: Namespace, num_blocks: int) -> None:
        import torch  # Imported here: without it the raw ends start several seconds sooner.

        shape = space.shape
        self._space = space
        self._client = store.client(space)
        groups, heads, layers, planes, tokens, dim = shape.block_dims
        self._cache = torch.zeros(num_blocks, heads, groups * layers, planes, tokens, dim, dtype=torch.bfloat16)
        self._client.register_kv_caches(self._cache, axes="BHLPTD")
        self._bytes = self._cache.view(torch.uint8).reshape(-1).numpy()

    def save(self, round_number: int, num_blocks: int) -> None:
        """Draw data and save it under hashes of this round."""
        num_bytes = num_blocks * self._space.shape.block_bytes
        self._bytes[:num_bytes] = random_bytes(num_bytes, round_number)
        result = self._client.save(self._hashes(round_number, num_blocks), range(num_blocks)).result(_TIMEOUT_S)
        assert result.num_written == num_blocks, result

    def load(self, round_number: int, num_blocks: int) -> float:
        """Load the other node's blocks, compare every byte, and return the seconds."""
        num_bytes = num_blocks * self._space.shape.block_bytes
        self._bytes[:num_bytes] = POISON
        hashes = self._hashes(round_number, num_blocks)
        # As engines do: the scheduler looks blocks up before a load.
        assert max(count for _, count in self._client.lookup(hashes).nodes) == num_blocks
        started_s = time.perf_counter()
        result = self._client.load(hashes, range(num_blocks)).result(_TIMEOUT_S)
        seconds = time.perf_counter() - started_s
        assert result.num_peer == num_blocks, result
        if not np.array_equal(self._bytes[:num_bytes], random_bytes(num_bytes, round_number)):
            raise AssertionError("our load delivered other bytes than were saved")
        return seconds

    def put(self, seed: int, num_bytes: int) -> list[Any]:
        """Put the data of a seed into Ray's object store on this node."""
        return [ray.put(random_bytes(num_bytes, seed))]

    def get(self, refs: list[Any]) -> float:
        """Get it on this node, and return the seconds."""
        started_s = time.perf_counter()
        answer("ray object", refs[0], _TIMEOUT_S)
        return time.perf_counter() - started_s

    def _hashes(self, round_number: int, num_blocks: int) -> Any:
        tokens = np.arange(num_blocks * 16, dtype=np.int64) + round_number * 10_000_000
        return self._space.block_hashes(tokens)


@dataclass(frozen=True, slots=True)
class Measured:
    """Results so far: rows {"lane", "block_bytes", "way", "gb_per_s", "load_bytes"}, and failures."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def run_transfer(
    lanes: list[str],
    block_bytes: list[int],
    load_bytes: int,
    rounds: int,
    progress: Callable[[str], None],
    measured: Measured,
) -> None:
    """Measure every way for every lane and block size; a failure loses no other rows.

    Args:
        lanes: "default" and "tcp".
        block_bytes: sizes out of `SHAPES`.
        load_bytes: bytes moved at a time by every way.
        rounds: a figure is the median of this many; one more runs first and is dropped.
        progress: called with a text for each measurement.
        measured: gets rows and failures as they come. The row of "load" also has "of_nixl", its speed as a share of
            "nixl_huge_pages" in the same round, the median over the rounds.

    Raises:
        InvalidRequest: a block size that no shape has, or no block fits into `load_bytes`; nothing was measured.
    """
    if unknown := [size for size in block_bytes if size not in SHAPES]:
        raise InvalidRequest(f"block_bytes: wanted some of {sorted(SHAPES)}, got {unknown}")
    if load_bytes < max(block_bytes):
        raise InvalidRequest(f"load_bytes: wanted at least one block of {max(block_bytes)} bytes, got {load_bytes}")
    with two_nodes(object_store_bytes=4 * load_bytes + _LEAST_STORE_BYTES) as nodes:
        for lane in lanes:
            for size in block_bytes:
                what = f"lane {lane}, blocks of {size >> 10} KiB"
                progress(what)
                try:
                    times = _measure(nodes, lane, size, load_bytes, rounds)
                    measured.rows.extend(_rows(lane, size, load_bytes, times))
                except KVStoreError as error:
                    measured.failures.append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}")


def _rows(lane: str, block_bytes: int, load_bytes: int, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for way, seconds in times.items():
        rate = round(load_bytes / statistics.median(seconds) / 1e9, 3)
        row = {"lane": lane, "block_bytes": block_bytes, "way": way, "gb_per_s": rate, "load_bytes": load_bytes}
        if way == "load":
            # Round by round, because a slow moment of a shared machine slows both of a pair.
            pairs = zip(times["nixl_huge_pages"], seconds, strict=True)
            row["of_nixl"] = round(statistics.median(raw / load for raw, load in pairs), 3)
        rows.append(row)
    return rows


def _measure(nodes: list[str], lane: str, block_bytes: int, load_bytes: int, rounds: int) -> dict[str, list[float]]:
    num_blocks = load_bytes // block_bytes
    config = StoreConfig(name=f"bench-{lane}-{block_bytes >> 10}", capacity_bytes=(rounds + 2) * load_bytes, lane=lane)
    times: dict[str, list[float]] = {}

    def raw_pair(started: contextlib.ExitStack, name: str, tuned: bool = True, huge_pages: bool = False) -> list[Any]:
        arguments = 2 * load_bytes, block_bytes, tuned, huge_pages
        ends = [on_node(RawEnd, node).remote(lane, f"{name}-{i}", *arguments) for i, node in enumerate(nodes)]
        _kill_at_end(started, ends)
        return ends

    with contextlib.ExitStack() as started:
        # Their processes start while the store does.
        raw = raw_pair(started, f"{config.name}-a")
        huge = raw_pair(started, f"{config.name}-b", huge_pages=True)
        store = start(config, None, _TIMEOUT_S)
        started.callback(store.stop)
        space = Namespace(model="bench", shape=shape_of(block_bytes))
        workers = [on_node(Worker, node).remote(store, space, num_blocks) for node in nodes]
        _kill_at_end(started, workers)
        _connect(raw)
        _connect(huge)
        for number in range(rounds + 1):
            seen = {
                "memcpy": call("memcpy", raw[1].memcpy, load_bytes, timeout_s=_TIMEOUT_S),
                "nixl": _read_raw(raw, number, load_bytes),
            }
            call("save", workers[0].save, number, num_blocks, timeout_s=_TIMEOUT_S)
            # Right after each other, because their ratio is reported.
            seen["nixl_huge_pages"] = _read_raw(huge, number, load_bytes)
            seen["nixl_copied"] = _read_raw(huge, number, load_bytes, "read_and_copy")
            seen["load"] = call("load", workers[1].load, number, num_blocks, timeout_s=_TIMEOUT_S)
            refs = call("put", workers[0].put, number, load_bytes, timeout_s=_TIMEOUT_S)
            seen["ray"] = call("get", workers[1].get, refs, timeout_s=_TIMEOUT_S)
            del refs
            if number:  # The first round connects and warms up.
                for way, seconds in seen.items():
                    times.setdefault(way, []).append(seconds)
    with contextlib.ExitStack() as started:
        # Separately: each agent as the wrapper builds it always spins on a core.
        spinning = raw_pair(started, config.name, tuned=False)
        _connect(spinning)
        times["nixl_untuned"] = [_read_raw(spinning, number, load_bytes) for number in range(rounds + 1)][1:]
    return times


def _kill_at_end(started: contextlib.ExitStack, handles: list[Any]) -> None:
    started.callback(lambda: [ray.kill(handle) for handle in handles])


def _connect(ends: list[Any]) -> None:
    description = call("raw", ends[0].describe, timeout_s=_TIMEOUT_S)
    call("raw", ends[1].add_peer, description, timeout_s=_TIMEOUT_S)


def _read_raw(ends: list[Any], number: int, load_bytes: int, verb: str = "read") -> float:
    start_at = (number % 2) * load_bytes
    call("raw", ends[0].fill, start_at, load_bytes, number, timeout_s=_TIMEOUT_S)
    seconds: float = call("raw", getattr(ends[1], verb), start_at, load_bytes, number, timeout_s=_TIMEOUT_S)
    return seconds

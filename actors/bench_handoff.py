"""Benchmark: hand-offs of a request's blocks from one engine to another, from the call to the last byte in place.

Beside one copy of the same bytes between the two devices (the limit), and beside what NIXL does by itself with the
engine's own fragments and with blocks that are packed already, all warm. Caches have a tensor for each layer. Both
engines live in this process; stores and movers are those of two Ray nodes. Destinations are poisoned before and
compared after.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.actors.bench_cluster import on_node, two_nodes
from kvstore.actors.calls import call
from kvstore.actors.cluster import Store, start
from kvstore.bench_gpu import SHAPES
from kvstore.client import Client
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError
from kvstore.hashing import Namespace
from kvstore.kernels.reference import torch_dtype
from kvstore.shape import KVShape, Planes
from kvstore.transport import PeerDescription, ReadRequest, ReadState

Ids = np.ndarray[Any, np.dtype[np.int64]]

_TIMEOUT_S = 120.0
_POISON = 0x5A
_WINDOW = 3
#: Ways of our own: where the caches are, whether a stage is attached, and on how many nodes.
DIRECTIONS = ("gpu_to_gpu", "gpu_to_gpu_one_node", "gpu_through_host", "cpu_to_cpu")


@dataclass(slots=True, eq=False)
class _Engine:
    """One side: caches [plane, block, token, head, dim] of each layer, and a client."""

    client: Client
    caches: list[torch.Tensor]
    block_ids: Ids

    def bits(self, block_ids: Ids) -> Iterator[torch.Tensor]:
        """Yield blocks layer by layer, as integers."""
        for cache in self.caches:
            yield cache.view(torch.int16)[:, torch.from_numpy(block_ids).to(cache.device)]

    def poison(self, block_ids: Ids) -> None:
        """Overwrite blocks."""
        for cache in self.caches:
            cache.view(torch.uint8)[:, torch.from_numpy(block_ids).to(cache.device)] = _POISON


class RawStage:
    """One end of a raw NIXL transfer between two GPUs, in a process of its own."""

    def __init__(self, name: str, gpu: int, num_bytes: int) -> None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        from kvstore.kernels.vram import DeviceSlab
        from kvstore.nixl_transport import NixlTransport

        self._slab, self._gpu, self._num_bytes = DeviceSlab(gpu, num_bytes), gpu, num_bytes
        self._transport = NixlTransport(name, self._slab.address, num_bytes, gpu=gpu)

    def describe(self, piece_bytes: int, count: int) -> PeerDescription:
        """Cut the slab into pieces and return what the other end needs."""
        self._transport.set_slots(piece_bytes, count)
        return PeerDescription(
            agent=self._transport.describe(), address=self._slab.address, slot_bytes=piece_bytes, num_slots=count,
            gpu=self._gpu,
        )  # fmt: skip

    def read(self, peer: PeerDescription, chunk_bytes: int, mixed: bool, rounds: int) -> list[float]:
        """READ all pieces of a peer, `chunk_bytes` a request; return the seconds of each round, the first one cold."""
        name = f"{peer.slot_bytes}x{peer.num_slots}"
        self._transport.set_slots(peer.slot_bytes, self._num_bytes // peer.slot_bytes)
        self._transport.add_peer(name, peer)
        order = np.arange(peer.num_slots, dtype=np.int32)
        remote = np.random.default_rng(0).permutation(order) if mixed else order
        per_chunk, seconds = max(1, chunk_bytes // peer.slot_bytes), []
        for _ in range(rounds):
            began_s, running = time.perf_counter(), list[int]()
            for first in range(0, len(order), per_chunk):
                part = slice(first, first + per_chunk)
                request = ReadRequest(
                    peer=name, block_bytes=peer.slot_bytes, local_slots=order[part],
                    remote_slots=remote[part],
                )  # fmt: skip
                running.append(self._transport.post(request))
                self._wait(running, _WINDOW - 1)
            self._wait(running, 0)
            seconds.append(time.perf_counter() - began_s)
        return seconds

    def _wait(self, running: list[int], most: int) -> None:
        while len(running) > most:
            if self._transport.poll(running[0]) is not ReadState.RUNNING:
                self._transport.release(running.pop(0))


def run_handoff(
    names: Sequence[str],
    block_sizes: Sequence[int],
    counts: Sequence[int],
    rounds: int,
    device: str,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return a row for every shape, block size, number of blocks, direction and way.

    Args:
        names: keys of `bench_gpu.SHAPES`.
        block_sizes: tokens per block.
        counts: blocks that are handed off at once.
        rounds: the median of so many counts.
        device: "cuda" needs two GPUs; "cpu" hands off through host memory alone; "auto" takes what there is.
        say: shows progress.

    Raises:
        ConfigError: an unknown shape, or fewer than two GPUs.
    """
    unknown = sorted(set(names) - set(SHAPES))
    if unknown:
        raise ConfigError(f"unknown shapes {unknown}; known: {', '.join(SHAPES)}")
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    if device == "cuda" and torch.cuda.device_count() < 2:
        raise ConfigError(f"wanted two GPUs, got {torch.cuda.device_count()}; --device cpu goes through host memory")
    rows: list[dict[str, Any]] = []
    with two_nodes() as nodes:
        for name in names:
            for block_size in block_sizes:
                layers, heads, dim, planes = SHAPES[name]
                shape = KVShape(
                    num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype="bfloat16", block_size=block_size,
                    planes=Planes(planes),
                )  # fmt: skip
                for row in _measure(shape, counts, rounds, device, nodes):
                    rows.append({"shape": name, "block_size": block_size, **row})
                    say(
                        f"{name}: {row['num_blocks']} blocks of {block_size} tokens, {row['direction']}, {row['way']}: {row['gb_per_s']}"
                    )
    return rows


def _measure(
    shape: KVShape, counts: Sequence[int], rounds: int, device: str, nodes: list[str]
) -> Iterator[dict[str, Any]]:
    most_bytes = max(counts) * shape.block_bytes
    config = StoreConfig(
        name="bench-handoff", capacity_bytes=max(1 << 26, 3 * most_bytes), block_bytes=shape.block_bytes,
        max_handoff_fraction=1.0, max_pinned_fraction=1.0,
    )  # fmt: skip
    store = start(config, None, _TIMEOUT_S)
    try:
        space = Namespace(model="bench", shape=shape)
        for direction in DIRECTIONS[:3] if device == "cuda" else DIRECTIONS[3:]:
            for count in counts:
                yield _row(direction, "limit", count, shape, _copy_seconds(count * shape.block_bytes, device, rounds))
            yield from _ours(store, space, counts, rounds, direction, nodes)
        if device == "cuda":
            yield from _nixl(shape, counts, rounds, nodes, config.stage_chunk_bytes)
    finally:
        store.stop()


def _row(direction: str, way: str, count: int, shape: KVShape, seconds: list[float], **more: Any) -> dict[str, Any]:
    median_s = statistics.median(seconds)
    rate = round(count * shape.block_bytes / median_s / 1e9, 3)
    ms = round(1e3 * median_s, 3)
    return {"num_blocks": count, "direction": direction, "way": way, "gb_per_s": rate, "ms": ms, **more}


def _ours(
    store: Store, space: Namespace, counts: Sequence[int], rounds: int, direction: str, nodes: list[str]
) -> Iterator[dict[str, Any]]:
    places = ("cpu", "cpu") if direction == "cpu_to_cpu" else ("cuda:0", "cuda:1")
    here, there = nodes[0], nodes[0 if direction == "gpu_to_gpu_one_node" else 1]
    with contextlib.ExitStack() as opened:
        source, target = (
            _engine(
                opened.enter_context(contextlib.closing(store.client(space, node_id=node))), place, max(counts), seed
            )
            for node, place, seed in ((here, places[0], 1), (there, places[1], 2))
        )
        note = ""
        if direction.startswith("gpu_to_gpu"):
            staging = (max(counts) + 1) * space.shape.block_bytes
            first = source.client.attach_handoff(staging)
            second = target.client.attach_handoff(staging, peers=[here])
            note = first.why_not or second.why_not
        for count in counts:
            row = _hand_offs(source, target, count, rounds, places)
            yield _row(direction, "ours", count, space.shape, **{**row, "note": note or row["note"]})


def _hand_offs(source: _Engine, target: _Engine, count: int, rounds: int, places: tuple[str, str]) -> dict[str, Any]:
    here, there = source.block_ids[:count], target.block_ids[:count]
    total, publish, results = [], [], []
    for index in range(rounds + 2):
        target.poison(there)
        _synchronize(places)
        began_s = time.perf_counter()
        ticket = source.client.publish(here)
        published_s = time.perf_counter()
        result = target.client.fetch(ticket, there).result(_TIMEOUT_S)
        ended_s = time.perf_counter()
        if result.num_blocks != count:
            raise AssertionError(f"bench handoff: {result.failed[0].detail}")
        if index > 1:  # The first ones build kernels, map memory and meet peers.
            total.append(ended_s - began_s)
            publish.append(published_s - began_s)
            results.append(result)
    if not all(torch.equal(a, b.to(a.device)) for a, b in zip(source.bits(here), target.bits(there), strict=True)):
        raise AssertionError("bench handoff: other bytes arrived than were sent")
    return {
        "seconds": total,
        "publish_ms": round(1e3 * statistics.median(publish), 3),
        "claim_and_read_ms": round(1e3 * statistics.median(result.read_s for result in results), 3),
        "num_descriptors": results[-1].num_descriptors,
        "route": results[-1].route,
        "note": results[-1].note,
    }


def _engine(client: Client, device: str, count: int, seed: int) -> _Engine:
    shape, generator = client.space.shape, torch.Generator(device).manual_seed(seed)
    num_blocks = 2 * count
    dims = (shape.num_planes, num_blocks, shape.block_size, shape.num_kv_heads, shape.row_dim)
    caches = [
        torch.randint(-(2**15), 2**15, dims, dtype=torch.int16, generator=generator, device=device).view(
            torch_dtype(shape.dtype)
        )
        for _ in range(shape.num_layers)
    ]
    client.register_kv_caches(caches, axes="PBTHD")
    return _Engine(client, caches, np.random.default_rng(seed).permutation(num_blocks)[:count])


def _copy_seconds(num_bytes: int, device: str, rounds: int) -> list[float]:
    places = ("cpu", "cpu") if device == "cpu" else ("cuda:0", "cuda:1")
    source = torch.ones(num_bytes, dtype=torch.uint8, device=places[0])
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=places[1])
    seconds = []
    for _ in range(rounds + 2):
        _synchronize(places)
        began_s = time.perf_counter()
        target.copy_(source)
        _synchronize(places)
        seconds.append(time.perf_counter() - began_s)
    return seconds[2:]


def _synchronize(places: tuple[str, str]) -> None:
    for place in places:
        if place != "cpu":
            torch.cuda.synchronize(place)


def _nixl(
    shape: KVShape, counts: Sequence[int], rounds: int, nodes: list[str], chunk_bytes: int
) -> Iterator[dict[str, Any]]:
    import ray

    name, most_bytes = f"bench-{os.getpid()}-{time.monotonic_ns()}", max(counts) * shape.block_bytes
    ends = [on_node(RawStage, node).remote(f"{name}-{gpu}", gpu, most_bytes) for gpu, node in enumerate(nodes)]
    fragment_bytes = shape.block_bytes // shape.num_layers // shape.num_planes
    try:
        for count in counts:
            num_bytes = count * shape.block_bytes
            for way, piece_bytes, chunk, mixed, turns in (
                ("nixl_packed", shape.block_bytes, chunk_bytes, False, rounds + 1),
                ("nixl_fragments", fragment_bytes, num_bytes, True, 4),
            ):
                peer = call("source", ends[0].describe.remote(piece_bytes, num_bytes // piece_bytes), _TIMEOUT_S)
                seconds = call("reader", ends[1].read.remote(peer, chunk, mixed, turns), _TIMEOUT_S)
                cold = round(num_bytes / seconds[0] / 1e9, 3)
                yield _row("gpu_to_gpu", way, count, shape, seconds[1:], first_gb_per_s=cold)
    finally:
        for end in ends:
            ray.kill(end)

"""Benchmark: hand-offs of a request's blocks from one engine to another, from the call to the last byte in place.

Compared with one copy of the same bytes between the two devices (the limit), and with NIXL alone on the engine's own
fragments and on packed blocks, all warm. Caches have one tensor per layer. Engines, stores and movers are separate
processes without Ray; tickets go through a pipe, and their time counts. Destinations are poisoned before each round and
compared after the last. Rows "ours" wait for `Client.publish`. Rows "ours_begun" send the ticket of `begin_publish`
while the blocks are packed. Rows "ours_early" send the ticket of `prepare_ticket` before they publish. Rows
"ours_ahead" begin to publish while the blocks are still being computed, as an engine does that queues its work on the
device, and count from the end of that work. All processes run on the half of the cores that was faster a moment ago: a
hand-off is some milliseconds of single threads, and cores of a shared machine differ by half. Rows "..._cores_awake"
are the same on cores that never sleep: the difference is the host's time to wake cores.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from kvstore.actors.bench.cores import faster_half, keep_on, kept_awake
from kvstore.actors.bench.handoff_engine import Engine, Fetched, Published
from kvstore.actors.bench.nixl_gpu import raw_nixl
from kvstore.actors.bench.process import InProcess
from kvstore.actors.plain_nodes import PlainNode, plain_nodes
from kvstore.bench.gpu import SHAPES
from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError

_TIMEOUT_S = 60.0
_WARM_ROUNDS = 3  # They build kernels, map memory and meet peers.
#: Rounds after which the cores are measured again.
_ROUNDS_ON_CORES = 8
_GPUS, _HOST = ("cuda:0", "cuda:1"), ("cpu", "cpu")
#: The last way needs a device with queued work.
_WAYS = ("ours", "ours_begun", "ours_early", "ours_ahead")
#: The method of the publishing engine, if it is not `Engine.publish`.
_PUBLISH = {"ours_begun": "publish_begun", "ours_early": "publish_early", "ours_ahead": "publish_ahead"}


def run_handoff(
    names: Sequence[str],
    block_sizes: Sequence[int],
    counts: Sequence[int],
    rounds: int,
    device: str,
    say: Callable[[str], None],
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Measure, and return a row per shape, block size, number of blocks, direction and way.

    Args:
        names: keys of `kvstore.bench.gpu.SHAPES`.
        block_sizes: tokens per block.
        counts: numbers of blocks that are handed off at once.
        rounds: a figure is the median of this many measurements.
        device: "cuda" needs two GPUs; "cpu" hands off through host memory alone; "auto" takes what there is.
        say: shows progress.
        keep: called after each row with all rows so far, so that an interrupted run keeps its rows.

    Raises:
        ConfigError: an unknown shape, or fewer than two GPUs.
        KVStoreError: a store does not answer; every wait ends.
    """
    unknown = sorted(set(names) - set(SHAPES))
    if unknown:
        raise ConfigError(f"bench handoff: wanted shapes out of {', '.join(SHAPES)}, got {', '.join(unknown)}")
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    if device == "cuda" and torch.cuda.device_count() < 2:
        raise ConfigError(
            f"bench handoff: wanted two GPUs, got {torch.cuda.device_count()}; --device cpu goes through host memory"
        )
    rows: list[dict[str, Any]] = []
    for name in names:
        for block_size in block_sizes:
            layers, heads, dim, planes = SHAPES[name]
            shape = KVShape(
                num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype="bfloat16", block_size=block_size,
                planes=planes,
            )  # fmt: skip
            for row in _measure(shape, sorted(counts), rounds, device, say):
                rows.append({"shape": name, "block_size": block_size, **row})
                keep(rows)
                say(f"{name}: {row['num_blocks']} blocks, {row['direction']}, {row['way']}: {row['gb_per_s']}")
    return rows


def _measure(
    shape: KVShape, counts: Sequence[int], rounds: int, device: str, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    most_bytes, space = max(counts) * shape.block_bytes, Namespace(model="bench", shape=shape)
    config = StoreConfig(
        name="bench-handoff", capacity_bytes=max(1 << 26, most_bytes + 2 * shape.block_bytes),
        block_bytes=shape.block_bytes, max_handoff_fraction=1.0, max_pinned_fraction=1.0,
    )  # fmt: skip
    places, between = (_HOST, "cpu_to_cpu") if device == "cpu" else (_GPUS, "gpu_to_gpu")
    for count in counts:
        copied = {"seconds": _copy_seconds(count * shape.block_bytes, places, rounds)}
        yield _row(between, "limit", count, shape, copied)
    say("starting two stores")
    with plain_nodes(config, timeout_s=_TIMEOUT_S) as nodes:
        with ExitStack() as closing:
            pair = _Pair(nodes, space, places, max(counts), closing)
            if device == "cpu":
                yield from _hand_offs(pair, shape, counts, rounds, between, _WAYS[:-1])
                return
            yield from _hand_offs(pair, shape, counts, rounds, between, ["host"])
            pair.attach(2 * most_bytes, say)
            yield from _hand_offs(pair, shape, counts, rounds, between, _WAYS)
            with kept_awake():
                yield from _hand_offs(pair, shape, counts, rounds, between, _WAYS, "_cores_awake")
        with ExitStack() as closing:
            pair = _Pair([nodes[0], nodes[0]], space, places, max(counts), closing)
            pair.attach(2 * most_bytes, say)
            yield from _hand_offs(pair, shape, counts, rounds, "gpu_to_gpu_one_node", ["ours"])
    say("NIXL alone")
    for count, way, seconds in raw_nixl(shape, counts, rounds, config.stage_chunk_bytes, _TIMEOUT_S):
        first = round(count * shape.block_bytes / seconds[0] / 1e9, 3)
        yield _row(between, way, count, shape, {"seconds": seconds[1:], "first_gb_per_s": first})


def _row(direction: str, way: str, count: int, shape: KVShape, found: dict[str, Any]) -> dict[str, Any]:
    median_s = statistics.median(found.pop("seconds"))
    rate = round(count * shape.block_bytes / median_s / 1e9, 3)
    ms = round(1e3 * median_s, 3)
    return {"num_blocks": count, "direction": direction, "way": way, "gb_per_s": rate, "ms": ms, **found}


class _Pair:
    """Two engines in child processes, with a pipe for tickets from the first to the second."""

    def __init__(
        self, nodes: Sequence[PlainNode], space: Namespace, places: tuple[str, str], num_blocks: int, closing: ExitStack
    ) -> None:
        receives, sends = multiprocessing.get_context("spawn").Pipe(duplex=False)
        self._block_bytes, self._nodes = space.shape.block_bytes, nodes
        self.source, self.target = (
            InProcess(Engine, node.control_path, space, place, num_blocks, seed, tickets, _TIMEOUT_S)
            for seed, (node, place, tickets) in enumerate(zip(nodes, places, (sends, receives), strict=True))
        )
        for end in (self.source, self.target):
            closing.callback(end.close)
            closing.callback(end.ask, "close", _TIMEOUT_S)
            end.begin("poison", 1)  # Both start at once.
        for end in (self.source, self.target):
            end.answer(_TIMEOUT_S)
        sends.close()
        receives.close()

    def attach(self, num_bytes: int, say: Callable[[str], None]) -> None:
        """Attach both to stages that hold `num_bytes`; the second warms up the lane from the first.

        One more block fits, because a hand-off's slots are given back only after its result.
        """
        for end, peers in ((self.source, ()), (self.target, (self._nodes[0].node_id,))):
            say(f"attached: {end.ask('attach', _TIMEOUT_S, num_bytes + self._block_bytes, peers)}")

    def _choose_cores(self) -> None:
        served = [pid for node in self._nodes for pid in node.ask("pids", _TIMEOUT_S).values()]
        keep_on(faster_half(), [self.source.pid, self.target.pid, *served])

    def hand_off(self, count: int, rounds: int, way: str = "ours") -> dict[str, Any]:
        """Hand blocks off again and again, and return the fields of a row."""
        total, publish, results = list[float](), list[float](), []
        for index in range(rounds + _WARM_ROUNDS):
            if index % _ROUNDS_ON_CORES == 0:
                self._choose_cores()
            self.target.ask("poison", _TIMEOUT_S, count)
            self.target.begin("fetch", count)
            published: Published = self.source.ask(_PUBLISH.get(way, "publish"), _TIMEOUT_S, count)
            fetched: Fetched = self.target.answer(_TIMEOUT_S)
            result = fetched.result
            if result.num_blocks != count:
                raise AssertionError(f"bench handoff: {result.failed[0].detail}")
            if index >= _WARM_ROUNDS:
                total.append(fetched.ended_s - published.began_s)
                publish.append(published.returned_s - published.began_s)
                results.append(result)
        self.target.begin("digest", count)
        if self.source.ask("digest", _TIMEOUT_S, count) != self.target.answer(_TIMEOUT_S):
            raise AssertionError("bench handoff: other bytes arrived than were sent")
        return {
            "seconds": total,
            "publish_ms": round(1e3 * statistics.median(publish), 3),
            "claim_and_read_ms": round(1e3 * statistics.median(result.read_s for result in results), 3),
            "num_descriptors": results[-1].num_descriptors,
            "route": results[-1].route,
            "note": results[-1].note,
        }


def _hand_offs(
    pair: _Pair, shape: KVShape, counts: Sequence[int], rounds: int, direction: str, ways: Sequence[str], how: str = ""
) -> Iterator[dict[str, Any]]:
    for way in ways:
        for count in counts:
            yield _row(direction, way + how, count, shape, pair.hand_off(count, rounds, way))


def _copy_seconds(num_bytes: int, places: tuple[str, str], rounds: int) -> list[float]:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=places[0])
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=places[1])
    gpus, seconds = [device for device in (source.device, target.device) if device.type == "cuda"], []
    for _ in range(rounds + _WARM_ROUNDS):
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        began_s = time.perf_counter()
        target.copy_(source)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        seconds.append(time.perf_counter() - began_s)
    return seconds[_WARM_ROUNDS:]

"""Benchmark: KV blocks between an engine's layer-separate cache, device memory and pinned host memory.

All ways take turns in each round of one run, so that noise affects all alike; the limit is one copy of the same bytes.
Before each way other memory is read and written, so that the L2 holds the same for all. A figure is bytes of KV over
the median of event times. The device is kept busy until the host has queued its work, as a forward pass does before a
save; "from_idle" includes the host's work before that. Other ways move fragments in the engine's own order; ours also
moves heads outside, as slots need it. Speed inside device memory depends by a few percent on the addresses of caches
and slots, also for one plain copy, so its rounds are divided among several places.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvstore.bench.gpu_beside import beside_products
from kvstore.bench.gpu_ways import Setup, Way, device_directions, in_slots, link_directions
from kvstore.blocks.shape import KVShape
from kvstore.errors import ConfigError
from kvstore.kernels.gpu import GpuCopier
from kvstore.kernels.plan import plan_copy
from kvstore.kernels.reference import torch_dtype

_POISON = 0xA5
#: About one and four milliseconds, so that the host has queued everything before the device begins.
DEVICE_DELAY_CYCLES, _LINK_DELAY_CYCLES = 2_000_000, 8_000_000
#: Several times the size of the L2.
OTHER_BYTES = 256 << 20
BESIDE = "host_to_gpu_beside_products"
_SPARE = 2  # the engine's cache and the arena are this many times as large as what is moved
#: How often caches and slots are made again, for rounds in device memory.
NUM_PLACES = 7
#: Name -> (layers, KV heads, head dim, planes), bfloat16.
SHAPES = {
    "8B": (32, 8, 128, "kv"),
    "70B/TP8": (80, 1, 128, "kv"),
    "MLA": (61, 1, 576, "single"),
}
Times = dict[str, list[float]]
"""Seconds by way."""


def run_gpu(
    names: Sequence[str],
    block_sizes: Sequence[int],
    counts: Sequence[int],
    rounds: int,
    max_bytes: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Measure, and return a row per shape, block size, number of blocks, direction and way.

    Loads during matrix products are measured for the first block size and most blocks.

    Args:
        names: keys of `SHAPES`.
        block_sizes: tokens per block.
        counts: numbers of blocks that are moved at once.
        rounds: a figure is the median of this many measurements.
        max_bytes: measurements that would move more than this at once are left out.
        say: shows progress.

    Raises:
        ConfigError: there is no CUDA device, or a shape is unknown.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench gpu: wanted a CUDA device, got none; run it where `nvidia-smi` shows one")
    rows: list[dict[str, Any]] = []
    other = torch.zeros(OTHER_BYTES, dtype=torch.uint8, device="cuda")
    for name in names:
        if name not in SHAPES:
            raise ConfigError(f"bench gpu: wanted a shape out of {', '.join(SHAPES)}, got {name!r}")
        for size in block_sizes:
            shape = make_shape(name, size)
            fitting = [count for count in counts if count * shape.block_bytes <= max_bytes]
            if not fitting:
                continue
            say(f"{name}, blocks of {size} tokens")
            rows += _shape_rows(name, shape, fitting, rounds, other, beside=size == block_sizes[0])
            torch.cuda.empty_cache()
    return rows


def _shape_rows(
    name: str, shape: KVShape, counts: Sequence[int], rounds: int, other: torch.Tensor, beside: bool
) -> list[dict[str, Any]]:
    host = torch.empty((_SPARE * max(counts), shape.block_bytes), dtype=torch.uint8, pin_memory=True)
    measured = _on_device(shape, counts, host, rounds, other)
    whole = make_setup(shape, max(counts), host)
    for count in counts:
        measured |= _over_the_link(whole.first(count), rounds, other)
    place = {"shape": name, "block_size": shape.block_size}
    rows = [
        place
        | {
            "num_blocks": count,
            "direction": direction,
            "way": way,
            "gb_per_s": round(
                count * shape.block_bytes * (2 if direction == "both" else 1) / 1e9 / statistics.median(seconds), 2
            ),
        }
        for (count, direction), ways in sorted(measured.items(), key=lambda item: item[0][0])
        for way, seconds in ways.items()
    ]
    if beside:
        where = place | {"num_blocks": max(counts), "direction": BESIDE}
        rows += [where | row for row in beside_products(whole, rounds)]
    return rows


def make_shape(name: str, block_size: int) -> KVShape:
    """Return a shape of `SHAPES` with blocks of `block_size` tokens."""
    layers, heads, dim, planes = SHAPES[name]
    return KVShape(
        num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype="bfloat16", block_size=block_size, planes=planes
    )


def _on_device(
    shape: KVShape, counts: Sequence[int], host: torch.Tensor, rounds: int, other: torch.Tensor
) -> dict[tuple[int, str], Times]:
    """Return times of moves inside device memory, by (number of blocks, direction)."""
    found: dict[tuple[int, str], Times] = {}
    places = min(rounds, NUM_PLACES)
    for place in range(places):
        whole = make_setup(shape, max(counts), host)
        for count in counts:
            setup = whole.first(count)
            for direction, ways in device_directions(setup):
                so_far = found.setdefault((count, direction), {})
                times = measure_ways(ways, other, rounds // places + (place < rounds % places), DEVICE_DELAY_CYCLES)
                for way, seconds in times.items():
                    so_far.setdefault(way, []).extend(seconds)
                check_bytes(setup, direction, ways["ours"])
        del whole, setup, ways
        torch.cuda.empty_cache()
    return found


def _over_the_link(setup: Setup, rounds: int, other: torch.Tensor) -> dict[tuple[int, str], Times]:
    """Return times of moves to the host, from it, or both, by (number of blocks, direction)."""
    found: dict[tuple[int, str], Times] = {}
    for direction, ways in link_directions(setup):
        times = measure_ways(ways, other, rounds, _LINK_DELAY_CYCLES)
        if direction != "both":
            cold = {f"{name}_from_idle": ways[name] for name in ("limit", "ours")}
            times |= measure_ways(cold, other, rounds, 0)
        check_bytes(setup, direction, ways["ours"])
        found[len(setup.block_ids), direction] = times
    return found


def make_setup(shape: KVShape, num_blocks: int, host: torch.Tensor | None = None) -> Setup:
    """Return an engine's cache of random bits, slots in host memory, and random blocks of both.

    Args:
        shape: of a block.
        num_blocks: number of blocks to draw, which are moved at once.
        host: pinned slots to use, uint8 `[2 * num_blocks, block_bytes]`; default new ones.
    """
    total = _SPARE * num_blocks
    rng = np.random.default_rng()
    spacers = []  # Between caches and slots, so that their addresses differ each time.
    dims = (shape.num_planes, total, shape.block_size, shape.num_kv_heads, shape.row_dim)
    caches = []
    for _ in range(shape.num_layers):
        bits = torch.randint(-(2**15), 2**15, dims, dtype=torch.int16, device="cuda")
        caches.append(bits.view(torch_dtype(shape.dtype)))
        if rng.random() < 0.2:
            spacers.append(_spacer(rng, 64))
    views = [cache.permute(1, 3, 0, 2, 4) for cache in caches]
    copier = GpuCopier(plan_copy(views, shape.stored_block))
    size = (num_blocks, shape.block_bytes)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    spacers.append(_spacer(rng, 512))
    return Setup(
        shape=shape,
        caches=caches,
        copier=copier,
        block_ids=rng.permutation(total)[:num_blocks],
        slot_ids=rng.permutation(total)[:num_blocks],
        host=torch.empty((total, shape.block_bytes), dtype=torch.uint8, pin_memory=True) if host is None else host,
        device=device,
        flat=torch.randint(0, 256, size, dtype=torch.uint8, device="cuda"),
    )


def _spacer(rng: np.random.Generator, most_mib: int) -> torch.Tensor:
    return torch.empty(int(rng.integers(1, most_mib)) << 20, dtype=torch.uint8, device="cuda")


def measure_ways(ways: dict[str, Way], other: torch.Tensor, rounds: int, delay_cycles: int) -> Times:
    """Return the seconds of each way per round; one more round before them warms up."""
    found: Times = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            other.add_(1)
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            if delay_cycles:
                torch.cuda._sleep(delay_cycles)  # type: ignore[no-untyped-call]
            begin.record()
            way().record_event(end)
            torch.cuda.synchronize()
            if turn:
                found[name].append(begin.elapsed_time(end) / 1e3)
    return found


def check_bytes(setup: Setup, direction: str, ours: Way) -> None:
    """Run our way again over a poisoned destination, and compare every byte."""
    shape, ids = setup.shape, torch.from_numpy(setup.block_ids).cuda()
    bits, slots = [cache.view(torch.int16) for cache in setup.caches], torch.from_numpy(setup.slot_ids).cuda()
    # On the device: a host takes seconds to gather as many slots.
    far = torch.full_like(setup.host, _POISON, device="cuda")
    got = setup.flat
    if direction == "pack":
        got = setup.device.fill_(_POISON)
    elif direction == "unpack":
        setup.device.copy_(got)
    else:
        if direction == "host_to_gpu":
            got = far[slots] = torch.randint_like(got, 256)
        setup.host.copy_(far)
    if direction in ("unpack", "host_to_gpu"):
        for cache in bits:
            cache[:, ids] = _POISON
    torch.cuda.synchronize()
    ours()
    torch.cuda.synchronize()
    if direction in ("gpu_to_host", "both"):
        got = far.copy_(setup.host)[slots]
    pieces = in_slots(got, shape)
    if not all(
        torch.equal(pieces[:, layer].transpose(0, 1).view(torch.int16), cache[:, ids])
        for layer, cache in enumerate(bits)
    ):
        raise AssertionError(f"bench gpu: {direction} delivered other bytes than were there")

"""Benchmark: KV blocks between an engine's layer-separate cache, device memory and pinned host memory.

Ours beside the limit, which is one copy of the same bytes, and beside what others do, all in one run and round by
round in turn, so that noise hits all ways alike. Before each of them other memory is read and written, so that the L2
holds the same whichever way came before. Data is drawn fresh for each shape, destinations are poisoned before and
compared after. A figure is bytes of KV over the median of event times, with the device kept busy until the host has
queued its work, as a forward pass does before a save; "from_idle" counts what the host does first, too. Rivals move
fragments in the engine's own order; ours also bring heads outside, as slots want it. Loads beside matrix products have
the time of one product, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvstore.bench_gpu_beside import beside_products
from kvstore.bench_gpu_ways import Setup, Way, directions, in_slots
from kvstore.errors import ConfigError
from kvstore.kernels.gpu import GpuCopier
from kvstore.kernels.plan import plan_copy
from kvstore.kernels.reference import torch_dtype
from kvstore.shape import KVShape

_POISON = 0xA5
# About one and four milliseconds: the host has queued everything before the device begins.
_DELAY_CYCLES, _LINK_DELAY_CYCLES = 2_000_000, 8_000_000
_OTHER_BYTES = 256 << 20  # several times the L2
BESIDE = "host_to_gpu_beside_products"
_SPARE = 2  # the engine's cache and the arena are this many times as large as what is moved
#: Name -> (layers, KV heads, head dim, planes), bfloat16.
SHAPES = {
    "8B": (32, 8, 128, "kv"),
    "70B/TP8": (80, 1, 128, "kv"),
    "MLA": (61, 1, 576, "single"),
}


def run_gpu(
    names: Sequence[str],
    block_sizes: Sequence[int],
    counts: Sequence[int],
    rounds: int,
    max_bytes: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return a row for every shape, block size, number of blocks, direction and way.

    Loads beside matrix products are measured for the first block size and most blocks.

    Args:
        names: keys of `SHAPES`.
        block_sizes: tokens per block.
        counts: blocks that are moved at once.
        rounds: the median of so many counts.
        max_bytes: what would move more than this at once is left out.
        say: shows progress.

    Raises:
        ConfigError: there is no CUDA device, or a shape is unknown.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench gpu: wanted a CUDA device, got none; run it where `nvidia-smi` shows one")
    rows = []
    other = torch.zeros(_OTHER_BYTES, dtype=torch.uint8, device="cuda")
    for name in names:
        if name not in SHAPES:
            raise ConfigError(f"bench gpu: wanted a shape out of {', '.join(SHAPES)}, got {name!r}")
        for size in block_sizes:
            shape = make_shape(name, size)
            fitting = [count for count in counts if count * shape.block_bytes <= max_bytes]
            if not fitting:
                continue
            say(f"{name}, blocks of {size} tokens")
            whole = make_setup(shape, max(fitting))
            for count in fitting:
                setup = _smaller(whole, count)
                for direction, ways in directions(setup):
                    on_device = direction in ("pack", "unpack")
                    delay = _DELAY_CYCLES if on_device else _LINK_DELAY_CYCLES
                    medians = _measure(ways, other, rounds, delay)
                    if direction in ("gpu_to_host", "host_to_gpu"):
                        cold = {f"{name}_from_idle": ways[name] for name in ("limit", "ours")}
                        medians |= _measure(cold, other, rounds, 0)
                    _check(setup, direction, ways["ours"])
                    num_bytes = setup.num_bytes * (2 if direction == "both" else 1)
                    rows += [
                        {
                            "shape": name,
                            "block_size": size,
                            "num_blocks": count,
                            "direction": direction,
                            "way": way,
                            "gb_per_s": round(num_bytes / 1e9 / seconds, 2),
                        }
                        for way, seconds in medians.items()
                    ]
            if size == block_sizes[0]:
                place = {"shape": name, "block_size": size, "num_blocks": max(fitting), "direction": BESIDE}
                rows += [place | row for row in beside_products(whole, rounds)]
            del whole, setup
            torch.cuda.empty_cache()
    return rows


def make_shape(name: str, block_size: int) -> KVShape:
    """Return a shape of `SHAPES` with blocks of so many tokens."""
    layers, heads, dim, planes = SHAPES[name]
    return KVShape(
        num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype="bfloat16", block_size=block_size, planes=planes
    )


def make_setup(shape: KVShape, num_blocks: int) -> Setup:
    """Return an engine's cache of random bits, slots in host memory, and so many blocks drawn at random out of each."""
    total = _SPARE * num_blocks
    rng = np.random.default_rng()
    dims = (shape.num_planes, total, shape.block_size, shape.num_kv_heads, shape.row_dim)
    caches = []
    for _ in range(shape.num_layers):
        bits = torch.randint(-(2**15), 2**15, dims, dtype=torch.int16, device="cuda")
        caches.append(bits.view(torch_dtype(shape.dtype)))
    views = [cache.permute(1, 3, 0, 2, 4) for cache in caches]
    copier = GpuCopier(plan_copy(views, shape.stored_block))
    size = (num_blocks, shape.block_bytes)
    return Setup(
        shape=shape,
        caches=caches,
        copier=copier,
        block_ids=rng.permutation(total)[:num_blocks],
        slot_ids=rng.permutation(total)[:num_blocks],
        host=torch.empty((total, shape.block_bytes), dtype=torch.uint8, pin_memory=True),
        device=torch.empty(size, dtype=torch.uint8, device="cuda"),
        flat=torch.randint(0, 256, size, dtype=torch.uint8, device="cuda"),
    )


def _smaller(whole: Setup, count: int) -> Setup:
    return Setup(
        shape=whole.shape,
        caches=whole.caches,
        copier=whole.copier,
        block_ids=whole.block_ids[:count],
        slot_ids=whole.slot_ids[:count],
        host=whole.host,
        device=whole.device[:count],
        flat=whole.flat[:count],
    )


def _measure(ways: dict[str, Way], other: torch.Tensor, rounds: int, delay_cycles: int) -> dict[str, float]:
    """Return the median seconds of each way; the first round warms up and does not count."""
    found: dict[str, list[float]] = {name: [] for name in ways}
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
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def _check(setup: Setup, direction: str, ours: Way) -> None:
    """Run ours once more over a poisoned destination and compare every byte."""
    shape, ids = setup.shape, torch.from_numpy(setup.block_ids).cuda()
    bits, slots = [cache.view(torch.int16) for cache in setup.caches], torch.from_numpy(setup.slot_ids).cuda()
    # On the device: a host takes seconds to gather as many slots.
    far = torch.full_like(setup.host, _POISON, device="cuda")
    if direction in ("pack", "gpu_to_host", "both"):
        if direction == "pack":
            setup.device.fill_(_POISON)
        else:
            setup.host.copy_(far)
        torch.cuda.synchronize()
        ours()
        torch.cuda.synchronize()
        got = setup.device if direction == "pack" else far.copy_(setup.host)[slots]
    else:
        got = setup.flat if direction == "unpack" else torch.randint_like(setup.flat, 256)
        if direction == "unpack":
            setup.device.copy_(got)
        else:
            far[slots] = got
            setup.host.copy_(far)
        for cache in bits:
            cache[:, ids] = _POISON
        torch.cuda.synchronize()
        ours()
        torch.cuda.synchronize()
    pieces = in_slots(got, shape)
    if not all(
        torch.equal(pieces[:, layer].transpose(0, 1).view(torch.int16), cache[:, ids])
        for layer, cache in enumerate(bits)
    ):
        raise AssertionError(f"bench gpu: {direction} delivered other bytes than were there")

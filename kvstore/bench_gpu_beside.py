"""Loads beside a model: how fast blocks come in while matrix products fill the device, and what those lose by it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from kvstore.bench_gpu_ways import Setup
from kvstore.kernels.spans import block_spans
from kvstore.kernels.staging import StagingRing

_SIZE = 8192  # products of two square bfloat16 matrices
_NUM_LEAD, _NUM_TIMED, _NUM_BEHIND = 4, 10, 34  # products before the load, timed beside it, and behind for slow ones
_LOAD_BYTES = 1_300_000_000  # at the speed of the link a little longer than the timed products take
CAPS = (8, 32, 132)
"""Caps on thread blocks that are tried beside none."""

Queue = Callable[[], torch.cuda.Event]
"""Queues one load of all blocks after what is on the current stream; returns the event of its end."""


def beside_products(setup: Setup, rounds: int) -> list[dict[str, Any]]:
    """Return for every way of loading the blocks its speed, and the time of one product meanwhile.

    Args:
        setup: the engine's cache and the slots.
        rounds: the median of so many counts.

    Returns:
        Rows with "way", "gb_per_s" of the load and "product_ms". "no_load" is the product by itself, "limit" one
        memcpy of the same bytes.
    """
    factors = [torch.randn(_SIZE, _SIZE, device="cuda").to(torch.bfloat16) for _ in range(2)]
    result, link = torch.empty_like(factors[0]), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    repeats = -(-_LOAD_BYTES // setup.num_bytes)
    ways: dict[str, Queue | None] = {"no_load": None, "limit": _plain(setup), "ours": _ring(setup, None)}
    ways |= {f"ours_max_ctas_{cap}": _ring(setup, cap) for cap in CAPS}

    def once(queue: Queue | None) -> tuple[float, float]:
        torch.cuda.synchronize()
        marks = [_timer() for _ in range(_NUM_LEAD + _NUM_TIMED + _NUM_BEHIND)]
        begin, end = _timer(), _timer()
        for number, mark in enumerate(marks):
            mark.record()
            torch.mm(*factors, out=result)
            if number + 1 == _NUM_LEAD and queue is not None:
                link.wait_event(marks[number])
        if queue is not None:
            begin.record(link)
            with torch.cuda.stream(link):
                for _ in range(repeats):
                    link.wait_event(queue())
            end.record(link)
        torch.cuda.synchronize()
        product_ms = marks[_NUM_LEAD].elapsed_time(marks[_NUM_LEAD + _NUM_TIMED]) / _NUM_TIMED
        return product_ms, begin.elapsed_time(end) / 1e3 if queue is not None else 0.0

    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, queue in ways.items():
            measured = once(queue)
            if turn:
                found[name].append(measured)
    rows = []
    for name, measured_all in found.items():
        product_ms, seconds = (statistics.median(values) for values in zip(*measured_all, strict=True))
        speed = repeats * setup.num_bytes / 1e9 / seconds if seconds else 0.0
        rows.append({"way": name, "gb_per_s": round(speed, 2), "product_ms": round(product_ms, 4)})
    return rows


def _plain(setup: Setup) -> Queue:
    done, near = _timer(), setup.host[: len(setup.block_ids)]

    def queue() -> torch.cuda.Event:
        setup.flat.copy_(near, non_blocking=True)
        done.record()
        return done

    return queue


def _ring(setup: Setup, max_ctas: int | None) -> Queue:
    ring, count = StagingRing(setup.copier, max_ctas=max_ctas), len(setup.block_ids)

    def queue() -> torch.cuda.Event:
        spans = block_spans(setup.copier.plan.paging, setup.block_ids, range(count), count)
        return ring.load(setup.host, setup.slot_ids, spans)

    return queue


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

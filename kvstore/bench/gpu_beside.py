"""Loads during a model's work: the speed of loads while matrix products fill the device, and the products' loss.

A device at its power limit slows down by itself, more in the first milliseconds after a pause than later, and never
twice alike. So one round is one row of products without a pause, in which the ways take turns, and a way's figure is
its share of the limit of its own round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from kvstore.bench.gpu_ways import Setup
from kvstore.kernels.staging import StagingRing

_SIZE = 8192  # products of two square bfloat16 matrices
#: Products before the first way; and in each way: before the load, timed during it, and after it for slow loads.
_NUM_WARM, _NUM_LEAD, _NUM_TIMED, _NUM_BEHIND = 14, 6, 10, 24
#: At the link's speed this takes a little longer than the timed products. As few pieces as possible: between two
#: pieces the link waits for a product to end.
_LOAD_BYTES = 1_100_000_000
_ROUNDS = 2  # times the rounds of other measurements, because a product varies more than the effect
_DELAY_CYCLES = 40_000_000  # the host queues ahead of the device
CAPS = (32, 132)
"""Caps on thread blocks to try, besides no cap."""

Queue = Callable[[], torch.cuda.Event]
"""Queues one load of all blocks after the current stream's work; returns the event of its end."""


def beside_products(setup: Setup, rounds: int) -> list[dict[str, Any]]:
    """Measure each way of loading the blocks: its speed, and the time of one product meanwhile.

    Args:
        setup: the engine's cache and the slots.
        rounds: a figure is the median of twice this many measurements.

    Returns:
        Rows with "way", "gb_per_s" of the load and "product_ms". "of_limit" and "product_of_limit" are the medians of
        both as shares of the limit in the same round. "no_load" is the product alone, "limit" one memcpy of the same
        bytes, and "limit_again" another one, which shows the error of the measurement.
    """
    factors = [torch.randn(_SIZE, _SIZE, device="cuda").to(torch.bfloat16) for _ in range(2)]
    result, link = torch.empty_like(factors[0]), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    setup = setup.first(-(-_LOAD_BYTES // setup.shape.block_bytes))
    repeats = -(-_LOAD_BYTES // setup.num_bytes)
    ways: dict[str, Queue | None] = {"no_load": None, "limit": _plain(setup), "limit_again": _plain(setup)}
    ways |= {"ours": _ring(setup, None)} | {f"ours_max_ctas_{cap}": _ring(setup, cap) for cap in CAPS}

    def queue_way(queue: Queue | None) -> Callable[[], tuple[float, float]]:
        """Queue the products and the load of one way; return a function that returns product time and speed."""
        marks = [_timer() for _ in range(_NUM_LEAD + _NUM_TIMED + _NUM_BEHIND)]
        begin, end = _timer(), _timer()
        for number, mark in enumerate(marks):
            mark.record()
            torch.mm(*factors, out=result)
            if number + 1 == _NUM_LEAD:
                link.wait_event(marks[number])
        begin.record(link)
        if queue is not None:
            with torch.cuda.stream(link):
                for _ in range(repeats):
                    link.wait_event(queue())
        end.record(link)
        torch.cuda.current_stream().wait_event(end)

        def measured() -> tuple[float, float]:
            product_ms = marks[_NUM_LEAD].elapsed_time(marks[_NUM_LEAD + _NUM_TIMED]) / _NUM_TIMED
            return product_ms, repeats * setup.num_bytes / 1e6 / begin.elapsed_time(end) if queue is not None else 0.0

        return measured

    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(_ROUNDS * rounds + 1):
        torch.cuda.synchronize()
        torch.cuda._sleep(_DELAY_CYCLES)  # type: ignore[no-untyped-call]
        for _ in range(_NUM_WARM):
            torch.mm(*factors, out=result)
        first = turn % len(names)
        queued = {name: queue_way(ways[name]) for name in names[first:] + names[:first]}
        torch.cuda.synchronize()
        for name, measured in queued.items():
            if turn:
                found[name].append(measured())
    return [_row(name, measured, found["limit"]) for name, measured in found.items()]


def _row(way: str, measured: list[tuple[float, float]], limit: list[tuple[float, float]]) -> dict[str, Any]:
    product_ms, speed = (statistics.median(values) for values in zip(*measured, strict=True))
    shares = [(ms / limit_ms, of / limit_of) for (ms, of), (limit_ms, limit_of) in zip(measured, limit, strict=True)]
    product_share, speed_share = (statistics.median(values) for values in zip(*shares, strict=True))
    return {
        "way": way,
        "gb_per_s": round(speed, 2),
        "product_ms": round(product_ms, 4),
        "of_limit": round(speed_share, 4),
        "product_of_limit": round(product_share, 4),
    }


def _plain(setup: Setup) -> Queue:
    done, near = _timer(), setup.host[: len(setup.block_ids)]

    def queue() -> torch.cuda.Event:
        setup.flat.copy_(near, non_blocking=True)
        done.record()
        return done

    return queue


def _ring(setup: Setup, max_ctas: int | None) -> Queue:
    ring = StagingRing(setup.copier, max_ctas=max_ctas)
    return lambda: ring.load(setup.host, setup.slot_ids, setup.spans())


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

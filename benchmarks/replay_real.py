"""What real stores hit of a trace, on each tier, beside what the simulator says; every loaded byte is compared.

Two replays: all requests in one life of the stores, and with a restart of all stores in the middle. Memory has room for
a quarter of the trace's blocks on each of two nodes, and the disk for all. `kvstore replay --mode real` does one such
replay; docs/replay.md says what the columns are.

Run: `python benchmarks/replay_real.py TRACE [--name TEXT] [--rows N] [--block-bytes SIZE] [--output FILE]`. --name says
in the document what the trace is. Exit status 1 if the hits differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvstore.actors.bench.replay import replay_real
from kvstore.bounds import parse_bytes
from kvstore.replay.commands import describe
from kvstore.replay.files import write_whole
from kvstore.replay.formats import read_trace
from kvstore.replay.model import LOAD_GB_PER_S, PREFILL_TOKENS_PER_S, Rates
from kvstore.replay.report import Plan, RealSettings, progress_bar, run_plan, show_table
from kvstore.replay.traces import Trace, first_requests
from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance

Rows = list[dict[str, Any]]


def measure(trace: Trace, settings: RealSettings) -> Iterator[dict[str, Any]]:
    """Yield the rows of both replays, the real one first and the simulated one behind it."""
    rates = Rates(PREFILL_TOKENS_PER_S, LOAD_GB_PER_S, settings.block_bytes)
    for restart_at in (0, len(trace.requests) // 2):
        plan = Plan(
            ["lru"], [max(2, trace.num_blocks // 4)], 2, disk_blocks=max(2, trace.num_blocks), restart_at=restart_at
        )
        with progress_bar(2, len(trace.requests)) as begin:
            (real,), (same,) = replay_real(trace, plan, settings, begin), run_plan(trace, plan, rates, begin)
        yield {"mode": "real", **real}
        yield {"mode": "simulate", **same}


def differences(rows: Rows) -> list[str]:
    """Return the names of hits that differ between a real and a simulated row."""
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return [name for real, same in pairs for name in real if name.startswith("num_hits") and real[name] != same[name]]


def main() -> None:
    """Measure, show, and write what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--name", default="", help="what the trace is; its file's name without it")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--block-bytes", default="64KiB")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    whole = read_trace(given.trace)
    trace = replace(first_requests(whole, given.rows), name=given.name or whole.name)
    settings = RealSettings(parse_bytes(given.block_bytes), is_settled=True)
    rows = list(measure(trace, settings))
    show_table(trace, rows)
    if given.output:
        about = {"block_bytes": settings.block_bytes, "wait_written": settings.is_settled}
        write_whole(given.output, as_document({**provenance(), "trace": describe(trace), **about, "rows": rows}))
    if names := differences(rows):
        raise SystemExit(f"real and simulated hits differ: {', '.join(names)}")


if __name__ == "__main__":
    main()

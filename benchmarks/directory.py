"""What the directory's index costs: one thread, no sockets. Times of single calls on an index of a million blocks.

- A batch: what a store announces in one message, taken in, of blocks that nobody had and of blocks that another has.
- A question: the longest prefix of a prompt.
- Forgetting a node: of 1,000 blocks, all of it; of a million, one of the steps in which its entries go.

Run: `python benchmarks/directory.py [--json] [--rounds N]`. Prints a table, or with --json one object with the
rows {op, num_blocks, p50_us, p99_us, max_us} and the machine and commit they were measured on.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.announcements import PIECE_BLOCKS
from kvstore.directory_index import SWEEP_BLOCKS, DirectoryIndex
from kvstore.provenance import provenance

NUM_BLOCKS, SMALL, PROMPT = 1_000_000, 1000, 1024


def timed(call: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    call()
    return (time.perf_counter() - began_s) * 1e6


def row(op: str, num_blocks: int, times_us: list[float]) -> dict[str, Any]:
    return {
        "op": op,
        "num_blocks": num_blocks,
        "p50_us": round(float(np.percentile(times_us, 50)), 1),
        "p99_us": round(float(np.percentile(times_us, 99)), 1),
        "max_us": round(max(times_us), 1),
    }


def measure(num_rounds: int) -> list[dict[str, Any]]:
    index = DirectoryIndex()
    hashes = [os.urandom(32) for _ in range(NUM_BLOCKS)]
    batches = [hashes[at : at + PIECE_BLOCKS] for at in range(0, NUM_BLOCKS, PIECE_BLOCKS)]
    rows = [
        row(f"add a batch ({kind})", PIECE_BLOCKS, [timed(lambda b=b, n=node: index.add(n, b)) for b in batches])
        for kind, node in (("new", "large"), ("known", "other"))
    ]
    prompts = [hashes[at : at + PROMPT] for at in range(0, num_rounds * PROMPT, PROMPT)]
    rows.append(row("locate", PROMPT, [timed(lambda p=p: index.locate(p)) for p in prompts]))
    took_us = []
    for number in range(num_rounds):
        at = number * SMALL % NUM_BLOCKS
        index.add("small", [*hashes[at : at + SMALL // 2], *(os.urandom(32) for _ in range(SMALL // 2))])
        took_us.append(timed(lambda: index.forget("small")))
    rows.append(row("forget a node, all", SMALL, took_us))
    took_us = [timed(lambda: index.forget("large"))]
    while index.is_sweeping:
        took_us.append(timed(index.sweep))
    rows.append(row("forget a node, a step", SWEEP_BLOCKS, took_us))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    rows = measure(arguments.rounds)
    if arguments.json:
        print(json.dumps({"benchmark": "directory", **provenance(), "rows": rows}, indent=1))
        return
    print(f"{'op':28} {'blocks':>7} {'p50 us':>10} {'p99 us':>10} {'max us':>10}")
    for each in rows:
        times_us = f"{each['p50_us']:10.1f} {each['p99_us']:10.1f} {each['max_us']:10.1f}"
        print(f"{each['op']:28} {each['num_blocks']:7} {times_us}")


if __name__ == "__main__":
    main()

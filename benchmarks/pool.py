"""What the pool alone costs: one thread, no sockets, no bytes. Times of single calls, warm.

Each round stores one new chain, looks it up, pins and releases it. The pool holds as many chains as there are
rounds in the first half, so that every `prepare` of the second half evicts as many blocks as it claims.

Run: `python benchmarks/pool.py [--json] [--rounds N]`. Prints a table, or with --json one object with the
rows {op, num_blocks, p50_us, p99_us} and the machine and commit they were measured on.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.chain import Chain
from kvstore.pool import Pool
from kvstore.provenance import provenance

NAMESPACE = bytes(32)
SIZES = (128, 1024)


def new_chain(num_blocks: int) -> Chain:
    return Chain(NAMESPACE, NAMESPACE, 0, os.urandom(32 * num_blocks))


def measure(num_blocks: int, num_rounds: int) -> list[dict[str, Any]]:
    pool = Pool(num_blocks * (num_rounds // 2))
    took_us: dict[str, list[float]] = {}

    def timed(op: str, call: Callable[[], Any]) -> Any:
        began_s = time.perf_counter()
        result = call()
        took_us.setdefault(op, []).append((time.perf_counter() - began_s) * 1e6)
        return result

    for number in range(num_rounds):
        chain = new_chain(num_blocks)
        evicts = " (evicting)" if number >= num_rounds // 2 else ""
        ticket = timed(f"prepare_store{evicts}", lambda chain=chain: pool.prepare_store(chain, "writer"))
        assert len(ticket.slots) == num_blocks
        timed("complete_store", lambda ticket=ticket: pool.complete_store(ticket.write_id, "writer"))
        assert timed("lookup", lambda chain=chain: pool.lookup(chain)) == num_blocks
        grant = timed("pin_prefix", lambda chain=chain: pool.pin_prefix(chain, "reader", 1e9))
        assert timed("release", lambda grant=grant: pool.release(grant.lease_id, "reader"))
        pool.drain_events()
    pool.check_integrity()
    return [
        {
            "op": op,
            "num_blocks": num_blocks,
            "p50_us": round(float(np.percentile(times, 50)), 1),
            "p99_us": round(float(np.percentile(times, 99)), 1),
        }
        for op, times in took_us.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=400)
    arguments = parser.parse_args()
    rows = [row for num_blocks in SIZES for row in measure(num_blocks, arguments.rounds)]
    if arguments.json:
        print(json.dumps({"benchmark": "pool", **provenance(), "rows": rows}, indent=1))
        return
    print(f"{'op':28} {'blocks':>6} {'p50 us':>9} {'p99 us':>9} {'us/block':>9}")
    for row in rows:
        each_us = row["p50_us"] / row["num_blocks"]
        print(f"{row['op']:28} {row['num_blocks']:6} {row['p50_us']:9.1f} {row['p99_us']:9.1f} {each_us:9.3f}")


if __name__ == "__main__":
    main()

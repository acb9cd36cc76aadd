"""What the pool alone costs: one thread, no sockets, no bytes. Times of single calls, warm.

- Calls: each round stores one new chain, looks it up, pins and releases it. The pool holds as many chains as there are
  rounds in the first half, so that every `prepare` of the second half evicts as many blocks as it claims.
- Parts: each round stores one long chain in one part, and one in eight, as the ranks of an engine do; a row is of one
  rank's calls.
- Clearing: of a namespace that has nothing here, and of one that fills a large pool; of that, what the whole takes, and
  for how long it holds the pool's lock at once. The directory's index has a benchmark of its own.

Run: `python benchmarks/pool.py [--json] [--rounds N]`. Prints a table, or with --json one object with the
rows {op, num_blocks, p50_us, p99_us, max_us} and the machine and commit they were measured on.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from kvstore.blocks.chain import BlockHashes
from kvstore.pool.pool import Pool
from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance

NAMESPACE = bytes(32)
SIZES = (128, 1024)
#: A prompt of 131,072 tokens in blocks of 16.
LONG, NUM_PARTS = 8192, 8
#: 100 GiB of blocks of 256 KiB.
MANY, CHAIN = 400_000, 4000

Rows = list[dict[str, Any]]


class Times:
    """What calls took, by the name of the call."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.took_us: defaultdict[str, list[float]] = defaultdict(list)

    def timed(self, op: str, call: Callable[[], Any]) -> Any:
        began_s = time.perf_counter()
        result = call()
        self.took_us[op].append((time.perf_counter() - began_s) * 1e6)
        return result

    def rows(self) -> Rows:
        return [
            {
                "op": op,
                "num_blocks": self._num_blocks,
                "p50_us": round(float(np.percentile(times, 50)), 1),
                "p99_us": round(float(np.percentile(times, 99)), 1),
                "max_us": round(max(times), 1),
            }
            for op, times in self.took_us.items()
        ]


class TimedLock:
    """A lock that notes for how long it was held."""

    def __init__(self, took_us: list[float]) -> None:
        self._lock, self._took_us, self._began_s = threading.Lock(), took_us, 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._began_s = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._took_us.append((time.perf_counter() - self._began_s) * 1e6)
        self._lock.release()


def new_chain(num_blocks: int) -> BlockHashes:
    return BlockHashes(NAMESPACE, NAMESPACE, 0, os.urandom(32 * num_blocks))


def measure_calls(num_blocks: int, num_rounds: int) -> Rows:
    pool, times = Pool(num_blocks * (num_rounds // 2)), Times(num_blocks)
    for number in range(num_rounds):
        chain = new_chain(num_blocks)
        evicts = " (evicting)" if number >= num_rounds // 2 else ""
        ticket = times.timed(f"prepare_store{evicts}", lambda chain=chain: pool.prepare_store(chain, "writer"))
        assert len(ticket.slots) == num_blocks
        times.timed("complete_store", lambda ticket=ticket: pool.complete_store(ticket.write_id, "writer"))
        assert times.timed("lookup", lambda chain=chain: pool.lookup(chain)) == num_blocks
        grant = times.timed("pin_prefix", lambda chain=chain: pool.pin_prefix(chain, "reader", 1e9))
        assert times.timed("release", lambda grant=grant: pool.release(grant.lease_id, "reader"))
        pool.drain_events()
    pool.check_integrity()
    return times.rows()


def measure_parts(num_rounds: int) -> Rows:
    times = Times(LONG)
    for _ in range(num_rounds):
        for num_parts in (1, NUM_PARTS):
            pool, chain, tickets = Pool(LONG), new_chain(LONG), []
            for part in range(num_parts):
                call = lambda part=part: pool.prepare_store(chain, f"{part}", num_parts=num_parts, part=part)  # noqa
                tickets.append(times.timed(f"prepare_store (1 of {num_parts} parts)", call))
            for part, ticket in enumerate(tickets):
                call = lambda part=part, ticket=ticket: pool.complete_store(ticket.write_id, f"{part}")  # noqa
                times.timed(f"complete_store (1 of {num_parts} parts)", call)
            assert pool.lookup(chain) == LONG
    return times.rows()


def measure_clearing(num_rounds: int) -> Rows:
    times = Times(MANY)
    for _ in range(num_rounds):
        pool = Pool(MANY)
        for _ in range(MANY // CHAIN):
            pool.complete_store(pool.prepare_store(new_chain(CHAIN), "writer").write_id, "writer")
        pool.drain_events()
        assert times.timed("clear (nothing there)", lambda pool=pool: pool.clear(b"another" + bytes(25))) == 0
        pool._lock = TimedLock(times.took_us["clear (lock held at once)"])  # type: ignore[assignment]
        assert times.timed("clear (all blocks)", lambda pool=pool: pool.clear(NAMESPACE)) == MANY
        assert pool.stats().num_free == MANY
    return times.rows()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=400)
    arguments = parser.parse_args()
    rows = [row for num_blocks in SIZES for row in measure_calls(num_blocks, arguments.rounds)]
    rows += measure_parts(max(1, arguments.rounds // 20))
    rows += measure_clearing(max(1, arguments.rounds // 100))
    if arguments.json:
        print(as_document({"benchmark": "pool", **provenance(), "rows": rows}), end="")
        return
    print(f"{'op':32} {'blocks':>7} {'p50 us':>10} {'p99 us':>10} {'max us':>10} {'us/block':>9}")
    for row in rows:
        each_us = row["p50_us"] / row["num_blocks"]
        times_us = f"{row['p50_us']:10.1f} {row['p99_us']:10.1f} {row['max_us']:10.1f}"
        print(f"{row['op']:32} {row['num_blocks']:7} {times_us} {each_us:9.3f}")


if __name__ == "__main__":
    main()

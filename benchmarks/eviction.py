"""What every eviction policy hits on made traces of every kind, beside the bound that no policy exceeds.

Index only: the pool leases and stores the blocks of each request, and no bytes are moved. `kvstore replay` does so for
one trace; docs/replay.md says what the columns and the kinds are. A row is one trace, policy and capacity; `of_bound`
is its share of the bound's hits, and `of_lru` that of LRU's.

Run: `python benchmarks/eviction.py [--kinds A,B] [--blocks N,M] [--policies A,B] [--seconds S] [--seed N]
[--trace FILE] [--json] [--output FILE]`. Prints a table for each trace, or with --json one object with the rows and the
machine and commit they were measured on. --trace adds a file to the made traces, and may be repeated.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore.replay.commands import describe
from kvstore.replay.files import write_whole
from kvstore.replay.formats import read_trace
from kvstore.replay.kinds import KINDS, as_mooncake, make_requests
from kvstore.replay.model import LOAD_GB_PER_S, PREFILL_TOKENS_PER_S, TOKEN_BYTES, Rates
from kvstore.replay.report import POLICIES, Plan, progress_bar, run_plan
from kvstore.replay.traces import Trace
from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance

BLOCKS = (1000, 3000, 5000, 10_000, 30_000)
Rows = list[dict[str, Any]]


def made_trace(kind: str, seconds: float, seed: int) -> Trace:
    """Return a trace of a kind, by way of a file as everyone else's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / kind
        path.write_text(as_mooncake(make_requests(kind, seconds, seed)))
        return read_trace(path)


def measure(trace: Trace, policies: list[str], capacities: list[int]) -> Rows:
    """Return a row for each policy and capacity."""
    rates = Rates(PREFILL_TOKENS_PER_S, LOAD_GB_PER_S, trace.block_tokens * TOKEN_BYTES)
    with progress_bar(len(policies) * len(capacities), len(trace.requests)) as begin:
        rows = run_plan(trace, Plan(policies, capacities), rates, lambda name: begin(f"{trace.name}: {name}"))
    hits = {(row["policy"], row["capacity_blocks"]): row["num_hits"] for row in rows}
    return [
        {
            "trace": trace.name,
            "policy": row["policy"],
            "capacity_blocks": row["capacity_blocks"],
            "prefix_hit_ratio": row["prefix_hit_ratio"],
            "of_bound": share(row["num_hits"], hits.get(("bound", row["capacity_blocks"]))),
            "of_lru": share(row["num_hits"], hits.get(("lru", row["capacity_blocks"]))),
            "num_evictions": row["num_evictions"],
            "us_per_reference": row["us_per_reference"],
        }
        for row in rows
    ]


def share(num_hits: int, of: int | None) -> float | None:
    """Return a quotient; None without a divisor."""
    return round(num_hits / of, 3) if of else None


def table(rows: Rows) -> Iterator[str]:
    """Yield the lines of one trace's table: a line for each policy, a column for each capacity."""
    capacities = sorted({row["capacity_blocks"] for row in rows})
    yield f"{rows[0]['trace']:<24}" + "".join(f"{size:>10,}" for size in capacities) + f"{'us/ref':>10}"
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["capacity_blocks"])
        worst_us = max(row["us_per_reference"] for row in own)
        yield f"  {policy:<22}" + "".join(f"{row['prefix_hit_ratio']:>10.4f}" for row in own) + f"{worst_us:>10.1f}"


def words(text: str) -> list[str]:
    """Return the words of a comma list."""
    return [word for word in text.split(",") if word]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", type=words, default=list(KINDS), help="of made traces; default: all")
    parser.add_argument("--blocks", type=words, default=list(BLOCKS), help="capacities")
    parser.add_argument("--policies", type=words, default=list(POLICIES), help="default: all")
    parser.add_argument("--seconds", type=float, default=1800.0, help="length of the made traces")
    parser.add_argument("--seed", type=int, default=0, help="of the made traces")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a file to replay, too")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--output", type=Path, help="also write that object to this file")
    arguments = parser.parse_args()
    capacities = [int(size) for size in arguments.blocks]
    rows, traces = [], []
    for make in [*arguments.kinds, *arguments.trace]:
        trace = read_trace(make) if isinstance(make, Path) else made_trace(make, arguments.seconds, arguments.seed)
        found = measure(trace, arguments.policies, capacities)
        rows += found
        traces.append(describe(trace))
        if not arguments.json:
            print("\n".join(table(found)), end="\n\n", flush=True)
    about = {"benchmark": "eviction", **provenance(), "seconds": arguments.seconds, "seed": arguments.seed}
    document = as_document({**about, "traces": traces, "rows": rows})
    if arguments.json:
        print(document, end="")
    if arguments.output:
        write_whole(arguments.output, document)


if __name__ == "__main__":
    main()

"""What examples/prefill_decode.py shows of a run: a row for each request."""

from __future__ import annotations

import sys
from typing import Any

from demo_prompts import BLOCK_SIZE
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

LEGEND = f"""\
engine: tokens of the prompt that the decode engine still had in pages. own, peer, computed: blocks of
{BLOCK_SIZE} tokens that came from the decode node's memory, from the other node, and out of the model. TTFT: time to
first token on the decode node; beside it the same without any cache, with the prompt in one step. (With a
cache it is computed in small steps of one size, which is slower where much is computed, but makes bits
comparable: see demo_engine.py.)
"""


def as_table(rows: list[dict[str, Any]]) -> Table:
    """Return the rows for a human."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("request", "hit"):
        table.add_column(title)
    for title in ("tokens", "engine", "own", "peer", "computed", "NIXL", "GB/s", "TTFT", "without", "identical"):
        table.add_column(title, justify="right", no_wrap=True)
    counts = ("num_prompt_tokens", "num_tokens_engine", "num_blocks_own", "num_blocks_peer", "num_blocks_recomputed")
    for row in rows:
        moved = row["nixl_bytes"]
        table.add_row(
            row["request"],
            row["hit"],
            *(str(row[count]) for count in counts),
            f"{moved / 1e6:.1f} MB" if moved else "-",
            f"{row['nixl_gb_per_s']:.2f}" if moved else "-",
            f"{row['ttft_cached_s'] * 1e3:.0f} ms",
            f"{row['ttft_uncached_s'] * 1e3:.0f} ms",
            "yes" if row["identical"] else "NO",
        )
    return table


def show(result: dict[str, Any]) -> None:
    """Print what came of one way for a human."""
    summary = result["summary"]
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(as_table(result["rows"]))
    print(LEGEND)
    print(
        f"{summary['num_identical']} of {summary['num_requests']} requests identical: "
        f"{summary['num_full_peer_hits']} full peer hits, {summary['num_engine_hits']} of the engine's own pages, "
        f"{summary['num_local_hits']} local, "
        f"{summary['num_mixed_hits']} mixed, {summary['num_partial_hits']} partial, "
        f"{summary['num_misses']} missed; {summary['nixl_bytes'] / 1e6:.1f} MB over NIXL ({result['lane']} lane)"
        + (f", handed off through {' and '.join(summary['routes'])} memory" if result["handoff"] else "")
    )

"""What `benchmarks.serving` makes of its times: rows, what they say about each other, tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

Rows = list[dict[str, Any]]
Found = dict[str, Any]


def spread(times_s: Sequence[float]) -> dict[str, Any]:
    """Return the median of times in seconds, and where most of them lie, in milliseconds."""
    low, middle, high = (round(float(np.percentile(times_s, share)) * 1e3, 1) for share in (10, 50, 90))
    return {"p10_ms": low, "p50_ms": middle, "p90_ms": high, "num_times": len(times_s)}


def ratios(rows: Rows) -> Rows:
    """Return what the rows of one run say about each other."""

    def ms(**wanted: Any) -> float:
        (row,) = (row for row in rows if all(row.get(key) == value for key, value in wanted.items()))
        return float(row["p50_ms"])

    found = []
    for num_tokens in sorted({row["num_tokens"] for row in rows if row["what"] == "first token"}):
        at = {"what": "first token", "num_tokens": num_tokens}
        warm, cold = ms(**at, way="raykv", state="warm"), ms(**at, way="raykv", state="cold")
        none = ms(**at, way="none", state="cold")
        found += [
            {"ratio": "warm / bound", "num_tokens": num_tokens, "is": warm / ms(**at, way="dict", state="warm")},
            {"ratio": "recompute / warm", "num_tokens": num_tokens, "is": none / warm},
            {"ratio": "cold / no connector", "num_tokens": num_tokens, "is": cold / none},
        ]
    for lane in sorted({row["lane"] for row in rows if row["what"] == "hand-off"}):
        for state in ("decode", "prefill"):
            theirs = ms(what="hand-off", lane=lane, way="nixl", state=state)
            for way in ("raykv", "ticket"):
                ours = ms(what="hand-off", lane=lane, way=way, state=state)
                found.append({"ratio": f"{state}: {way} / NixlConnector", "lane": lane, "is": ours / theirs})
    return [row | {"is": round(row["is"], 3)} for row in found]


def show(found: Found) -> None:
    """Print the rows and ratios as tables."""
    table = Table(title=f"vLLM {found['vllm']} on the CPU in {found['dtype']}, times to first token in ms")
    for name in ("what", "way", "state", "tokens", "lane", "p10", "p50", "p90", "tokens/s"):
        table.add_column(name, justify="left" if name in ("what", "way", "state", "lane") else "right")
    for row in found["rows"]:
        keys = ("what", "way", "state", "num_tokens", "lane", "p10_ms", "p50_ms", "p90_ms", "answer_tokens_per_s")
        table.add_row(*(str(row.get(key, "")) for key in keys))
    console = Console()
    console.print(table)
    table = Table(title="ratios of this run")
    for name in ("what", "of", "is"):
        table.add_column(name, justify="right" if name == "is" else "left")
    for row in found["ratios"]:
        table.add_row(row["ratio"], str(row.get("num_tokens", row.get("lane"))), f"{row['is']:.2f}")
    console.print(table)
    for name, why in found["refused"].items():
        console.print(f"{name}: vLLM refused it here: {why}", soft_wrap=True)

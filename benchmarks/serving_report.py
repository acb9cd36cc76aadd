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
    """Return times in seconds as milliseconds, their median, and where most of them lie."""
    low, middle, high = (round(float(np.percentile(times_s, share)) * 1e3, 1) for share in (10, 50, 90))
    times_ms = [round(each * 1e3, 1) for each in times_s]
    return {"p10_ms": low, "p50_ms": middle, "p90_ms": high, "num_times": len(times_s), "times_ms": times_ms}


def paired(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Compare times of the same prompts, taken in turns: what the machine does meanwhile falls on both of a pair.

    Args:
        ours: one time for each prompt.
        theirs: those of another way, in the same order.

    Returns:
        {"is", "low", "high", "num_pairs"}: the median of the pairs' ratios, and its quartiles.
    """
    each = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, middle, high = (round(float(np.percentile(each, share)), 3) for share in (25, 50, 75))
    return {"is": middle, "low": low, "high": high, "num_pairs": len(each)}


def ratios(rows: Rows) -> Rows:
    """Return what the rows of one run say about each other; see `paired`."""

    def row_of(**wanted: Any) -> dict[str, Any]:
        (row,) = (row for row in rows if all(row.get(key) == value for key, value in wanted.items()))
        return row

    def ms(**wanted: Any) -> list[float]:
        return list(row_of(**wanted)["times_ms"])

    found: Rows = []
    for num_tokens in sorted({row["num_tokens"] for row in rows if row["what"] == "first token"}):
        at = {"what": "first token", "num_tokens": num_tokens}
        warm, cold = ms(**at, way="raykv", state="warm"), ms(**at, way="raykv", state="cold")
        # Engines with a connector have a prefix cache too.
        none, own = ms(**at, way="none", state="cold"), ms(**at, way="own", state="cold")
        times = round(float(np.median(none) / np.median(warm)), 3)  # Of medians: there are more warm ones.
        found += [
            {"ratio": "warm / bound", "num_tokens": num_tokens, **paired(warm, ms(**at, way="dict", state="warm"))},
            {"ratio": "recompute / warm", "num_tokens": num_tokens, "is": times},
            {"ratio": "cold / no connector", "num_tokens": num_tokens, **paired(cold, own)},
            {"ratio": "cold / no connector, no prefix cache", "num_tokens": num_tokens, **paired(cold, none)},
        ]
    for num_tokens in sorted({row["num_tokens"] for row in rows if row["what"] == "disk tier"}):
        at = {"what": "disk tier", "num_tokens": num_tokens}
        found += [
            {"ratio": f"cold: {ours} / {theirs}", "num_tokens": num_tokens,
             **paired(ms(**at, way=ours, state="cold"), ms(**at, way=theirs, state="cold"))}
            for ours, theirs in (("disk 1", "memory 1"), ("disk 2", "memory 2"), ("memory 2", "memory 1"),
                                 ("disk 2", "disk 1"))
        ]  # fmt: skip
        both = {way: ms(**at, way=f"{way} 1", state="cold") + ms(**at, way=f"{way} 2", state="cold")
                for way in ("memory", "disk")}  # fmt: skip
        old = ms(**at, way="disk 1", state="from disk")
        computed = ms(**at, way="disk 1", state="cold")[: len(old)]
        found += [
            {"ratio": "cold: disk tier / none", "num_tokens": num_tokens, **paired(both["disk"], both["memory"])},
            {"ratio": "from disk / recompute", "num_tokens": num_tokens, **paired(old, computed)},
        ]
    talks = {row["way"]: row for row in rows if row["what"] == "conversations"}
    for way in sorted(talks.keys() - {"raykv"}):
        found.append(
            {"ratio": f"conversations: raykv / {way}", **paired(talks["raykv"]["walls_s"], talks[way]["walls_s"])}
        )
    for lane in sorted({row["lane"] for row in rows if row["what"] == "hand-off"}):
        for state in ("decode", "prefill"):
            theirs = ms(what="hand-off", lane=lane, way="nixl", state=state)
            for way in ("raykv", "ticket"):
                ours = ms(what="hand-off", lane=lane, way=way, state=state)
                found.append({"ratio": f"{state}: {way} / NixlConnector", "lane": lane, **paired(ours, theirs)})
    return found


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
    for name in ("what", "of", "is", "quartiles"):
        table.add_column(name, justify="left" if name in ("what", "of") else "right")
    for row in found["ratios"]:
        quartiles = f"{row['low']:.2f} to {row['high']:.2f}" if "low" in row else ""
        table.add_row(row["ratio"], str(row.get("num_tokens", row.get("lane", ""))), f"{row['is']:.2f}", quartiles)
    console.print(table)
    for name, why in found["refused"].items():
        console.print(f"{name}: vLLM refused it here: {why}", soft_wrap=True)

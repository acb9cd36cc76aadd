"""From benchmarks/results/gpu-h200.json: the tables of docs/performance*.md (printed) and docs/gpu-h200.svg.

From gpu-beside-h200.json: the table of loads beside products; from gpu-bounds-h200.json and gpu-scatter-h200.json: of
what memory itself takes; from gpu-strips-h200.json: of the strips of unpacking; from gpu-client-h200.json: that of
docs/gpu.md.

    python benchmarks/plot_gpu.py

A test fails when either is not what the committed results give.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/gpu-h200.json"
BESIDE = ROOT / "benchmarks/results/gpu-beside-h200.json"
BOUNDS = ROOT / "benchmarks/results/gpu-bounds-h200.json"
SCATTER = ROOT / "benchmarks/results/gpu-scatter-h200.json"
STRIPS = ROOT / "benchmarks/results/gpu-strips-h200.json"
CLIENT = ROOT / "benchmarks/results/gpu-client-h200.json"
PICTURE = ROOT / "docs/gpu-h200.svg"
SHAPES = ("8B", "70B/TP8", "MLA")
COUNTS = (8, 16, 64, 256, 1024)
DIRECTIONS = {
    "pack": "pack",
    "unpack": "unpack",
    "gpu_to_host": "GPU to host",
    "host_to_gpu": "host to GPU",
    "both": "both at once",
}
#: Way -> (label, colour), in the order of the bars.
WAYS = {
    "limit": ("one memcpy (limit)", "#9aa0a6"),
    "ours": ("ours", "#1a73e8"),
    "batch_of_fragments": ("cudaMemcpyBatchAsync", "#f9ab00"),
    "torch_gather": ("torch gather + copy", "#34a853"),
    "memcpy_per_fragment": ("memcpy per fragment", "#d93025"),
}
ORDERS = {
    "side_by_side": "side by side",
    "by_block": "anywhere, block after block",
    "by_plane": "anywhere, plane after plane",
    "random": "anywhere, in any order",
}
ACTIONS = {"copy_in": "into blocks", "copy_out": "out of blocks"}
SCATTERED = {
    "within": "4 KiB in any order within windows of",
    "pieces": "in any order, pieces of",
    "one_of": "4 KiB in order, of those that lie there one in",
}
#: Way -> label of docs/gpu.md.
CLIENT_WAYS = {
    "limit, to the host": "one copy to the host",
    "save": "save",
    "limit, to the GPU": "one copy to the GPU",
    "load": "load",
    "load, until a stream goes on": "load, until a stream goes on",
}
Speeds = dict[tuple[str, int, int, str], dict[str, dict[str, Any]]]


def speeds(rows: list[dict[str, Any]]) -> Speeds:
    """Return rows by (shape, block size, number of blocks, direction) and way."""
    found: Speeds = {}
    for row in rows:
        key = (row["shape"], row["block_size"], row["num_blocks"], row["direction"])
        found.setdefault(key, {})[row["way"]] = row
    return found


def tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of all tables, as Markdown."""
    found = speeds(rows)
    for size in (16, 64):
        yield f"| blocks of {size} tokens: GB/s (of the limit) | " + " | ".join(f"{count:,}" for count in COUNTS) + " |"
        yield "|---|" + "---|" * len(COUNTS)
        for shape in SHAPES:
            for direction, label in DIRECTIONS.items():
                cells = []
                for count in COUNTS:
                    ways = found.get((shape, size, count, direction))
                    cells.append(_share(ways["ours"]["gb_per_s"], ways["limit"]["gb_per_s"]) if ways else "")
                yield f"| {shape}, {label} | " + " | ".join(cells) + " |"
        yield ""
    yield "| 256 blocks of 16 tokens, GB/s | " + " | ".join(label for label, _ in WAYS.values()) + " |"
    yield "|---|" + "---|" * len(WAYS)
    for shape, direction, bars in groups(rows):
        cells = ["" if speed is None else f"{speed:.1f}" for speed in bars]
        yield f"| {shape}, {DIRECTIONS[direction]} | " + " | ".join(cells) + " |"


def beside_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of gpu-beside-h200.json: speed of a load, time of a product meanwhile."""
    found = speeds(rows)
    yield "| loads beside products: GB/s, ms of a product (of the limit) | " + " | ".join(SHAPES) + " |"
    yield "|---|" + "---|" * len(SHAPES)
    beside = [next(ways for key, ways in found.items() if key[0] == shape) for shape in SHAPES]
    for way in beside[0]:
        yield f"| {way} | " + " | ".join(_beside(ways[way]) for ways in beside) + " |"


def bounds_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of gpu-bounds-h200.json: copies into and out of blocks, of one copy of the bytes."""
    yield "| copied, of the limit: 256, 1,024 blocks | " + " | ".join(SHAPES) + " |"
    yield "|---|" + "---|" * len(SHAPES)
    for action, place in ACTIONS.items():
        found: dict[str, dict[tuple[str, int], float]] = {}
        for row in rows:
            if row["action"] == action:
                found.setdefault(row["way"], {})[row["shape"], row["num_blocks"]] = row["us"]
        limit = found.pop("limit")
        for way, times in found.items():
            cells = [
                ", ".join(f"{limit[shape, count] / times[shape, count]:.3f}" for count in (256, 1024))
                for shape in SHAPES
            ]
            yield f"| {place} {ORDERS[way]} | " + " | ".join(cells) + " |"


def scatter_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of gpu-scatter-h200.json: one side scattered, of one copy of the bytes."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row["what"] in SCATTERED:
            found.setdefault((row["what"], row["size"]), {})[row["side"]] = row["of_limit"]
    yield "| 640 MiB, of the limit | that side written | that side read |"
    yield "|---|---|---|"
    for (what, size), sides in found.items():
        label = str(size) if what == "one_of" else _size(size)
        yield f"| {SCATTERED[what]} {label} | {sides['written']:.3f} | {sides['read']:.3f} |"


def strips_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of gpu-strips-h200.json: every style of unpacking, of one copy; bold is chosen."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        case = f"{row['shape']}, {row['num_blocks']:,} blocks of {row['block_size']}, one in {row['one_in']}"
        bold = "**" if row["chosen"] else ""
        found.setdefault(case, {})[row["way"]] = f"{bold}{row['of_limit']:.3f}{bold}"
    ways = list(dict.fromkeys(row["way"] for row in rows))
    yield "| planes of a strip, of the limit | " + " | ".join(ways) + " |"
    yield "|---|" + "---|" * len(ways)
    for case, cells in found.items():
        yield f"| {case} | " + " | ".join(cells[way] for way in ways) + " |"


def client_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of gpu-client-h200.json."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row["what"] == "client":
            found.setdefault((row["layout"], row["num_blocks"]), {})[row["way"]] = row["gb_per_s"]
    yield "| cache, blocks | " + " | ".join(CLIENT_WAYS.values()) + " |"
    yield "|---|" + "---|" * len(CLIENT_WAYS)
    for (layout, count), ways in found.items():
        yield f"| {layout}, {count} | " + " | ".join(f"{ways[way]:.1f}" for way in CLIENT_WAYS) + " |"


def groups(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str, list[float | None]]]:
    """Yield (shape, direction, GB/s of each way) of the bars."""
    found = speeds(rows)
    for shape in SHAPES:
        for direction in ("gpu_to_host", "host_to_gpu"):
            ways = found[shape, 16, 256, direction]
            yield shape, direction, [ways[way]["gb_per_s"] if way in ways else None for way in WAYS]


def picture(rows: list[dict[str, Any]]) -> str:
    """Return the bars as SVG."""
    width, height, left, top, base = 900, 360, 50, 50, 300
    scale = (base - top) / 60
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for value in range(0, 61, 10):
        at = base - value * scale
        lines.append(f'<path d="M{left} {at:.1f}H{width - 10}" stroke="#e0e0e0"/>')
        lines.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{value}</text>')
    for number, (label, colour) in enumerate(WAYS.values()):
        at = left + number * 168
        lines.append(f'<rect x="{at}" y="14" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{at + 18}" y="24">{label}</text>')
    bar = 22
    for number, (shape, direction, bars) in enumerate(groups(rows)):
        begin = left + 12 + number * 140
        for at, (speed, (_, colour)) in enumerate(zip(bars, WAYS.values(), strict=True)):
            if speed is not None:
                x, tall = begin + at * bar, speed * scale
                lines.append(
                    f'<rect x="{x}" y="{base - tall:.1f}" width="{bar - 3}" height="{tall:.1f}" fill="{colour}"/>'
                )
                lines.append(
                    f'<text x="{x + bar / 2 - 1.5}" y="{base - tall - 4:.1f}" font-size="9" text-anchor="middle">'
                    f"{speed:.1f}</text>"
                )
        middle = begin + len(WAYS) * bar / 2
        lines.append(f'<text x="{middle}" y="{base + 18}" text-anchor="middle">{shape}</text>')
        lines.append(f'<text x="{middle}" y="{base + 34}" text-anchor="middle">{DIRECTIONS[direction]}</text>')
    lines.append(f'<text x="14" y="{top - 10}">GB/s</text>')
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def _beside(row: dict[str, Any]) -> str:
    product = f"{row['product_ms']:.3f} ({row['product_of_limit']:.3f})"
    return f"{row['gb_per_s']:.1f} ({row['of_limit']:.3f}), {product}" if row["gb_per_s"] else product


def _share(ours: float, limit: float) -> str:
    return f"{ours:,.0f} ({ours / limit:.2f})" if limit > 500 else f"{ours:.1f} ({ours / limit:.3f})"


def main() -> None:
    """Write the picture and print the tables."""
    rows = json.loads(RESULTS.read_text())["rows"]
    PICTURE.write_text(picture(rows))
    print("\n".join(tables(rows)), "", sep="\n")
    print("\n".join(beside_table(json.loads(BESIDE.read_text())["rows"])), "", sep="\n")
    print("\n".join(bounds_table(json.loads(BOUNDS.read_text())["rows"])), "", sep="\n")
    print("\n".join(scatter_table(json.loads(SCATTER.read_text())["rows"])), "", sep="\n")
    print("\n".join(strips_table(json.loads(STRIPS.read_text())["rows"])), "", sep="\n")
    print("\n".join(client_table(json.loads(CLIENT.read_text())["rows"])))


if __name__ == "__main__":
    main()

"""Draw prefix hit ratio over capacity, a line for each policy: SVG by itself, PNG with matplotlib."""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError, InvalidRequest

#: Of the lines, in the order of the policies.
COLOURS = ("#1a73e8", "#9aa0a6", "#d93025", "#34a853", "#f9ab00")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 640, 400, 64, 48, 56
Lines = dict[str, list[tuple[int, float]]]


def check_plot(path: Path) -> None:
    """Refuse, before anything is replayed, a plot that cannot be drawn.

    Raises:
        InvalidRequest: the name ends neither in .svg nor in .png.
        ConfigError: a PNG is wanted, and matplotlib is not here.
    """
    if path.suffix not in (".svg", ".png"):
        raise InvalidRequest(f"--plot: wanted a name that ends in .svg or .png, got {str(path)!r}; an SVG always works")
    if path.suffix == ".png":
        _matplotlib()


def draw(path: Path, title: str, rows: Sequence[dict[str, Any]]) -> bytes:
    """Return the picture in the format that the file's name says."""
    lines = lines_of(rows)
    return svg(title, lines).encode() if path.suffix == ".svg" else _png(title, lines)


def lines_of(rows: Sequence[dict[str, Any]]) -> Lines:
    """Return (capacity, ratio) by policy, in the order of capacity."""
    found: Lines = {}
    for row in sorted(rows, key=lambda row: row["capacity_blocks"]):
        found.setdefault(row["policy"], []).append((row["capacity_blocks"], row["prefix_hit_ratio"]))
    order = list(dict.fromkeys(row["policy"] for row in rows))
    return {policy: found[policy] for policy in order}


def svg(title: str, lines: Lines) -> str:
    """Return the picture as SVG; capacity on a logarithmic scale."""
    points = [point for line in lines.values() for point in line]
    least, most = math.log10(min(size for size, _ in points)), math.log10(max(size for size, _ in points))
    top_ratio = max(0.1, math.ceil(10 * max(ratio for _, ratio in points)) / 10)
    wide, tall = _WIDTH - _LEFT - 24, _HEIGHT - _TOP - _BOTTOM
    base = _HEIGHT - _BOTTOM

    def at(size: int, ratio: float) -> tuple[float, float]:
        share = (math.log10(size) - least) / (most - least) if most > least else 0.5
        return _LEFT + share * wide, base - ratio / top_ratio * tall

    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20">{escape(title)}: prefix hit ratio</text>',
    ]
    for step in range(6):
        ratio = step * top_ratio / 5
        y = at(10, ratio)[1]
        found.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + wide}" y2="{y:.1f}" stroke="#e0e0e0"/>')
        found.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{ratio:.2f}</text>')
    for size in sorted({size for size, _ in points}):
        found.append(f'<text x="{at(size, 0)[0]:.1f}" y="{base + 18}" text-anchor="middle">{size:,}</text>')
    found.append(f'<text x="{_LEFT + wide / 2}" y="{_HEIGHT - 12}" text-anchor="middle">blocks</text>')
    for number, (policy, line) in enumerate(lines.items()):
        colour, places = COLOURS[number % len(COLOURS)], [at(*point) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        # The first is wider, so that it is seen where another covers it.
        found.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{2 if number else 4}"/>')
        found += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        found.append(f'<rect x="{_LEFT + number * 100}" y="28" width="12" height="12" fill="{colour}"/>')
        found.append(f'<text x="{_LEFT + number * 100 + 18}" y="38">{escape(policy)}</text>')
    return "\n".join([*found, "</svg>"]) + "\n"


def _matplotlib() -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            "--plot: wanted matplotlib to draw a PNG, got none; `pip install '.[plot]'`, or name a file that ends "
            "in .svg"
        ) from error


def _png(title: str, lines: Lines) -> bytes:
    figure = _matplotlib().Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for number, (policy, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(*zip(*line, strict=True), marker="o", label=policy, color=colour, linewidth=2 if number else 4)
    axes.set(xscale="log", xlabel="blocks", ylabel="prefix hit ratio", title=title, ylim=(0, None))
    axes.legend()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()

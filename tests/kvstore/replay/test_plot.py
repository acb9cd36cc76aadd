"""Plots: an SVG without any package, a PNG where matplotlib is."""

from __future__ import annotations

import importlib
import sys
import types
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from kvstore.errors import ConfigError, InvalidRequest
from kvstore.replay import plot

ROWS = [
    {"policy": policy, "capacity_blocks": size, "prefix_hit_ratio": ratio}
    for policy, size, ratio in [
        ("lru", 5000, 0.11),
        ("bound", 5000, 0.34),
        ("lru", 1000, 0.04),
        ("bound", 1000, 0.19),
    ]
]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(rows, title="a trace"):
    return ElementTree.fromstring(plot.draw(Path("a.svg"), title, rows))


def test_a_line_for_each_policy_from_the_least_capacity_on():
    root = drawn(ROWS)
    lines = [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in root.iter(f"{SVG}polyline")
    ]
    assert [len(line) for line in lines] == [2, 2]
    for line in lines:
        assert line[0][0] < line[1][0]  # more blocks to the right
        assert line[0][1] > line[1][1]  # more hits above
    assert lines[0][0][1] > lines[1][0][1]
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"lru", "bound", "1,000", "5,000", "blocks", "a trace: prefix hit ratio"} <= texts


def test_one_capacity_and_no_hits_are_drawn_too():
    assert len(list(drawn([{**ROWS[0], "prefix_hit_ratio": 0.0}]).iter(f"{SVG}circle"))) == 1


def test_a_title_is_text():
    assert "<b>&" in "".join(text.text for text in drawn(ROWS, "<b>&").iter(f"{SVG}text"))


@pytest.mark.parametrize("name", ["a.jpg", "svg", "a.SVG.txt"])
def test_other_formats_are_refused(name):
    with pytest.raises(InvalidRequest, match=r"--plot: wanted a name that ends in .svg or .png, got"):
        plot.check_plot(Path(name))


def test_an_svg_is_never_refused():
    plot.check_plot(Path("a.svg"))


def test_without_matplotlib_a_png_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"wanted matplotlib to draw a PNG, got none; `pip install '\.\[plot\]'`"):
        plot.check_plot(Path("a.png"))


def test_with_matplotlib_a_png_has_the_same_lines(monkeypatch):
    drawn_lines = []

    class Axes:
        def plot(self, sizes, ratios, label, **_):
            drawn_lines.append((label, list(sizes), list(ratios)))

        def set(self, **_):
            pass

        def legend(self):
            pass

    class Figure:
        def __init__(self, **_):
            pass

        def subplots(self):
            return Axes()

        def savefig(self, file, **_):
            file.write(b"png")

    monkeypatch.setattr(importlib, "import_module", lambda _: types.SimpleNamespace(Figure=Figure))
    plot.check_plot(Path("a.png"))
    assert plot.draw(Path("a.png"), "t", ROWS) == b"png"
    assert drawn_lines == [("lru", [1000, 5000], [0.04, 0.11]), ("bound", [1000, 5000], [0.19, 0.34])]

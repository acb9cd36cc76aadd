"""The Grafana board and the page of metrics have every metric of a node store, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvstore.tools.metrics import METRICS

DOCS = Path(__file__).resolve().parents[3] / "docs"
BOARD = json.loads((DOCS / "dashboards/raykv.json").read_text(encoding="utf-8"))
SHOWN = {f"ray_{metric.name}{'_total' if metric.is_counter else ''}": metric for metric in METRICS}
TARGETS = [target for panel in BOARD["panels"] for target in panel["targets"]]


def test_the_board_has_every_metric_and_no_other():
    assert {name for target in TARGETS for name in re.findall(r"ray_\w+", target["expr"])} == SHOWN.keys()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["legendFormat"])
def test_a_panel_asks_for_tags_that_its_metrics_have(target):
    query = target["expr"]
    asked = set(re.findall(r"(\w+)=", query)) | {
        tag for tags in re.findall(r"by \(([^)]*)\)", query) for tag in tags.split(", ")
    }
    for name in re.findall(r"ray_\w+", query):
        if name == "ray_raykv_hit_blocks_total":  # Beside misses, which have a path.
            asked -= {"path"}
        assert asked <= {"node", "store", *SHOWN[name].tags} | ({"tier"} if "ignoring(tier)" in query else set())
    assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= asked
    assert query.count("(") == query.count(")")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["legendFormat"])
def test_a_query_is_one_that_prometheus_reads(target):
    """After `group_left` it takes parentheses for a list of labels: these have to be there, and empty."""
    assert re.search(r"group_(left|right) *\((?! *\))", target["expr"]) is None


def test_counters_are_shown_as_rates_and_gauges_as_they_are():
    for target in TARGETS:
        for name, metric in SHOWN.items():
            for before in re.findall(rf"(\w+)\({name}\b", target["expr"]):
                assert (before == "rate") == metric.is_counter, target["expr"]


def test_panels_do_not_cover_each_other():
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in BOARD["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in BOARD["panels"]})


def test_the_page_has_every_metric_with_its_tags():
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(ray_\w+)` \| ([^|]*) \| ([^|]+) \|$", page, re.MULTILINE)
    told = {name: (tuple(re.findall(r"`(\w+)`", tags)), text) for name, tags, text in rows}
    assert told == {name: (metric.tags, metric.description.rstrip(".")) for name, metric in SHOWN.items()}

"""The page of the directory has every metric of a shard, and every count."""

from __future__ import annotations

import re
from pathlib import Path

from kvstore.tools.metrics import METRICS
from kvstore.tools.shard_metrics import SHARD_METRICS

PAGE = (Path(__file__).resolve().parents[3] / "docs/directory.md").read_text(encoding="utf-8")


def test_the_page_has_every_metric_of_a_shard():
    told = dict(re.findall(r"^\| `(ray_\w+)` \| ([^|]+) \|$", PAGE, re.MULTILINE))
    assert told == {
        f"ray_{metric.name}{'_total' if metric.is_counter else ''}": metric.description.rstrip(".")
        for metric in SHARD_METRICS
    }


def test_no_metric_of_a_shard_has_the_name_of_one_of_a_store_and_each_has_the_shards_number():
    assert not {metric.name for metric in METRICS} & {metric.name for metric in SHARD_METRICS}
    assert {metric.tags for metric in SHARD_METRICS} == {("shard",)}


def test_the_page_has_every_count_of_a_shard(directory):
    counts = {*directory.stats(), "shard"}
    rows = re.findall(r"^\| (`(?:shard|num_)[^|]+) \|", PAGE, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == counts

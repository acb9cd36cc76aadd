"""A connector's counts and times among vLLM's own metrics, on its /metrics or, in Ray, among Ray's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvstore.integrations.vllm.stats import bucket_mean_s

#: (metric, label of it, text, {name in the stats: value of the label}); "" is a metric without a label.
_COUNTERS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    (
        "loaded_blocks", "tier", "Blocks that loads brought into the engine, by the tier that had them",
        {f"num_loaded_{name}_blocks": tier for name, tier in (("local", "memory"), ("disk", "disk"), ("peer", "peer"))},
    ),
    (
        "loaded_bytes", "tier", "Bytes that loads brought into the engine, by the tier that had them",
        {f"num_loaded_{name}_bytes": tier for name, tier in (("local", "memory"), ("disk", "disk"), ("peer", "peer"))},
    ),
    (
        "fetched_blocks", "tier", "Blocks of hand-offs that were brought into the engine",
        {"num_fetched_local_blocks": "memory", "num_fetched_peer_blocks": "peer"},
    ),
    (
        "fetched_bytes", "tier", "Bytes of hand-offs that were brought into the engine",
        {"num_fetched_local_bytes": "memory", "num_fetched_peer_bytes": "peer"},
    ),
    ("saved_blocks", "", "Blocks that saves wrote to the store", {"num_saved_blocks": ""}),
    ("saved_bytes", "", "Bytes that saves wrote to the store", {"num_saved_bytes": ""}),
    ("refused_blocks", "", "Blocks of saves for which the store had no slot", {"num_refused_blocks": ""}),
    ("published_blocks", "", "Blocks that were published for a hand-off", {"num_published_blocks": ""}),
    ("published_bytes", "", "Bytes that were published for a hand-off", {"num_published_bytes": ""}),
    ("abandoned_saves", "", "Saves that were given up because their blocks were needed", {"num_abandoned_saves": ""}),
    ("preempted_requests", "", "Requests that vLLM preempted while they were saved", {"num_preempted": ""}),
)  # fmt: skip
#: Names of failures with a reason, and what failed.
_FAILED = re.compile("num_failed_(loads|fetches|saves|publications)_(.+)")
_WHAT = {"loads": "load", "fetches": "fetch", "saves": "save", "publications": "publish"}
#: Failures that have no reason.
_OTHER_FAILURES = {"num_lookup_errors": ("lookup", "error"), "num_request_errors": ("request", "error")}
#: Names of times, and the text of their histogram.
_TIMES = {
    "load": "Seconds of a load, from its begin until its blocks are in the engine",
    "fetch": "Seconds of a hand-off's fetch, from its begin until its blocks are in the engine",
    "save": "Seconds of a save, from its begin until its blocks can be found",
    "publish": "Seconds of a publication for a hand-off",
    "lookup": "Seconds until the store has answered what it has of a prompt",
}
_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class RaykvPromMetrics(KVConnectorPromMetrics):
    """Metrics named `vllm:raykv_...` with vLLM's labels, and one of their own where they have several values.

    Ranks are added up: each rank of a split engine counts its part of a block, and the bytes of that part.

    Args:
        vllm_config: of the engine.
        metric_types: vLLM's classes for counters and histograms: those of Prometheus, or of Ray.
        labelnames: of vLLM.
        per_engine_labelvalues: their values, by the index of an engine.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), list(labelnames), dict(per_engine_labelvalues))
        self._label_values = per_engine_labelvalues
        counter, histogram = metric_types[Counter], metric_types[Histogram]

        def labels(*own: str) -> list[str]:
            return [*labelnames, *filter(None, own)]

        #: By the name of a count: its metric, and the values of its own labels.
        self._counters: dict[str, tuple[Any, tuple[str, ...]]] = {}
        for name, label, text, counts in _COUNTERS:
            metric = counter(name=f"vllm:raykv_{name}", documentation=text, labelnames=labels(label))
            self._counters |= {count: (metric, (value,) if label else ()) for count, value in counts.items()}
        self._failures = counter(
            name="vllm:raykv_failures",
            documentation="Loads, fetches, saves, publications and lookups that failed, by reason",
            labelnames=labels("what", "reason"),
        )
        self._times = {
            name: histogram(
                name=f"vllm:raykv_{name}_seconds", documentation=text, buckets=list(_BUCKETS_S), labelnames=labels()
            )
            for name, text in _TIMES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what an interval's `RaykvStats` have, all ranks together.

        Times that lie within a quarter of each other in one interval count as their mean; sums and numbers are exact.
        """
        values = tuple(self._label_values[engine_idx])
        for name, number in transfer_stats_data["counts"].items():
            if name in self._counters:
                metric, own = self._counters[name]
            elif (failure := _failure(name)) is not None:
                metric, own = self._failures, failure
            else:
                continue
            if number:
                metric.labels(*values, *own).inc(number)
        for name, times in transfer_stats_data["times"].items():
            if name in self._times:
                histogram = self._times[name].labels(*values)
                for bucket, number in times["buckets"].items():
                    mean_s = bucket_mean_s(times, bucket)
                    for _ in range(number):
                        histogram.observe(mean_s)


def _failure(name: str) -> tuple[str, str] | None:
    if found := _FAILED.fullmatch(name):
        return _WHAT[found[1]], found[2]
    return _OTHER_FAILURES.get(name)

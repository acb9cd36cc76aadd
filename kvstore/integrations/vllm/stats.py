"""Counts and times of a connector: per interval for vLLM's log and Prometheus, and in total."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

#: Upper ends of the buckets of times: 1 us, then each a quarter larger, up to 17 minutes.
_STEP = 1.25
_NUM_BUCKETS = 95
_INTERVAL_S = 0.5


class Stats:
    """Counts and times of one half of a connector; any thread may use it.

    Each time bucket ends a quarter higher than the one before, so a quantile is at most that much too high.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = RaykvStats()  # Everything up to the last `take`.
        self._since = RaykvStats()
        self._taken_s = time.monotonic()

    def count(self, name: str, by: int | float = 1) -> None:
        """Add to a count."""
        with self._lock:
            self._since.count(name, by)

    def time(self, name: str, seconds: float) -> None:
        """Count one event and how long it took."""
        exponent = math.ceil(math.log(max(seconds, 1e-9) * 1e6, _STEP))
        bucket = str(min(max(exponent, 0), _NUM_BUCKETS - 1))
        with self._lock:
            self._since.add_times(name, {"max_s": seconds, "buckets": {bucket: 1}, "sums_s": {bucket: seconds}})

    @contextlib.contextmanager
    def timed(self, *names: str) -> Iterator[None]:
        """Count and time the body, under each of some names."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            for name in names:
                self.time(name, time.perf_counter() - begin_s)

    def total(self) -> dict[str, int | float]:
        """Return counts, and p50, p99 and maximum of each time in milliseconds, since the start; flat."""
        with self._lock:
            return RaykvStats().aggregate(self._taken).aggregate(self._since).reduce()

    def take(self) -> RaykvStats | None:
        """Return the counts and times since the last call; None if there are none, or it was too short ago."""
        if time.monotonic() - self._taken_s < _INTERVAL_S:
            return None
        with self._lock:
            taken, self._since, self._taken_s = self._since, RaykvStats(), time.monotonic()
            self._taken.aggregate(taken)
        return None if taken.is_empty() else taken


class RaykvStats(KVConnectorStats):
    """An interval's counts and times, as vLLM passes them between processes.

    Args:
        data: {"counts": {name: number}, "times": {name: {"max_s", "buckets", "sums_s"}}}. The last two are by bucket:
            the number of events, and their seconds together.
    """

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data={"counts": {}, "times": {}} if data is None else data)

    def reset(self) -> None:
        """Forget everything."""
        self.data = {"counts": {}, "times": {}}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data["counts"] and not self.data["times"]

    def count(self, name: str, by: int | float) -> None:
        """Add to a count."""
        self.data["counts"][name] = self.data["counts"].get(name, 0) + by

    def add_times(self, name: str, times: Mapping[str, Any]) -> None:
        """Add events with a name, in the format of `data`."""
        mine = self.data["times"].setdefault(name, {"max_s": 0.0, "buckets": {}, "sums_s": {}})
        mine["max_s"] = max(mine["max_s"], times["max_s"])
        for kind in ("buckets", "sums_s"):
            for bucket, number in times[kind].items():
                mine[kind][bucket] = mine[kind].get(bucket, 0) + number

    def aggregate(self, other: Any) -> RaykvStats:
        """Add the counts and times of another worker or interval."""
        for name, number in other.data["counts"].items():
            self.count(name, number)
        for name, times in other.data["times"].items():
            self.add_times(name, times)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return counts, and p50, p99 and maximum of each time in milliseconds; flat, for a log."""
        flat: dict[str, int | float] = dict(sorted(self.data["counts"].items()))
        for name, times in sorted(self.data["times"].items()):
            flat[f"num_{name}"] = sum(times["buckets"].values())
            for share in (50, 99):
                flat[f"{name}_p{share}_ms"] = round(min(_quantile_s(times["buckets"], share), times["max_s"]) * 1e3, 4)
            flat[f"{name}_max_ms"] = round(times["max_s"] * 1e3, 4)
        return flat


def bucket_mean_s(times: Mapping[str, Any], bucket: str) -> float:
    """Return the mean of the times of one bucket."""
    return float(times["sums_s"][bucket]) / int(times["buckets"][bucket])


def _quantile_s(buckets: Mapping[str, int], share: int) -> float:
    """Return the upper end of the bucket in which a quantile lies."""
    left = sum(buckets.values()) * share / 100
    for bucket, number in sorted((int(bucket), number) for bucket, number in buckets.items()):
        left -= number
        if left <= 0:
            return float(_STEP**bucket) * 1e-6
    return 0.0

"""Counts and times of a connector: per interval for vLLM's log and Prometheus, and in total."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

#: Upper ends of the buckets of times: 1 us, then each a quarter larger, up to 17 minutes.
_STEP = 1.25
_NUM_BUCKETS = 95
_INTERVAL_S = 0.5


def _bucket(seconds: float) -> int:
    return min(max(math.ceil(math.log(max(seconds, 1e-9) * 1e6, _STEP)), 0), _NUM_BUCKETS - 1)


class Stats:
    """Counts and times of one half of a connector; any thread may use it.

    Each time bucket ends a quarter higher than the one before, so a quantile is at most that much too high.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = RaykvStats()
        self._since = RaykvStats()
        self._taken_s = time.monotonic()

    def count(self, name: str, by: int | float = 1) -> None:
        """Add to a count."""
        with self._lock:
            for stats in (self._total, self._since):
                stats.data["counts"][name] = stats.data["counts"].get(name, 0) + by

    def time(self, name: str, seconds: float) -> None:
        """Count one event and how long it took."""
        self.time_each((name,), seconds)

    def time_each(self, names: Iterable[str], seconds: float) -> None:
        """Count one event under several names."""
        bucket = str(_bucket(seconds))
        with self._lock:
            for name in names:
                for stats in (self._total, self._since):
                    times = stats.data["times"].get(name)
                    if times is None:
                        times = stats.data["times"][name] = {"max_s": 0.0, "sum_s": 0.0, "buckets": {}}
                    times["max_s"] = max(times["max_s"], seconds)
                    times["sum_s"] += seconds
                    times["buckets"][bucket] = times["buckets"].get(bucket, 0) + 1

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count and time the body."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self.time(name, time.perf_counter() - begin_s)

    def total(self) -> dict[str, int | float]:
        """Return counts, and p50, p99 and maximum of each time in milliseconds, since the start; flat."""
        with self._lock:
            return self._total.reduce()

    def take(self) -> RaykvStats | None:
        """Return the counts and times since the last call; None if there are none, or it was too short ago."""
        if time.monotonic() - self._taken_s < _INTERVAL_S:
            return None
        with self._lock:
            taken, self._since, self._taken_s = self._since, RaykvStats(), time.monotonic()
        return None if taken.is_empty() else taken


class RaykvStats(KVConnectorStats):
    """An interval's counts and times, as vLLM passes them between processes.

    Args:
        data: {"counts": {name: number}, "times": {name: {"max_s", "sum_s", "buckets"}}}.
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

    def aggregate(self, other: Any) -> RaykvStats:
        """Add the counts and times of another worker or interval."""
        for name, number in other.data["counts"].items():
            self.data["counts"][name] = self.data["counts"].get(name, 0) + number
        for name, theirs in other.data["times"].items():
            mine = self.data["times"].setdefault(name, {"max_s": 0.0, "sum_s": 0.0, "buckets": {}})
            mine["max_s"] = max(mine["max_s"], theirs["max_s"])
            mine["sum_s"] += theirs["sum_s"]
            for bucket, number in theirs["buckets"].items():
                mine["buckets"][bucket] = mine["buckets"].get(bucket, 0) + number
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


def _quantile_s(buckets: Mapping[str, int], share: int) -> float:
    """Return the upper end of the bucket in which a quantile lies."""
    left = sum(buckets.values()) * share / 100
    for bucket, number in sorted((int(bucket), number) for bucket, number in buckets.items()):
        left -= number
        if left <= 0:
            return float(_STEP**bucket) * 1e-6
    return 0.0

"""Hand the counts of a node store, or of a directory's shard, to Ray's metrics, once a second, on an own thread.

Ray shows them to Prometheus on the metrics port of each node, after about 10 s. A call of Ray's metrics costs
microseconds, so nothing that serves makes one. A failure here is logged and costs counts, never the store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.runtime.guard import Guard
from kvstore.tools.metrics import METRICS, Metric, Stats, samples

logger = logging.getLogger(__name__)

#: Takes a value and the values of all tags, by name.
Record = Callable[[float, dict[str, str]], object]
_EVERY_S = 1.0


def ray_recorders(metrics: Sequence[Metric] = METRICS) -> dict[str, Record]:
    """Make metrics in this process; return what records a value of each, by its name."""
    from ray.util.metrics import Counter, Gauge

    found: dict[str, Record] = {}
    for metric in metrics:
        tags = ("node", "store", *metric.tags)
        if metric.is_counter:
            found[metric.name] = Counter(metric.name, metric.description, tags).inc
        else:
            found[metric.name] = Gauge(metric.name, metric.description, tags).set
    return found


class Flusher:
    """Records what changed, again and again, until it is stopped.

    Args:
        node_id: the tag "node".
        store: the name of the store; the tag "store".
        counts: returns the counts of the node store, and does not wait.
        make: makes the metrics; called on the thread.
        every_s: time between two flushes.
        metrics: read from the counts.
    """

    def __init__(
        self,
        node_id: str,
        store: str,
        counts: Callable[[], Stats],
        make: Callable[[], dict[str, Record]] = ray_recorders,
        every_s: float = _EVERY_S,
        *,
        metrics: Sequence[Metric] = METRICS,
    ) -> None:
        self._metrics = metrics
        self._tags, self._counts, self._make, self._every_s = {"node": node_id, "store": store}, counts, make, every_s
        self._closed, self._guard = threading.Event(), Guard(logger, "the flush of metrics")
        self._recorders: dict[str, Record] = {}
        self._before: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._run, name="raykv-metrics", daemon=True)

    def start(self) -> None:
        """Begin to flush. If no thread can be started, there are no metrics."""
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:
            logger.error("no thread can be started for metrics, so there are none: %s", error)

    def stop(self, timeout_s: float = 2.0) -> bool:
        """End the thread; may be called again. Return whether it has ended."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def flush(self) -> None:
        """Record what changed since the last flush. After an error, what was not recorded is lost, never doubled."""
        if not self._recorders:
            self._recorders = self._make()
        before, after = self._before, self._counts()
        self._before = after
        for sample in samples(before, after, self._metrics):
            self._recorders[sample.metric.name](sample.value, {**self._tags, **sample.tags})

    def _run(self) -> None:
        pause_s = self._every_s
        while not self._closed.wait(pause_s):
            pause_s = self._every_s
            try:
                self.flush()
                self._guard.passed()
            except Exception as error:  # noqa: BLE001 - logged by the guard.
                pause_s += self._guard.failed(error)

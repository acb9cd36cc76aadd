"""Two nodes of one real Ray cluster on this machine, with this process connected as a driver."""

from __future__ import annotations

from typing import Any

NAMESPACE = "raykv-tests"
OBJECT_STORE_BYTES = 80 << 20  # Ray refuses less than 75 MiB
NODE_MEMORY_BYTES = 1 << 40  # only a number to Ray: more than any machine here really has
#: A raylet that is gone makes its node dead after 3 s instead of 15; a slow one has as long as ever.
_HEALTH = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}
#: For every node, and for the head node only; what no test looks at is not started.
NODE = {"include_log_monitor": False}
HEAD = {**NODE, "include_dashboard": False, "no_monitor": True}


class TwoNodes:
    """A cluster that is started when somebody wants it."""

    def __init__(self) -> None:
        self._running: Any = None

    def start(self) -> Any:
        """Return the cluster that runs; starts one if none does."""
        import ray
        from ray.cluster_utils import Cluster

        if self._running is None:
            self._running = Cluster()
            try:
                for only in ({**HEAD, "_system_config": _HEALTH}, NODE):
                    self._running.add_node(
                        num_cpus=2, memory=NODE_MEMORY_BYTES, object_store_memory=OBJECT_STORE_BYTES, **only
                    )
                ray.init(address=self._running.address, namespace=NAMESPACE, log_to_driver=False)
                self._running.wait_for_nodes(timeout=30)
            except BaseException:
                self.stop()
                raise
        return self._running

    def stop(self) -> None:
        """End the cluster, if one runs."""
        import ray

        if self._running is not None:
            ray.shutdown()
            self._running.shutdown()
            self._running = None

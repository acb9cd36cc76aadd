"""A private Ray cluster of several nodes on this machine, for benchmarks and replays."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import ray
from ray._raylet import Config  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvstore.actors.calls import actor_class

#: One for all clusters of this process: Ray's core keeps the first that it reads.
_TOKEN = secrets.token_hex(32)


@contextlib.contextmanager
def private_nodes(num_nodes: int, object_store_bytes: int = 100 << 20) -> Iterator[list[str]]:
    """Run Ray nodes, yield their ids, the driver's first, and end them with everything in them.

    Args:
        num_nodes: how many.
        object_store_bytes: Ray's own object store of each node.
    """
    # Ray starts as many worker processes at once as a node has CPUs.
    num_cpus = max(2, (os.cpu_count() or 2) // 2)
    folder = tempfile.mkdtemp(prefix="rk", dir="/tmp")
    before = dict(os.environ)
    os.environ.update(RAY_TMPDIR=folder, RAY_USAGE_STATS_ENABLED="0")
    # A private token: no other process may join, and the user's token is not sent.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=_TOKEN)
    Config.initialize("")  # Replaces the values that Ray read when it was imported.
    os.environ.pop("RAY_ADDRESS", None)
    cluster: Any = None
    try:
        # Run nothing that is not measured.
        of_each = {"num_cpus": num_cpus, "object_store_memory": object_store_bytes, "include_log_monitor": False}
        cluster = Cluster(
            initialize_head=True, head_node_args={**of_each, "include_dashboard": False, "no_monitor": True}
        )
        for _ in range(num_nodes - 1):
            cluster.add_node(**of_each)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        here = ray.get_runtime_context().get_node_id()
        nodes = [cluster.head_node, *cluster.worker_nodes]
        yield [here, *sorted(node.node_id for node in nodes if node.node_id != here)]
    finally:
        ray.shutdown()
        if cluster is not None:
            cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
        Config.initialize("")
        shutil.rmtree(folder, ignore_errors=True)


def two_nodes(object_store_bytes: int = 100 << 20) -> contextlib.AbstractContextManager[list[str]]:
    """Run two Ray nodes; see `private_nodes`."""
    return private_nodes(2, object_store_bytes)


def on_node(cls: type, node_id: str) -> Any:
    """Return the class as a Ray actor class pinned to a node."""
    pinned = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return actor_class(cls, scheduling_strategy=pinned)

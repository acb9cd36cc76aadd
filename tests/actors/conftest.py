from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

OBJECT_STORE_BYTES = 80 << 20  # Ray refuses less than 75 MiB
NAMESPACE = "raykv-tests"


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """Two nodes of one real Ray cluster on this machine, with this process connected as a driver.

    Yields the `ray.cluster_utils.Cluster`; a test may add nodes to it, and removes only those.
    """
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for is_head in (True, False):
            head_only = {"include_dashboard": False} if is_head else {}
            cluster.add_node(num_cpus=2, object_store_memory=OBJECT_STORE_BYTES, **head_only)
        ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False)
        cluster.wait_for_nodes(timeout=30)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()

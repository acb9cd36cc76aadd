"""The front door: start a store, connect to one, get a node store's actor handle.

One of the two modules of the core that may look up to kvstore.actors, and only when called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.config import StoreConfig, parse_bytes

if TYPE_CHECKING:
    from kvstore.actors.cluster import Store


def start(
    capacity: str | int = "1GiB",
    *,
    name: str = "default",
    address: str | None = None,
    timeout_s: float = 60.0,
    **settings: Any,
) -> Store:
    """Run a store on every node of the Ray cluster, or join the one that runs.

    With no Ray running and no `address`, a local Ray with one node is started and ends with `Store.stop`.

    Args:
        capacity: memory for blocks on each node, such as "8GiB".
        name: distinguishes several stores of one cluster.
        address: of the Ray cluster; what `ray.init` accepts. Not needed inside a Ray job or actor.
        timeout_s: how long every node may take to be ready.
        settings: any other field of StoreConfig.

    Returns:
        The store. It goes on running when this process ends, unless Ray was started here.

    Raises:
        ConfigError: a setting cannot work, or a node has not that much memory; nothing is left running.
        IncompatibleStore: a store of this name runs with other settings; it is left alone.
        StoreUnavailable: a node was not ready in time.
    """
    from kvstore.actors import cluster

    config = StoreConfig(name=name, capacity_bytes=parse_bytes(capacity), **settings)
    return cluster.start(config, address, timeout_s)


def connect(name: str = "default", *, address: str | None = None, timeout_s: float = 30.0) -> Store:
    """Find a store that runs.

    Raises:
        StoreNotRunning: none of that name does, or no Ray cluster is there.
        IncompatibleStore: it speaks another protocol version.
    """
    from kvstore.actors import cluster

    return cluster.connect(name, address, timeout_s)


def node_store(node_id: str | None = None, *, name: str = "default") -> Any:
    """Return the Ray actor handle of a node's store: lookup, lease, release, stats and so on.

    Args:
        node_id: Ray's id of the node; the caller's own when None.
        name: of the store.

    Raises:
        StoreNotRunning: there is none.
    """
    from kvstore.actors import cluster

    return cluster.node_store(node_id, name)

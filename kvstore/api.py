"""The front door: start a store, connect to one, get a node store's actor handle.

One of the two modules of the core that may look up to kvstore.actors, and only when called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.bounds import check_seconds, check_text
from kvstore.config import StoreConfig, parse_bytes
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.actors.cluster import Store as Store


def start(
    capacity: str | int = "1GiB",
    *,
    name: str = "default",
    address: str | None = None,
    timeout_s: float = 60.0,
    **settings: Any,
) -> Store:
    """Run a store on every node of the Ray cluster, or join the one that runs.

    The cluster is, in this order: the one that this process is connected to, `address`, RAY_ADDRESS, and the one that
    `ray start` began on this machine. Without any, a Ray with one node is started for this process alone; it ends with
    the last store in it, and with the process. Which it was is logged.

    Args:
        capacity: memory for blocks on each node, such as "8GiB".
        name: distinguishes several stores of one cluster.
        address: host:port of the Ray cluster; "auto": the one that runs on this machine, however it was started;
            "local": a Ray of this process alone. Not needed inside a Ray job or actor.
        timeout_s: how long all of it may take: joining or starting Ray, and every node until it is ready. Where it is
            not enough, what this call began is ended in a few seconds more.
        settings: any other field of StoreConfig, as docs/api.md lists them.

    Returns:
        A handle. `stop` ends the store if this call started it, and only the handle if others did. A store that is
        not stopped goes on when this process ends, unless Ray was started for it.

    Raises:
        ConfigError: a setting cannot work, a node has not that much memory, or several Rays run on this machine;
            nothing is left running.
        StoreNotRunning: no Ray answers at the address, or the one that `ray start` began does not.
        WrongCluster: this process is connected to another Ray than `address`.
        IncompatibleStore: a store of this name runs with other settings; it is left alone.
        ForkedClient: this is a fork of a process that was connected to Ray, where Ray hangs.
        StoreUnavailable: a node, or a Ray for this process, was not ready in time. Where other calls of `start` wait
            for the same store, it is theirs from then on, and goes on.
        StoreBusy: another thread of this process joins or leaves Ray, and was not done in time.
        InvalidRequest: `timeout_s` is no time, or over a day, or `address` no text.
    """
    from kvstore.actors import starting

    timeout_s = check_seconds("timeout_s", timeout_s)
    if address is not None:
        check_text("address", address)
    if "capacity_bytes" in settings:
        raise ConfigError("capacity_bytes: pass it as capacity=, the first argument of start()")
    StoreConfig.check_names(settings)
    config = StoreConfig(name=name, capacity_bytes=parse_bytes(capacity), **settings)
    return starting.start(config, address, timeout_s)


def connect(name: str = "default", *, address: str | None = None, timeout_s: float = 30.0) -> Store:
    """Find a store that runs, in the cluster that `start` would take, or else the only one on this machine.

    Returns:
        A handle. The store is of others: `stop` ends the handle only, `destroy` the store.

    Where this fails, as where `start` does, the process is connected to no Ray that it was not connected to before,
    unless other threads of it use that meanwhile.

    Raises:
        StoreNotRunning: none of that name does, or no Ray cluster is there.
        ConfigError: several run on this machine, and none was named.
        WrongCluster: this process is connected to another Ray than `address`.
        IncompatibleStore: it speaks another protocol version.
        ForkedClient: this is a fork of a process that was connected to Ray, where Ray hangs.
        StoreBusy: another thread of this process joins or leaves Ray, and was not done in time.
        InvalidRequest: an argument is of another type, or `timeout_s` over a day.
        TransferTimeout: the store was not found in time, or does not answer.
    """
    from kvstore.actors import starting

    timeout_s = check_seconds("timeout_s", timeout_s)
    check_text("name", name)
    if address is not None:
        check_text("address", address)
    return starting.connect(name, address, timeout_s)


def node_store(node_id: str | None = None, *, name: str = "default") -> Any:
    """Return the Ray actor handle of a node's store: lookup, lease, release, stats and so on.

    Args:
        node_id: Ray's id of the node; the caller's own when None.
        name: of the store.

    Raises:
        StoreNotRunning: there is none.
        ForkedClient: this is a fork of a process that was connected to Ray.
    """
    from kvstore.actors import cluster

    return cluster.node_store(node_id, name)


def __getattr__(name: str) -> Any:
    if name != "Store":
        raise AttributeError(f"module 'kvstore.api' has no attribute {name!r}")
    from kvstore.actors.cluster import Store

    return Store

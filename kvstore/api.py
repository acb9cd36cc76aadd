"""Start a store, connect to one, or get a node store's actor handle.

This is one of two core modules that may import kvstore.actors, and only inside a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.bounds import check_seconds, check_text, check_ttl, parse_bytes
from kvstore.config import StoreConfig, check_name
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.actors.cluster import Store as Store


def start(
    capacity: str | int = "1GiB",
    *,
    name: str = "default",
    address: str | None = None,
    timeout_s: float = 60.0,
    disk_capacity: str | int = 0,
    **settings: Any,
) -> Store:
    """Run a store on every node of the Ray cluster, or join the running one.

    The cluster is the first of: the one that this process is connected to, `address`, RAY_ADDRESS, the one that
    `ray start` began on this machine. If there is none, a Ray with one node is started for this process alone; it ends
    with its last store, or with the process. The choice is logged.

    Args:
        capacity: memory for blocks on each node, such as "8GiB".
        name: distinguishes several stores of one cluster.
        address: host:port of the Ray cluster; "auto": the one that runs on this machine, however it was started;
            "local": a Ray of this process alone. Not needed inside a Ray job or actor.
        timeout_s: time for the whole call: joining or starting Ray, and every node until it is ready. If it is not
            enough, the call takes a few seconds more to end everything that it began.
        disk_capacity: disk for blocks on each node, such as "100GiB"; only together with `disk_path`, the folder.
        settings: any other field of StoreConfig, as docs/api.md lists them.

    Returns:
        A handle. `stop` ends the store if this call started it, otherwise only the handle. A store that is not
        stopped continues after this process ends, unless Ray was started for it.

    Raises:
        ConfigError: a setting cannot work, a node does not have that much memory, or several Rays run on this machine;
            nothing is left running.
        StoreNotRunning: no Ray answers at the address, or the one that `ray start` began does not.
        WrongCluster: this process is connected to another Ray than `address`.
        IncompatibleStore: a store of this name runs with other settings; it is not changed.
        ForkedClient: this is a fork of a process that was connected to Ray, where Ray hangs.
        StoreUnavailable: a node, or a Ray for this process, was not ready in time. If other calls of `start` wait
            for the same store, the store continues and is theirs from then on.
        StoreBusy: another thread of this process joins or leaves Ray, and did not finish in time.
        InvalidRequest: `timeout_s` is no number of seconds above 0, or over a day, or `address` is no text.
    """
    from kvstore.actors import starting

    timeout_s = check_ttl("timeout_s", timeout_s)
    if address is not None:
        check_text("address", address)
    if "capacity_bytes" in settings:
        raise ConfigError("capacity_bytes: pass it as capacity=, the first argument of start()")
    if disk_capacity:
        if "disk_capacity_bytes" in settings:
            raise ConfigError("disk_capacity_bytes: wanted it or disk_capacity=, got both; leave one out")
        settings["disk_capacity_bytes"] = parse_bytes(disk_capacity)
    StoreConfig.check_names(settings)
    config = StoreConfig(name=name, capacity_bytes=parse_bytes(capacity), **settings)
    return starting.start(config, address, timeout_s)


def connect(name: str = "default", *, address: str | None = None, timeout_s: float = 30.0) -> Store:
    """Return a handle of a running store: in the cluster of `start`, or else the only one here.

    Returns:
        A handle. The store belongs to others: `stop` ends the handle only, `destroy` the store.

    If `connect` or `start` fails, it leaves no new connection to Ray, unless other threads use that meanwhile. To join
    Ray takes its own time, some seconds for the first time in a process, also where `timeout_s` is less.

    Raises:
        StoreNotRunning: no store of that name runs, or there is no Ray cluster.
        ConfigError: no store can have that name; or several Rays run on this machine, and none was named.
        WrongCluster: this process is connected to another Ray than `address`.
        IncompatibleStore: the store has another protocol version.
        ForkedClient: this is a fork of a process that was connected to Ray, where Ray hangs.
        StoreBusy: another thread of this process joins or leaves Ray, and did not finish in time.
        InvalidRequest: `address` is no text, or `timeout_s` no number of seconds, or over a day.
        TransferTimeout: the store was not found in time, or does not answer.
    """
    from kvstore.actors import starting

    timeout_s = check_seconds("timeout_s", timeout_s)
    name = check_name(name)
    if address is not None:
        check_text("address", address)
    return starting.connect(name, address, timeout_s)


def node_store(node_id: str | None = None, *, name: str = "default") -> Any:
    """Return the Ray actor handle of a node's store: lookup, lease, release, stats and so on.

    Args:
        node_id: Ray's id of the node; the caller's own when None.
        name: of the store.

    Raises:
        StoreNotRunning: there is no such store.
        ConfigError: no store can have that name.
        InvalidRequest: `node_id` is not the id of a node.
        ForkedClient: this is a fork of a process that was connected to Ray.
    """
    from kvstore.actors import finding

    return finding.node_store(node_id, check_name(name))


def __getattr__(name: str) -> Any:
    if name != "Store":
        raise AttributeError(f"module 'kvstore.api' has no attribute {name!r}")
    from kvstore.actors.cluster import Store

    return Store

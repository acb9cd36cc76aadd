"""Check what a node's next store needs there, before the present one gives its memory away and ends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvstore.bounds import clip
from kvstore.config import StoreConfig
from kvstore.disk.folder import check_folder
from kvstore.errors import ConfigError
from kvstore.memory.room import check_room
from kvstore.node.core import NodeCore
from kvstore.node.events.outlet import Limits, Outlet

#: Only these are sent, so a store of an older version hears of no setting that it does not know.
_NEEDED = ("capacity_bytes", "disk_path", "disk_capacity_bytes", "events_endpoint", "events_replay_endpoint")
_ANY_PORT = "tcp://127.0.0.1:0"


def needs_of(config: StoreConfig) -> dict[str, Any]:
    """Return the settings that need something of the node, for `check_next`."""
    return {name: getattr(config, name) for name in _NEEDED}


def check_next(core: NodeCore, needs: Mapping[str, Any]) -> None:
    """Check that the node can have a store with other settings once this one has ended; changes nothing.

    Args:
        core: the store that the node has.
        needs: from `needs_of` the other settings.

    Raises:
        ConfigError: there is too little memory, or the disk or an address cannot be used.
    """
    present, events = core.state.config, core.state.events
    # All others at their defaults: present ones may not fit these, and no place depends on them.
    wanted = StoreConfig(name=present.name, **{name: value for name, value in needs.items() if name in _NEEDED})
    if wanted.capacity_bytes > present.capacity_bytes:
        check_room(wanted.capacity_bytes, core.state.arena.num_bytes)
    has = {} if events is None else events.stats()
    check_places(wanted, core.state.node_id, {_port(has.get(name, "")) for name in ("endpoint", "replay_endpoint")})


def check_places(config: StoreConfig, node_id: str, own_ports: set[str] | None = None) -> None:
    """Check that a store can have its folder of the disk and its addresses for events.

    Args:
        config: of the store.
        node_id: of the node.
        own_ports: that the node's present store has; the next one takes them over.

    Raises:
        ConfigError: it cannot.
    """
    if config.disk_path:
        check_folder(config.disk_path, config.name, node_id, config.disk_capacity_bytes)
    if config.events_endpoint:
        names = ("events_endpoint", "events_replay_endpoint")
        endpoint, replay = (_to_try(name, getattr(config, name), own_ports or set()) for name in names)
        if {endpoint, replay} - {_ANY_PORT, ""}:
            Outlet(endpoint, replay, "", Limits()).close()


def _to_try(name: str, endpoint: str, own_ports: set[str]) -> str:
    """Return what can be bound while the present store serves, in place of an address."""
    if endpoint.startswith("ipc://"):
        _check_path(name, endpoint)
        return _ANY_PORT  # At a path ZeroMQ would take the place of whoever listens there.
    # Its own port is taken as long as it serves; the host may be another one.
    return f"{endpoint.rpartition(':')[0]}:0" if _port(endpoint) in own_ports - {""} else endpoint


def _check_path(name: str, endpoint: str) -> None:
    folder = os.path.dirname(endpoint.removeprefix("ipc://"))
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"{name}: wanted an address in a folder that is there and that user {os.geteuid()} can write, got "
            f"{clip(endpoint)}; make the folder on this node, or give another address"
        )


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2] if endpoint.startswith("tcp:") else ""

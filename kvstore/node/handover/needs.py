"""Check what a node's next store needs there, before the present one gives its memory away and ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.config import StoreConfig
from kvstore.disk.folder import check_folder
from kvstore.memory.arena import check_room
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
        endpoint, replay = (
            _ANY_PORT if each and _cannot_try(each, own_ports or set()) else each
            for each in (config.events_endpoint, config.events_replay_endpoint)
        )
        if {endpoint, replay} - {_ANY_PORT, ""}:
            Outlet(endpoint, replay, "", Limits()).close()


def _cannot_try(endpoint: str, own_ports: set[str]) -> bool:
    # At a path ZeroMQ would take the place of whoever listens there.
    return not endpoint.startswith("tcp:") or _port(endpoint) in own_ports


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2] if endpoint.startswith("tcp:") else ""

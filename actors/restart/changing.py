"""Change the settings of a running store: check them, and have a supervisor that makes stores with them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import ray

from kvstore.actors.calls import actor_name, call, find_actor, is_silent, ray_failures, stop_for
from kvstore.actors.finding import alive_nodes, make_actor, node_stores
from kvstore.actors.supervisor import ASKED_GROUP, Supervisor
from kvstore.bounds import parse_bytes
from kvstore.config import MAX_WATERMARK, PROTOCOL_VERSION, StoreConfig
from kvstore.errors import ConfigError, IncompatibleStore, KVStoreError, PeerLost, StoreNotRunning, StoreUnavailable
from kvstore.node.handover.needs import needs_of

logger = logging.getLogger(__name__)

_CALL_S = 10.0
#: How long the old supervisor may take to end, and the new one to begin.
_REPLACED_WITHIN_S = 60.0
_WATERMARKS = ("low_watermark", "high_watermark")
_SIZES = {"capacity": "capacity_bytes", "disk_capacity": "disk_capacity_bytes"}


def changed(config: StoreConfig, changes: Mapping[str, Any]) -> StoreConfig:
    """Return settings with some changed, given as for `kvstore.start`.

    Raises:
        ConfigError: a setting is unknown, cannot work or cannot be changed.
    """
    wanted = {
        _SIZES.get(name, name): parse_bytes(value) if name in _SIZES else value for name, value in changes.items()
    }
    StoreConfig.check_names(wanted)
    if wanted.get("name", config.name) != config.name:
        raise ConfigError(f"a restart keeps the name {config.name!r}, got {wanted['name']!r}; start another store")
    shards = wanted.get("num_directory_shards", config.num_directory_shards)
    if shards != config.num_directory_shards:
        raise ConfigError(
            f"num_directory_shards: wanted {config.num_directory_shards}, which a restart keeps, got {shards}; stop "
            "the store and start it again"
        )
    return StoreConfig(**{**asdict(config), **wanted, **_watermarks(config, wanted)})


def _watermarks(config: StoreConfig, wanted: Mapping[str, Any]) -> dict[str, None]:
    """Return the watermarks that are chosen anew, as a start does, because no change names them.

    The other one stays if only one is changed, unless the loop was off or is turned off: then there is none to keep.

    Raises:
        ConfigError: the one that is changed does not fit the other one.
    """
    low, high = _WATERMARKS
    named = [name for name in _WATERMARKS if name in wanted]
    if not named:
        # With "through" the loop may have been off; "back" needs it.
        is_missing = wanted.get("disk_write") == "back" and not config.high_watermark
        return dict.fromkeys(_WATERMARKS) if is_missing else {}
    if len(named) == 2:
        return {}
    (one,), (other,) = named, [name for name in _WATERMARKS if name not in wanted]
    value, stays = wanted[one], getattr(config, other)
    if not stays or value == 0:
        return {other: None}
    if isinstance(value, int | float) and 0 < value <= MAX_WATERMARK:
        pair = {one: value, other: stays}
        if pair[low] > pair[high]:
            fits = StoreConfig(low_watermark=value) if one == low else StoreConfig(high_watermark=value)
            raise ConfigError(
                f"{one}: wanted 0 < low <= high with {other}={stays}, which the store runs with, got {value}; change "
                f"both, for example {low}={fits.low_watermark} and {high}={fits.high_watermark}"
            )
    return {}


def check_room(config: StoreConfig, nodes: Mapping[str, Mapping[str, float]]) -> None:
    """Check that the nodes have the Ray memory that these settings want.

    Raises:
        ConfigError: some have not.
    """
    too_small = {node: int(has.get("memory", 0)) for node, has in nodes.items()}
    too_small = {node: room for node, room in too_small.items() if room < config.capacity_bytes}
    if too_small:
        raise ConfigError(
            f"wanted {config.capacity_bytes} bytes on every node, got nodes with less Ray memory: {too_small}; lower "
            "capacity_bytes"
        )


def _running(name: str, path: str) -> tuple[Any, dict[str, Any]]:
    """Return the supervisor and what it says of its store; without one, None and what a node's store says.

    A restart that was killed may have left none.

    Raises:
        StoreNotRunning: there is no node's store either, or the store is being stopped.
    """
    try:
        supervisor = find_actor(path)
        said = call("supervisor", supervisor.config, timeout_s=_CALL_S)
    except StoreNotRunning:
        for handle in node_stores(name).values():
            settings = call("store", handle.settings, timeout_s=_CALL_S)
            return None, {"config": settings, "protocol": PROTOCOL_VERSION, "starter": ""}
        raise
    if said.get("ends_stores"):  # Not of a supervisor that gave way to a restart which was killed then.
        raise StoreNotRunning(f"store {name!r} is being stopped; nothing was restarted")
    return supervisor, said


def check_node(node_id: str, handle: Any, config: StoreConfig) -> None:
    """Have a node's store check that the next one, with other settings, can have its disk, addresses and memory.

    A store that cannot check it, because it is of an older version or hangs, is restarted all the same.

    Raises:
        ConfigError: it cannot.
    """
    try:
        call("store", handle.check_next, needs_of(config), timeout_s=_CALL_S)
    except ConfigError as error:
        raise ConfigError(f"node {node_id}: {error}") from error
    except (KVStoreError, AttributeError) as error:
        logger.info("node %s: whether it can have these settings is not known: %s", node_id, error)


def give_way(supervisor: Any, reason: str) -> None:
    """Have a supervisor make no more actors, and leave the stores to the next one."""
    try:
        call("supervisor", supervisor.give_way, reason, timeout_s=_CALL_S)
    except AttributeError:  # It is of a version that ends the stores which it is making.
        stop_for("supervisor", supervisor, reason, _CALL_S)


def replace_supervisor(
    name: str, changes: Mapping[str, Any], node_ids: Iterable[str] = (), check: Callable[[], str] = lambda: "a restart"
) -> tuple[Any, StoreConfig]:
    """End a store's supervisor and make another one, with changed settings and this version of raykv.

    Stores with the old settings serve on; the new supervisor names them under problems, and leaves them alone.

    Args:
        name: of the store.
        changes: of its settings.
        node_ids: of the nodes that will be restarted, where the settings have to work.
        check: returns the id of this restart, or ends what that made and raises StoreNotRunning: the store was stopped
            meanwhile, and must not begin again.

    Returns:
        Its handle, and the settings.

    Raises:
        StoreNotRunning: there is no such store; nothing changed.
        ConfigError: a setting cannot work, or the store speaks another protocol; nothing changed.
        StoreUnavailable, TransferError: the new one cannot be made, or the old one does not answer.
    """
    path = actor_name(name, "supervisor")
    try:
        old, said = _running(name, path)
    except PeerLost as error:
        if is_silent(error):
            raise
        raise StoreUnavailable(f"another call changes the settings of store {name!r}, or ends it; try again") from error
    if said["protocol"] != PROTOCOL_VERSION:
        # Its directory, which alone knows all clearings, could not be asked by new stores.
        raise IncompatibleStore(
            f"wanted a store of protocol {PROTOCOL_VERSION}, as this raykv speaks, got one of {said['protocol']}; stop "
            "it with `kvstore stop`, and start it again"
        )
    config = changed(StoreConfig.from_json(said["config"]), changes)
    check_room(config, alive_nodes())
    handles = node_stores(name)
    # One after the other: two nodes of one machine may look at the same folder.
    for node_id in node_ids:
        try:
            if node_id in handles:
                check_node(node_id, handles[node_id], config)
        except ConfigError as error:
            raise ConfigError(f"{error}; nothing was restarted, and no setting changed") from error
    if old is not None:
        with contextlib.suppress(KVStoreError):
            give_way(old, "a restart makes another one")
        with ray_failures("supervisor"):
            ray.kill(old)
    deadline_s = time.monotonic() + _REPLACED_WITHIN_S
    while True:
        args = (config.to_json(), said["starter"], True, check())
        try:
            made = make_actor(path, Supervisor, ASKED_GROUP, args, max_restarts=-1, max_concurrency=4)
            # Ray names the old one a moment longer. `have`: no call of `start` that fails may end this store.
            if old is None or made._actor_id != old._actor_id:
                begun = call("supervisor", made.have, "", timeout_s=_CALL_S)
                break
        except (StoreNotRunning, StoreUnavailable):
            raise
        except KVStoreError:
            if time.monotonic() > deadline_s:
                raise
        if time.monotonic() > deadline_s:
            raise StoreUnavailable(f"the supervisor of store {name!r} does not end; `kvstore stop` ends the store")
        time.sleep(0.1)
    check()  # Again: a stop between the last check and Ray's naming of the new one has not seen it.
    if text := config.differences(StoreConfig.from_json(begun["config"])):
        raise StoreUnavailable(f"another call changes the settings of store {name!r}, too ({text}); try again")
    return made, config

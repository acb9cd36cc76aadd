"""The options of `kvstore start` that are settings of a store, and what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from kvstore.config import EVICTION_POLICIES, MAX_MIN_USES, MAX_WATERMARK, StoreConfig
from kvstore.errors import ConfigError
from kvstore.quotas import parse_tenant
from kvstore.tools.commands import Seconds, parse_size, with_options

_Function = TypeVar("_Function", bound=Callable[..., Any])

_DEFAULTS = StoreConfig()
_EVICTION = (
    click.option(
        "--eviction",
        type=click.Choice(EVICTION_POLICIES),
        default=EVICTION_POLICIES[0],
        show_default=True,
        help="What goes when a node is full: what is least likely to be used again, or the least recently used.",
    ),
    click.option(
        "--low-watermark",
        type=click.FloatRange(0.0, MAX_WATERMARK),
        help="Evict in a loop when a smaller share of a node's slots is free; 0 for never. Without it half of "
        "the high one; without both 0, or 0.05 with --disk-write back.",
    ),
    click.option(
        "--high-watermark",
        type=click.FloatRange(0.0, MAX_WATERMARK),
        help="The loop ends when this share is free. Without it twice the low one, but at most 0.5.",
    ),
)
_EVENTS = (
    click.option(
        "--events-endpoint",
        metavar="ADDRESS",
        default="",
        help="Publish on each node which blocks it has, in vLLM's format, like tcp://*:5557.",
    ),
    click.option(
        "--events-replay-endpoint",
        metavar="ADDRESS",
        default="",
        help="Where subscribers ask for events that they missed, like tcp://*:5558.",
    ),
)
_TENANTS = (
    click.option(
        "--tenant",
        "tenants",
        metavar="NAME[:QUOTAS]",
        multiple=True,
        help="A tenant and its quotas on each node, like team-a:max_bytes=8GiB,max_handoffs=64; may be repeated. "
        "Quotas: max_bytes, max_pinned_bytes, max_handoffs, max_disk_bytes.",
    ),
    click.option("--private-tenants", is_flag=True, help="No tenant finds what another has saved."),
)
_DISK = (
    click.option("--disk-path", metavar="PATH", help="Keep blocks on disk, too, in this folder of each node."),
    click.option("--disk-capacity", default="0", help="Disk for blocks on each node, like 100GiB."),
    click.option(
        "--disk-min-uses",
        type=click.IntRange(1, MAX_MIN_USES),
        default=_DEFAULTS.disk_min_uses,
        show_default=True,
        help="Write a block only when it is stored or used for the n-th time.",
    ),
    click.option(
        "--disk-write",
        type=click.Choice(["through", "back"]),
        default=_DEFAULTS.disk_write,
        show_default=True,
        help="'through' writes a block behind the save that brings it; 'back' when it is about to be evicted.",
    ),
    click.option("--disk-write-budget", default="0", help="Bytes written a day at most, like 1TiB; 0 for no limit."),
    click.option("--disk-sync", is_flag=True, help="A block counts only when the disk keeps it without power, too."),
    click.option(
        "--disk-timeout",
        type=Seconds(0.1, 3600.0),
        default=_DEFAULTS.disk_timeout_s,
        show_default=True,
        help="Seconds without an answer after which the disk is off.",
    ),
)


def store_options(command: _Function) -> _Function:
    """Give a command the options of eviction, events, tenants and the disk tier."""
    return with_options(command, (*_EVICTION, *_DISK, *_EVENTS, *_TENANTS))


def store_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a store that these options give.

    Raises:
        ConfigError: a size that is none, a text that is no tenant, or a disk without a path or a capacity.
    """
    left = dict(options)
    found = _take(left, "eviction", "low_watermark", "high_watermark", "events_endpoint", "events_replay_endpoint")
    tenants, is_private = [parse_tenant(text) for text in left.pop("tenants")], left.pop("private_tenants")
    found |= {"tenants": tenants} if tenants else {}
    found |= {"private_tenants": True} if is_private else {}
    return {**found, **_disk_settings(**left)}


def _take(options: dict[str, Any], *names: str) -> dict[str, Any]:
    given = {name: options.pop(name) for name in names}
    return {name: value for name, value in given.items() if value not in (None, "")}


def _disk_settings(
    disk_path: str | None,
    disk_capacity: str,
    disk_min_uses: int,
    disk_write: str,
    disk_write_budget: str,
    disk_sync: bool,
    disk_timeout: float,
) -> dict[str, Any]:
    given = {
        "disk_min_uses": disk_min_uses,
        "disk_write": disk_write,
        "disk_write_bytes_per_day": parse_size("--disk-write-budget", disk_write_budget),
        "disk_sync": disk_sync,
        "disk_timeout_s": disk_timeout,
    }
    given = {name: value for name, value in given.items() if value != getattr(_DEFAULTS, name)}
    capacity = parse_size("--disk-capacity", disk_capacity)
    if not disk_path and not capacity and not given:
        return {}
    if not disk_path or not capacity:
        raise ConfigError("--disk-path and --disk-capacity: wanted both, or no option of the disk at all")
    return {"disk_path": disk_path, "disk_capacity": capacity, **given}

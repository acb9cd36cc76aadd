"""The options of `kvstore start` that are settings of a store, and what they give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from kvstore.config import EVICTION_POLICIES, MAX_MIN_USES, MAX_WATERMARK, StoreConfig
from kvstore.errors import ConfigError
from kvstore.quotas import parse_tenant, read_tenants
from kvstore.tools.commands import Seconds, parse_size, with_options
from kvstore.tools.settings import SET, merged, settings_of

_Function = TypeVar("_Function", bound=Callable[..., Any])

_DEFAULTS = StoreConfig()
#: None where a setting is chosen, which _DEFAULTS has not.
_UNSET = {field.name: field.default for field in fields(StoreConfig)}
#: The settings of options that have a name of their own.
_SETTINGS = {
    "capacity": "capacity_bytes",
    "disk_capacity": "disk_capacity_bytes",
    "disk_write_budget": "disk_write_bytes_per_day",
    "disk_timeout": "disk_timeout_s",
}
_SIZES = ("capacity_bytes", "block_bytes", "disk_capacity_bytes", "disk_write_bytes_per_day")
#: Settings that are arguments of `kvstore.start` under another name.
_ARGUMENTS = {"capacity_bytes": "capacity", "disk_capacity_bytes": "disk_capacity"}
#: Given to `kvstore.start` also where they are its defaults, which could change.
_ALWAYS = ("name", "capacity_bytes", "block_bytes", "lane", "eviction")
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
    """Give a command the options of eviction, events, tenants and the disk tier, and `--set` for all others."""
    return with_options(command, (*_EVICTION, *_DISK, *_EVENTS, *_TENANTS, SET))


def store_settings(ctx: click.Context) -> dict[str, Any]:
    """Return the arguments of `kvstore.start` that the options of a command give, `--set` among them.

    Raises:
        ConfigError: a size that is none, a text that is no tenant or no setting, a disk without a path or a capacity,
            or an option and a `--set` that disagree.
    """
    options, explicit = dict[str, Any](), dict[str, str]()
    for param in ctx.command.params:
        name = _SETTINGS.get(str(param.name), str(param.name))
        if name not in _UNSET:
            continue
        options[name] = _value_of(name, param.opts[-1], ctx.params[str(param.name)])
        if ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE:
            explicit[name] = param.opts[-1]
    found = merged(options, explicit, settings_of(ctx.params["changes"]))
    given = {name: value for name, value in found.items() if name in _ALWAYS or value != _UNSET[name]}
    is_complete = bool(found["disk_path"] and found["disk_capacity_bytes"])
    if not is_complete and any(name.startswith("disk_") for name in given):
        raise ConfigError("--disk-path and --disk-capacity: wanted both, or no option of the disk at all")
    return {_ARGUMENTS.get(name, name): value for name, value in given.items()}


def _value_of(name: str, option: str, value: Any) -> Any:
    if value is None:
        return _UNSET[name]
    if name == "tenants":
        return read_tenants([parse_tenant(text) for text in value])
    return parse_size(option, value) if name in _SIZES else value

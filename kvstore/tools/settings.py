"""Read `--set NAME=VALUE` of `kvstore start` and `kvstore restart`: any setting of a store, by its name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import click

from kvstore.bounds import clip
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError
from kvstore.quotas import read_tenants
from kvstore.tools.commands import parse_size

SET = click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="NAME=VALUE",
    help="Any setting by its name, like lease_ttl_s=60 or capacity_bytes=8GiB; may be repeated. docs/api.md, "
    "'Settings of a store', has all names with default, unit and meaning.",
)
_DEFAULTS = {field.name: field.default for field in fields(StoreConfig)}


def settings_of(changes: Iterable[str]) -> dict[str, Any]:
    """Return the settings that several `--set` give, by name.

    Raises:
        ConfigError: there is no such setting, this is no value of it, or it is given twice with different values.
    """
    found = dict[str, Any]()
    for text in changes:
        name, value = setting_of(text)
        if name in found and found[name] != value:
            raise ConfigError(f"--set {name}: wanted one value, got {clip(found[name])} and {clip(value)}; give one")
        found[name] = value
    return found


def setting_of(text: str) -> tuple[str, Any]:
    """Return the name and the value of a setting that is written as name=value; sizes may be like 8GiB.

    Raises:
        ConfigError: there is no such setting, or this is no value of it.
    """
    name, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--set: wanted name=value, got {clip(text)}")
    StoreConfig.check_names([name])
    default = _DEFAULTS[name]
    if name.endswith("_bytes") or name == "disk_write_bytes_per_day":
        return name, parse_size(f"--set {name}", value)
    if isinstance(default, str):
        return name, value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--set {name}: wanted {_kind_of(default)}, got {clip(value)}") from error
    if name == "tenants":
        return name, read_tenants(found)
    return name, float(found) if isinstance(default, float) and type(found) is int else found


def merged(options: Mapping[str, Any], explicit: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of options and of `--set` together.

    Args:
        options: values of all options, by the name of their setting.
        explicit: the options that were written on the command line, like "--lane", by the name of their setting.
        given: what `--set` gave.

    Raises:
        ConfigError: an option and `--set` give one setting different values.
    """
    for name, option in explicit.items():
        if name in given and given[name] != options[name]:
            raise ConfigError(
                f"{option} and --set {name}: wanted one value, got {clip(options[name])} and {clip(given[name])}; "
                "leave one of them out"
            )
    return {**options, **given}


def _kind_of(default: object) -> str:
    if isinstance(default, bool):
        return "true or false"
    if isinstance(default, tuple):
        return 'a JSON object like {"team-a": {"max_bytes": "8GiB"}}'
    return "a number"

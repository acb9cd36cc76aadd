"""The command `kvstore restart`; the command line gives it the way to join a store."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click

from kvstore.config import StoreConfig
from kvstore.errors import ConfigError
from kvstore.tools.commands import ADDRESS, JSON, NAME, Command, Seconds, parse_size
from kvstore.tools.terminal import progress


def setting_of(text: str) -> tuple[str, Any]:
    """Return the name and the value of a setting that is written as name=value; sizes may be like 8GiB.

    Raises:
        ConfigError: there is no such setting, or this is no value of it.
    """
    name, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--set: wanted name=value, got {text!r}")
    StoreConfig.check_names([name])
    default = next(field.default for field in fields(StoreConfig) if field.name == name)
    if name.endswith("_bytes") or name == "disk_write_bytes_per_day":
        return name, parse_size(f"--set {name}", value)
    if isinstance(default, str):
        return name, value
    try:
        found = json.loads(value)
    except ValueError as error:
        kind = "true or false" if isinstance(default, bool) else "a number"
        raise ConfigError(f"--set {name}: wanted {kind}, got {value!r}") from error
    return name, float(found) if isinstance(default, float) and type(found) is int else found


def restart_command(connect: Callable[[str, str | None], Any]) -> click.Command:
    """Return the command; `connect` returns the handle of a store, by its name and address."""

    @click.command("restart", cls=Command, short_help="Restart nodes, and keep their blocks.")
    @NAME
    @ADDRESS
    @click.option("--node", "node_ids", multiple=True, metavar="ID", help="This node only; may be repeated.")
    @click.option(
        "--set",
        "changes",
        multiple=True,
        metavar="NAME=VALUE",
        help="Change a setting, by its name in docs/api.md, like capacity_bytes=8GiB; may be repeated.",
    )
    @click.option("--cold", is_flag=True, help="Begin with empty memory; a disk tier keeps its blocks.")
    @click.option(
        "--wait",
        "wait_s",
        type=Seconds(0.0, 3600.0),
        default=10.0,
        show_default=True,
        help="Seconds that each node waits for leases, writes and hand-offs to end.",
    )
    @JSON
    def restart(
        name: str,
        address: str | None,
        node_ids: tuple[str, ...],
        changes: tuple[str, ...],
        cold: bool,
        wait_s: float,
        as_json: bool,
    ) -> None:
        """Restart the node stores one after the other, with changed settings or another version of raykv.

        Each next store takes over the memory of the one before, with its blocks, where that is safe. The result says
        so for each node, or why it begins empty. Clients of the store before have to be made anew.
        """
        wanted = dict(map(setting_of, changes))
        with progress() as say:
            say(f"restarting store {name!r}")
            found = connect(name, address).restart(list(node_ids) or None, cold=cold, wait_s=wait_s, **wanted)
        if as_json:
            click.echo(json.dumps(found))
            return
        for node_id, said in found.items():
            kept = f"warm, {said['num_blocks']} blocks kept" if said["is_warm"] else f"cold: {said['why_cold']}"
            held = f", {said['num_held_slots']} slots wait for workers" if said["num_held_slots"] else ""
            click.echo(f"node {node_id}: {kept}{held}")

    return restart

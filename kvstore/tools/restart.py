"""The command `kvstore restart`; the command line gives it the way to join a store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import click

from kvstore.config import StoreConfig
from kvstore.errors import ConfigError
from kvstore.quotas import TenantQuota
from kvstore.tools.commands import ADDRESS, JSON, NAME, Command, Seconds, parse_size
from kvstore.tools.doctor import human_bytes
from kvstore.tools.own_output import drop_output
from kvstore.tools.settings import SET, settings_of
from kvstore.tools.terminal import progress


def restart_command(connect: Callable[[str, str | None], Any]) -> click.Command:
    """Return the command; `connect` returns the handle of a store, by its name and address."""

    @click.command("restart", cls=Command, short_help="Restart nodes, and keep their blocks.")
    @NAME
    @ADDRESS
    @click.option(
        "--node",
        "node_ids",
        multiple=True,
        metavar="ID",
        help="This node only, by its id or the first digits of it; may be repeated.",
    )
    @click.option("--capacity", metavar="SIZE", help="Memory for blocks on each node, like --set capacity_bytes=8GiB.")
    @SET
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
        capacity: str | None,
        changes: tuple[str, ...],
        cold: bool,
        wait_s: float,
        as_json: bool,
    ) -> None:
        """Restart the node stores one after the other, with changed settings or another version of raykv.

        Each next store takes over the memory of the one before, with its blocks, where that is safe. The result says
        so for each node, or why it begins empty, and which settings changed. Clients of the store before have to be
        made anew.

        --set changes any setting but name and num_directory_shards; all others stay.
        """
        wanted = settings_of(changes)
        if capacity is not None:
            if "capacity_bytes" in wanted:
                raise ConfigError("--capacity and --set capacity_bytes: wanted one of them, got both; leave one out")
            wanted["capacity_bytes"] = parse_size("--capacity", capacity)
        with progress() as say:
            say(f"asking store {name!r} for a restart")
            store = connect(name, address)
            before = store.config

            def say_step(node_id: str, what: str) -> None:
                say(f"node {node_id[:12]}: {what}")

            found = store.restart(list(node_ids) or None, cold=cold, wait_s=wait_s, on_step=say_step, **wanted)
        lines = [json.dumps(found)] if as_json else _lines_of(before, store.config, found, bool(wanted))
        try:
            for line in lines:
                click.echo(line)
        except OSError as error:
            drop_output()
            with contextlib.suppress(OSError):
                click.echo(
                    f"the restart is done; its result could not be written to standard output: {error}", err=True
                )
            click.get_current_context().exit(1)

    return restart


def _lines_of(
    before: StoreConfig, after: StoreConfig, found: dict[str, dict[str, Any]], has_changes: bool
) -> Iterator[str]:
    lines = list(changes_of(before, after))
    yield from lines or (["no setting changed: the store had these values"] if has_changes else [])
    for node_id, said in found.items():
        kept = f"warm, {said['num_blocks']} blocks kept" if said["is_warm"] else f"cold: {said['why_cold']}"
        held = f", {said['num_held_slots']} slots wait for workers" if said["num_held_slots"] else ""
        yield f"node {node_id}: {kept}{held}"


def changes_of(before: StoreConfig, after: StoreConfig) -> Iterator[str]:
    """Yield a line for each setting that a restart changed; for tenants, one for each that came, left or changed."""
    for field in fields(StoreConfig):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if field.name != "tenants" and old != new:
            yield f"{field.name}: {old!r} before, {new!r} now"
    olds, news = ({quota.name: quota for quota in config.tenants} for config in (before, after))
    for name in sorted({*olds, *news}):
        if name not in news:
            yield f"tenant {name}: removed"
        elif name not in olds:
            yield f"tenant {name}: new, {_quotas(news[name])}"
        elif olds[name] != news[name]:
            yield f"tenant {name}: {_quotas(olds[name])} before, {_quotas(news[name])} now"


def _quotas(quota: TenantQuota) -> str:
    given = {field.name: getattr(quota, field.name) for field in fields(quota)[1:]}
    shown = {name: human_bytes(value) if name.endswith("_bytes") and value else value for name, value in given.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if value is not None) or "no quotas"

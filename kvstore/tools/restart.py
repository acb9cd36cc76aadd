"""The command `kvstore restart`; the command line gives it the way to join a store."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from kvstore.tools.commands import ADDRESS, JSON, NAME, Command, Seconds
from kvstore.tools.settings import SET, settings_of
from kvstore.tools.terminal import progress


def restart_command(connect: Callable[[str, str | None], Any]) -> click.Command:
    """Return the command; `connect` returns the handle of a store, by its name and address."""

    @click.command("restart", cls=Command, short_help="Restart nodes, and keep their blocks.")
    @NAME
    @ADDRESS
    @click.option("--node", "node_ids", multiple=True, metavar="ID", help="This node only; may be repeated.")
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
        changes: tuple[str, ...],
        cold: bool,
        wait_s: float,
        as_json: bool,
    ) -> None:
        """Restart the node stores one after the other, with changed settings or another version of raykv.

        Each next store takes over the memory of the one before, with its blocks, where that is safe. The result says
        so for each node, or why it begins empty. Clients of the store before have to be made anew.

        --set changes any setting but name and num_directory_shards; all others stay.
        """
        wanted = settings_of(changes)
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

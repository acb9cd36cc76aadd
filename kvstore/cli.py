"""The commands `kvstore start|status|top|inspect|restart|stop|doctor|bench|replay|trace`. Thin.

One of the two modules of the core that may import kvstore.actors, and only when a command needs it.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvstore import __version__
from kvstore.bench.commands import disk, gpu
from kvstore.bounds import parse_bytes
from kvstore.errors import ConfigError, StoreNotRunning
from kvstore.replay.commands import replay, trace_group
from kvstore.tools.commands import (
    ADDRESS,
    JSON,
    LANE,
    MAX_ERROR_CHARS,
    NAME,
    OUTPUT,
    POSITIVE,
    START_TIMEOUT,
    Group,
    check_settings,
    doctor_options,
    write_rows,
)
from kvstore.tools.doctor import Status, human_bytes, machine_checks
from kvstore.tools.inspection.commands import inspect_group
from kvstore.tools.own_output import keep_own_output
from kvstore.tools.restart import restart_command
from kvstore.tools.store_options import store_options, store_settings
from kvstore.tools.terminal import progress, show_check, show_rows, show_status, show_summary
from kvstore.tools.top import top_command

_JOIN_S = 30.0  # how long `kvstore stop` tries to join Ray


def _replay_real(*args: Any) -> list[dict[str, Any]]:
    """Replay with real stores. The room of the replay knows no Ray, so it gets this from here."""
    from kvstore.actors.bench.replay import replay_real

    return replay_real(*args)


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "obj": _replay_real},
)
@click.version_option(__version__, package_name="raykv", prog_name="kvstore")
def main() -> None:
    """A distributed KV-cache store for LLM serving on Ray.

    A store is a set of Ray actors, one per node of a Ray cluster. These commands start, watch and stop one;
    engines use it from Python with kvstore.connect() and Store.client().
    """
    keep_own_output()


@main.command()
@click.option("--capacity", default="1GiB", show_default=True, help="Memory for blocks on each node, like 8GiB.")
@NAME
@ADDRESS
@LANE
@click.option("--block-bytes", default="0", help="Size of a slot at least; 0 takes it from the first client.")
@store_options
@click.option("--local", is_flag=True, help="Start a Ray for this store alone; stay until Ctrl-C or SIGTERM.")
@START_TIMEOUT
@click.pass_context
def start(ctx: click.Context, /, address: str | None, local: bool, timeout_s: float, **_: Any) -> None:
    """Run a store on every node of a Ray cluster.

    The store outlives this command and serves until `kvstore stop`; nodes that join later get one too. Run
    again with the same settings it changes nothing.
    """
    from kvstore.actors.session.joining import join_ray
    from kvstore.api import start as start_store

    if local and address:
        raise click.UsageError("--local starts a Ray of its own; leave --address out")
    settings = {"timeout_s": timeout_s, **store_settings(ctx)}
    check_settings(settings)
    if local:
        from kvstore.actors.session.foreground import serve_until_signal

        with progress() as say:
            say("starting a local Ray with a store")
            store = start_store(address="local", **settings)
        listens = f"Ray listens at {store.address}; Ctrl-C stops the store and this Ray."
        serve_until_signal(store, lambda: f"{_started(store)}\n{listens}")
        return
    named = address or os.environ.get("RAY_ADDRESS")
    if named == "local":
        raise ConfigError(
            "wanted a Ray that outlives this command, got 'local', which begins one that would end with it; leave "
            "address= and RAY_ADDRESS out, or use `kvstore start --local`, which stays in the foreground"
        )
    # RAY_ADDRESS is not passed on as address=, because errors would then call it an option.
    wanted, is_named = address or (None if named else "auto"), named not in (None, "auto")
    try:
        with progress() as say:
            joined = join_ray(wanted, may_start=False, deadline_s=time.monotonic() + timeout_s)
            why = "" if is_named else f" ({joined.why})"
            say(f"starting store {settings['name']!r} in the Ray at {joined.session.address}{why}")
            store = start_store(address=wanted, **settings)
    except StoreNotRunning as error:
        if named:
            raise
        raise StoreNotRunning(
            f"{error}. A store needs a Ray that outlives this command: run `ray start --head` first, pass --address, "
            "or use `kvstore start --local`, which starts a Ray of its own and stays in the foreground"
        ) from error
    click.echo(_started(store))


def _started(store: Any) -> str:
    capacity = human_bytes(store.config.capacity_bytes)
    if store.config.disk_path:
        capacity += f" and {human_bytes(store.config.disk_capacity_bytes)} of disk"
    where = f"on {len(store.node_ids())} node(s) of the Ray at {store.address}"
    lines = [f"store {store.config.name!r} runs {where}, {capacity} each"]
    if 0 < store.config.disk_capacity_bytes < store.config.capacity_bytes:
        lines.append("the disk is smaller than the memory: blocks that find no room there are gone after a stop")
    for tenant in store.config.tenants:
        for quota, has in (("max_bytes", "capacity_bytes"), ("max_disk_bytes", "disk_capacity_bytes")):
            most, room = getattr(tenant, quota), getattr(store.config, has)
            if most is None or store.config.block_bytes <= most <= room:
                continue
            said = f"bounds nothing, a node has {human_bytes(room) if room else 'no disk tier'}"
            if most <= room:
                said = f"has no room for a slot of {human_bytes(store.config.block_bytes)}: this tenant keeps no block"
            lines.append(f"tenant {tenant.name}: {quota} of {human_bytes(most)} {said}")
    return "\n".join(lines)


def _connect(name: str, address: str | None) -> Any:
    from kvstore.api import connect

    return connect(name, address=address)


main.add_command(restart_command(_connect))


@main.command(short_help="Show every node's store.")
@NAME
@ADDRESS
@JSON
@click.pass_context
def status(ctx: click.Context, name: str, address: str | None, as_json: bool) -> None:
    """Show the settings that are not the defaults, and every node's store: slots, leases, evictions, bytes over NIXL.

    Exit status 1 when a node of the cluster has no store that answers, 2 when there is none at all.
    """
    store = _connect(name, address)
    stats = store.stats()
    stats["without_store"] = [node for node in store.node_ids() if "error" in stats["nodes"].get(node, {"error": ""})]
    if as_json:
        click.echo(json.dumps({**stats, "settings": asdict(store.config)}))
    else:
        show_status(stats, store.config)
    ctx.exit(1 if stats["without_store"] else 0)


main.add_command(top_command(_connect))
main.add_command(inspect_group(_connect))


@main.command()
@NAME
@ADDRESS
def stop(name: str, address: str | None) -> None:
    """Stop one store on every node, also while it is used. Ray and other stores go on.

    Its blocks in memory are gone. Those of a disk tier stay on the disks, for the next store of that name and path.

    This works for a store whose supervisor hangs or is gone, and for one of another version. Where several Rays run on
    this machine, --address or RAY_ADDRESS has to name one.
    """
    from kvstore.actors.ending import end_store
    from kvstore.actors.session.joining import check_named, join_ray

    check_named(address)
    where = join_ray(address, may_start=False, deadline_s=time.monotonic() + _JOIN_S).session.address
    end_store(name, lambda found: click.echo(f"stopping store {name!r} of the Ray at {where}, {found}"))
    click.echo(f"store {name!r} of the Ray at {where} stopped")


@main.command(short_help="Say what this machine can do, and what to fix.")
@ADDRESS
@JSON
@doctor_options
@click.pass_context
def doctor(
    ctx: click.Context,
    address: str | None,
    as_json: bool,
    idle_seconds: float,
    no_idle: bool,
    roundtrip: bool,
    disk_path: str | None,
) -> None:
    """Check what this machine can do for a store, and say how to fix what is missing.

    Two processes move bytes, and a small store with a Ray of its own runs for a moment, unless --no-idle is given.
    That, and --roundtrip, may take minutes on a busy machine. Nothing is changed. Exit status 1 when a row says fail.
    """
    from kvstore.actors.doctor.diagnose import check_idle, check_roundtrip, ray_checks
    from kvstore.actors.doctor.own_folder import check_path

    if disk_path and not roundtrip:
        raise click.UsageError("--disk-path is for --roundtrip; give both")
    if disk_path:
        check_path(disk_path)
    looks = [*machine_checks(), *ray_checks(address)]
    if not no_idle:
        looks.append((f"what an idle store costs, over {idle_seconds:g} s", lambda: check_idle(idle_seconds)))
    if roundtrip:
        looks.append(("blocks through each tier, and a restart", lambda: check_roundtrip(disk_path)))
    rows = []
    for title, look in looks:
        with progress() as say:
            say(title)
            rows.append(look())
        if not as_json:
            show_check(rows[-1])
    if as_json:
        click.echo(json.dumps([row.as_row() for row in rows]))
    else:
        show_summary(rows)
    ctx.exit(1 if any(row.status is Status.FAIL for row in rows) else 0)


@main.group(cls=Group)
def bench() -> None:
    """Measure this machine, with two Ray nodes of its own, or its GPU. Compare rows of one run only."""


@bench.command(short_help="GB/s of blocks between two nodes.")
@click.option("--lane", "lanes", multiple=True, type=click.Choice(["default", "tcp", "all"]), help="Default: all.")
@click.option("--block-bytes", "sizes", multiple=True, help="64KiB, 512KiB or 2MiB; may be repeated. Default: all.")
@click.option("--load-bytes", default="64MiB", show_default=True, help="Moved at a time.")
@click.option("--rounds", type=POSITIVE, default=7, show_default=True, help="The median counts.")
@JSON
@OUTPUT
def transfer(
    lanes: tuple[str, ...], sizes: tuple[str, ...], load_bytes: str, rounds: int, as_json: bool, output: Path | None
) -> None:
    """GB/s of blocks between two nodes: memcpy, raw NIXL, our load, Ray's object store.

    A failure is shown on stderr, and the exit status is 1; all rows that were measured are printed.
    """
    from kvstore.actors.bench.transfer import Measured, run_transfer

    blocks, found = [parse_bytes(size) for size in sizes or ("64KiB", "512KiB", "2MiB")], Measured()
    chosen = ["default", "tcp"] if not lanes or "all" in lanes else list(lanes)
    try:
        with progress() as say:
            run_transfer(chosen, blocks, parse_bytes(load_bytes), rounds, say, found)
    except (KeyboardInterrupt, SystemExit):
        found.failures.append("the rest: interrupted")
    write_rows(found.rows, as_json, output)
    if found.rows and not as_json:
        show_rows(found.rows, ("lane", "block_bytes"), lambda row: f"{row['gb_per_s']:.2f}", "GB/s")
    for failure in found.failures:
        click.echo(f"not measured: {failure[:MAX_ERROR_CHARS]}", err=True)
    if found.failures:
        raise SystemExit(1)


@bench.command(short_help="Microseconds of lookup and lease.")
@click.option("--num-hashes", "counts", multiple=True, type=POSITIVE, help="May be repeated. Default: 128 2048.")
@click.option(
    "--rounds", type=POSITIVE, default=2000, show_default=True, help="Calls over the socket; a tenth over Ray."
)
@JSON
@OUTPUT
def control(counts: tuple[int, ...], rounds: int, as_json: bool, output: Path | None) -> None:
    """Microseconds of lookup and lease, over the local socket and over the Ray handle."""
    from kvstore.actors.bench.control import run_control

    with progress() as say:
        rows = run_control(list(counts or (128, 2048)), rounds, say)
    write_rows(rows, as_json, output)
    if not as_json:
        show_rows(rows, ("op", "num_hashes"), lambda row: f"{row['p50_us']:,} / {row['p99_us']:,}", "us, p50 / p99")


@bench.command(short_help="GB/s of a request's blocks from engine to engine.")
@click.option("--shape", "shapes", multiple=True, help="8B, 70B/TP8 or MLA; may be repeated. Default: 8B.")
@click.option("--block-size", "sizes", multiple=True, type=POSITIVE, help="Tokens; may be repeated. Default: 16.")
@click.option("--num-blocks", "counts", multiple=True, type=POSITIVE, help="May be repeated. Default: 16 64 256.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option("--rounds", type=POSITIVE, default=9, show_default=True, help="The median counts.")
@JSON
@OUTPUT
def handoff(
    shapes: tuple[str, ...],
    sizes: tuple[int, ...],
    counts: tuple[int, ...],
    device: str,
    rounds: int,
    as_json: bool,
    output: Path | None,
) -> None:
    """GB/s of hand-offs, from publish to the last byte fetched, between caches of separate layers on two nodes.

    Ours beside one copy of the same bytes between the devices (the limit), and beside READs by NIXL alone: of the
    engine's fragments, and of blocks that are packed already. Ours: published and then fetched; begun, with the ticket
    sent while blocks are packed; early, with the ticket sent first; ahead, published while blocks are computed; and all
    of that on cores that are kept from sleeping. With fewer than two GPUs through host memory.
    """
    from kvstore.actors.bench.handoff import run_handoff

    with progress() as say:
        rows = run_handoff(
            shapes or ("8B",), sizes or (16,), counts or (16, 64, 256), rounds, device, say,
            lambda rows: write_rows(rows, False, output),
        )  # fmt: skip
    write_rows(rows, as_json, output)
    if not as_json:
        groups = ("shape", "block_size", "num_blocks", "direction")
        show_rows(rows, groups, lambda row: f"{row['gb_per_s']:.1f}", "GB/s")


bench.add_command(gpu)
bench.add_command(disk)
main.add_command(replay)
main.add_command(trace_group)

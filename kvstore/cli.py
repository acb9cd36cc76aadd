"""The command line: `kvstore start|status|stop|doctor|bench`. Thin: other modules find out what it shows.

One of the two modules of the core that may import kvstore.actors, and only when a command needs it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvstore import __version__
from kvstore.config import parse_bytes
from kvstore.errors import ConfigError, KVStoreError, StoreNotRunning
from kvstore.runtime import clock
from kvstore.tools.doctor import Status, human_bytes, machine_checks
from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance
from kvstore.tools.terminal import progress, show_check, show_rows, show_status, show_summary

_MAX_ERROR_CHARS = 600
#: Texts of errors for Python callers, and their replacements on the command line.
_OWN_WORDS = [
    (re.compile(pattern), words)
    for pattern, words in (
        (r"kvstore\.start\(name=('[^']*')\)", r"`kvstore start --name \1`"),
        (r"kvstore\.start\(\)", "`kvstore start`"),
        (r"\bconnect\(\) to it", "use it as it runs"),
        (r"\baddress='local'", "`kvstore start --local`"),
        (r"\b(address|name|capacity|lane)=(?=[ ,;.]|$)", r"--\1"),
        (r"\btimeout_s=(?=[ ,;.]|$)", "--timeout"),
        (r"\bblock_bytes=(?=[ ,;.]|$)", "--block-bytes"),
        (r"^block_bytes: ", "--block-bytes: "),
        (r"^capacity_bytes: ", "--capacity: "),
        (r"^(name|address): ", r"--\1: "),
    )
]
#: Numbers this large in errors about settings are sizes.
_SIZE = re.compile(r"\b[0-9]{6,15}\b")
_LOOKS_EVERY_S = 2.0
#: How long to wait for the end of a Ray that does not answer.
_GRACE_S = 5.0
#: How long `kvstore stop` tries to join Ray.
_JOIN_S = 30.0
_name = click.option("--name", default="default", show_default=True, help="Which store of the cluster.")
_address = click.option(
    "--address",
    metavar="HOST:PORT",
    help="The Ray cluster. Without it RAY_ADDRESS, then what `ray start` began here, then the only one here.",
)
_positive = click.IntRange(1)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout and nothing else there.")


def _in_own_words(error: KVStoreError) -> str:
    """Return an error's text in one line, with options in place of Python's arguments."""
    text = " ".join(str(error).split())
    for pattern, words in _OWN_WORDS:
        text = pattern.sub(words, text)
    if isinstance(error, ConfigError):
        text = _SIZE.sub(lambda size: f"{size[0]} ({human_bytes(int(size[0]))})", text)
    return text


def _size(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


class _Seconds(click.FloatRange):
    """A time within bounds. Refuses NaN, which no comparison with a bound refuses."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value} is no time.", param, ctx)
        return seconds


class _Output(click.Path):
    """A file to be written later. Reports an unwritable folder before anything is measured."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        folder = Path(str(path)).absolute().parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            self.fail(f"{folder} is no folder that can be written to; make it first.", param, ctx)
        return path


_output = click.option(
    "--output",
    type=_Output(dir_okay=False, writable=True, path_type=Path),
    help="Also write the rows with hardware, versions and commit to this file.",
)


class _Command(click.Command):
    """A command that shows a KVStoreError as one line, or one JSON object, with exit status 2."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            size = next((word for word in given if word[:1].isdigit()), None)
            if size is None or self.name != "start" or "unexpected extra argument" not in error.message:
                raise
            hint = f"{error.message}; the memory of each node is given by --capacity {size}"
            raise click.UsageError(hint, ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KVStoreError as error:
            kind, text = type(error).__name__, _in_own_words(error)
            if ctx.params.get("as_json"):
                click.echo(json.dumps({"error": kind, "text": text}))
            else:
                short = text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}..."
                click.echo(f"{click.style(kind, fg='red', bold=True)}: {short}", err=True)
            ctx.exit(2)


class _Group(click.Group):
    command_class = _Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # As defined below, not by name.


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, package_name="raykv", prog_name="kvstore")
def main() -> None:
    """A distributed KV-cache store for LLM serving on Ray.

    A store is a set of Ray actors, one per node of a Ray cluster. These commands start, watch and stop one;
    engines use it from Python with kvstore.connect() and Store.client().
    """


@main.command()
@click.option("--capacity", default="1GiB", show_default=True, help="Memory for blocks on each node, like 8GiB.")
@_name
@_address
@click.option(
    "--lane",
    type=click.Choice(["default", "tcp"]),
    default="default",
    show_default=True,
    help="'default' lets UCX choose: RDMA, shared memory on one host, then TCP.",
)
@click.option("--block-bytes", default="0", help="Size of a slot at least; 0 takes it from the first client.")
@click.option("--local", is_flag=True, help="Start a Ray for this store alone; stay until Ctrl-C or SIGTERM.")
@click.option(
    "--timeout",
    "timeout_s",
    type=_Seconds(1.0, 3600.0),
    default=60.0,
    show_default=True,
    help="Seconds within which every node has to have its store.",
)
def start(
    capacity: str, name: str, address: str | None, lane: str, block_bytes: str, local: bool, timeout_s: float
) -> None:
    """Run a store on every node of a Ray cluster.

    The store outlives this command and serves until `kvstore stop`; nodes that join later get one too. Run
    again with the same settings it changes nothing.
    """
    from kvstore.api import start as start_store

    if local and address:
        raise click.UsageError("--local starts a Ray of its own; leave --address out")
    settings: dict[str, Any] = {
        "name": name,
        "lane": lane,
        "capacity": _size("--capacity", capacity),
        "block_bytes": _size("--block-bytes", block_bytes),
        "timeout_s": timeout_s,
    }
    if local:
        _serve_until_signal(lambda: start_store(address="local", **settings))
        return
    named = address or os.environ.get("RAY_ADDRESS")
    if named == "local":
        raise ConfigError(
            "wanted a Ray that outlives this command, got 'local', which begins one that would end with it; leave "
            "address= and RAY_ADDRESS out, or use `kvstore start --local`, which stays in the foreground"
        )
    try:
        with progress() as say:
            say(f"starting store {name!r}")
            # RAY_ADDRESS is not passed on as address=, because errors would then call it an option.
            store = start_store(address=address or (None if named else "auto"), **settings)
    except StoreNotRunning as error:
        if named:
            raise
        raise StoreNotRunning(
            f"{error}. A store needs a Ray that outlives this command: run `ray start --head` first, pass --address, "
            "or use `kvstore start --local`, which starts a Ray of its own and stays in the foreground"
        ) from error
    _say_started(store)


def _serve_until_signal(start_store: Callable[[], Any]) -> None:
    """Start a store with a local Ray, wait for Ctrl-C, SIGTERM or the store's end, then stop both."""
    stop = threading.Event()
    with progress() as say:
        say("starting a local Ray with a store")
        store = start_store()
    try:
        # After the start, because Ray sets its own handlers, which would end this process at once.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        _say_started(store)
        click.echo(f"Ray listens at {store.address}; Ctrl-C stops the store and this Ray.")
        while not stop.wait(_LOOKS_EVERY_S):
            if end := _end_of(store):
                click.echo(end)
                break
    finally:
        click.echo("stopping", err=True)
        _stop_local(store)


def _end_of(store: Any) -> str:
    """Return how a store with a local Ray has ended; empty while it runs or does not answer."""
    from kvstore.actors.calls import actor_name, find_actor
    from kvstore.actors.session.probing import check_answers

    name = store.config.name
    try:
        check_answers(store.address)
    except StoreNotRunning:
        return f"the Ray at {store.address} has ended, and store {name!r} with it"
    try:
        find_actor(actor_name(name, "supervisor"), _GRACE_S)
    except StoreNotRunning:
        return f"store {name!r} was stopped by another process; its Ray ends with it"
    except KVStoreError:
        pass  # Perhaps slow: the caller asks again.
    return ""


def _stop_local(store: Any) -> None:
    """Stop a store with its Ray, and give up if that Ray ends first, as after a signal to the process group."""
    from kvstore.actors.session.probing import check_answers

    failed: list[KVStoreError] = []
    # Warnings of a Ray that does not answer would only confuse: it is to end. A failure is raised.
    logging.getLogger("kvstore").setLevel(logging.ERROR)

    def run() -> None:
        try:
            store.stop()
        except KVStoreError as error:
            failed.append(error)

    stopping = threading.Thread(target=run, name="raykv-stop", daemon=True)
    stopping.start()
    gone_s = None
    while stopping.is_alive():
        stopping.join(0.2)
        try:
            if gone_s is None:  # An ending Ray may accept a question and not answer it.
                check_answers(store.address, time.monotonic() + _GRACE_S)
        except StoreNotRunning:
            gone_s = clock.now_s()
        if gone_s is not None and clock.now_s() > gone_s + _GRACE_S:
            name = store.config.name
            text = f"the Ray at {store.address} has ended, too, as after a signal to all processes, and store {name!r}"
            click.echo(f"{text} with it", err=True)
            return
    if failed:
        raise failed[0]


def _say_started(store: Any) -> None:
    capacity = human_bytes(store.config.capacity_bytes)
    where = f"on {len(store.node_ids())} node(s) of the Ray at {store.address}"
    click.echo(f"store {store.config.name!r} runs {where}, {capacity} each")


@main.command(short_help="Show every node's store.")
@_name
@_address
@_json
@click.pass_context
def status(ctx: click.Context, name: str, address: str | None, as_json: bool) -> None:
    """Show every node's store: slots, leases, evictions, bytes over NIXL.

    Exit status 1 when a node of the cluster has no store that answers, 2 when there is none at all.
    """
    from kvstore.api import connect

    store = connect(name, address=address)
    stats = store.stats()
    nodes = stats["nodes"]
    stats["without_store"] = [node for node in store.node_ids() if "error" in nodes.get(node, {"error": ""})]
    if as_json:
        click.echo(json.dumps(stats))
    else:
        show_status(stats, store.config.capacity_bytes)
    ctx.exit(1 if stats["without_store"] else 0)


@main.command()
@_name
@_address
def stop(name: str, address: str | None) -> None:
    """Stop one store on every node, whoever uses it. Its blocks are gone; Ray and other stores go on.

    Also what is left of one whose supervisor hangs or is gone, and a store of another version. Where several Rays run
    on this machine, --address or RAY_ADDRESS has to say which.
    """
    from kvstore.actors.ending import end_store
    from kvstore.actors.session.joining import check_named, join_ray

    check_named(address)
    where = join_ray(address, may_start=False, deadline_s=time.monotonic() + _JOIN_S).session.address
    end_store(name, lambda found: click.echo(f"stopping store {name!r} of the Ray at {where}, {found}"))
    click.echo(f"store {name!r} of the Ray at {where} stopped")


@main.command(short_help="Say what this machine can do, and what to fix.")
@_address
@_json
@click.option(
    "--idle-seconds",
    type=_Seconds(0.1, 3600.0),
    default=10.0,
    show_default=True,
    help="How long to measure an idle store.",
)
@click.option("--no-idle", is_flag=True, help="Do not measure it.")
@click.pass_context
def doctor(ctx: click.Context, address: str | None, as_json: bool, idle_seconds: float, no_idle: bool) -> None:
    """Say what this machine can do for a store, what it will use, and how to fix what is missing.

    Bytes are really moved between two processes, and unless --no-idle is given a small store with a Ray of its
    own is run for a moment. Nothing is changed. Exit status 1 when a row says fail.
    """
    from kvstore.actors.diagnose import check_idle, ray_checks

    looks = [*machine_checks(), *ray_checks(address)]
    if not no_idle:
        looks.append((f"what an idle store costs, over {idle_seconds:g} s", lambda: check_idle(idle_seconds)))
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


@main.group(cls=_Group)
def bench() -> None:
    """Measure on this machine, with two Ray nodes of its own or its GPU. Compare rows of one run only."""


@bench.command(short_help="GB/s of blocks between two nodes.")
@click.option("--lane", "lanes", multiple=True, type=click.Choice(["default", "tcp", "all"]), help="Default: all.")
@click.option("--block-bytes", "sizes", multiple=True, help="64KiB, 512KiB or 2MiB; may be repeated. Default: all.")
@click.option("--load-bytes", default="64MiB", show_default=True, help="Moved at a time.")
@click.option("--rounds", type=_positive, default=7, show_default=True, help="The median counts.")
@_json
@_output
def transfer(
    lanes: tuple[str, ...], sizes: tuple[str, ...], load_bytes: str, rounds: int, as_json: bool, output: Path | None
) -> None:
    """GB/s of blocks between two nodes: memcpy, raw NIXL, our load, Ray's object store.

    What cannot be measured is said on stderr, and the exit status is 1; the rows of the rest are printed in any case.
    """
    from kvstore.actors.bench.transfer import Measured, run_transfer

    blocks, found = [parse_bytes(size) for size in sizes or ("64KiB", "512KiB", "2MiB")], Measured()
    chosen = ["default", "tcp"] if not lanes or "all" in lanes else list(lanes)
    try:
        with progress() as say:
            run_transfer(chosen, blocks, parse_bytes(load_bytes), rounds, say, found)
    except (KeyboardInterrupt, SystemExit):
        found.failures.append("the rest: interrupted")
    _write(found.rows, as_json, output)
    if found.rows and not as_json:
        show_rows(found.rows, ("lane", "block_bytes"), lambda row: f"{row['gb_per_s']:.2f}", "GB/s")
    for failure in found.failures:
        click.echo(f"not measured: {failure[:_MAX_ERROR_CHARS]}", err=True)
    if found.failures:
        raise SystemExit(1)


@bench.command(short_help="Microseconds of lookup and lease.")
@click.option("--num-hashes", "counts", multiple=True, type=_positive, help="May be repeated. Default: 128 2048.")
@click.option(
    "--rounds", type=_positive, default=2000, show_default=True, help="Calls over the socket; a tenth over Ray."
)
@_json
@_output
def control(counts: tuple[int, ...], rounds: int, as_json: bool, output: Path | None) -> None:
    """Microseconds of lookup and lease, over the local socket and over the Ray handle."""
    from kvstore.actors.bench.control import run_control

    with progress() as say:
        rows = run_control(list(counts or (128, 2048)), rounds, say)
    _write(rows, as_json, output)
    if not as_json:
        show_rows(rows, ("op", "num_hashes"), lambda row: f"{row['p50_us']:,} / {row['p99_us']:,}", "us, p50 / p99")


@bench.command(short_help="GB/s between an engine's cache and slots.")
@click.option("--shape", "shapes", multiple=True, help="8B, 70B/TP8 or MLA; may be repeated. Default: all.")
@click.option("--block-size", "sizes", multiple=True, type=_positive, help="Tokens; may be repeated. Default: 16 64.")
@click.option(
    "--num-blocks", "counts", multiple=True, type=_positive, help="May be repeated. Default: 8 16 64 256 1024."
)
@click.option("--max-bytes", default="2GiB", show_default=True, help="What would move more at once is left out.")
@click.option("--rounds", type=_positive, default=7, show_default=True, help="The median counts.")
@_json
@_output
def gpu(
    shapes: tuple[str, ...],
    sizes: tuple[int, ...],
    counts: tuple[int, ...],
    max_bytes: str,
    rounds: int,
    as_json: bool,
    output: Path | None,
) -> None:
    """GB/s of blocks between a CUDA cache of separate layers, device memory and pinned host memory.

    Ours beside one copy of the same bytes (the limit), a copy for each fragment, the driver's batch of fragments,
    and torch's gather. Pack and unpack are in device memory; the other directions cross the link. No Ray is started.
    """
    from kvstore.bench.gpu import SHAPES, run_gpu

    with progress() as say:
        rows = run_gpu(
            shapes or tuple(SHAPES), sizes or (16, 64), counts or (8, 16, 64, 256, 1024), rounds,
            parse_bytes(max_bytes), say,
        )  # fmt: skip
    _write(rows, as_json, output)
    if not as_json:
        groups = ("shape", "block_size", "num_blocks", "direction")
        beside = [row for row in rows if "product_ms" in row]
        show_rows([row for row in rows if row not in beside], groups, lambda row: f"{row['gb_per_s']:.1f}", "GB/s")
        title = "GB/s of loads, ms of a matrix product beside them"
        show_rows(beside, groups, lambda row: f"{row['gb_per_s']:.1f}, {row['product_ms']:.2f}", title)


@bench.command(short_help="GB/s of a request's blocks from engine to engine.")
@click.option("--shape", "shapes", multiple=True, help="8B, 70B/TP8 or MLA; may be repeated. Default: 8B.")
@click.option("--block-size", "sizes", multiple=True, type=_positive, help="Tokens; may be repeated. Default: 16.")
@click.option("--num-blocks", "counts", multiple=True, type=_positive, help="May be repeated. Default: 16 64 256.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option("--rounds", type=_positive, default=9, show_default=True, help="The median counts.")
@_json
@_output
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
            lambda rows: _write(rows, False, output),
        )  # fmt: skip
    _write(rows, as_json, output)
    if not as_json:
        groups = ("shape", "block_size", "num_blocks", "direction")
        show_rows(rows, groups, lambda row: f"{row['gb_per_s']:.1f}", "GB/s")


def _write(rows: list[dict[str, Any]], as_json: bool, output: Path | None) -> None:
    if output is not None:
        output.write_text(as_document({**provenance(), "rows": rows}))
    if as_json:
        click.echo(as_document(rows), nl=False)

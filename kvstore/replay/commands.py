"""The commands `kvstore replay` and `kvstore trace make`. What they need is imported when they run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.bounds import MAX_SLOTS, clip
from kvstore.config import EVICTION_POLICIES
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.tools.commands import JSON, OUTPUT, Command, Group, WrittenFile, parse_size
from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance
from kvstore.tools.terminal import say_line

if TYPE_CHECKING:
    from kvstore.replay.report import Plan, RealSettings, RunReal
    from kvstore.replay.traces import Trace

_REAL_BLOCK_BYTES = 64 << 10
#: Each is several processes on this machine.
_MOST_REAL_NODES = 16


@click.command("replay", cls=Command, short_help="Replay a trace of requests, without bytes or with real stores.")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--blocks", "capacities", multiple=True, required=True, help="Capacities in blocks: 1000,5000; repeatable."
)
@click.option(
    "--disk-blocks",
    type=int,
    help="Capacity of each node's disk, 0 for none; the nodes then give each other blocks. Default: caches alone.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help="default (or learned), lru, bound or all; a comma list, or repeated. Default: all; lru with --mode real.",
)
@click.option(
    "--mode",
    type=click.Choice(["simulate", "real"]),
    default="simulate",
    show_default=True,
    help="Index only; or real stores, whose every loaded byte is compared.",
)
@click.option("--rows", "num_rows", type=int, default=0, help="Replay the first so many requests. 0: all.")
@click.option("--restart-at", type=int, default=0, help="Before this request begin again with what is on the disks.")
@click.option("--wait-written", is_flag=True, help="real: before each request wait for the disks: hits are then exact.")
@click.option("--disk-path", default="", help="real: folder of the disk tiers. Default: a temporary one.")
@click.option(
    "--format", "format_name", default="", help="mooncake, bailian, weka or csv. Default: by the first record."
)
@click.option("--block-tokens", type=int, default=0, help="Tokens of a block. Default: what the format says.")
@click.option(
    "--time-unit", type=click.Choice(["s", "ms"]), help="Of the file's times. Default: ms for mooncake, else s."
)
@click.option("--nodes", "num_nodes", type=int, help="Nodes, each with --blocks. Default: 1; 2 with --mode real.")
@click.option(
    "--routing",
    default="round-robin",
    show_default=True,
    help="round-robin, or prefix: to whom the longest prefix has.",
)
@click.option(
    "--tie-blocks", type=int, default=0, show_default=True, help="Prefixes shorter by at most so many blocks are equal."
)
@click.option(
    "--jitter-s",
    type=float,
    default=0.0,
    show_default=True,
    help="Add up to so many seconds to the time of each request.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of that.")
@click.option(
    "--prefill-tokens-per-s",
    type=float,
    default=10_000.0,
    show_default=True,
    help="For the modelled time to first token. An assumption.",
)
@click.option("--load-gb-per-s", type=float, default=10.0, show_default=True, help="Likewise: 10^9 bytes a second.")
@click.option(
    "--block-bytes",
    default="",
    help="Likewise: of a block. Default: 128KiB for each token of it; real: 64KiB, and multiples of 4KiB.",
)
@click.option("--plot", type=WrittenFile, help="Draw ratio over capacity into this .svg or .png.")
@JSON
@OUTPUT
@click.pass_obj
def replay(
    run_real: RunReal | None,
    trace: Path,
    capacities: Sequence[str],
    disk_blocks: int | None,
    policies: Sequence[str],
    mode: str,
    num_rows: int,
    restart_at: int,
    wait_written: bool,
    disk_path: str,
    format_name: str,
    block_tokens: int,
    time_unit: str | None,
    num_nodes: int | None,
    routing: str,
    tie_blocks: int,
    jitter_s: float,
    seed: int,
    prefill_tokens_per_s: float,
    load_gb_per_s: float,
    block_bytes: str,
    plot: Path | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Say which share of a trace's blocks a store would have had.

    TRACE is a file of requests, each with the ids of its prompt's blocks: in the Mooncake, Bailian or weka format, or a
    table time,obj_id. The store's own pool leases what is there of each prompt and stores the rest, with the trace's
    time as the clock; no bytes are moved. "bound" is what no policy can exceed. Times to first token are modelled.

    With --mode real, real stores on several nodes of a Ray of their own save and load blocks of bytes, and each loaded
    byte is compared. A row of the simulator stands beside each row. docs/replay.md explains every column.
    """
    from kvstore.replay.files import write_whole
    from kvstore.replay.formats import FORMATS, read_trace
    from kvstore.replay.model import TOKEN_BYTES, Rates, spread
    from kvstore.replay.plot import check_plot, draw
    from kvstore.replay.report import Plan, progress_bar, run_plan, show_table
    from kvstore.replay.traces import first_requests

    is_real = mode == "real"
    plan = Plan(
        _policies(policies, "lru" if is_real else "all"),
        _capacities(capacities),
        num_nodes if num_nodes is not None else 2 if is_real else 1,
        routing,
        tie_blocks,
        disk_blocks or 0 if is_real else disk_blocks,
        restart_at,
    )
    if format_name and format_name not in FORMATS:
        raise ConfigError(
            f"--format: wanted {', '.join(FORMATS)}, got {clip(format_name)}; leave it out to have it found"
        )
    if block_tokens < 0:
        raise InvalidRequest(
            f"--block-tokens: wanted 1 or more, got {block_tokens}; leave it out for that of the format"
        )
    if plot is not None:
        check_plot(plot)
    if num_rows < 0:
        raise InvalidRequest(f"--rows: wanted 0 or more, got {num_rows}; 0 takes all")
    wanted_bytes = parse_size("--block-bytes", block_bytes) if block_bytes else 0
    if is_real and plot is not None:
        raise InvalidRequest("--plot: wanted --mode simulate with it, got real; leave one of them out")
    if is_real:
        settings = _real_settings(plan, wanted_bytes if block_bytes else _REAL_BLOCK_BYTES, disk_path, wait_written)
    elif disk_path or wait_written:
        raise InvalidRequest("--disk-path, --wait-written: wanted --mode real with them, got simulate; add it")
    Rates(prefill_tokens_per_s, load_gb_per_s, wanted_bytes if block_bytes else 1)  # Refused before the file is read.
    whole = read_trace(trace, format_name, block_tokens, time_unit or "")
    found = spread(first_requests(whole, num_rows) if num_rows else whole, jitter_s, seed)
    if restart_at >= len(found.requests):
        raise InvalidRequest(
            f"--restart-at: wanted a number below that of the requests, {len(found.requests)}, got {restart_at}; lower "
            "it"
        )
    rates = Rates(prefill_tokens_per_s, load_gb_per_s, wanted_bytes or found.block_tokens * TOKEN_BYTES)
    num_replays = len(plan.policies) * len(plan.capacities) * (1 + is_real)
    with progress_bar(num_replays, len(found.requests), is_long=is_real) as begin:
        rows = run_plan(found, plan, rates, begin)
        if is_real:
            if run_real is None:
                raise ConfigError("--mode real: wanted to be called as `kvstore replay`, got a call without Ray; do so")
            say_line(f"starting a Ray of {plan.num_nodes} node(s) for real stores")
            pairs = zip(run_real(found, plan, settings, begin), rows, strict=True)
            rows = [row for real, same in pairs for row in ({"mode": mode, **real}, {"mode": "simulate", **same})]
    if not as_json:  # Before files are written, so that a full disk does not lose it.
        show_table(found, rows)
    if output is not None:
        about = {"mode": mode, "jitter_s": jitter_s, "seed": seed, "prefill_tokens_per_s": rates.prefill_tokens_per_s}
        about |= {"load_gb_per_s": rates.load_gb_per_s, "block_bytes": rates.block_bytes}
        about |= {"num_rows": num_rows, "wait_written": wait_written}
        write_whole(output, as_document({**provenance(), "trace": describe(found), **about, "rows": rows}))
    if plot is not None:
        write_whole(plot, draw(plot, found.name, rows))
    if as_json:
        click.echo(as_document(rows), nl=False)


def describe(trace: Trace) -> dict[str, Any]:
    """Return what a document says about a trace."""
    return {
        "name": trace.name,
        "format": trace.format_name,
        "num_requests": len(trace.requests),
        "num_references": trace.num_references,
        "num_blocks": trace.num_blocks,
        "block_tokens": trace.block_tokens,
    }


def _words(texts: Sequence[str]) -> list[str]:
    """Return the words of comma lists, each once, in order."""
    words = itertools.chain.from_iterable(text.split(",") for text in texts)
    return list(dict.fromkeys(word.strip() for word in words if word.strip()))


def _real_settings(plan: Plan, block_bytes: int, disk_path: str, wait_written: bool) -> RealSettings:
    from kvstore.replay.report import RealSettings
    from kvstore.replay.simulate import POOL_POLICIES

    if not set(plan.policies) <= set(POOL_POLICIES):
        raise ConfigError(
            f"--policy: wanted {' or '.join(POOL_POLICIES)} with --mode real, got {', '.join(plan.policies)}; a real "
            "store has no other"
        )
    if min(plan.capacities) < 2 or plan.disk_blocks == 1 or plan.num_nodes > _MOST_REAL_NODES:
        raise InvalidRequest(
            "--mode real: wanted 2 or more --blocks, no or 2 or more --disk-blocks, and up to "
            f"{_MOST_REAL_NODES} --nodes, got {min(plan.capacities)}, {plan.disk_blocks} and {plan.num_nodes}"
        )
    return RealSettings(block_bytes, disk_path and str(Path(disk_path).absolute()), wait_written)


def _policies(texts: Sequence[str], default: str) -> list[str]:
    from kvstore.replay.report import POLICIES

    # The name that `kvstore start --eviction` has for it.
    words = list(dict.fromkeys("default" if word == EVICTION_POLICIES[0] else word for word in _words(texts)))
    words = words or [default]
    for word in words:
        if word not in (*POLICIES, "all"):
            raise ConfigError(
                f"--policy: wanted {', '.join(POLICIES)} or all, got {clip(word)}; a comma list, or the option repeated"
            )
    return list(POLICIES) if "all" in words else words


def _capacities(texts: Sequence[str]) -> list[int]:
    words = _words(texts)
    for word in words or [""]:
        if not (word.isascii() and word.isdigit() and 1 <= int(word[:20]) <= MAX_SLOTS):
            raise InvalidRequest(
                f"--blocks: wanted numbers of blocks from 1 to {MAX_SLOTS}, got {clip(word)}; write them like 1000,5000"
            )
    return sorted({int(word) for word in words})


@click.group("trace", cls=Group, short_help="Make a trace for `kvstore replay`.")
def trace_group() -> None:
    """Make a trace of requests for `kvstore replay`."""


KINDS_HELP = """

    \b
    conversation     people who chat: long first prompts, few turns, minutes between
    tool-agent       60 sets of tools, some used much more often; short turns
    coding-agent     4 sets of tools; sessions of tens of turns that only grow
    long-documents   documents of 40 to 200 blocks, asked about 1 to 6 times
    scan             conversations, and from a sixth of the time on long prompts seen once
    loop             300 documents of 40 blocks, over and over in the same order
    mix              the first four at once
"""


@trace_group.command("make", short_help="Write a made trace in the Mooncake format.")
@click.argument("kind")
@click.option("--seconds", type=float, default=1800.0, show_default=True, help="Length of the trace.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed makes the same file.")
@click.option("--output", type=WrittenFile, help="File to write. Default: stdout.")
def make_trace(kind: str, seconds: float, seed: int, output: Path | None) -> None:
    """Write a trace of one KIND in the Mooncake format, blocks of 512 tokens.

    docs/replay.md has the statistics of each kind. The kinds:
    """
    from kvstore.replay.files import write_whole
    from kvstore.replay.kinds import as_mooncake, make_requests
    from kvstore.tools.own_output import drop_output

    text = as_mooncake(make_requests(kind, seconds, seed))
    if output is not None:
        write_whole(output, text)
        click.echo(f"{text.count(chr(10)):,} requests written to {output}", err=True)
        return
    try:
        click.echo(text, nl=False)
    except BrokenPipeError:
        raise  # The reader has enough, as with `| head`.
    except OSError as error:
        drop_output()
        raise ConfigError(
            f"wanted to write {len(text)} bytes to stdout, got {error.strerror}; free some space"
        ) from error


make_trace.help = (make_trace.help or "") + KINDS_HELP

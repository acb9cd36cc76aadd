"""Terminal output of the command line: a node's store, a finding, a table of figures, progress."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich import markup
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from kvstore.config import StoreConfig
from kvstore.tools.doctor import Check, Status, human_bytes

_BAR_CHARS = 50
_STATUS_CHARS, _NAME_CHARS = 6, 20
#: Slot states in the order of the bar: field of PoolStats, its sign without colour, its colour.
_STATES = (
    ("pinned", "█", "magenta"),
    ("writing", "▒", "yellow"),
    ("quarantined", "x", "red"),
    ("idle", "▓", "green"),
    ("free", "·", "bright_black"),
)
#: What the quotas of a tenant refused: the end of its name in the statistics, and words for a person.
_REFUSED = {
    "bytes": "blocks by max_bytes", "pins": "blocks by max_pinned_bytes", "handoffs": "hand-offs",
    "disk": "blocks by max_disk_bytes",
}  # fmt: skip
_COLOUR = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}


def printable(text: str) -> str:
    """Return text that others may have chosen with its control characters as Python writes them; lines stay lines.

    Sent to a terminal, they clear it, name its window, or write over what is there.
    """
    return "".join(sign if sign.isprintable() or sign == "\n" else ascii(sign)[1:-1] for sign in text)


def escape(text: str) -> str:
    """Return `printable` text for a console of rich, which takes nothing in it as markup."""
    return markup.escape(printable(text))


def show_status(stats: dict[str, Any], config: StoreConfig) -> None:
    """Print a store's settings and statistics; "without_store" has the ids of nodes that have no store."""
    out, nodes = Console(highlight=False, soft_wrap=True, emoji=False), stats["nodes"]
    known = sorted({*nodes, *stats["without_store"]})
    num_draining = sum(bool(node.get("draining")) for node in nodes.values())
    num_serving = sum("error" not in node for node in nodes.values()) - num_draining
    out.print(
        f"store [bold]{stats['name']}[/]: {num_serving} of {len(known)} nodes serve, "
        f"{f'{num_draining} draining, ' if num_draining else ''}{human_bytes(config.capacity_bytes)} each"
    )
    click.echo(f"settings: {config.chosen() or 'the defaults'}", color=True)  # As it is: rich changes tabs.
    for line in _directory_lines(stats.get("directory", [])):
        out.print(line)
    for node in known:
        out.print(f"\nnode [bold]{node}[/]")
        said = nodes.get(node, {"error": "no store"})
        if "error" in said and node in stats["starting"] and node not in stats["problems"]:
            said = {"starting": stats["starting"][node]}
        for label, text in _node_lines(said):
            out.print(f"  [bright_black]{label:<9}[/] {text}")
        if node in stats["problems"]:
            out.print(f"  [red]problem[/]   {escape(stats['problems'][node])}")
    if "supervisor" in stats["problems"]:
        out.print(f"\n[red]problem[/] supervisor: {escape(stats['problems']['supervisor'])}")


def _directory_lines(shards: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each shard of the directory."""
    for number, shard in enumerate(shards):
        what = f"directory, shard {number}" if len(shards) > 1 else "directory"
        if "error" in shard:
            yield f"{what}: [red]{escape(shard['error'])}[/]"
            continue
        line = (
            f"{what}: {shard['num_blocks']:,} blocks of {shard['num_nodes']} nodes in {human_bytes(shard['num_bytes'])}"
        )
        if shard["num_dropped"]:
            line += f"   [yellow]not noted, for lack of room: {shard['num_dropped']:,}[/]"
        yield line


def _node_lines(node: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of one node: a label and text with rich's markup."""
    if "error" in node:
        yield "error", f"[red]{escape(node['error'])}[/]"
        return
    if "starting" in node:
        yield "starting", f"[yellow]{escape(node['starting'])}[/]"
        return
    yield (
        "host",
        f"{escape(node['host'])}   epoch {node['epoch']}{'   [yellow]draining[/]' if node['draining'] else ''}",
    )
    pool, nixl, mover = node["pool"], node["nixl"], node["mover_pid"] or "[red]gone[/]"
    yield "processes", f"store {node['pid']}   mover {mover}"
    if node.get("mover_problem"):
        yield "", f"[red]no mover can begin, so blocks of other nodes are misses[/]: {escape(node['mover_problem'])}"
    if pool is None:
        yield "slots", f"{human_bytes(node['capacity_bytes'])}, not divided yet: no client has come"
    else:
        total = pool["num_slots"]
        yield "slots", f"{total:,} of {human_bytes(node['slot_bytes'])}"
        yield "", _bar(pool)
        shares = ((state, colour, pool[f"num_{state}"]) for state, _, colour in _STATES)
        yield "", "   ".join(f"[{colour}]{state}[/] {n:,} ({n / total:.0%})" for state, colour, n in shares)
        counts = [f"{what} {pool[f'num_{what}']:,}" for what in ("leases", "writes")]
        counts += [f"hand-offs {node['num_handoffs']:,}", f"blocks stored {pool['num_published']:,}"]
        counts += [f"evicted {pool['num_evicted']:,}"]
        yield "pool", "   ".join(counts)
    for name, tenant in node.get("tenants", {}).items():
        yield "tenant", _tenant_line(escape(name), tenant)
    if node.get("reclaim") is not None:
        yield "watermark", _loop_line(node["reclaim"])
    if node.get("disk") is not None:
        yield from _disk_lines(node["disk"])
    if nixl is not None:
        yield (
            "nixl",
            f"{human_bytes(nixl['num_bytes'])} in {nixl['num_reads']:,} READs, "
            f"{nixl['num_descriptors']:,} descriptors; {node['num_abandoned_reads']:,} abandoned",
        )


def _tenant_line(name: str, tenant: dict[str, int | None]) -> str:
    """Return the line of one tenant: what it has of its quotas, and what they refused."""
    shares = [tenant_share(tenant, "bytes"), "pinned " + tenant_share(tenant, "pinned_bytes")]
    if tenant["num_disk_bytes"] or tenant["max_disk_bytes"]:
        shares.append("disk " + tenant_share(tenant, "disk_bytes"))
    shares.append("hand-offs " + tenant_share(tenant, "handoffs"))
    line = f"{name}: {', '.join(shares)}, evicted {tenant['num_evicted']:,}"
    if tenant["num_evicted_by_quota"]:
        line += f", {tenant['num_evicted_by_quota']:,} by quota"
    said = tenant_refusals(tenant)
    return f"{line}   [yellow]refused: {said}[/]" if said else line


def tenant_refusals(tenant: dict[str, int | None]) -> str:
    """Return what the quotas of a tenant refused; "" for nothing."""
    refused = {words: tenant[f"num_refused_{what}"] for what, words in _REFUSED.items()}
    return ", ".join(f"{count:,} {words}" for words, count in refused.items() if count)


def tenant_share(tenant: dict[str, int | None], what: str) -> str:
    """Return what a tenant has of one quota, like "992 KiB of 1 MiB"; without the quota what it has.

    Args:
        tenant: of `stats()["tenants"]`.
        what: "bytes", "pinned_bytes", "disk_bytes" or "handoffs".
    """
    num, most = tenant[f"num_{what}"] or 0, tenant[f"max_{what}"]
    has, may = (human_bytes(each or 0) if what.endswith("bytes") else f"{each or 0:,}" for each in (num, most))
    return has if most is None else f"{has} of {may}"


def _loop_line(loop: dict[str, Any]) -> str:
    """Return the line of the loop that keeps slots free."""
    line = f"low {loop['low_watermark']:g}   high {loop['high_watermark']:g}   evicted {loop['num_evicted']:,}"
    if loop["num_failures"]:
        line += f"   [yellow]failures {loop['num_failures']:,}[/]"
    return line if loop["is_alive"] else f"{line}   [red]the loop has ended[/]"


def _disk_lines(disk: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a node's disk tier."""
    pool, back = disk.get("pool"), "   written back at eviction" if disk["disk_write"] == "back" else ""
    if pool is not None:
        held = pool["num_slots"] - pool["num_free"]
        yield "disk", f"{held:,} of {pool['num_slots']:,} blocks at {escape(disk['path'])}{back}"
        counts = [f"{what} {disk[f'num_{what}']:,}" for what in ("queued", "written", "read", "damaged")]
        yield "", "   ".join([*counts, f"restored {disk['num_restored']:,}"])
        if disk["dropped"]:
            yield "", "not written " + ", ".join(f"{why} {count:,}" for why, count in sorted(disk["dropped"].items()))
    elif not disk["reason"]:
        yield "disk", f"{escape(disk['path'])}, not divided yet: no client has come{back}"
        return
    if disk["is_off"]:
        yield "" if pool else "disk", f"[red]off[/]: {escape(disk['reason'] or 'the directory was not reached yet')}"
    elif disk["reason"]:
        yield "", f"[yellow]was off {disk['num_trips']:,} times[/], last: {escape(disk['reason'])}"
    if num_bytes := disk["num_other_bytes"]:
        yield "", f"{human_bytes(num_bytes)} in files of other slot sizes, kept until their room is needed"


def disk_cell(row: dict[str, Any]) -> str:
    """Return the text of one figure of `kvstore bench disk`."""
    share = f", {row['of_plain']:.2f} of plain" if "of_plain" in row else ""
    return f"{row['gb_per_s']:.2f} ({row['cpu_s_per_gb']:.2f}){share}"


def _bar(pool: dict[str, int]) -> str:
    """Return the bar of slots by state; each state with a slot has at least one character."""
    widths = {
        state: max(1, round(_BAR_CHARS * pool[f"num_{state}"] / pool["num_slots"])) if pool[f"num_{state}"] else 0
        for state, _, _ in _STATES
    }
    widest = max(widths, key=lambda state: widths[state])
    widths[widest] -= sum(widths.values()) - _BAR_CHARS
    return "".join(f"[{colour}]{sign * widths[state]}[/]" for state, sign, colour in _STATES)


def show_check(check: Check) -> None:
    """Print one finding of the doctor: status, name, what was found, and what to do below it."""
    console, colour = Console(highlight=False, soft_wrap=True), _COLOUR[check.status]
    blank = " " * (_STATUS_CHARS + _NAME_CHARS)
    # A file or a pipe gets one line each; only a terminal gets wrapped lines.
    width = max(40, console.width - len(blank)) if console.is_terminal else None
    head = f"[{colour}]{check.status.value:<{_STATUS_CHARS}}[/]{check.name:<{_NAME_CHARS}}"
    for line in _wrapped(check.found, width):
        console.print(f"{head}{escape(line)}")
        head = blank
    hint = colour if check.status is not Status.OK else "bright_black"
    for number, line in enumerate(_wrapped(check.fix, width and width - 2)):
        console.print(f"{blank}[{hint}]{' ' if number else '→'} {escape(line)}[/]")


def show_summary(checks: list[Check]) -> None:
    """Print how many findings are of each status."""
    counts = [
        f"[{colour}]{sum(check.status is status for check in checks)} {status.value}[/]"
        for status, colour in _COLOUR.items()
    ]
    Console(highlight=False).print(f"\n{', '.join(counts)}")


def _wrapped(text: str, width: int | None) -> list[str]:
    if width is None:
        return [text] if text else []
    return textwrap.wrap(text, width, break_on_hyphens=False)


def show_rows(
    rows: list[dict[str, Any]], keys: tuple[str, ...], cell: Callable[[dict[str, Any]], str], unit: str
) -> None:
    """Print figures as a table: a line for each combination of `keys`, a column for each "way".

    Args:
        rows: all with `keys` and "way".
        keys: fields that identify a line; numbers under a name that ends in "_bytes" are sizes.
        cell: returns the text of one figure.
        unit: unit of the figures; the title.
    """
    ways = list(dict.fromkeys(row["way"] for row in rows))
    table = Table(title=unit, title_justify="left")
    for heading in (*keys, *ways):
        table.add_column(heading, justify="left" if isinstance(rows[0].get(heading), str) else "right")
    for group in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        found = {row["way"]: cell(row) for row in rows if tuple(row[key] for key in keys) == group}
        shown = [_shown(key, value) for key, value in zip(keys, group, strict=True)]
        table.add_row(*shown, *(found.get(way, "") for way in ways))
    Console().print(table)


def _shown(key: str, value: str | int) -> str:
    if isinstance(value, str):
        return value
    return human_bytes(value) if key.endswith("_bytes") else f"{value:,}"


def say_line(text: str) -> None:
    """Print a line on stderr; where nobody reads it any more it is lost."""
    # Not with rich: it ends the process where the pipe is broken.
    with contextlib.suppress(OSError, ValueError):
        click.echo(text, err=True)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that reports progress on stderr: with a spinner, or as lines without a terminal.

    Where nobody reads the lines any more, as after `2>&1 | head`, they are lost and the work goes on.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield say_line
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as spinner:
        task = spinner.add_task("", total=None)
        yield lambda text: spinner.update(task, description=escape(text))

"""Show the answers of `kvstore inspect` as tables: a line for each thing that a node has.

They go to stdout, or to a `console` that is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from kvstore.blocks.chain import BlockHashes
from kvstore.tools.doctor import human_bytes
from kvstore.tools.inspection.finding import Answers, absent, is_error
from kvstore.tools.terminal import escape, tenant_refusals, tenant_share

_NODE_DIGITS = _NAME_DIGITS = 12
_MOST_OWNER_CHARS = 28
#: (least seconds, seconds of the unit, unit): the first that fits.
_UNITS = ((172_800, 86_400, "d"), (7200, 3600, "h"), (120, 60, "min"))
Row = tuple[str, ...]
_SIZES = ("blocks>", "bytes>", "age>", "left>")


def age(seconds: float | None) -> str:
    """Return a time for people; "-" for none."""
    if seconds is None:
        return "-"
    for least_s, unit_s, unit in _UNITS:
        if seconds >= least_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _show(console: Console | None, title: str, columns: tuple[str, ...], rows: list[Row]) -> None:
    console = console or Console(highlight=False)
    if not rows:
        console.print(f"{title}: none", soft_wrap=True)
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        name, _, right = column.partition(">")
        table.add_column(name, justify="right" if right or column.endswith(">") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    if not console.is_terminal:  # A file or a pipe gets whole lines.
        console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    console.print(table)


def _without_empty(title: str, columns: tuple[str, ...], rows: list[Row]) -> tuple[tuple[str, ...], list[Row]]:
    """Leave out the column of a title in which no row says anything."""
    at = columns.index(title)
    if any(row[at].strip("-") for row in rows):
        return columns, rows
    return columns[:at] + columns[at + 1 :], [row[:at] + row[at + 1 :] for row in rows]


def _answered(nodes: Answers) -> Iterator[tuple[str, Any]]:
    return ((node[:_NODE_DIGITS], each) for node, each in sorted(nodes.items()) if not is_error(each))


def show_silent(nodes: Answers) -> None:
    """Say which nodes gave no answer, and why."""
    console = Console(highlight=False, soft_wrap=True)
    for node, each in sorted(nodes.items()):
        if is_error(each):
            console.print(f"[red]node {node[:_NODE_DIGITS]}[/]: {escape(each['error'])}")


def _say_more(console: Console | None, num_shown: int, num_all: int, what: str) -> None:
    if num_all > num_shown:
        (console or Console(highlight=False)).print(f"{num_all - num_shown:,} more {what}; --limit shows more")


def show_namespaces(name: str, nodes: Answers, *, has_details: bool, console: Console | None = None) -> None:
    """Show what namespaces have on each node and tier."""
    columns = ("namespace", "version>", "node", "tier", "blocks>", "bytes>", "pinned>", "being written>")
    more = ("chains>", "low>", "high>", "last use>") if has_details else ()
    rows, num_shown, num_all = [], 0, 0
    for node, each in _answered(nodes):
        num_shown, num_all = num_shown + len(each["namespaces"]), num_all + each["num_all"]
        for found in each["namespaces"]:
            tiers = {tier: counts for tier, counts in found["tiers"].items() if any(counts.values())}
            for tier, counts in (tiers or {"memory": found["tiers"]["memory"]}).items():
                row: Row = (
                    found["namespace"][:_NAME_DIGITS], f"{found['version']:,}", node, tier,
                    f"{counts['num_blocks']:,}", human_bytes(counts["num_bytes"]), f"{counts['num_pinned']:,}",
                    f"{counts['num_writing']:,}",
                )  # fmt: skip
                if has_details:
                    row += tuple(f"{counts.get(key, 0):,}" for key in ("num_chains", "num_low", "num_high"))
                    row += (_ago(counts.get("last_use_age_s")),)
                rows.append(row)
    _show(console, f"namespaces of store {escape(name)}", columns + more, sorted(rows))
    _say_more(console, num_shown, num_all, "namespaces")
    for node, each in _answered(nodes):
        held = [f"{number:,} in {tier}" for tier, number in each["num_cleared"].items() if number]
        if held:
            (console or Console(highlight=False)).print(
                f"node {node}: cleared blocks that readers still hold: {', '.join(held)}"
            )


def _ago(seconds: float | None) -> str:
    return "not known" if seconds is None else f"{age(seconds)} ago"


def show_chain(chain: BlockHashes, nodes: Answers, console: Console | None = None, *, by_tokens: bool = False) -> None:
    """Show which node has which run of a chain; where nothing is found `by_tokens`, also what may be wrong."""
    columns = ("blocks>", "node", "tier", "state", "readers>", "hard>", "soft>", "priority", "last use>")
    found = [(run["start"], node, run) for node, each in _answered(nodes) for run in each["runs"]]
    rows: list[Row] = [
        (
            _numbers(start, start + run["num_blocks"]), node, run["tier"],
            "stored" if run["is_written"] else "[yellow]being written[/]",
            *(f"{run[key]:,}" for key in ("num_readers", "num_hard", "num_soft")), run["priority"],
            _ago(run["last_use_age_s"]),
        )
        for start, node, run in sorted(found, key=lambda each: (each[0], each[1], each[2]["tier"]))
    ]  # fmt: skip
    title = f"{len(chain):,} blocks of namespace {chain.namespace.hex()[:_NAME_DIGITS]}, from block {chain.start:,} on"
    _show(console, title, columns, rows)
    _say_more(console, len(rows), sum(each["num_all"] for _, each in _answered(nodes)), "runs")
    if missing := absent(nodes, chain):
        text = ", ".join(_numbers(*run) for run in missing[:10]) + (", ..." if len(missing) > 10 else "")
        (console or Console(highlight=False)).print(f"on no node that answered, or not shown: blocks {text}")
    if by_tokens and not rows:
        (console or Console(highlight=False, soft_wrap=True)).print(
            "The hashes are right only with the --block-size of the namespace, and for requests without adapters and "
            "media: with another one no block can be found."
        )


def _numbers(start: int, end: int) -> str:
    return f"{start}" if end == start + 1 else f"{start}-{end - 1}"


def show_leases(name: str, nodes: Answers, console: Console | None = None) -> None:
    """Show leases and pins, and what a single one holds."""
    columns = (
        "id>",
        "node",
        "kind",
        "owner",
        "process",
        "tenant",
        "namespace",
        "blocks>",
        "bytes>",
        "age>",
        "left>",
        "ends with",
    )
    rows, runs = list[Row](), list[Row]()
    for node, each in _answered(nodes):
        for lease in each["leases"]:
            rows.append(
                (
                    str(lease["id"]), node, lease["kind"], escape(lease["owner"][:_MOST_OWNER_CHARS]), _place(lease),
                    escape(lease["tenant"]) or "-", _short(lease["namespace"]), f"{lease['num_blocks']:,}",
                    human_bytes(lease["num_bytes"]), age(lease["age_s"]), age(lease["left_s"]),
                    ", ".join(lease["ends_with"]),
                )
            )  # fmt: skip
        for run in each.get("runs", ()):
            blocks = _numbers(run["start"], run["start"] + run["num_blocks"])
            is_here = run["namespace"] is not None
            runs.append(
                (node, _short(run["namespace"]), blocks if is_here else f"{run['num_blocks']:,} gone", run["priority"])
            )
    _show(console, f"leases and pins of store {escape(name)}", *_without_empty("tenant", columns, rows))
    _say_more(console, len(rows), sum(each["num_all"] for _, each in _answered(nodes)), "leases and pins")
    if runs:
        _show(console, "what it holds", ("node", "namespace", "blocks>", "priority"), runs)
        _say_more(console, len(runs), sum(each.get("num_all_runs", 0) for _, each in _answered(nodes)), "runs")


def _place(row: dict[str, Any]) -> str:
    return f"pid {row['pid']}" if row["pid"] else escape(row.get("host", "")) or "-"


def _short(digest: str | None) -> str:
    return "-" if digest is None else digest[:_NAME_DIGITS]


def show_handoffs(name: str, nodes: Answers, console: Console | None = None) -> None:
    """Show tickets, fetches from other nodes, and readers that came before the blocks."""
    columns = ("ticket", "node", "what", "owner", "process", "tenant", "where", *_SIZES, "waits for")
    rows = list[Row]()
    for node, each in _answered(nodes):
        for ticket in each["tickets"]:
            waits_for = ticket["waits_for"] + (f", then gone ({ticket['void']})" if ticket["void"] else "")
            if ticket["num_readers"]:
                waits_for += f"; {ticket['num_readers']} reader(s) wait"
            rows.append(_handoff_row(ticket, node, "published", ticket["place"], waits_for))
        for fetch in each["fetches"]:
            source = f"from {fetch['from_node'][:_NODE_DIGITS]}"
            rows.append(_handoff_row(fetch, node, "fetched", source, fetch["waits_for"]))
        for early in each["early"]:
            readers = f"its publisher; {early['num_readers']} reader(s) wait"
            rows.append((early["ticket"], node, "early", *"--------", readers))
    _show(console, f"hand-offs of store {escape(name)}", *_without_empty("tenant", columns, rows))
    num_all = sum(each[f"num_{what}"] for _, each in _answered(nodes) for what in ("tickets", "fetches", "early"))
    _say_more(console, len(rows), num_all, "hand-offs")


def show_tenants(name: str, nodes: Answers, console: Console | None = None) -> None:
    """Show what tenants have of their quotas, and what these refused."""
    columns = ("tenant", "node", "memory>", "pinned>", "disk>", "hand-offs>", "evicted>", "by quota>", "refused")
    rows: list[Row] = [
        (
            escape(tenant), node,
            *(tenant_share(has, what) for what in ("bytes", "pinned_bytes", "disk_bytes", "handoffs")),
            f"{has['num_evicted']:,}", f"{has['num_evicted_by_quota']:,}", tenant_refusals(has) or "-",
        )
        for node, each in _answered(nodes)
        for tenant, has in each["tenants"].items()
    ]  # fmt: skip
    _show(console, f"tenants of store {escape(name)}", columns, sorted(rows))


def _handoff_row(row: dict[str, Any], node: str, what: str, where: str, waits_for: str) -> Row:
    owner = escape(row["owner"][:_MOST_OWNER_CHARS])
    sizes = f"{row['num_blocks']:,}", human_bytes(row["num_bytes"]), age(row["age_s"]), age(row["left_s"])
    tenant = escape(row["tenant"]) or "-"
    return row["ticket"], node, what, owner, _place(row), tenant, escape(where), *sizes, escape(waits_for)

"""What the nodes of a store do now: rates between two statistics, as rows and as a table; and `kvstore top`."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from kvstore.tools.commands import ADDRESS, JSON, NAME, Command, Seconds
from kvstore.tools.terminal import escape, tenant_share

#: Of blocks that loads asked for; the rest were missed.
_TIERS = ("memory", "disk", "peer")
_IN, _OUT = ("save", "peer", "disk", "handoff"), ("load", "peer", "disk", "handoff")
_COLUMNS = (
    ("node", ""), ("slots", "used, pinned"), ("hits of loads", "memory disk peer"),
    ("GB/s in", "save peer disk handoff"), ("GB/s out", "load peer disk handoff"), ("leases, pins", "oldest"),
    ("queues", "loads threads disk"), ("evicted/s", ""),
)  # fmt: skip
#: Of tenants: heading of a share, and what it is of; then of the rates. They are narrow, as names are shown whole.
_SHARES = {"memory": "bytes", "pinned": "pinned_bytes", "disk": "disk_bytes", "hand-\noffs": "handoffs"}
_TENANT_RATES = {"evicted\n/s": "evicted_per_s", "by\nquota/s": "by_quota_per_s"}
_MOST_NAME_CHARS = 40
#: More than any table of `top` needs.
_WIDEST = 1000


class _HasStats(Protocol):
    def stats(self) -> dict[str, Any]: ...


def rows_of(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each node did between two answers of `Store.stats`.

    Returns:
        A row for each node of the later answer, in the order of their ids: {"node", "error"}, or {"node", "seconds",
        "num_slots", "num_used", "num_pinned", "hit_share", "in_gb_per_s", "out_gb_per_s", "pins", "oldest_pin_s",
        "queues", "num_handoffs", "evicted_per_s", "tenants", "draining"}. "hit_share" is by tier, and None when no load
        asked for blocks. "tenants" has what `Store.stats` says of each, "evicted_per_s", and "by_quota_per_s": those
        that went for its own new blocks. A store that began in between is compared with its beginning; "seconds" is
        None, and so are its rates.
    """
    return [_row(node, before["nodes"].get(node, {}), now) for node, now in sorted(after["nodes"].items())]


def _row(node: str, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    if "error" in now:
        return {"node": node, "error": now["error"]}
    is_same = before.get("epoch") == now["epoch"]
    seconds = now["now_s"] - before["now_s"] if is_same else 0.0

    def growth(*keys: str) -> float:
        found, earlier = _at(now, keys), _at(before, keys) if is_same else 0
        return max(found - earlier, 0)

    def gb_per_s(part: str, paths: tuple[str, ...]) -> dict[str, float | None]:
        return {path: _share(growth("traffic", part, path) / 1e9, seconds) for path in paths}

    hits = {tier: growth("traffic", "hit_blocks", tier) for tier in _TIERS}
    reasons = now["traffic"]["miss_blocks"]["load"]
    num_asked = sum(hits.values()) + sum(growth("traffic", "miss_blocks", "load", reason) for reason in reasons)
    pool, disk = now["pool"] or {}, now["disk"] or {}
    return {
        "node": node,
        "seconds": round(seconds, 3) or None,
        "draining": now["draining"],
        "num_slots": pool.get("num_slots", 0),
        "num_used": pool.get("num_slots", 0) - pool.get("num_free", 0),
        "num_pinned": pool.get("num_pinned", 0),
        "hit_share": {tier: hits[tier] / num_asked for tier in _TIERS} if num_asked else None,
        "in_gb_per_s": gb_per_s("in_bytes", _IN),
        "out_gb_per_s": gb_per_s("out_bytes", _OUT),
        "pins": {kind: pins["num"] for kind, pins in now["pins"].items()},
        "oldest_pin_s": max(pins["oldest_s"] for pins in now["pins"].values()),
        "queues": {**now["queues"], "disk": disk.get("num_unwritten", 0)},
        "num_handoffs": now["num_handoffs"],
        "evicted_per_s": _share(growth("pool", "num_evicted"), seconds),
        "tenants": {
            name: {
                **tenant,
                "evicted_per_s": _share(growth("tenants", name, "num_evicted"), seconds),
                "by_quota_per_s": _share(growth("tenants", name, "num_evicted_by_quota"), seconds),
            }
            for name, tenant in now.get("tenants", {}).items()
        },
    }


def _at(stats: dict[str, Any], keys: tuple[str, ...]) -> float:
    found: Any = stats
    for key in keys:
        found = (found or {}).get(key, 0)
    return float(found or 0)


def _share(value: float, of: float) -> float | None:
    return value / of if of > 0 else None


def watch(
    find: Callable[[], _HasStats],
    interval_s: float,
    *,
    is_once: bool,
    as_json: bool,
    wait: Callable[[float], object] = time.sleep,
) -> None:
    """Show every interval until Ctrl-C, which ends it without a word.

    Args:
        find: returns the store.
        interval_s: between two questions.
        is_once: end after the first interval.
        as_json: print one JSON object an interval, {"name", "nodes"}, in place of tables.
        wait: waits so many seconds.
    """
    with contextlib.suppress(KeyboardInterrupt), _shown(as_json) as show:
        store = find()
        before = store.stats()
        while True:
            wait(interval_s)
            after = store.stats()
            show(after["name"], rows_of(before, after))
            if is_once:
                return
            before = after


def top_command(connect: Callable[[str, str | None], Any]) -> click.Command:
    """Return the command; `connect` returns the handle of a store, by its name and address."""

    @click.command("top", cls=Command, short_help="Watch what every node does.")
    @NAME
    @ADDRESS
    @JSON
    @click.option(
        "--interval",
        "interval_s",
        type=Seconds(0.1, 3600.0),
        default=2.0,
        show_default=True,
        help="Seconds between two looks.",
    )
    @click.option("--once", is_flag=True, help="Show one interval and end.")
    def top(name: str, address: str | None, as_json: bool, interval_s: float, once: bool) -> None:
        """Watch what every node does: use, hits, GB/s by way, pins, queues, evictions; Ctrl-C ends it.

        Shares and rates are those of the last interval. With --json each interval is one object on a line of its own.
        """
        watch(lambda: connect(name, address), interval_s, is_once=once, as_json=as_json)

    return top


@contextlib.contextmanager
def _shown(as_json: bool) -> Iterator[Callable[[str, list[dict[str, Any]]], None]]:
    """Yield what shows the rows of a store: as JSON, as tables one below the other, or in place in a terminal."""
    console = Console(highlight=False)
    if as_json:
        yield lambda name, rows: click.echo(json.dumps({"name": name, "nodes": rows}))
    elif not console.is_terminal:
        yield lambda name, rows: console.print(table_of(name, rows, console))
    else:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda name, rows: live.update(table_of(name, rows, console), refresh=True)


def table_of(name: str, rows: list[dict[str, Any]], console: Console) -> RenderableType:
    """Return the table of one interval: a line for each node, or several if the console is too narrow for that.

    Below it is one of the tenants, where the store has some.
    """
    table = Table(title=f"store {name}", title_justify="left")
    for heading, below in _COLUMNS:
        table.add_column(f"{heading}\n[bright_black]{below}[/]" if below else heading, no_wrap=heading != "node")
    for row in rows:
        table.add_row(*_cells(row))
    wanted = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    nodes = table if wanted <= console.width else _narrow(name, rows)
    return Group(nodes, _tenant_table(rows)) if any(row.get("tenants") for row in rows) else nodes


def _tenant_table(rows: list[dict[str, Any]]) -> Table:
    is_one = len(rows) == 1
    found = [(row["node"], name, tenant) for row in rows for name, tenant in row.get("tenants", {}).items()]
    shares = dict(_SHARES)
    if not any(tenant["num_disk_bytes"] or tenant["max_disk_bytes"] for _, _, tenant in found):
        del shares["disk"]
    table = Table(title="tenants", title_justify="left")
    if not is_one:
        table.add_column("node")
    # Whole, because two names may begin alike.
    longest = max(len(name) for _, name, _ in found)
    table.add_column("tenant", no_wrap=True, min_width=min(longest, _MOST_NAME_CHARS))
    for heading in (*shares, *_TENANT_RATES):
        table.add_column(heading, justify="right")
    for node, name, tenant in found:
        table.add_row(
            *(() if is_one else (node[:12],)),
            escape(name),
            *(tenant_share(tenant, what) for what in shares.values()),
            *map(_rate, (tenant[key] for key in _TENANT_RATES.values())),
        )
    return table


def _rate(per_s: float | None) -> str:
    return "-" if per_s is None else f"{per_s:,.0f}"


def _narrow(name: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"store {name}", title_justify="left", show_header=False)
    for row in rows:
        for (heading, below), cell in zip(_COLUMNS, _cells(row), strict=False):
            table.add_row(heading, cell, f"[bright_black]{below}[/]")
        table.add_section()
    return table


def _cells(row: dict[str, Any]) -> Iterator[str]:
    if "error" in row:
        yield f"{row['node'][:12]}\n[red]{escape(row['error'][:60])}[/]"
        return
    yield row["node"][:12] + ("\n[yellow]draining[/]" if row["draining"] else "")
    total = row["num_slots"]
    yield f"{row['num_used'] / total:.0%}, {row['num_pinned'] / total:.0%}" if total else "none yet"
    hits = row["hit_share"]
    yield " ".join(f"{hits[tier]:.0%}" for tier in _TIERS) if hits is not None else "-"
    for way in ("in_gb_per_s", "out_gb_per_s"):
        yield " ".join("-" if value is None else f"{value:.2f}" for value in row[way].values())
    pins = "/".join(str(count) for count in row["pins"].values())
    yield f"{pins}, {row['oldest_pin_s']:.0f} s" if any(row["pins"].values()) else "none"
    yield " ".join(str(row["queues"][queue]) for queue in ("loads", "threads", "disk"))
    yield _rate(row["evicted_per_s"])

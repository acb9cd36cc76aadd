"""Run the replays that a caller asked for, and show their figures."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvstore.bounds import MAX_SLOTS, clip
from kvstore.disk.records import PAGE_BYTES
from kvstore.errors import InvalidRequest
from kvstore.replay.bound import replay_bound
from kvstore.replay.model import Rates, first_token_s, percentile
from kvstore.replay.simulate import POOL_POLICIES, ROUTINGS, Nodes, replay_pools, replay_tiers
from kvstore.replay.traces import Found, Outcome, TierOutcome, Trace
from kvstore.runtime import clock
from kvstore.tools.terminal import say_line

POLICIES = (*POOL_POLICIES, "bound")
MAX_NODES = 1024
_FILE_CHARS = 150
#: The bar moves once in so many requests: it would be seen in the microseconds of a reference.
_TICKS_SHOWN = 64
_LINE_EVERY_S = 5.0
Rows = list[dict[str, Any]]
#: Of the table: title, name in a row, and its form. A column that no row has is left out.
_COLUMNS = (
    ("mode", "mode", "{}"),
    ("policy", "policy", "{}"),
    ("blocks", "capacity_blocks", "{:,}"),
    ("on disk", "disk_blocks", "{:,}"),
    ("hit ratio", "prefix_hit_ratio", "{:.4f}"),
    ("hits", "num_hits", "{:,}"),
    ("memory", "num_hits_memory", "{:,}"),
    ("disk", "num_hits_disk", "{:,}"),
    ("peer", "num_hits_peer", "{:,}"),
    ("evictions", "num_evictions", "{:,}"),
    ("us/ref", "us_per_reference", "{:.1f}"),
    ("p50 s", "modelled_ttft_p50_s", "{:.3f}"),
    ("p99 s", "modelled_ttft_p99_s", "{:.3f}"),
    ("load p50 s", "load_p50_s", "{:.4f}"),
    ("load p99 s", "load_p99_s", "{:.4f}"),
    ("largest node", "largest_node_share", "{:.0%}"),
)
#: Left out where a real replay has a row: they say nothing about it.
_SIMULATED = {"us_per_reference", "modelled_ttft_p50_s", "modelled_ttft_p99_s", "largest_node_share"}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to replay: each policy at each capacity, which is that of each node.

    Args:
        policies: of `POLICIES`.
        capacities: in blocks.
        num_nodes: how many pools.
        routing: one of `ROUTINGS`.
        tie_blocks: prefixes that are shorter than the longest by at most so many blocks count as equal.
        disk_blocks: capacity of each node's disk, 0 for none; the nodes give each other blocks. None for caches that do
            not know of each other.
        restart_at: number of requests before all nodes begin again with what is on their disks; 0 for never.
    """

    policies: Sequence[str]
    capacities: Sequence[int]
    num_nodes: int = 1
    routing: str = "round-robin"
    tie_blocks: int = 0
    disk_blocks: int | None = None
    restart_at: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= MAX_NODES:
            raise InvalidRequest(f"--nodes: wanted 1 to {MAX_NODES}, got {self.num_nodes}; leave it out for one")
        if self.routing not in ROUTINGS:
            raise InvalidRequest(f"--routing: wanted {' or '.join(ROUTINGS)}, got {clip(self.routing)}")
        if self.tie_blocks < 0:
            raise InvalidRequest(f"--tie-blocks: wanted 0 or more, got {self.tie_blocks}; leave it out for 0")
        if not 0 <= (self.disk_blocks or 0) <= MAX_SLOTS:
            raise InvalidRequest(
                f"--disk-blocks: wanted 0 to {MAX_SLOTS}, got {self.disk_blocks}; 0 is memory alone, leave it out for "
                "caches that do not know of each other"
            )
        if self.restart_at < 0 or (self.restart_at and self.disk_blocks is None):
            raise InvalidRequest(
                f"--restart-at: wanted a number of requests, and --disk-blocks with it, got {self.restart_at} and "
                f"{self.disk_blocks}; give both, or leave it out for no restart"
            )

    @property
    def nodes(self) -> Nodes:
        """How many nodes, and how a request finds its own."""
        return Nodes(self.num_nodes, self.routing, self.tie_blocks)


@dataclass(frozen=True, slots=True)
class RealSettings:
    """What a replay with real stores needs besides a plan.

    Args:
        block_bytes: of each block.
        disk_path: folder of the disk tiers; "" for one that is made, and removed at the end.
        is_settled: whether each request waits until the blocks of the ones before are on the disks.
    """

    block_bytes: int
    disk_path: str = ""
    is_settled: bool = False

    def __post_init__(self) -> None:
        if self.block_bytes < 1 or self.block_bytes % PAGE_BYTES:
            raise InvalidRequest(
                f"--block-bytes: wanted a multiple of {PAGE_BYTES}, got {self.block_bytes}; real disks keep whole pages"
            )


#: Replays a trace with real stores: trace, plan, settings, and `begin` of `run_plan`; returns a row for each capacity.
RunReal = Callable[[Trace, Plan, RealSettings, Callable[[str], Callable[[], None]]], "Rows"]


def run_plan(trace: Trace, plan: Plan, rates: Rates, begin: Callable[[str], Callable[[], None]]) -> Rows:
    """Replay the trace once for each policy and capacity; return a row for each.

    Args:
        trace: the requests.
        plan: policies, capacities, nodes.
        rates: of the modelled time to first token.
        begin: called with the name of each replay; what it returns is called after each request.
    """
    return [
        _row(trace, plan, rates, policy, capacity, begin(f"{policy}, {capacity:,} blocks"))
        for capacity in plan.capacities
        for policy in plan.policies
    ]


def _row(
    trace: Trace, plan: Plan, rates: Rates, policy: str, capacity: int, tick: Callable[[], None]
) -> dict[str, Any]:
    # Of this thread alone: neither the bar nor other programs count.
    began_s = time.thread_time()
    outcome = _outcome(trace, plan, policy, capacity, tick)
    took_s = time.thread_time() - began_s
    times_s = first_token_s(trace, outcome.hits, rates)
    return {
        **common_columns(trace, plan, policy, capacity, outcome),
        "us_per_reference": round(1e6 * took_s / trace.num_references, 2),
        "modelled_ttft_p50_s": round(percentile(times_s, 50), 4),
        "modelled_ttft_p99_s": round(percentile(times_s, 99), 4),
        **node_columns(plan, outcome),
    }


def common_columns(trace: Trace, plan: Plan, policy: str, capacity: int, outcome: Outcome) -> dict[str, Any]:
    """Return the columns that a simulated and a real replay have."""
    row: dict[str, Any] = {
        "policy": policy,
        "capacity_blocks": capacity,
        "prefix_hit_ratio": round(outcome.num_hits / trace.num_references, 4),
        "num_references": trace.num_references,
        "num_hits": outcome.num_hits,
        "num_evictions": outcome.num_evictions,
    }
    return row if outcome.tiers is None else row | _tier_columns(plan, outcome.tiers)


def _tier_columns(plan: Plan, tiers: TierOutcome) -> dict[str, Any]:
    row: dict[str, Any] = {"disk_blocks": plan.disk_blocks, **_hits_by_tier(tiers.found, "")}
    if plan.restart_at:
        row |= {"restart_at": plan.restart_at, **_hits_by_tier(tiers.found[plan.restart_at :], "_after_restart")}
    return row | {
        "num_disk_evictions": tiers.num_disk_evictions,
        "num_disk_written": tiers.num_disk_written,
        "num_disk_read": tiers.num_disk_read,
        "dropped": tiers.dropped,
    }


def _hits_by_tier(found: Sequence[Found], after: str) -> dict[str, int]:
    return {
        f"num_hits_memory{after}": sum(each.memory for each in found),
        f"num_hits_disk{after}": sum(each.disk for each in found),
        f"num_hits_peer{after}": sum(each.peer for each in found),
    }


def node_columns(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """Return the columns of a row about several nodes."""
    if plan.num_nodes == 1:
        return {}
    given = outcome.node_references
    return {
        "num_nodes": plan.num_nodes, "routing": plan.routing, "tie_blocks": plan.tie_blocks,
        "largest_node_share": round(max(given) / sum(given), 4) if given else None,
    }  # fmt: skip


def _outcome(trace: Trace, plan: Plan, policy: str, capacity: int, tick: Callable[[], None]) -> Outcome:
    if policy == "bound":
        # One cache with the blocks of all nodes: whatever routes requests to several, this one could hold the same.
        return replay_bound(trace.requests, (capacity + (plan.disk_blocks or 0)) * plan.num_nodes, tick)
    if plan.disk_blocks is None:
        return replay_pools(trace, policy, capacity, tick, plan.nodes)
    return replay_tiers(trace, policy, capacity, plan.disk_blocks, tick, plan.nodes, plan.restart_at)


def show_table(trace: Trace, rows: Rows) -> None:
    """Print a trace and the rows of its replays."""
    out, requests = Console(highlight=False, soft_wrap=True), trace.requests
    out.print(
        f"{trace.name} ({trace.format_name}): {len(requests):,} requests in "
        f"{requests[-1].time_s - requests[0].time_s:,.0f} s, {trace.num_references:,} references to "
        f"{trace.num_blocks:,} blocks of {trace.block_tokens} tokens",
        markup=False,
    )
    table = Table(box=SIMPLE)
    hidden = _SIMULATED if "mode" in rows[0] else set()
    columns = [column for column in _COLUMNS if any(column[1] in row for row in rows) and column[1] not in hidden]
    for title, name, _ in columns:
        table.add_column(title, justify="left" if name in ("mode", "policy") else "right", no_wrap=True)
    for row in rows:
        cells = [(form, row.get(name)) for _, name, form in columns]
        table.add_row(*("" if value is None else form.format(value) for form, value in cells))
    # A file or a pipe has no width; its lines are not cut.
    Console(width=None if out.is_terminal else _FILE_CHARS).print(table)
    said = "p50 and p99: time to first token, modelled from a prefill rate and a load rate. No bytes were moved."
    if "mode" in rows[0]:
        num_verified = sum(row.get("num_verified", 0) for row in rows)
        said = f"{num_verified:,} loaded blocks were compared, byte for byte: none was wrong."
    out.print(said, markup=False)


@contextlib.contextmanager
def progress_bar(
    num_replays: int, num_requests: int, *, is_long: bool = False
) -> Iterator[Callable[[str], Callable[[], None]]]:
    """Yield the `begin` of `run_plan`, which shows a bar on stderr; where that is no terminal nothing, or lines.

    Args:
        num_replays: how often `begin` is called.
        num_requests: of each replay.
        is_long: whether each request takes so long that every one is shown, and lines without a terminal.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield (lambda name: _lines(name, num_requests)) if is_long else (lambda name: _nothing)
        return
    shown = 1 if is_long else _TICKS_SHOWN
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, refresh_per_second=4) as bar:
        task = bar.add_task("", total=num_replays * num_requests)

        def begin(name: str) -> Callable[[], None]:
            bar.update(task, description=name)
            ticks = itertools.count(1)

            def tick() -> None:
                if not next(ticks) % shown:
                    bar.advance(task, shown)

            return tick

        yield begin


def _nothing() -> None:
    """Show nothing."""


def _lines(name: str, num_requests: int) -> Callable[[], None]:
    """Say on stderr that a replay begins, and return what says now and then how far it is."""
    say_line(f"{name}: 0 of {num_requests:,} requests")
    num_done, said_s = 0, clock.now_s()

    def tick() -> None:
        nonlocal num_done, said_s
        num_done += 1
        if clock.now_s() - said_s >= _LINE_EVERY_S or num_done == num_requests:
            say_line(f"{name}: {num_done:,} of {num_requests:,} requests")
            said_s = clock.now_s()

    return tick

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
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvstore.bounds import clip
from kvstore.errors import InvalidRequest
from kvstore.replay.bound import replay_bound
from kvstore.replay.model import Rates, first_token_s, percentile
from kvstore.replay.simulate import POOL_POLICIES, ROUTINGS, Nodes, replay_pools
from kvstore.replay.traces import Outcome, Trace

POLICIES = (*POOL_POLICIES, "bound")
MAX_NODES = 1024
_FILE_CHARS = 120
#: The bar moves once in so many requests: it would be seen in the microseconds of a reference.
_TICKS_SHOWN = 64
Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to replay: each policy at each capacity, which is that of each node.

    Args:
        policies: of `POLICIES`.
        capacities: in blocks.
        num_nodes: how many pools.
        routing: one of `ROUTINGS`.
        tie_blocks: prefixes that are shorter than the longest by at most so many blocks count as equal.
    """

    policies: Sequence[str]
    capacities: Sequence[int]
    num_nodes: int = 1
    routing: str = "round-robin"
    tie_blocks: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= MAX_NODES:
            raise InvalidRequest(f"--nodes: wanted 1 to {MAX_NODES}, got {self.num_nodes}; leave it out for one")
        if self.routing not in ROUTINGS:
            raise InvalidRequest(f"--routing: wanted {' or '.join(ROUTINGS)}, got {clip(self.routing)}")
        if self.tie_blocks < 0:
            raise InvalidRequest(f"--tie-blocks: wanted 0 or more, got {self.tie_blocks}; leave it out for 0")


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
    num_references, given = trace.num_references, outcome.node_references
    times_s = first_token_s(trace, outcome.hits, rates)
    row = {
        "policy": policy,
        "capacity_blocks": capacity,
        "prefix_hit_ratio": round(outcome.num_hits / num_references, 4),
        "num_references": num_references,
        "num_hits": outcome.num_hits,
        "num_evictions": outcome.num_evictions,
        "us_per_reference": round(1e6 * took_s / num_references, 2),
        "modelled_ttft_p50_s": round(percentile(times_s, 50), 4),
        "modelled_ttft_p99_s": round(percentile(times_s, 99), 4),
    }
    if plan.num_nodes > 1:
        row |= {"num_nodes": plan.num_nodes, "routing": plan.routing, "tie_blocks": plan.tie_blocks}
        row["largest_node_share"] = round(max(given) / sum(given), 4) if given else None
    return row


def _outcome(trace: Trace, plan: Plan, policy: str, capacity: int, tick: Callable[[], None]) -> Outcome:
    if policy != "bound":
        return replay_pools(trace, policy, capacity, tick, Nodes(plan.num_nodes, plan.routing, plan.tie_blocks))
    # One cache with the blocks of all nodes: whatever routes requests to several, this one could hold the same.
    return replay_bound(trace.requests, capacity * plan.num_nodes, tick)


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
    titles = ("policy", "blocks", "hit ratio", "hits", "evictions", "us/ref", "p50 s", "p99 s")
    has_nodes = "num_nodes" in rows[0]
    for title in (*titles, *(("largest node",) if has_nodes else ())):
        table.add_column(title, justify="left" if title == "policy" else "right", no_wrap=True)
    for row in rows:
        share = f"{row['largest_node_share']:.0%}" if row.get("largest_node_share") else ""
        table.add_row(
            row["policy"], f"{row['capacity_blocks']:,}", f"{row['prefix_hit_ratio']:.4f}", f"{row['num_hits']:,}",
            f"{row['num_evictions']:,}", f"{row['us_per_reference']:.1f}", f"{row['modelled_ttft_p50_s']:.3f}",
            f"{row['modelled_ttft_p99_s']:.3f}", *((share,) if has_nodes else ()),
        )  # fmt: skip
    # A file or a pipe has no width; its lines are not cut.
    Console(width=None if out.is_terminal else _FILE_CHARS).print(table)
    out.print(
        "p50 and p99: time to first token, modelled from a prefill rate and a load rate. No bytes were moved.",
        markup=False,
    )


@contextlib.contextmanager
def progress_bar(num_replays: int, num_requests: int) -> Iterator[Callable[[str], Callable[[], None]]]:
    """Yield the `begin` of `run_plan`, which shows a bar on stderr; nothing where that is no terminal."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda name: _nothing
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, refresh_per_second=4) as bar:
        task = bar.add_task("", total=num_replays * num_requests)

        def begin(name: str) -> Callable[[], None]:
            bar.update(task, description=name)
            ticks = itertools.count(1)

            def tick() -> None:
                if not next(ticks) % _TICKS_SHOWN:
                    bar.advance(task, _TICKS_SHOWN)

            return tick

        yield begin


def _nothing() -> None:
    """Show nothing."""

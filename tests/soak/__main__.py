"""Soak a store: two nodes, client processes that verify every byte, processes killed and stopped at random.

Exits with status 1 when anything was found: a wrong byte, a leak, a hang, an untyped error, a part that did
not come back. The folder with all logs is kept then, and --seed repeats the choices.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance
from kvstore.tools.terminal import progress
from tests.soak.run import Outcome, soak


def show(outcome: Outcome) -> None:
    """Print an outcome for eyes."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    counts = outcome.to_json()["counts"]
    for title in (
        "operations",
        "loads",
        "blocks",
        "hand-offs",
        "fetches that failed",
        "misses",
        "other misses",
        "errors",
        "jobs",
    ):
        values = counts.get(title, {})
        if title == "errors":
            values = {f"{verb}: {name}": n for verb, names in values.items() for name, n in names.items()}
        if values:
            total = f" ({sum(values.values()):,})" if title in ("operations", "loads") else ""
            text = ", ".join(f"{name} {count:,}" for name, count in sorted(values.items(), key=lambda item: -item[1]))
            console.print(f"[bold]{title}[/]{total}: {text}")
    faults = ", ".join(f"{name} {count:,}" for name, count in sorted(outcome.faults.items()))
    console.print(f"[bold]faults[/]: {faults}")
    disk = ", ".join(f"{name} {count:,}" for name, count in sorted(outcome.disk.items()))
    console.print(f"[bold]disk[/]: {disk}")
    table = Table(title="faults, and seconds until the store served again", title_justify="left")
    for heading in ("fault", "count", "median", "longest"):
        table.add_column(heading, justify="left" if heading == "fault" else "right")
    for name, times in sorted(outcome.recovery_s.items()):
        table.add_row(name, str(len(times)), f"{statistics.median(times):.2f}", f"{max(times):.2f}")
    console.print(table)
    console.print(f"{outcome.num_verified_at_end:,} blocks left at the end, all compared; seed {outcome.seed}")
    for number, finding in enumerate(outcome.findings, 1):
        console.print(f"[red]finding {number}[/] {finding}", markup=True, soft_wrap=True)
    if outcome.findings:
        console.print(f"[red]{len(outcome.findings)} findings[/]; logs in {outcome.folder}")
    else:
        console.print("[green]nothing wrong, nothing leaked[/]")
    if not outcome.findings and Path(outcome.folder).exists():
        console.print(f"logs in {outcome.folder}")


@click.command(help=__doc__)
@click.option("--minutes", type=click.FloatRange(0.1), default=10.0, show_default=True, help="How long clients work.")
@click.option("--faults", type=click.IntRange(0), default=0, help="Work longer until so many faults have happened.")
@click.option("--seed", type=click.IntRange(0), help="Of all choices; drawn and printed when not given.")
@click.option("--clients", type=click.IntRange(2), default=8, show_default=True, help="Client processes.")
@click.option("--lane", type=click.Choice(["default", "tcp"]), default="tcp", show_default=True)
@click.option("--only-disk", is_flag=True, help="Only faults of the disk, kills of stores and clearings.")
@click.option("--keep-logs", is_flag=True, help="Also when nothing is wrong.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on stdout.")
def main(
    minutes: float,
    faults: int,
    seed: int | None,
    clients: int,
    lane: str,
    only_disk: bool,
    keep_logs: bool,
    as_json: bool,
) -> None:
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    print(f"soak of {minutes:g} min, {clients} clients, lane {lane}, --seed {seed}", file=sys.stderr)
    # Ray says on stdout whose process died; stdout is for the result.
    with progress() as say, contextlib.redirect_stdout(sys.stderr):
        outcome = soak(
            seed=seed,
            minutes=minutes,
            num_clients=clients,
            lane=lane,
            keep_logs=keep_logs,
            say=say,
            only_disk=only_disk,
            num_faults=faults,
        )
    if as_json:
        print(as_document({**outcome.to_json(), **provenance()}), end="")
    else:
        show(outcome)
    sys.exit(1 if outcome.findings else 0)


if __name__ == "__main__":
    main()

"""Run prompts through every combination of page size, tiers, transfer, drafts and decode workers.

Each answer is compared with one that was computed without any cache: KV, logits and tokens must be the same to the last
bit. `make test` runs a part in which every two values meet; this runs all, or that part with --pairwise.
"""

from __future__ import annotations

import contextlib
import sys

import click
from rich.console import Console
from rich.table import Table

from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance
from kvstore.tools.terminal import progress
from tests.matrix.cases import all_cases, pairwise
from tests.matrix.run import SOURCES, Outcome, run


def show(outcomes: list[Outcome]) -> None:
    """Print a row for each case."""
    table = Table(title="tokens of prompts, by where their KV came from")
    for title in ("model", "page", "tiers", "transfer", "drafts", "decoders", *SOURCES, "accepted", "identical"):
        table.add_column(title, justify="right" if title in SOURCES else "left")
    for outcome in outcomes:
        case = outcome.case
        table.add_row(
            case.model,
            str(case.page_size),
            case.tiers,
            case.transfer,
            str(case.num_draft_tokens),
            str(case.num_decoders),
            *(str(outcome.tokens[source]) for source in SOURCES),
            f"{outcome.num_accepted} of {outcome.num_drafted}",
            "NO" if outcome.problems else "yes",
        )
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for outcome in outcomes:
        for problem in outcome.problems:
            console.print(f"[red]{outcome.case}: {problem}")


@click.command(help=__doc__)
@click.option("--pairwise", "is_pairwise", is_flag=True, help="Only cases in which every two values meet once.")
@click.option("--match", default="", help="Only cases whose line has this text, such as 'llama, pages of 16'.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on stdout.")
def main(is_pairwise: bool, match: str, device: str, as_json: bool) -> None:
    cases = [case for case in (pairwise(all_cases()) if is_pairwise else all_cases()) if match in str(case)]
    if not cases:
        raise click.UsageError(f"--match: wanted a part of a case such as '{all_cases()[0]}', got {match!r}")
    with progress() as say, contextlib.redirect_stdout(sys.stderr):
        outcomes = run(cases, device, say)
    if as_json:
        print(as_document({"cases": [outcome.to_json() for outcome in outcomes], **provenance()}), end="")
    else:
        show(outcomes)
    sys.exit(1 if any(outcome.problems for outcome in outcomes) else 0)


if __name__ == "__main__":
    main()

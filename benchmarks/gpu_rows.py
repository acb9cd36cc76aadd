"""What the gpu_*.py share: rows of several parts, measured on a GPU and printed, and the command that does so."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import click
import torch

from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance

Rows = list[dict[str, Any]]


def print_rows(parts: Iterable[tuple[str, Callable[[], Rows]]], as_json: bool) -> None:
    """Measure part after part, and print all rows.

    Args:
        parts: name and measurement of each; asked for one by one, once the GPU is in use.
        as_json: one object with hardware, versions and commit, else a line for each row.

    Raises:
        ClickException: there is no CUDA device; nothing was measured.
    """
    if not torch.cuda.is_available():
        raise click.ClickException("wanted a CUDA device, got none; run it where `nvidia-smi` shows one")
    torch.zeros(1, device="cuda")
    rows: Rows = []
    for name, measured in parts:
        print(f"{name} ...", file=sys.stderr)
        rows += measured()
        torch.cuda.empty_cache()
    if as_json:
        print(as_document({**provenance(), "rows": rows}), end="")
        return
    for row in rows:
        print("  ".join(f"{value}" for value in row.values()))


def rows_command(
    text: str | None,
    parts: Callable[[int], Iterable[tuple[str, Callable[[], Rows]]]],
    *,
    rounds: int = 15,
    most_rounds: int = 100,
    note: str = "",
) -> click.Command:
    """Return a command that measures every part and prints all rows; see `print_rows`.

    Args:
        text: of its help.
        parts: name and measurement of each, for so many rounds.
        rounds: default of `--rounds`.
        most_rounds: that it takes.
        note: what else is to be said of that.
    """

    @click.command(help=text)
    @click.option("--rounds", type=click.IntRange(1, most_rounds), default=rounds, show_default=True, help=note)
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
    def main(rounds: int, as_json: bool) -> None:
        print_rows(parts(rounds), as_json)

    return main

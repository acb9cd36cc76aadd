"""What gpu_bounds.py and gpu_client.py share: rows of several parts, measured on a GPU and printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import click
import torch

from kvstore.provenance import provenance

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
        print(json.dumps({**provenance(), "rows": rows}, indent=1))
        return
    for row in rows:
        print("  ".join(f"{value}" for value in row.values()))

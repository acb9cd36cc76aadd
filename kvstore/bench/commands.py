"""The commands of `kvstore bench` that need no cluster. Thin: other modules measure, and only when they are asked."""

from __future__ import annotations

from pathlib import Path

import click

from kvstore.bounds import parse_bytes
from kvstore.tools.commands import JSON, OUTPUT, POSITIVE, Command, parse_size, write_rows
from kvstore.tools.terminal import disk_cell, progress, show_rows


@click.command(cls=Command, short_help="GB/s between an engine's cache and slots.")
@click.option("--shape", "shapes", multiple=True, help="8B, 70B/TP8 or MLA; may be repeated. Default: all.")
@click.option("--block-size", "sizes", multiple=True, type=POSITIVE, help="Tokens; may be repeated. Default: 16 64.")
@click.option(
    "--num-blocks", "counts", multiple=True, type=POSITIVE, help="May be repeated. Default: 8 16 64 256 1024."
)
@click.option(
    "--max-bytes", default="2GiB", show_default=True, help="Leave out measurements that would move more at once."
)
@click.option("--rounds", type=POSITIVE, default=7, show_default=True, help="The median counts.")
@JSON
@OUTPUT
def gpu(
    shapes: tuple[str, ...],
    sizes: tuple[int, ...],
    counts: tuple[int, ...],
    max_bytes: str,
    rounds: int,
    as_json: bool,
    output: Path | None,
) -> None:
    """GB/s of blocks between a CUDA cache of separate layers, device memory and pinned host memory.

    Ours beside one copy of the same bytes (the limit), a copy for each fragment, the driver's batch of fragments,
    and torch's gather. Pack and unpack are in device memory; the other directions cross the link. No Ray is started.
    """
    from kvstore.bench.gpu import SHAPES, run_gpu

    with progress() as say:
        rows = run_gpu(
            shapes or tuple(SHAPES), sizes or (16, 64), counts or (8, 16, 64, 256, 1024), rounds,
            parse_bytes(max_bytes), say,
        )  # fmt: skip
    write_rows(rows, as_json, output)
    if not as_json:
        groups = ("shape", "block_size", "num_blocks", "direction")
        beside = [row for row in rows if "product_ms" in row]
        show_rows([row for row in rows if row not in beside], groups, lambda row: f"{row['gb_per_s']:.1f}", "GB/s")
        title = "GB/s of loads, ms of a matrix product beside them"
        show_rows(beside, groups, lambda row: f"{row['gb_per_s']:.1f}, {row['product_ms']:.2f}", title)


@click.command(cls=Command, short_help="GB/s of the disk tier, beside plain calls.")
@click.option(
    "--path",
    "folder",
    required=True,
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder on the disk. What is written there is removed at the end.",
)
@click.option("--size", default="2GiB", show_default=True, help="Bytes of blocks, in memory and on the disk.")
@click.option(
    "--block-bytes", "sizes", multiple=True, help="Of a block: a multiple of 4 KiB; may be repeated. Default: 2MiB."
)
@click.option("--rounds", type=POSITIVE, default=3, show_default=True, help="The median counts.")
@JSON
@OUTPUT
def disk(folder: Path, size: str, sizes: tuple[str, ...], rounds: int, as_json: bool, output: Path | None) -> None:
    """GB/s of saves and loads through the disk tier, beside plain sequential writes and reads of the same file.

    Plain: one thread, calls of 8 MiB, past the page cache (O_DIRECT) where the file system can. The tier: saves until
    all blocks are on the disk, loads of all of them into memory, each compared with what was saved. No Ray is started.
    """
    from kvstore.bench.disk import run_disk

    num_bytes = parse_size("--size", size)
    blocks = [parse_size("--block-bytes", each) for each in sizes or ("2MiB",)]
    with progress() as say:
        rows = run_disk(folder, num_bytes, blocks, rounds, say)
    write_rows(rows, as_json, output)
    if not as_json:
        show_rows(rows, ("op", "block_bytes"), disk_cell, "GB/s (CPU seconds a GB)")
        click.echo("with O_DIRECT" if rows[0]["is_direct"] else "through the page cache: no O_DIRECT here")

"""What scattered addresses cost device memory, and why: copies whose one side is a run and whose other side is not.

    python -m benchmarks.studies.gpu_scatter [--rounds N] [--json]

The kernel and its table of addresses are those of gpu_bounds.py, and one copy of the same bytes is the limit. A side is
scattered so that pieces of 4 KiB come in any order within windows, the windows one after another ("within"); so that
pieces of some length come in any order ("pieces"); or so that pieces of 4 KiB come in order, but are only one in so
many of those that lie there ("one_of"). Last, 16 MiB that are in the L2 are read again and again, out of a few pages of
2 MiB or out of thousands ("l2"): whether addresses have to be looked up costs anything, without the memory behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_rows import Rows, rows_command
from benchmarks.studies.gpu_bounds import kernels, medians, touch

KIB, MIB = 1 << 10, 1 << 20
PIECE_BYTES, PAGE_BYTES = 4 * KIB, 2 * MIB
NUM_BYTES = 640 * MIB  # 1,024 blocks of the 70B/TP8 shape
WINDOWS = (1 * MIB, 8 * MIB, 32 * MIB, 128 * MIB, NUM_BYTES)
PIECES = (4 * KIB, 64 * KIB, 512 * KIB, 2 * MIB, 8 * MIB, 32 * MIB)
ONE_OF = (2, 4)
#: Action of the kernel -> which side the table is of.
SIDES = {"copy_in": "written", "copy_out": "read"}
L2_BYTES, L2_PASSES, L2_PAGES = 16 * MIB, 16, (8, 64, 512, 4096)
MEMORY_BYTES = max(max(ONE_OF) * NUM_BYTES, max(L2_PAGES) * PAGE_BYTES)

Offsets = np.ndarray[Any, np.dtype[np.int64]]


def patterns(rng: np.random.Generator) -> Iterator[tuple[str, int, Offsets]]:
    """Yield the name, the number in it and the offset of each piece of 4 KiB, of every way to scatter them."""
    for window in WINDOWS:
        per = window // PIECE_BYTES
        order = np.concatenate([begin + rng.permutation(per) for begin in range(0, NUM_BYTES // PIECE_BYTES, per)])
        yield "within", window, order * PIECE_BYTES
    for piece in PIECES:
        inside = np.arange(piece // PIECE_BYTES) * PIECE_BYTES
        yield "pieces", piece, (rng.permutation(NUM_BYTES // piece)[:, None] * piece + inside).ravel()
    for spare in ONE_OF:
        count = NUM_BYTES // PIECE_BYTES
        yield "one_of", spare, np.sort(rng.permutation(count * spare)[:count]) * PIECE_BYTES


def l2_offsets(num_pages: int, rng: np.random.Generator) -> Offsets:
    """Return pieces that together fill L2_BYTES of so many pages, in any order, and once more for each pass."""
    per = L2_BYTES // PIECE_BYTES // num_pages
    places = rng.permuted(np.tile(np.arange(PAGE_BYTES // PIECE_BYTES), (num_pages, 1)), axis=1)[:, :per]
    pieces = (np.arange(num_pages)[:, None] * PAGE_BYTES + places * PIECE_BYTES).ravel()
    return np.concatenate([rng.permutation(pieces) for _ in range(L2_PASSES)])


def rows_of(found: dict[str, Any], rounds: int) -> Rows:
    rng = np.random.default_rng()
    memory = torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device="cuda")
    run, other = (torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    limit = partial(run.copy_, other)
    in_order = np.arange(0, NUM_BYTES, PIECE_BYTES)
    listed = [("in_order", NUM_BYTES, in_order), *patterns(rng)]
    tables = {(name, size): torch.from_numpy(memory.data_ptr() + offsets).cuda() for name, size, offsets in listed}
    ways: dict[tuple[str, str, int], Callable[[], Any]] = {("limit", "limit", 0): limit}
    for action, side in SIDES.items():
        for (name, size), table in tables.items():
            ways[side, name, size] = partial(touch, found[action], table, run, PIECE_BYTES)
    measured = medians(ways, limit, rounds)
    limit_s = measured.pop(("limit", "limit", 0))
    rows: Rows = [
        {"what": name, "size": size, "side": side, "of_limit": round(limit_s / seconds, 3)}
        for (side, name, size), seconds in measured.items()
    ]
    reads = {pages: torch.from_numpy(memory.data_ptr() + l2_offsets(pages, rng)).cuda() for pages in L2_PAGES}
    hits = {pages: partial(touch, found["read"], table, run, PIECE_BYTES) for pages, table in reads.items()}
    for pages, call in hits.items():
        seconds = medians({pages: call}, call, rounds)[pages]  # The call before each has brought all to the L2.
        rate = round(L2_BYTES * L2_PASSES / seconds / 1e12, 2)
        rows.append({"what": "l2", "size": pages, "side": "read", "tb_per_s": rate})
    return rows


def parts(rounds: int) -> Iterator[tuple[str, Callable[[], Rows]]]:
    _module, found = kernels()
    yield "640 MiB", partial(rows_of, found, rounds)


main = rows_command(__doc__, parts)


if __name__ == "__main__":
    main()

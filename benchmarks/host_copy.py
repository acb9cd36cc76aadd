"""How fast blocks are copied in host memory, by layout: the measurement behind docs/adr/0005 and 0006.

Stored blocks of 32 layers x 8 heads x 128, bfloat16, 16 tokens: 2 MiB. Per order of an engine's cache, engine
block size and part, and per direction: the copier that clients use, torch's own operations (the oracle, for equal
block sizes), and the C library's memcpy of the same bytes as the limit of ordinary stores. Medians, in turns
within one run, one thread, every result compared.

    python benchmarks/host_copy.py [--json]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.blocks.part import WHOLE, Part
from kvstore.blocks.shape import KVShape
from kvstore.engine.copier import engine_pages
from kvstore.engine.detect import detect_layout
from kvstore.engine.host_copier import HostCopier
from kvstore.engine.layout import canonical_views
from kvstore.engine.registered import register_cache
from kvstore.kernels import reference
from kvstore.memory.arena import Arena, create_arena
from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance

SHAPE = KVShape(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16)
NUM_BLOCKS, ROUNDS = 48, 7
ORDERS = {"tokens before heads": "PBTHD", "heads before tokens": "PBHTD", "one run per block": "BHLPTD"}


@dataclass(frozen=True)
class Case:
    """One engine: order of dims, tokens per block, part."""

    order: str
    block_size: int = 16
    part: Part = WHOLE


CASES = [
    *(Case(order) for order in ORDERS),
    *(Case(order, size) for order in list(ORDERS)[:2] for size in (32, 128, 8, 1)),
    *(Case(order, part=Part(1, 2, 0, 1)) for order in ORDERS),
]


def caches_of(case: Case) -> Any:
    """An engine's cache with a third more room than the blocks that are copied take."""
    axes = ORDERS[case.order]
    sizes = {"L": 32, "P": 2, "B": (NUM_BLOCKS + 16) * 16 // case.block_size, "T": case.block_size, "D": 128}
    sizes["H"] = 8 // case.part.tp_size
    dims = [sizes[axis] for axis in axes]
    return torch.zeros(dims, dtype=torch.bfloat16) if "L" in axes else [
        torch.zeros(dims, dtype=torch.bfloat16) for _ in range(32)
    ]  # fmt: skip


def measure(case: Case, arena: Arena) -> list[dict[str, Any]]:
    """Time a case, and check that what was loaded comes back as it was stored."""
    rng = np.random.default_rng(1)
    caches = caches_of(case)
    layout = detect_layout(caches, SHAPE, ORDERS[case.order], case.part)
    stored = SHAPE.stored_block
    (begin, part_bytes), *more = stored.runs(*case.part.ranges(SHAPE))
    assert not more
    copier = HostCopier(register_cache(caches, layout, SHAPE), arena, SHAPE.block_bytes, NUM_BLOCKS)
    flat, views = torch.from_numpy(arena.bytes_view()), canonical_views(caches, layout, SHAPE)
    mine = flat.view(NUM_BLOCKS, SHAPE.block_bytes)[:, begin : begin + part_bytes]
    typed = reference.slot_tensor(flat, SHAPE.block_bytes, NUM_BLOCKS, SHAPE.block_dims, SHAPE.dtype)
    fresh = np.empty((NUM_BLOCKS, SHAPE.block_bytes), np.uint8)
    source, target = (np.zeros(NUM_BLOCKS * part_bytes, np.uint8) for _ in range(2))
    indexes = np.arange(NUM_BLOCKS, dtype=np.int64)
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS + 1):
        fresh[:] = rng.integers(0, 256, fresh.shape, dtype=np.uint8)
        slots = rng.permutation(NUM_BLOCKS).astype(np.int64)
        ids = rng.permutation(layout.num_blocks)[: NUM_BLOCKS * 16 // case.block_size]
        pages = engine_pages(ids, layout, 16, 0, NUM_BLOCKS)
        torch_slots, torch_ids = torch.from_numpy(slots), torch.from_numpy(ids)
        ways: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "copier": (
                lambda p=pages, s=slots: copier.out_of_slots(p, indexes, s),
                lambda p=pages, s=slots: copier.into_slots(p, indexes, s),
            ),
            "memcpy": (lambda: np.copyto(target, source), lambda: np.copyto(target, source)),
        }
        if case.block_size == 16 and case.part == WHOLE:
            ways["torch"] = (
                lambda s=torch_slots, i=torch_ids: reference.unpack_blocks(typed, s, views, i),
                lambda s=torch_slots, i=torch_ids: reference.pack_blocks(views, i, typed, s),
            )
        for way, copies in ways.items():
            flat.copy_(torch.from_numpy(fresh).flatten())
            for direction, copy in zip(("load", "save"), copies, strict=True):
                started_s = time.perf_counter()
                copy()
                times.setdefault((way, direction), []).append(time.perf_counter() - started_s)
                if direction == "load" and way != "memcpy":
                    flat.fill_(0xA5)
            if way != "memcpy" and not np.array_equal(mine.numpy(), fresh[:, begin : begin + part_bytes]):
                raise AssertionError(f"{way} with {case}: other bytes came back than were stored")
    copier.close()
    return [
        {
            "order": case.order,
            "block_size": case.block_size,
            "tp_size": case.part.tp_size,
            "direction": direction,
            "way": way,
            "gb_per_s": round(NUM_BLOCKS * part_bytes / statistics.median(seconds[1:]) / 1e9, 2),
        }
        for (way, direction), seconds in times.items()
    ]


def main() -> None:
    """Measure all cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of lines")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arena = create_arena(NUM_BLOCKS * SHAPE.block_bytes)
    rows = [row for case in CASES for row in measure(case, arena)]
    if arguments.json:
        sizes = {"block_bytes": SHAPE.block_bytes, "stored_block_size": SHAPE.block_size, "num_blocks": NUM_BLOCKS}
        print(as_document({**provenance(), **sizes, "rows": rows}), end="")
    else:
        for row in rows:
            print(
                f"{row['order']:20} engine blocks of {row['block_size']:3}, 1/{row['tp_size']} of the heads  "
                f"{row['direction']}  {row['way']:8} {row['gb_per_s']:6.2f} GB/s"
            )


if __name__ == "__main__":
    main()

"""How fast blocks are copied in host memory, by layout: the measurement behind docs/adr/0005.

Per layout of an engine's cache (32 layers x 8 heads x 128, bfloat16, 16 tokens: 2 MiB a block) and direction:
the compiled copies, torch's own operations (the oracle), and the C library's memcpy of the same bytes as the
limit of ordinary stores. Medians, in turns within one run, one thread, every result compared.

    python benchmarks/host_copy.py [--json]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from kvstore.detect import detect_layout
from kvstore.engine_copy import engine_plan
from kvstore.kernels import host_copy, reference
from kvstore.layout import canonical_views
from kvstore.provenance import provenance
from kvstore.shape import KVShape

SHAPE = KVShape(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16)
NUM_BLOCKS, ROUNDS = 48, 7
LAYOUTS = {
    "tokens before heads": lambda n: [torch.zeros(2, n, 16, 8, 128, dtype=torch.bfloat16) for _ in range(32)],
    "heads before tokens": lambda n: [torch.zeros(2, n, 8, 16, 128, dtype=torch.bfloat16) for _ in range(32)],
    "one run per block": lambda n: torch.zeros(n, 8, 32, 2, 16, 128, dtype=torch.bfloat16),
}


def measure(name: str) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    caches = LAYOUTS[name](NUM_BLOCKS + 16)
    layout = detect_layout(caches, SHAPE)
    views = canonical_views(caches, layout, SHAPE)
    tables = host_copy.fragments_of(engine_plan(caches, layout, SHAPE))
    num_bytes = NUM_BLOCKS * SHAPE.block_bytes
    flat = torch.zeros(num_bytes, dtype=torch.uint8)
    slots = flat.view(NUM_BLOCKS, SHAPE.block_bytes)
    typed = reference.slot_tensor(flat, SHAPE.block_bytes, NUM_BLOCKS, SHAPE.block_dims, SHAPE.dtype)
    fresh, target = np.empty(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS + 1):
        fresh[:] = rng.integers(0, 256, num_bytes, dtype=np.uint8)
        ids = rng.permutation(NUM_BLOCKS).astype(np.int64)
        blocks = rng.permutation(layout.num_blocks)[:NUM_BLOCKS].astype(np.int64)
        torch_ids, torch_blocks = torch.from_numpy(ids), torch.from_numpy(blocks)
        for way, load, save in (
            (
                "compiled",
                lambda b=blocks, i=ids: host_copy.unpack(tables, slots, i, b),
                lambda b=blocks, i=ids: host_copy.pack(tables, b, slots, i),
            ),
            (
                "torch",
                lambda b=torch_blocks, i=torch_ids: reference.unpack_blocks(typed, i, views, b),
                lambda b=torch_blocks, i=torch_ids: reference.pack_blocks(views, b, typed, i),
            ),
            ("memcpy", lambda: np.copyto(target, fresh), lambda: np.copyto(target, fresh)),
        ):
            flat.copy_(torch.from_numpy(fresh))
            for direction, copy in (("load", load), ("save", save)):
                started_s = time.perf_counter()
                copy()
                times.setdefault((way, direction), []).append(time.perf_counter() - started_s)
                if direction == "load":
                    flat.fill_(0xA5 if way != "memcpy" else 0)
            if way != "memcpy" and not np.array_equal(flat.numpy(), fresh):
                raise AssertionError(f"{way} with {name}: other bytes came back than were stored")
    return [
        {
            "layout": name,
            "direction": direction,
            "way": way,
            "gb_per_s": round(num_bytes / statistics.median(seconds[1:]) / 1e9, 2),
        }
        for (way, direction), seconds in times.items()
    ]


def main() -> None:
    torch.set_num_threads(1)
    host_copy.compiled()
    rows = [row for name in LAYOUTS for row in measure(name)]
    if "--json" in sys.argv:
        print(json.dumps({**provenance(), "num_bytes": NUM_BLOCKS * SHAPE.block_bytes, "rows": rows}, indent=1))
    else:
        for row in rows:
            print(f"{row['layout']:22} {row['direction']:6} {row['way']:10} {row['gb_per_s']:6.2f} GB/s")


if __name__ == "__main__":
    main()

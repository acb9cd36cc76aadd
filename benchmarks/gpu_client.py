"""Client.save and load of a cache on a GPU beside one memcpy of the same bytes: the measurements behind docs/gpu.md.

    python -m benchmarks.gpu_client [--what client|paths]... [--rounds N] [--json]

client  a real store (kvstore.start) and client: time on the host's clock from the call of save or load to its
        result, and to the moment when a stream that waits for it (Job.wait_on) goes on; "limit" is one pinned
        copy of the same bytes, from its call to its end, in the same rounds.
paths   staged copies against direct ones, by the length of the runs in which blocks lie in the engine. What a
        copy costs a model beside it: `kvstore bench gpu`.

8B shape: 32 layers, 8 KV heads x 128, bfloat16, 16 tokens, 2 MiB a block. Medians; every byte that was loaded
through the client is compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import numpy as np
import torch

import kvstore
from benchmarks.gpu_rows import Rows, print_rows
from kvstore.engine.cuda_copier import CudaCopier
from kvstore.kernels.direct import DirectCopies
from kvstore.kernels.gpu import GpuCopier
from kvstore.kernels.plan import CopyPlan, plan_copy
from kvstore.kernels.spans import block_spans
from kvstore.kernels.staging import StagingRing
from kvstore.kernels.stored import StoredBlock

SHAPE = kvstore.KVShape(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16)
COUNTS = (16, 64, 256)
NUM_BLOCKS = 256
STORE_BYTES = 3 << 30
#: Layout -> dims of the engine's tensors, in the letters of kvstore/engine/layout.py.
LAYOUTS = {"per layer (NHD)": "PBTHD", "cross-layer, stored order": "BHLPTD"}
SECOND = 1e9


def timed(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


# The client.


class Engine:
    """A cache of the 8B shape on the GPU, registered with a client of its own."""

    def __init__(self, store: kvstore.api.Store, axes: str) -> None:
        sizes = {
            "P": 2, "B": 2 * NUM_BLOCKS, "T": SHAPE.block_size, "H": SHAPE.num_kv_heads, "L": SHAPE.num_layers,
            "D": SHAPE.head_dim,
        }  # fmt: skip
        dims = [sizes[axis] for axis in axes]
        self.axes = axes
        count = 1 if "L" in axes else SHAPE.num_layers
        self.tensors = [torch.empty(dims, dtype=torch.bfloat16, device="cuda") for _ in range(count)]
        self.client = store.client(kvstore.Namespace(model=f"bench {axes}", shape=SHAPE))
        self.client.register_kv_caches(self.tensors[0] if "L" in axes else self.tensors, axes)

    def fill(self) -> None:
        for tensor in self.tensors:
            tensor.view(torch.int16).random_()

    def blocks(self, ids: np.ndarray) -> list[torch.Tensor]:
        index = torch.from_numpy(ids).cuda()
        return [tensor.view(torch.int16).index_select(self.axes.index("B"), index) for tensor in self.tensors]


def client_rows(rounds: int) -> Rows:
    store = kvstore.start(STORE_BYTES, name="bench-gpu", address="local", timeout_s=120)
    rows = []
    try:
        for layout, axes in LAYOUTS.items():
            engine = Engine(store, axes)
            for count in COUNTS:
                rows += measured_client(engine, layout, count, rounds)
            engine.client.close()
            del engine
            torch.cuda.empty_cache()
    finally:
        store.stop()
    return rows


def measured_client(engine: Engine, layout: str, count: int, rounds: int) -> Rows:
    client, rng = engine.client, np.random.default_rng()
    copier = client._attached.registered()
    path = copier.path.value if isinstance(copier, CudaCopier) else "host"
    num_bytes = count * SHAPE.block_bytes
    pinned, flat = (
        torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True),
        torch.empty(num_bytes, dtype=torch.uint8, device="cuda"),
    )
    stream = torch.cuda.Stream()
    times: dict[str, list[float]] = {}

    def plain(target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        stream.synchronize()

    def until_a_stream_goes_on(hashes: Any, ids: np.ndarray) -> None:
        job = client.load(hashes, ids)
        job.wait_on(stream)
        stream.synchronize()
        later.append(job)

    later: list[Any] = []
    for turn in range(rounds + 2):
        hashes, more = (client.space.block_hashes(rng.integers(0, 1 << 30, count * SHAPE.block_size)) for _ in range(2))
        saved, loaded = rng.permutation(2 * NUM_BLOCKS)[:count], rng.permutation(2 * NUM_BLOCKS)[:count]
        engine.fill()
        want = engine.blocks(saved)
        found = {
            "limit, to the host": timed(lambda: plain(pinned, flat)),
            "save": timed(lambda h=hashes, i=saved: client.save(h, i).result(60)),
            "limit, to the GPU": timed(lambda: plain(flat, pinned)),
            "load": timed(lambda h=hashes, i=loaded: client.load(h, i).result(60)),
        }
        if not all(torch.equal(a, b) for a, b in zip(engine.blocks(loaded), want, strict=True)):
            raise AssertionError(f"{layout}: a load brought other bytes than were saved")
        found["load, until a stream goes on"] = timed(lambda h=hashes, i=loaded: until_a_stream_goes_on(h, i))
        later.pop().result(60)

        def both(h: Any = hashes, i: np.ndarray = loaded, m: Any = more, s: np.ndarray = saved) -> None:
            jobs = [client.load(h, i), client.save(m, s)]
            for job in jobs:
                job.result(60)

        found["save and load at once"] = timed(both)
        if turn >= 2:  # The first rounds warm up.
            for name, seconds in found.items():
                times.setdefault(name, []).append(seconds)
    rows = []
    for name, seconds in times.items():
        moved = num_bytes * (2 if "at once" in name else 1)
        median = statistics.median(seconds)
        rows.append(
            {
                "what": "client", "layout": layout, "path": path,
                "num_blocks": count, "way": name,
                "ms": round(median * 1e3, 3), "gb_per_s": round(moved / median / SECOND, 2),
            }
        )  # fmt: skip
    return rows


# Paths, by the length of runs.


def headed_plan(num_heads: int) -> CopyPlan:
    """A cache whose blocks of 2 MiB are one run for each head."""
    layers = 256 // num_heads
    cache = torch.zeros((num_heads, 2 * NUM_BLOCKS, layers, 2, 16, 128), dtype=torch.bfloat16, device="cuda")
    views = [layer.permute(1, 0, 2, 3, 4) for layer in cache.unbind(2)]
    return plan_copy(views, StoredBlock(block_dims=(1, num_heads, layers, 2, 16, 128), dtype="bfloat16"))


def path_rows(rounds: int) -> Rows:
    rows = []
    for num_heads in (1, 2, 4, 8, 16, 32, 64):
        plan = headed_plan(num_heads)
        rows += [row for count in COUNTS for row in measured_paths(plan, num_heads, count, rounds)]
        del plan
        torch.cuda.empty_cache()
    return rows


def measured_paths(plan: CopyPlan, num_heads: int, count: int, rounds: int) -> Rows:
    host = torch.empty((2 * NUM_BLOCKS, plan.stored.block_bytes), dtype=torch.uint8, pin_memory=True)
    ways = {"staged": StagingRing(GpuCopier(plan)), "direct": DirectCopies(plan)}
    times: dict[str, list[float]] = {}

    def save(copies: Any, blocks: np.ndarray, slots: np.ndarray) -> None:
        copies.save(block_spans(plan.paging, blocks, range(count), count), host, slots).synchronize()

    def load(copies: Any, blocks: np.ndarray, slots: np.ndarray) -> None:
        copies.load(host, slots, block_spans(plan.paging, blocks, range(count), count)).synchronize()

    for turn in range(rounds + 1):
        rng = np.random.default_rng(turn)
        blocks, slots = (rng.permutation(2 * NUM_BLOCKS)[:count] for _ in range(2))
        for way, copies in ways.items():
            for call in (save, load):
                seconds = timed(lambda call=call, copies=copies: call(copies, blocks, slots))  # noqa: B023
                if turn:
                    times.setdefault(f"{call.__name__}, {way}", []).append(seconds)
    moved = count * plan.stored.block_bytes
    return [
        {
            "what": "paths", "run_bytes": plan.stored.block_bytes // num_heads, "num_blocks": count, "way": way,
            "gb_per_s": round(moved / statistics.median(seconds) / SECOND, 2),
        }
        for way, seconds in times.items()
    ]  # fmt: skip


PARTS = {"client": client_rows, "paths": path_rows}


@click.command(help=__doc__)
@click.option("--what", type=click.Choice(list(PARTS)), multiple=True, help="Default: all.")
@click.option("--rounds", type=click.IntRange(1, 100), default=9, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(what: tuple[str, ...], rounds: int, as_json: bool) -> None:
    print_rows(((part, partial(PARTS[part], rounds)) for part in what or PARTS), as_json)


if __name__ == "__main__":
    main()

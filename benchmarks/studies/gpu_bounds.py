"""What memory itself takes for an engine's blocks: one kernel over the pieces in which they lie, and over one run.

    python -m benchmarks.studies.gpu_bounds [--rounds N] [--json]

A piece is a block in one plane of one layer, as an engine with a cache for each layer has it. The kernel is as simple
as can be: it has the address of every piece from a table, and reads, writes or copies 16 bytes a thread, twice. The
same work with the same table, and nothing differs but the addresses in it: where blocks lie that are drawn at random
out of twice as many as the most that are moved, or side by side. What is slower then is not a matter of how a kernel
goes about it. "copy_in" writes the pieces and reads one run, as unpacking does, "copy_out" is the other way round.
Orders: all planes of a block first, all blocks of a plane first (ascending), or pieces at random. "limit" is one copy
of the same bytes. Medians of event times.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.gpu_rows import Rows, rows_command
from kvstore.bench.gpu import SHAPES
from kvstore.kernels.driver import launch, on_device

Way = TypeVar("Way")
COUNTS = (256, 1024)
BLOCK_SIZE, ELEMENT_BYTES, WORD_BYTES = 16, 2, 16
THREADS, WORDS_PER_THREAD = 128, 2
SPARE = 2  # blocks of the cache for each block of the largest count
DELAY_CYCLES = 500_000
ACTIONS = {"read": 0, "write": 1, "copy_in": 2, "copy_out": 3}
SOURCE = r"""
template <int kAction>
__global__ void __launch_bounds__(128, 16)
touch(const long long* pieces, uint4* run, unsigned words, unsigned total) {
    uint4 held[2];
    uint4* places[2];
#pragma unroll
    for (unsigned step = 0; step < 2; ++step) {
        const unsigned at = (blockIdx.x * 2 + step) * 128 + threadIdx.x;
        if (at < total) {
            const unsigned piece = at / words;
            places[step] = reinterpret_cast<uint4*>(pieces[piece]) + (at - piece * words);
            held[step] = kAction == 1 ? make_uint4(at, at, at, at) : __ldcg(kAction == 2 ? run + at : places[step]);
        }
    }
#pragma unroll
    for (unsigned step = 0; step < 2; ++step) {
        const unsigned at = (blockIdx.x * 2 + step) * 128 + threadIdx.x;
        if (at >= total) {
            return;
        }
        const uint4 word = held[step];
        if (kAction == 0) {
            if ((word.x ^ word.y ^ word.z ^ word.w) == 0x9e3779b9u && threadIdx.x == 1000) {  // never: keeps the read
                run[0] = word;
            }
        } else {
            __stcg(kAction == 3 ? run + at : places[step], word);
        }
    }
}
"""


def kernels() -> tuple[Any, dict[str, Any]]:
    """Compile the kernel for every action; the module unloads with its last reference."""
    import cupy

    names = {action: f"touch<{number}>" for action, number in ACTIONS.items()}
    module = cupy.RawModule(code=SOURCE, options=("-std=c++17",), name_expressions=list(names.values()))
    return module, {action: module.get_function(name).kernel for action, name in names.items()}


def seconds_of(call: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY_CYCLES)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def orders(pieces: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the pieces `[planes, blocks]` in every order, as one list."""
    return {
        "by_block": pieces.T.ravel(),
        "by_plane": np.sort(pieces, axis=1).ravel(),
        "random": rng.permutation(pieces.ravel()),
    }


def touch(kernel: Any, table: torch.Tensor, run: torch.Tensor, piece_bytes: int) -> None:
    num_words = len(table) * piece_bytes // WORD_BYTES
    args = (
        ctypes.c_int64(table.data_ptr()),
        ctypes.c_int64(run.data_ptr()),
        ctypes.c_uint32(piece_bytes // WORD_BYTES),
        ctypes.c_uint32(num_words),
    )
    with on_device(torch.cuda.current_device()):
        num_ctas = -(-num_words // (THREADS * WORDS_PER_THREAD))
        launch(kernel.ptr, num_ctas, THREADS, args, torch.cuda.current_stream().cuda_stream)


def medians(ways: dict[Way, Callable[[], Any]], limit: Callable[[], Any], rounds: int) -> dict[Way, float]:
    """Return the median seconds of every way, in turn; the first round warms up."""
    times: dict[Way, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, call in ways.items():
            limit()  # Leaves the same in the L2 before each.
            seconds = seconds_of(call)
            if turn:
                times[way].append(seconds)
    return {way: statistics.median(measured) for way, measured in times.items()}


def shape_rows(name: str, rounds: int, found: dict[str, Any]) -> Rows:
    layers, heads, dim, planes = SHAPES[name]
    rng, num_planes = np.random.default_rng(), layers * (2 if planes == "kv" else 1)
    piece_bytes, total = BLOCK_SIZE * heads * dim * ELEMENT_BYTES, SPARE * max(COUNTS)
    cache = [torch.empty(total * piece_bytes, dtype=torch.uint8, device="cuda") for _ in range(num_planes)]
    bases = np.array([plane.data_ptr() for plane in cache], np.int64)[:, None]
    most = num_planes * max(COUNTS) * piece_bytes
    run, other = (torch.empty(most, dtype=torch.uint8, device="cuda") for _ in range(2))
    rows = []
    for count in COUNTS:
        num_pieces = num_planes * count
        limit = partial(run[: num_pieces * piece_bytes].copy_, other[: num_pieces * piece_bytes])
        listed = {"side_by_side": other.data_ptr() + np.arange(num_pieces, dtype=np.int64) * piece_bytes}
        listed |= orders(bases + rng.permutation(total)[:count] * piece_bytes, rng)
        tables = {order: torch.from_numpy(np.ascontiguousarray(pieces)).cuda() for order, pieces in listed.items()}
        for action in ACTIONS:
            ways: dict[str, Callable[[], Any]] = {"limit": limit} if action.startswith("copy") else {}
            ways |= {way: partial(touch, found[action], table, run, piece_bytes) for way, table in tables.items()}
            measured = medians(ways, limit, rounds)
            rows += [
                {
                    "shape": name, "num_blocks": count, "piece_bytes": piece_bytes, "action": action, "way": way,
                    "us": round(seconds * 1e6, 1), "of_side_by_side": round(measured["side_by_side"] / seconds, 3),
                }
                for way, seconds in measured.items()
            ]  # fmt: skip
    return rows


def parts(rounds: int) -> Iterator[tuple[str, Callable[[], Rows]]]:
    _module, found = kernels()
    for name in SHAPES:
        yield name, partial(shape_rows, name, rounds, found)


main = rows_command(__doc__, parts)


if __name__ == "__main__":
    main()

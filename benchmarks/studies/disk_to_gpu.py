"""Blocks between a disk and a GPU: NIXL's plugins for files beside the way of the disk tier.

The tier moves blocks between the file and host memory with O_DIRECT, and a copy takes them to the GPU. NIXL's GDS
plugins name GPU memory directly: without the kernel module nvidia-fs they do the same inside (compatibility mode), with
it the disk writes to the GPU. Says which plugins can be made here, whether the module is there, GB/s and CPU seconds
per GB, and whether the bytes are right. The decision is in docs/adr/0033-no-gds.md.

    python -m benchmarks.studies.disk_to_gpu --folder /mnt/nvme --json > benchmarks/results/disk-to-gpu.json
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from kvstore.mover.nixl import load_bindings
from kvstore.tools.documents import as_document
from kvstore.tools.provenance import provenance

BLOCK_BYTES, NUM_BLOCKS = 2 << 20, 256
TOTAL_BYTES = BLOCK_BYTES * NUM_BLOCKS
#: Of the tier: as many threads read.
NUM_THREADS = 8
_WAIT_S = 120.0

Move = Callable[[str], None]


class NixlFile:
    """One plugin with the GPU's memory, or the host's, and the file registered.

    Args:
        plugin: of NIXL.
        memory: of `TOTAL_BYTES`.
        fd: of the file.
    """

    def __init__(self, plugin: str, memory: torch.Tensor, fd: int) -> None:
        self._nixl = nixl = load_bindings()
        config = nixl.nixlAgentConfig()
        config.useProgThread = config.useListenThread = False
        self._name = f"raykv-{plugin}"
        self._agent = nixl.nixlAgent(self._name, config)
        self._backend = self._agent.createBackend(plugin, {})
        segment = nixl.VRAM_SEG if memory.is_cuda else nixl.DRAM_SEG
        device, begin = memory.get_device() if memory.is_cuda else 0, memory.data_ptr()
        for kind, row in ((segment, (begin, TOTAL_BYTES, device)), (nixl.FILE_SEG, (0, TOTAL_BYTES, fd))):
            self._agent.registerMem(nixl.nixlRegDList(kind, np.array([row], np.uint64)), [self._backend])
        starts = np.arange(NUM_BLOCKS, dtype=np.uint64) * BLOCK_BYTES
        sizes = np.full(NUM_BLOCKS, BLOCK_BYTES, np.uint64)
        columns = ((segment, begin, device), (nixl.FILE_SEG, 0, fd))
        self._ends = [
            nixl.nixlXferDList(kind, np.stack([starts + first, sizes, np.full(NUM_BLOCKS, of, np.uint64)], 1))
            for kind, first, of in columns
        ]

    def move(self, verb: str) -> None:
        """Move all blocks, "WRITE" to the file or "READ" from it; return when they are there."""
        nixl, deadline_s = self._nixl, time.monotonic() + _WAIT_S
        handle = self._agent.createXferReq(getattr(nixl, f"NIXL_{verb}"), *self._ends, self._name)
        state = self._agent.postXferReq(handle)
        while state == nixl.NIXL_IN_PROG:
            if time.monotonic() > deadline_s:
                raise click.ClickException(f"wanted {verb} to end within {_WAIT_S} s")
            state = self._agent.getXferStatus(handle)
        self._agent.releaseXferReq(handle)
        if state != nixl.NIXL_SUCCESS:
            raise click.ClickException(f"wanted {verb} to succeed, got {state}")


def through_host(memory: torch.Tensor, host: torch.Tensor, fd: int) -> Move:
    """Return the tier's way: calls with O_DIRECT to pinned memory by some threads, and one copy."""
    view = memoryview(host.numpy())
    pool = ThreadPoolExecutor(NUM_THREADS)

    def one(call: Callable[[int, list[memoryview], int], int], number: int) -> None:
        at = number * BLOCK_BYTES
        if call(fd, [view[at : at + BLOCK_BYTES]], at) != BLOCK_BYTES:
            raise click.ClickException("wanted a whole block, got a part")

    def move(verb: str) -> None:
        if verb == "WRITE":
            host.copy_(memory)
        list(pool.map(lambda number: one(os.pwritev if verb == "WRITE" else os.preadv, number), range(NUM_BLOCKS)))
        if verb == "READ":
            memory.copy_(host, non_blocking=True)
            torch.cuda.synchronize()

    return move


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rows_of(way: str, move: Move, memory: torch.Tensor, rounds: int) -> Iterator[dict[str, Any]]:
    """Write and read all blocks some times; every time what was read is compared."""
    times: dict[str, list[tuple[float, float]]] = {"WRITE": [], "READ": []}
    for number in range(rounds + 1):
        wanted = torch.randint(0, 256, (TOTAL_BYTES,), dtype=torch.uint8, device=memory.device)
        for verb in times:
            memory.copy_(wanted) if verb == "WRITE" else memory.zero_()
            if memory.is_cuda:
                torch.cuda.synchronize()
            began_s, cpu_s = time.perf_counter(), _cpu_s()
            move(verb)
            if number:
                times[verb].append((time.perf_counter() - began_s, _cpu_s() - cpu_s))
        if not torch.equal(memory, wanted):
            raise click.ClickException(f"{way}: other bytes came back")
    for verb, found in times.items():
        seconds, cpu_s = (statistics.median(each) for each in zip(*found, strict=True))
        yield {
            "way": way, "operation": verb.lower(), "gb_per_s": round(TOTAL_BYTES / seconds / 1e9, 2),
            "cpu_s_per_gb": round(cpu_s / TOTAL_BYTES * 1e9, 3), "num_rounds": rounds,
        }  # fmt: skip


@contextmanager
def _file(folder: str) -> Iterator[int]:
    with tempfile.TemporaryDirectory(dir=folder) as held:
        fd = os.open(Path(held) / "blocks", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(fd, 0, TOTAL_BYTES)
            yield fd
        finally:
            os.close(fd)


def measure(folder: str, rounds: int) -> dict[str, Any]:
    """Try every way; one that cannot be made is under "refused" with its reason."""
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    memory = torch.empty(TOTAL_BYTES, dtype=torch.uint8, device="cuda")
    host = torch.empty(TOTAL_BYTES, dtype=torch.uint8, pin_memory=True)
    with _file(folder) as fd:
        rows += rows_of("own threads and a copy", through_host(memory, host, fd), memory, rounds)
        for plugin, target in (("GDS", memory), ("GDS_MT", memory), ("POSIX", host)):
            try:
                rows += rows_of(f"NIXL {plugin}", NixlFile(plugin, target, fd).move, target, rounds)
            except Exception as error:  # noqa: BLE001 - whatever it raises is the finding.
                refused[plugin] = f"{type(error).__name__}: {error}"
    return {
        "rows": rows, "refused": refused, "has_nvidia_fs": Path("/proc/driver/nvidia-fs/stats").exists(),
        "num_bytes": TOTAL_BYTES, "block_bytes": BLOCK_BYTES, **provenance(),
    }  # fmt: skip


@click.command(help=__doc__)
@click.option("--folder", default="/tmp", show_default=True, type=click.Path(exists=True, file_okay=False))
@click.option("--rounds", type=click.IntRange(1, 50), default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def main(folder: str, rounds: int, as_json: bool) -> None:
    """Measure, and print a line for each row or one object."""
    if not torch.cuda.is_available():
        raise click.ClickException("wanted a CUDA device, got none; run it where `nvidia-smi` shows one")
    found = measure(folder, rounds)
    if as_json:
        print(as_document(found), end="")
        return
    for row in found["rows"]:
        print("  ".join(f"{value}" for value in row.values()))
    for plugin, why in found["refused"].items():
        print(f"{plugin}: refused: {why}")


if __name__ == "__main__":
    main()

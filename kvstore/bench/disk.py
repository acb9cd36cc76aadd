"""Benchmark: the disk tier beside plain sequential reads and writes of the same file, with O_DIRECT where it can.

Both move the same number of bytes of blocks, in turns. Plain calls reuse one buffer. The tier moves blocks from an
arena and into it, with their records, checksums and pools. Each block that it loads is compared with what was saved.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.indexes import ints_in
from kvstore.bounds import MAX_BLOCK_BYTES
from kvstore.config import StoreConfig
from kvstore.disk.folder import sized_files
from kvstore.disk.records import PAGE_BYTES, RECORD_BYTES
from kvstore.disk.tier import DiskTier
from kvstore.errors import ConfigError, DiskUnavailable, InvalidRequest
from kvstore.memory.arena import create_arena
from kvstore.memory.presence import PresenceCounts
from kvstore.pool.pool import Pool
from kvstore.runtime import clock

#: Bytes of one plain call.
_CALL_BYTES = 8 << 20
#: Bytes of one chain: those of a save, and of a load.
CHAIN_BYTES = 128 << 20
_OWNER, _NAME, _TIMEOUT_S = "bench", "bench", 600.0
_NAMESPACE = hashlib.sha256(b"bench disk").digest()
_OPS, _WAYS = ("write", "read"), ("plain", "tier")


@dataclass(slots=True)
class _Took:
    """Seconds, and seconds of all cores for this process, of one way of one operation; one of each for every round."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @contextmanager
    def one_round(self) -> Iterator[None]:
        started_s, cpu_s = time.perf_counter(), time.process_time()
        yield
        self.seconds.append(time.perf_counter() - started_s)
        self.cpu_s.append(time.process_time() - cpu_s)


def run_disk(
    folder: Path, num_bytes: int, block_bytes: Sequence[int], rounds: int, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure writes and reads of a disk, plain and by the tier.

    Args:
        folder: on the disk; a folder of its own is made there, and removed at the end.
        num_bytes: bytes of blocks, in memory and on the disk; rounded down to whole blocks.
        block_bytes: sizes of blocks, multiples of a page; one after the other.
        rounds: a figure is the median of this many. Before them the file is written once, which is not counted.
        progress: called with a text for each measurement.

    Returns:
        Rows {"op": "write"|"read", "way": "plain"|"tier", "block_bytes", "num_bytes", "rounds", "is_direct",
        "gb_per_s", "gb_per_s_of_rounds", "cpu_s_per_gb"}. Those of the tier also have "of_plain", its speed as a share
        of the plain one's in the same round, the median over the rounds, and "of_plain_of_rounds".

    Raises:
        InvalidRequest: a size that cannot be measured; nothing was written.
        ConfigError: the folder cannot be used, or the disk or the memory has too little room.
        DiskUnavailable: the disk refused, or did not answer in time.
        AssertionError: a block that was loaded has other bytes than were saved.
    """
    for size in block_bytes:
        if not 0 < size <= MAX_BLOCK_BYTES or size % PAGE_BYTES:
            raise InvalidRequest(
                f"--block-bytes: wanted a multiple of {PAGE_BYTES}, at most {MAX_BLOCK_BYTES}, got {size}"
            )
        if num_bytes < 2 * size:
            raise InvalidRequest(
                f"--size: wanted {2 * size} bytes or more, for two blocks of {size}, got {num_bytes}; raise it, or "
                "lower --block-bytes"
            )
    rows = list[dict[str, Any]]()
    for size in block_bytes:
        rows += _run_size(folder, num_bytes // size, size, rounds, progress)
    return rows


def _run_size(
    folder: Path, num_blocks: int, block_bytes: int, rounds: int, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    try:
        own = Path(tempfile.mkdtemp(prefix="raykv-bench-", dir=folder.resolve(strict=True)))
    except OSError as error:
        raise ConfigError(f"path: wanted a folder that can be written to, got {folder}: {error}") from error
    try:
        progress(f"preparing {num_blocks} blocks of {block_bytes} bytes in memory and on the disk")
        with Bench(own, num_blocks, block_bytes) as bench:
            return bench.run(rounds, progress)
    finally:
        shutil.rmtree(own)


class Bench:
    """One file of slots, one arena, and a tier on both."""

    def __init__(self, folder: Path, num_blocks: int, block_bytes: int) -> None:
        self._num_blocks, self._block_bytes = num_blocks, block_bytes
        capacity = num_blocks * (PAGE_BYTES + block_bytes + RECORD_BYTES)
        config = StoreConfig(name=_NAME, disk_path=str(folder), disk_capacity_bytes=capacity)
        #: Set when the tier may have got further.
        self._changed = threading.Event()
        self._tier = DiskTier(config, _NAME, dict)
        try:
            self._arena = create_arena(num_blocks * block_bytes)
        except BaseException:
            self._tier.stop()
            raise
        self._arena.populate()
        self._pool = Pool(num_blocks, max_pinned=num_blocks, on_published=self._tier.offer)
        self._tier.attach(
            self._pool, self._arena.memory, block_bytes, PresenceCounts(bytearray(1 << 12)),
            lambda space: block_bytes, lambda space: 0, self._changed.set,
        )  # fmt: skip
        self._tier.admit_old()
        # An anonymous mapping, for O_DIRECT wants aligned memory; filled, so that no page of it is new later.
        self._buffer = mmap.mmap(-1, _CALL_BYTES)
        self._buffer.write(np.random.default_rng(1).bytes(_CALL_BYTES))
        self._file, self._fd = sized_files(folder / f"{_NAME}-0", block_bytes)[0], -1
        #: Each block is another stretch of these bytes.
        self._bytes: npt.NDArray[np.uint8] = np.random.default_rng(0).integers(
            0, 256, block_bytes + (1 << 16), dtype=np.uint8
        )

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._tier.stop()
        self._buffer.close()
        self._arena.close()

    def run(self, rounds: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
        """Measure everything so many times in turns; return the rows."""
        if self._tier.is_off:
            raise DiskUnavailable(f"the disk tier did not begin: {self._tier.reason}")
        self._is_direct = bool(self._tier.stats()["is_direct"])
        took = {(op, way): _Took() for op in _OPS for way in _WAYS}
        # The first write makes the file, and is slower for any writer, so it is nobody's.
        self._save(self._fill(self._chains(rounds)))
        self._pool.discard(list(range(self._num_blocks)))
        self._fd = os.open(self._file, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self._is_direct else 0))
        for number in range(rounds):
            chains = self._chains(number)
            progress(f"round {number + 1} of {rounds}: plain writes")
            with took["write", "plain"].one_round():
                self._plain(os.pwritev)
            writes = self._fill(chains)
            progress(f"round {number + 1} of {rounds}: saves through the tier")
            with took["write", "tier"].one_round():
                self._save(writes)
            self._pool.discard(list(range(self._num_blocks)))
            self._arena.bytes_view()[:] = 0
            progress(f"round {number + 1} of {rounds}: plain reads")
            with took["read", "plain"].one_round():
                self._plain(os.preadv)
            progress(f"round {number + 1} of {rounds}: loads through the tier")
            with took["read", "tier"].one_round():
                self.load(chains)
            self._check(chains)
            self._pool.discard(list(range(self._num_blocks)))
        return [self._row(op, way, took) for op in _OPS for way in _WAYS]

    @property
    def _chain_blocks(self) -> int:
        return max(1, CHAIN_BYTES // self._block_bytes)

    def _chains(self, number: int) -> list[BlockHashes]:
        return [self._chain(number, first) for first in range(0, self._num_blocks, self._chain_blocks)]

    def _chain(self, number: int, first: int) -> BlockHashes:
        count = min(self._chain_blocks, self._num_blocks - first)
        names = [hashlib.sha256(b"%d %d" % (number, first + at)).digest() for at in range(count)]
        return BlockHashes(_NAMESPACE, _NAMESPACE, 0, b"".join(names))

    def _plain(self, call: Callable[[int, list[memoryview], int], int]) -> None:
        total = self._num_blocks * self._block_bytes
        with memoryview(self._buffer) as whole:
            for at in range(0, total, _CALL_BYTES):
                size = min(_CALL_BYTES, total - at)
                with whole[:size] as part:
                    got = call(self._fd, [part], at)
                if got != size:
                    raise DiskUnavailable(f"wanted {size} bytes at {at}, got {got}")

    def _bytes_of(self, name: bytes) -> npt.NDArray[np.uint8]:
        at = int.from_bytes(name[:2], "little")
        return self._bytes[at : at + self._block_bytes]

    def _in_slot(self, slot: int) -> npt.NDArray[np.uint8]:
        return self._arena.bytes_view()[slot * self._block_bytes : (slot + 1) * self._block_bytes]

    def _fill(self, chains: list[BlockHashes]) -> list[int]:
        """Put the bytes of all blocks into slots; return the writes that are to be completed."""
        writes = []
        for chain in chains:
            ticket = self._pool.prepare_store(chain, _OWNER)
            for slot, index in zip(ints_in(ticket.packed_slots), ints_in(ticket.packed_indexes), strict=True):
                self._in_slot(int(slot))[:] = self._bytes_of(chain.hash_at(int(index)))
            writes.append(ticket.write_id)
        return writes

    def _save(self, writes: list[int]) -> None:
        """Complete the writes, and wait until all blocks are on the disk."""
        wanted, until_s = self._tier.stats()["num_written"] + self._num_blocks, clock.now_s() + _TIMEOUT_S
        for write_id in writes:
            self._pool.complete_store(write_id, _OWNER)
        while True:
            self._changed.clear()
            stats = self._tier.stats()
            if stats["num_written"] >= wanted:
                return
            if stats["is_off"] or stats["dropped"] or clock.now_s() > until_s:
                why = stats["reason"] or f"dropped {stats['dropped']}"
                raise DiskUnavailable(f"{wanted - stats['num_written']} blocks were not written: {why}")
            self._changed.wait(1.0)

    def load(self, chains: list[BlockHashes]) -> None:
        """Bring all blocks of chains from the disk into memory."""
        until_s = clock.now_s() + _TIMEOUT_S
        reads = [self._tier.read(chain, lambda reached, num_read: None) for chain in chains]
        for chain, read in zip(chains, reads, strict=True):
            if read is None or not read.wait(until_s) or read.num_blocks != len(chain):
                got, why = (0, "not on the disk") if read is None else (read.num_blocks, read.reason)
                raise DiskUnavailable(
                    f"wanted {len(chain)} blocks of the disk, got {got}: {why or 'no answer in time'}"
                )

    def _check(self, chains: list[BlockHashes]) -> None:
        for chain in chains:
            grant = self._pool.pin_prefix(chain, _OWNER, float("inf"))
            for at, slot in enumerate(ints_in(grant.packed_slots).tolist()):
                if not np.array_equal(self._in_slot(slot), self._bytes_of(chain.hash_at(at))):
                    raise AssertionError(f"block {at} of a chain came back with other bytes than were saved")
            self._pool.release(grant.lease_id, _OWNER)
            assert grant.num_blocks == len(chain)

    def _row(self, op: str, way: str, took: dict[tuple[str, str], _Took]) -> dict[str, Any]:
        num_bytes, own = self._num_blocks * self._block_bytes, took[op, way]
        row = {
            "op": op,
            "way": way,
            "block_bytes": self._block_bytes,
            "num_bytes": num_bytes,
            "rounds": len(own.seconds),
            "is_direct": self._is_direct,
            "gb_per_s": round(num_bytes / statistics.median(own.seconds) / 1e9, 3),
            "gb_per_s_of_rounds": [round(num_bytes / each / 1e9, 3) for each in own.seconds],
            "cpu_s_per_gb": round(statistics.median(own.cpu_s) / num_bytes * 1e9, 3),
        }
        if way == "tier":
            # Round by round, because a slow moment of a shared disk slows both of a pair.
            shares = [plain / mine for plain, mine in zip(took[op, "plain"].seconds, own.seconds, strict=True)]
            row["of_plain"] = round(statistics.median(shares), 3)
            row["of_plain_of_rounds"] = [round(share, 3) for share in shares]
        return row

"""A store with a disk tier in one process, its lives, and what its folder holds; for the tests of kvstore.disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
import time
from pathlib import Path

from kvstore.disk.folder import LABEL, sized_files
from kvstore.disk.records import PAGE_BYTES, Record, unpack_index
from kvstore.disk.slot_file import SlotFile

#: Far longer than any step of these tests takes.
SOON_S = 10.0
#: Blocks of a worker's cache are saved from the first half, and loaded into the second.
HALF = 64


def wait_until(condition, timeout_s: float = SOON_S):
    """Wait for a condition and return what it said."""
    until_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until_s, "waited in vain"
        time.sleep(0.003)
    return found


def checksum(folder: Path) -> dict[str, tuple[int, str]]:
    """Return mode and content of everything below a folder."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path.relative_to(folder))] = path.lstat().st_mode, hashlib.sha256(data).hexdigest()
    return found


#: Bytes of a slot, unless a test says otherwise.
SLOT_BYTES = 4096


def records_of(folder: Path, slot_bytes: int = SLOT_BYTES) -> dict[bytes, Record]:
    """Return the records of a folder's index of one size of slots by block."""
    label = json.loads((folder / LABEL).read_bytes())
    found = unpack_index(bytes.fromhex(label["tier_id"]), sized_files(folder, slot_bytes)[1].read_bytes())
    return {record.block_hash: record for record in found}


def slot_span(folder: Path, block_hash: bytes) -> tuple[int, int]:
    """Return where a block's slot begins and ends in the slot file: a page with its record, then its bytes."""
    stride = PAGE_BYTES + SLOT_BYTES
    place = records_of(folder)[block_hash].place
    return place * stride, (place + 1) * stride


def flip(file: Path, at: int) -> None:
    """Change one byte of a file."""
    with file.open("r+b") as open_file:
        open_file.seek(at)
        byte = open_file.read(1)[0]
        open_file.seek(at)
        open_file.write(bytes([byte ^ 0x40]))


class Store:
    """One node of a cluster with a disk tier, and a worker that compares every byte it loads."""

    def __init__(self, cluster, node_id: str, settings: dict, saved: dict):
        self.cluster, self.node_id, self.settings, self.saved = cluster, node_id, settings, saved
        self.begin()

    def begin(self, *, waits: bool = True, **settings) -> None:
        """Begin a life; wait until old blocks are found."""
        self.settings = self.settings | settings
        self.core = self.cluster.add(self.node_id, **self.settings)
        self.disk = self.core.state.disk
        # The same bytes in each life: a name stands for them until it is cleared.
        self.worker = self.cluster.worker(self.node_id, 2 * HALF, seed=ord(self.node_id))
        if waits:
            wait_until(lambda: not self.disk.is_off)

    def stop(self) -> None:
        self.check()
        self.cluster.stop_node(self.node_id)

    def restart(self, **settings) -> None:
        self.stop()
        self.begin(**settings)

    @property
    def folder(self) -> Path:
        return Path(self.stats()["path"])

    @property
    def slots(self) -> Path:
        return sized_files(self.folder, SLOT_BYTES)[0]

    @property
    def index(self) -> Path:
        return sized_files(self.folder, SLOT_BYTES)[1]

    def stats(self) -> dict:
        return self.disk.stats()

    def num(self, name: str) -> int:
        return self.stats()[name]

    def dropped(self, reason: str) -> int:
        return self.stats()["dropped"].get(reason, 0)

    def check(self) -> None:
        """Assert that both pools are whole."""
        self.core.pool.check_integrity()
        self.disk.pool.check_integrity()

    def save(self, hashes, first: int = 0, *, is_written: bool = True):
        """Save a chain, and wait until it is on the disk."""
        ids = range(first, first + len(hashes))
        assert ids.stop <= HALF
        result = self.worker.save(hashes, ids)
        for at, own in zip(ids, hashes, strict=True):
            self.saved[own] = self.worker.block(at)
        if is_written:
            wait_until(lambda: self.disk.pool.lookup(hashes) == len(hashes))
            self.settle()
        return result

    def settle(self) -> None:
        """Wait until nothing is written or read any more."""
        wait_until(lambda: not self.num("num_queued") and not self.core.pool.num_leases())
        wait_until(lambda: not self.disk.pool.num_leases() and not self.disk.pool.stats().num_writes)
        self.check()

    def load(self, hashes, **more):
        """Load a chain; every block that is delivered must be what was saved under its name."""
        for cache in self.worker.caches:
            cache[:, HALF:] = 0
        result = self.worker.load(hashes, range(HALF, HALF + len(hashes)), **more)
        for at in range(result.num_blocks):
            assert self.worker.block(HALF + at) == self.saved[hashes[at]], f"block {at} has other bytes"
        self.check()
        return result

    def empty_memory(self) -> None:
        """Take all blocks out of the memory; the disk keeps them."""
        self.core.pool.discard(list(range(self.core.pool.num_slots)))
        self.check()

    def write_slot(self, block_hash: bytes, data: bytes) -> None:
        """Overwrite the slot of a block."""
        begin, end = slot_span(self.folder, block_hash)
        assert end - begin == len(data)
        with self.slots.open("r+b") as file:
            os.pwrite(file.fileno(), data, begin)

    def read_slot(self, block_hash: bytes) -> bytes:
        begin, end = slot_span(self.folder, block_hash)
        with self.slots.open("rb") as file:
            return os.pread(file.fileno(), end - begin, begin)


class Gate:
    """Stands before the reads or the writes of all slot files: lets them through, has them wait, or fail."""

    def __init__(self, monkeypatch, verb: str):
        self.num_calls, self.error, self._open = 0, None, threading.Event()
        #: Called before each call, with the file and its first slot.
        self.before = lambda file, first: None
        self.num_waiting = 0
        self._open.set()
        original = getattr(SlotFile, verb)

        def call(file, first, buffers):
            self.num_calls += 1
            self.before(file, first)
            if not self._open.is_set():
                self.num_waiting += 1
                assert self._open.wait(60.0)
                self.num_waiting -= 1
            if self.error is not None:
                raise self.error
            original(file, first, buffers)

        monkeypatch.setattr(SlotFile, verb, call)

    def hold(self) -> None:
        """Have each call wait until `let_go`."""
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()

    @contextlib.contextmanager
    def held(self):
        self.hold()
        try:
            yield
        finally:
            self.let_go()


def refuse(code=errno.EIO):
    return OSError(code, "broken")


def stops_writing(store):
    """Wait until nothing is to be written, and no turn of the disk is under way."""
    wait_until(lambda: not store.num("num_unwritten") and not store.core.pool.num_leases())
    store.check()

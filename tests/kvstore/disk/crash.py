"""Kill a store in the middle of its writes to disk, again and again, and compare every byte that is found afterwards.

    python -m tests.kvstore.disk.crash --kills 200

Each life of the store is a child process, with slots of one of two sizes, which share the capacity. It reads whatever
its folder has of its size, compares all of it, then stores blocks until SIGKILL comes. The bytes of a block follow from
its hash and from the last clearing of its namespace. Between two lives the files are sometimes torn: cut, overwritten,
with old content or with that of another place.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvstore.blocks.chain import BlockHashes
from kvstore.config import StoreConfig
from kvstore.disk.folder import sized_files
from kvstore.disk.records import PAGE_BYTES, RECORD_BYTES
from kvstore.errors import PeerLost
from kvstore.node.core import NodeCore
from kvstore.remote.directory import DirectoryServer
from kvstore.runtime import clock

NODE, HOST = "crash", "127.0.0.1"
SPACE = hashlib.sha256(b"namespace").digest()
#: Of a block; its slot is the next multiple of a page, or larger.
BLOCK_BYTES = 9000
SLOT_BYTES, LARGE_BYTES = 12288, 20480
STRIDE = PAGE_BYTES + SLOT_BYTES
NUM_CHAINS, TRUNK, LONGEST = 40, 4, 12
NUM_PLACES = 200
#: When a life writes its blocks: a crash loses more of one kind, and nothing wrong may be left of either.
WRITES = ("through", "back")
#: How long a life may take to begin and to compare what it finds, and at most how long it writes.
_BEGIN_S, _WRITE_S = 60.0, 0.12


def chain_of(number: int) -> BlockHashes:
    """Return one of the chains; four of them share a trunk each."""
    hashes, last = list[bytes](), SPACE
    for at in range(LONGEST):
        name = f"trunk {number // 4}" if at < TRUNK else f"chain {number}"
        last = hashlib.sha256(last + f"{name} {at}".encode()).digest()
        hashes.append(last)
    return BlockHashes(SPACE, SPACE, 0, b"".join(hashes))


def bytes_of(block_hash: bytes, version: int) -> bytes:
    """Return the bytes that a block has after a clearing."""
    return hashlib.shake_128(block_hash + version.to_bytes(8, "little")).digest(BLOCK_BYTES)


class Life:
    """One life of the store, in this process."""

    def __init__(self, root: str, seed: int, sync: bool, write: str, slot_bytes: int) -> None:
        self.rng, self.directory = random.Random(seed), DirectoryServer(HOST, settle_s=0.0)
        config = StoreConfig(
            capacity_bytes=64 * slot_bytes, block_bytes=slot_bytes, disk_path=root, disk_sync=sync,
            disk_capacity_bytes=NUM_PLACES * (STRIDE + RECORD_BYTES), disk_write=write,
        )  # fmt: skip
        self.core = NodeCore(NODE, config, HOST, _no_peer, self.directory.address)
        self.state = self.core.state
        self.disk, self.slot_bytes = self.state.disk, slot_bytes
        self.state.pool_service.attach(SPACE, BLOCK_BYTES)
        until_s = clock.now_s() + _BEGIN_S
        while self.disk.is_off:
            if clock.now_s() > until_s:
                raise TimeoutError(f"the tier does not begin: {self.disk.stats()}")
            time.sleep(0.002)

    @property
    def version(self) -> int:
        return self.state.versions.get(SPACE)

    def compare(self) -> dict[str, int]:
        """Read all blocks that are found, also those whose parents are gone; raise at the first wrong byte."""
        version, num_right = self.version, 0
        for number in range(NUM_CHAINS):
            chain, at = chain_of(number), 0
            while at < len(chain):
                rest = chain.tail(at)
                if self.disk.lookup(rest) and (read := self.disk.read(rest, lambda ready, num: None)) is not None:
                    assert read.wait(clock.now_s() + _BEGIN_S)
                grant = self.core.pool.pin_prefix(rest, "compare", float("inf"))
                for own, slot in zip(rest, grant.slots, strict=False):
                    found = bytes(self.state.arena.memory[slot * self.slot_bytes :][:BLOCK_BYTES])
                    if found != bytes_of(own, version):
                        raise AssertionError(f"block {own.hex()[:8]} has other bytes, version {version}")
                num_right += grant.num_blocks
                at += max(1, grant.num_blocks)
                self.core.pool.release(grant.lease_id, "compare")
        self.core.pool.check_integrity()
        self.disk.pool.check_integrity()
        stats = self.disk.stats()
        return {
            "num_right": num_right, "num_restored": stats["num_restored"], "num_damaged": stats["num_damaged"],
            "version": version, "num_other_bytes": stats["num_other_bytes"],
        }  # fmt: skip

    def store(self) -> None:
        """Store the beginning of a chain at random, clear now and then."""
        pool = self.core.pool
        if self.rng.random() < 0.004:
            self.state.pool_service.clear(SPACE)
        chain = chain_of(self.rng.randrange(NUM_CHAINS)).head(self.rng.randint(1, LONGEST))
        num_clears, version = pool.num_clears(SPACE), self.version
        ticket = pool.prepare_store(chain, "writer", num_clears=num_clears)
        if ticket.write_id:
            slots = np.frombuffer(ticket.packed_slots, np.int32)
            for index, slot in zip(np.frombuffer(ticket.packed_indexes, np.int32), slots, strict=True):
                begin = int(slot) * self.slot_bytes
                self.state.arena.memory[begin : begin + BLOCK_BYTES] = bytes_of(chain[int(index)], version)
            pool.complete_store(ticket.write_id, "writer")
        if self.disk.stats()["num_queued"] > 40:
            time.sleep(0.001)


def _no_peer(node_id: str, within_s: float) -> object:
    raise PeerLost(f"wanted no other node, got {node_id}")


def live(root: str, seed: int, sync: bool, write: str, slot_bytes: int, told: int) -> None:
    """One life, until it is killed. It tells what it found as a line of JSON."""
    life = Life(root, seed, sync, write, slot_bytes)
    os.write(told, json.dumps(life.compare()).encode() + b"\n")
    while True:
        life.store()


def tear(folder: Path, old: Path, rng: random.Random) -> str:
    """Change the files at random, as a crash of the machine or a bad disk might."""
    slots, index = sized_files(folder, SLOT_BYTES)
    what = rng.choice(["cut", "torn", "zeros", "moved", "old", "index cut", "index torn", "old index"])
    file = index if "index" in what else slots
    if not (size := file.stat().st_size):
        return "nothing"  # The other size has all room.
    at = rng.randrange(size)
    num = min(rng.randint(1, 3 * STRIDE if file is slots else 3 * RECORD_BYTES), size - at)
    if what.endswith("cut"):
        os.truncate(file, at)
        return what
    data = rng.randbytes(num)
    if what == "zeros":
        data = bytes(num)
    elif what == "moved":
        at, other = (rng.randrange(NUM_PLACES) * STRIDE for _ in range(2))
        with slots.open("rb") as source:
            data = os.pread(source.fileno(), STRIDE, other)
    elif what.startswith("old"):
        with (old / file.name).open("rb") as source:
            at, data = 0, source.read()
            if file is slots:  # Whole slots of an earlier life, beside those of the last one.
                at = rng.randrange(NUM_PLACES) * STRIDE
                data = data[at : at + rng.randint(1, 60) * STRIDE]
    with file.open("r+b") as target:
        os.pwrite(target.fileno(), data, at)
    return what


def run(kills: int, seed: int, root: str, writes: tuple[str, ...] = WRITES) -> dict[str, object]:
    """Run that many lives, each killed; return what was found. Raises at the first wrong byte."""
    rng, old = random.Random(seed), Path(root) / "old"
    folder, found, torn = Path(root) / "kv" / "default-0", list[dict[str, int]](), dict[str, int]()
    old.mkdir()
    for number in range(kills + 1):
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                os.close(reader)
                sync, write = rng.random() < 0.3, rng.choice(writes)
                slot_bytes = LARGE_BYTES if number % 5 == 2 else SLOT_BYTES
                live(f"{root}/kv", rng.randrange(1 << 30), sync, write, slot_bytes, writer)
            except BaseException:  # noqa: BLE001 - told to the parent, which sees the pipe end.
                import traceback

                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(writer)
        try:
            found.append(json.loads(_line(reader, number, seed)))
            time.sleep(rng.random() * _WRITE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(reader)
        if number % 10 == 3:
            for file in sized_files(folder, SLOT_BYTES):
                shutil.copyfile(file, old / file.name)
        elif number > 3 and rng.random() < 0.35:
            what = tear(folder, old, rng)
            torn[what] = torn.get(what, 0) + 1
    return {
        "kills": kills + 1, "seed": seed, "torn": torn,
        **{name: sum(each[name] for each in found) for name in ("num_right", "num_restored", "num_damaged")},
        "last_version": found[-1]["version"],
        "lives_beside_other_sizes": sum(each["num_other_bytes"] > 0 for each in found),
        "lives_with_blocks": sum(each["num_right"] > 0 for each in found),
    }  # fmt: skip


def _line(reader: int, number: int, seed: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([reader], [], [], 2 * _BEGIN_S)
        piece = os.read(reader, 1 << 16) if ready else b""
        if not piece:
            raise AssertionError(f"life {number} of seed {seed} ended before it had compared everything")
        line += piece
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description="kill a store in the middle of its writes to disk, and compare")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--write", choices=WRITES, help="of all lives; each draws one without this")
    asked = parser.parse_args()
    writes = (asked.write,) if asked.write else WRITES
    with tempfile.TemporaryDirectory(prefix="rks", dir="/tmp") as sockets, tempfile.TemporaryDirectory() as root:
        os.environ["RAYKV_SOCKET_DIR"] = sockets
        sys.stdout.write(json.dumps(run(asked.kills, asked.seed, root, writes)) + "\n")


if __name__ == "__main__":
    main()

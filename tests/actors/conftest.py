"""Real clusters, real stores and engines whose KV bytes can be told apart.

Every block is stamped from its hash alone, so any process can say whether an engine holds the right bytes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

POISON = 0x5A5A


class Engine:
    """What an inference engine is to the store: per-layer caches [2, blocks, tokens, heads, dim] and a client."""

    def __init__(
        self, store: Any, space: Any, num_blocks: int = 256, node_id: str | None = None, tenant: str = ""
    ) -> None:
        import torch

        self.space, shape = space, space.shape
        self.client = store.client(space, tenant=tenant, node_id=node_id)
        self.layers = [
            torch.zeros(
                2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim,
                dtype=getattr(torch, shape.dtype),
            )
            for _ in range(shape.num_layers)
        ]  # fmt: skip
        self._bits = [layer.view(torch.int16).numpy() for layer in self.layers]
        self.client.register_kv_caches(self.layers)

    def stamp(self, block_hash: bytes) -> np.ndarray:
        """Return the bits that the block of this hash has: [layer, plane, token, head, dim] int16."""
        shape = self.space.shape
        size = (shape.num_layers, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
        return np.random.default_rng(list(block_hash[:8])).integers(-(2**15), 2**15, size, np.int16)

    def write(self, hashes: Any, ids: list[int]) -> None:
        for block_hash, block in zip(hashes, ids, strict=True):
            for bits, stamped in zip(self._bits, self.stamp(block_hash), strict=True):
                bits[:, block] = stamped

    def poison(self, ids: list[int]) -> None:
        for bits in self._bits:
            bits[:, ids] = POISON

    def bits(self, block: int) -> np.ndarray:
        return np.stack([bits[:, block] for bits in self._bits])

    def num_right(self, hashes: Any, ids: list[int]) -> int:
        """Count the leading blocks that hold the bytes of their hashes."""
        for count, (block_hash, block) in enumerate(zip(hashes, ids, strict=True)):
            if not np.array_equal(self.bits(block), self.stamp(block_hash)):
                return count
        return len(ids)

    def save(self, hashes: Any, ids: list[int] | None = None) -> Any:
        """Stamp blocks and save them."""
        ids = list(range(len(hashes))) if ids is None else ids
        self.write(hashes, ids)
        return self.client.save(hashes, ids).result(30)

    def load(self, hashes: Any, ids: list[int] | None = None, skip: int = 0, timeout_s: float | None = None) -> Any:
        """Load over poisoned blocks; what the result calls usable must be right, byte for byte."""
        ids = list(range(len(hashes))) if ids is None else ids
        self.poison(ids)
        result = self.client.load(hashes, ids, skip, timeout_s=timeout_s).result(60)
        skipped = -(-skip // self.space.shape.block_size)
        usable = slice(skipped, result.num_blocks)
        assert self.num_right(hashes[usable], ids[usable]) == max(0, result.num_blocks - skipped)
        assert [failure.index for failure in result.failed] == list(range(result.num_blocks, len(hashes)))
        assert [block_id for failure in result.failed for block_id in failure.block_ids] == ids[result.num_blocks :]
        return result

    def publish(self, hashes: Any, ids: list[int], **options: Any) -> Any:
        """Stamp blocks and publish them for a hand-off; returns the ticket."""
        self.write(hashes, ids)
        return self.client.publish(ids, **options)

    def fetch(self, ticket: Any, hashes: Any, ids: list[int], timeout_s: float | None = None) -> Any:
        """Fetch over poisoned blocks; what the result calls usable must be right, byte for byte."""
        self.poison(ids)
        result = self.client.fetch(ticket, ids, timeout_s=timeout_s).result(60)
        assert self.num_right(hashes[: result.num_blocks], ids[: result.num_blocks]) == result.num_blocks
        assert [failure.index for failure in result.failed] == list(range(result.num_blocks, len(hashes)))
        return result

    def prefetch(self, hashes: Any) -> Any:
        return self.client.prefetch(hashes).result(60)

    def load_twice_at_once(self, hashes: Any, first: list[int], second: list[int]) -> list[Any]:
        """Have two loads of the same blocks under way, each into blocks of its own."""
        self.poison([*first, *second])
        jobs = [self.client.load(hashes, ids) for ids in (first, second)]
        results = [job.result(60) for job in jobs]
        assert [self.num_right(hashes, ids) for ids in (first, second)] == [len(hashes)] * 2
        return results

    def hold(self, leased: Any, written: Any) -> tuple[int, int]:
        """Take a lease and half of a write, and keep both; returns how many blocks each has."""
        from kvstore.blocks.codec import encode
        from kvstore.rpc.framing import Op
        from kvstore.rpc.messages import Prepare, decode_ticket

        self.held = self.client.lease(leased, ttl_s=600)
        request = encode(Prepare(self.client._attached.chain(written), 1))
        ticket = decode_ticket(self.client._attached.store.calls.call(Op.PREPARE_STORE, request, timeout_s=5))
        return len(self.held), len(ticket.slots)

    def num_calls(self) -> int:
        """Count the blocking calls that this client made so far, on all its connections."""
        return sum(connection.num_calls for connection in self.client._attached.store.open)

    def slots(self, hashes: Any) -> list[int]:
        """Return where this node keeps the readable prefix of a chain."""
        with self.client.lease(hashes) as lease:
            return list(lease.slots)


class Worker:
    """A worker process with engines in it, by name."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}

    def open(self, key: str, store: Any, space: Any, num_blocks: int = 256) -> str:
        self._engines[key] = Engine(store, space, num_blocks)
        return self._engines[key].client.node_id

    def put(self, key: str, make: Callable[..., Any], *args: Any) -> None:
        """Make an engine of another kind."""
        self._engines[key] = make(*args)

    def close(self, key: str) -> None:
        self._engines.pop(key).client.close()

    def do(self, key: str, verb: str, *args: Any, **options: Any) -> Any:
        """Call a method of an engine."""
        return getattr(self._engines[key], verb)(*args, **options)

    def ask(self, key: str, verb: str, *args: Any, **options: Any) -> Any:
        """Call a method of an engine's client."""
        return getattr(self._engines[key].client, verb)(*args, **options)

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def start_worker(ray_cluster: Any) -> Iterator[Callable[[str], Any]]:
    """Makes worker actors on a node of one's choice."""
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Workers cannot import this file, so its classes travel whole.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    started = []

    def make(node_id: str) -> Any:
        where = NodeAffinitySchedulingStrategy(node_id, soft=False)
        worker = ray.remote(Worker).options(num_cpus=0.1, scheduling_strategy=where).remote()
        started.append(worker)
        return worker

    yield make
    for worker in started:
        ray.kill(worker)
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def open_engine() -> Iterator[Callable[..., Engine]]:
    """Opens engines in this process, each on the store of a node of one's choice."""
    opened: list[Engine] = []

    def make(store: Any, space: Any, node_id: str, num_blocks: int = 256, tenant: str = "") -> Engine:
        opened.append(Engine(store, space, num_blocks, node_id, tenant))
        return opened[-1]

    yield make
    for engine in opened:
        engine.client.close()


@pytest.fixture(scope="session")
def make_space() -> Callable[..., Any]:
    """Makes namespaces; a block has 8 KiB unless told otherwise."""
    import kvstore

    def make(model: str = "m", **changes: Any) -> Any:
        shape = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32, "dtype": "bfloat16", "block_size": 16}
        shape |= {key: changes.pop(key) for key in list(changes) if key in shape}
        return kvstore.Namespace(model=model, shape=kvstore.KVShape(**shape), **changes)

    return make


@pytest.fixture(scope="session")
def chain_of() -> Callable[..., Any]:
    """Makes the hashes of blocks of tokens that no other seed has."""

    def make(space: Any, num_blocks: int, seed: int = 0, **options: Any) -> Any:
        size = space.shape.block_size
        tokens = np.arange(num_blocks * size) + 100_000 * (seed + 1)
        return space.block_hashes(tokens, **options)

    return make


@pytest.fixture(scope="session")
def eventually() -> Callable[..., Any]:
    """Waits until a function says something true, and returns that; an error of ours counts as not yet."""
    # Not at the top: what imports the project has to come after the environment is set.
    import waiting

    return waiting.eventually


@pytest.fixture
def stopped() -> Iterator[Callable[[int], None]]:
    """Stops processes with SIGSTOP; whatever happens they go on afterwards."""
    import waiting

    pids: list[int] = []

    def resume() -> None:
        while pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids.pop(), signal.SIGCONT)

    def stop(pid: int) -> None:
        pids.append(pid)
        waiting.stop_process(pid)

    stop.resume = resume  # type: ignore[attr-defined]
    yield stop
    resume()


@pytest.fixture(scope="session")
def process_lives() -> Callable[[int], bool]:
    """Whether a process runs; one that nobody has waited for yet does not."""

    def lives(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
        except OSError:
            return False

    return lives


@pytest.fixture(scope="session")
def arena_inode() -> Callable[[int], int]:
    """The inode of the arena that a node store's process holds."""

    def find(pid: int) -> int:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if "memfd:raykv-arena" in os.readlink(entry):
                return entry.stat().st_ino
        raise AssertionError(f"process {pid} has no arena")

    return find


@pytest.fixture(scope="session")
def arena_holders() -> Callable[[int], list[int]]:
    """The processes that have an arena open or mapped."""

    def holds(process: Path, inode: int) -> bool:
        try:
            lines = [line for line in (process / "maps").read_text().splitlines() if "raykv-arena" in line]
            if any(int(line.split()[4]) == inode for line in lines):
                return True
            entries = list((process / "fd").iterdir())
        except OSError:
            return False
        for entry in entries:
            try:
                if "raykv-arena" in os.readlink(entry) and entry.stat().st_ino == inode:
                    return True
            except OSError:
                continue
        return False

    def find(inode: int) -> list[int]:
        return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and holds(p, inode)]

    return find

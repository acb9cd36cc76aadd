"""Take blocks through each tier of a small store with a Ray of its own, and compare every byte.

Behind `kvstore doctor --roundtrip`, in a child process: written, read from memory, evicted, read from disk, the store
stopped and started again, and read from disk once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvstore.actors.session.handles import USE
from kvstore.actors.starting import start
from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.blocks.shape import KVShape
from kvstore.config import StoreConfig
from kvstore.disk.folder import open_folder
from kvstore.errors import TransferTimeout

_NUM_BLOCKS, _BLOCK_TOKENS = 4, 16
#: Room in memory for some blocks only, so that others push the first ones out.
_MEMORY_BYTES, _DISK_BYTES = 1 << 18, 8 << 20
_START_S, _WAIT_S, _JOB_S = 60.0, 20.0, 20.0


def take_round(disk_path: str) -> dict[str, int]:
    """Return how many blocks came back right, of how many, from memory, disk, and disk after a restart.

    Args:
        disk_path: for the disk tier; the caller removes what it leaves there.

    Raises:
        KVStoreError: the store cannot begin, or does not do a step in its time.
    """
    config = StoreConfig(
        name="doctor", capacity_bytes=_MEMORY_BYTES, disk_path=disk_path, disk_capacity_bytes=_DISK_BYTES
    )
    # Tried before Ray is begun, so that a wrong path is told at once.
    open_folder(disk_path, config.name, "doctor", _DISK_BYTES).close()
    # Both lives of the store are in one Ray, which would end with the first.
    with USE.joined("local", config.name, time.monotonic() + _START_S, may_start=True) as joined:
        found = {"num_blocks": _NUM_BLOCKS, **_first_life(config), **_second_life(config)}
    USE.leave(joined.session)
    return found


@contextmanager
def _life(config: StoreConfig) -> Iterator[tuple[Any, _Engine]]:
    store = start(config, "local", _START_S)
    try:
        engine = _Engine(store)
        yield store, engine
        engine.client.close()
    finally:
        store.stop()


def _first_life(config: StoreConfig) -> dict[str, int]:
    with _life(config) as (store, engine):
        first, number = engine.hashes(0), 0
        engine.save(first)
        found = {"memory": engine.num_right(first, lambda result: result.num_local)}
        _until("written to disk", lambda: engine.disk(store)["num_written"] >= _NUM_BLOCKS)
        while engine.client.lookup(first).num_local:
            number += 1
            if number > 1000:
                raise TransferTimeout("wanted the first blocks evicted by others, got them in memory still")
            engine.save(engine.hashes(number))
        found["disk"] = engine.num_right(first, lambda result: result.num_disk)
    return found


def _second_life(config: StoreConfig) -> dict[str, int]:
    with _life(config) as (_, engine):
        first = engine.hashes(0)
        _until("found on disk again", lambda: engine.client.lookup(first).num_disk >= _NUM_BLOCKS)
        return {"restart": engine.num_right(first, lambda result: result.num_disk)}


class _Engine:
    """A small cache with a client. Its blocks' bytes follow from their hashes."""

    def __init__(self, store: Any) -> None:
        import torch

        shape = KVShape(num_layers=2, num_kv_heads=2, head_dim=32, dtype="float32", block_size=_BLOCK_TOKENS)
        self._space = Namespace(model="doctor", shape=shape)
        self.client = store.client(self._space)
        dims = (2, 2 * _NUM_BLOCKS, _BLOCK_TOKENS, 2, 32)
        self._caches = [torch.zeros(dims, dtype=torch.float32) for _ in range(2)]
        self.client.register_kv_caches(self._caches)

    def hashes(self, number: int) -> BlockHashes:
        """Return the chain of other tokens for each number."""
        first = number * _NUM_BLOCKS * _BLOCK_TOKENS
        return self._space.block_hashes(list(range(first, first + _NUM_BLOCKS * _BLOCK_TOKENS)))

    def _bytes_of(self, block_hash: bytes) -> list[Any]:
        import torch

        generator = torch.Generator().manual_seed(int.from_bytes(block_hash[:4], "little"))
        return [torch.randn((2, _BLOCK_TOKENS, 2, 32), generator=generator) for _ in self._caches]

    def save(self, hashes: BlockHashes) -> None:
        for block, block_hash in enumerate(hashes):
            for cache, wanted in zip(self._caches, self._bytes_of(block_hash), strict=True):
                cache[:, block] = wanted
        self.client.save(hashes, range(_NUM_BLOCKS)).result(_JOB_S)

    def num_right(self, hashes: BlockHashes, num_of_tier: Callable[[Any], int]) -> int:
        """Load into other blocks of the cache; return how many came from that tier with the right bytes."""
        blocks = range(_NUM_BLOCKS, 2 * _NUM_BLOCKS)
        for cache in self._caches:
            cache[:, _NUM_BLOCKS:] = -1.0
        result = self.client.load(hashes, blocks).result(_JOB_S)
        num_right = 0
        for block, block_hash in zip(blocks, hashes, strict=True):
            pairs = zip(self._caches, self._bytes_of(block_hash), strict=True)
            num_right += all(bool((cache[:, block] == wanted).all()) for cache, wanted in pairs)
        return min(num_right, num_of_tier(result))

    @staticmethod
    def disk(store: Any) -> dict[str, Any]:
        """Return the counts of the disk tier of the only node."""
        (node,) = store.stats()["nodes"].values()
        counts: dict[str, Any] = node["disk"]
        return counts


def _until(what: str, condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > until_s:
            raise TransferTimeout(f"wanted {_NUM_BLOCKS} blocks {what} within {_WAIT_S:g} s, got fewer")
        time.sleep(0.05)

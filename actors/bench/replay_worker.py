"""The engine of a replay with real stores: a cache on the CPU, whose blocks' bytes follow from their names alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.actors.cluster import Store
from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.blocks.shape import KVShape
from kvstore.client.results import LoadResult, MissReason
from kvstore.errors import KVStoreError

_TIMEOUT_S = 120.0
#: Bytes of a layer of a block: K and V, 16 tokens, 64 elements of two bytes.
_LAYER_BYTES = 2 * 16 * 64 * 2
_POISON = 0x5A


def space_of(block_bytes: int) -> Namespace:
    """Return a namespace whose blocks have so many bytes, a multiple of a page."""
    shape = KVShape(
        num_layers=block_bytes // _LAYER_BYTES, num_kv_heads=1, head_dim=64, dtype="bfloat16", block_size=16
    )
    assert shape.block_bytes == block_bytes
    return Namespace(model="replay", shape=shape)


def bytes_of(block_hash: bytes, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return the bytes that the block of this name has."""
    return np.frombuffer(np.random.default_rng(list(block_hash)).bytes(num_bytes), np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request as its node served it.

    Args:
        memory: blocks that were in this node's memory.
        disk: blocks that were on its disk.
        peer: blocks that came from other nodes.
        num_peer_bytes: bytes that crossed between nodes.
        load_s: seconds of the load, without the comparison.
        reason: why the load ended early, if for another reason than that the blocks were nowhere; else "".
    """

    memory: int
    disk: int
    peer: int
    num_peer_bytes: int
    load_s: float
    reason: str


class ReplayWorker:
    """An engine on one node.

    Args:
        block_bytes: of each block.
        most_blocks: of a request.
    """

    def __init__(self, block_bytes: int, most_blocks: int) -> None:
        import torch

        self._space = space_of(block_bytes)
        _, heads, layers, planes, tokens, dim = self._space.shape.block_dims
        self._cache = torch.zeros(most_blocks, heads, layers, planes, tokens, dim, dtype=torch.bfloat16)
        #: The bytes of the cache, a row for each block.
        self.rows = self._cache.view(torch.uint8).reshape(most_blocks, block_bytes).numpy()
        self.client: Any = None

    def open(self, store: Store) -> None:
        """Attach to this node's store."""
        self.client = store.client(self._space)
        self.client.register_kv_caches(self._cache, axes="BHLPTD")

    def close(self) -> None:
        """Leave it."""
        self.client.close()

    def num_here(self, hashes: BlockHashes) -> int:
        """Return how many leading blocks are on this node, in memory and then on disk."""
        count: int = self.client.lookup(hashes, remote=False).num_here
        return count

    def serve(self, row: int, node: int, hashes: BlockHashes, numbers: Sequence[int]) -> Served:
        """Load what is there of a request, compare every byte, and save the rest.

        Args:
            row: of the trace, for messages; the first is 0.
            node: the number of this node, for messages.
            hashes: of its blocks.
            numbers: the same blocks as the trace numbers them, for messages.

        Raises:
            KVStoreError: a loaded block has a wrong byte.
        """
        count = len(hashes)
        self.rows[:count] = _POISON  # The bytes of an earlier request may be the right ones.
        began_s = time.perf_counter()
        result: LoadResult = self.client.load(hashes, range(count)).result(_TIMEOUT_S)
        load_s = time.perf_counter() - began_s
        for at in range(count):
            wanted = bytes_of(hashes[at], self.rows.shape[1])
            if at >= result.num_blocks:
                self.rows[at] = wanted
            elif said := wrong_byte(self.rows[at], wanted):
                raise KVStoreError(
                    f"row {row}, block {numbers[at]} ({hashes[at].hex()[:16]}), node {node}: {said}; the store "
                    "delivered a wrong block, please report it with the command and the trace"
                )
        if result.num_blocks < count:
            self.client.save(hashes, range(count)).result(_TIMEOUT_S)
        missed, num_peer = result.failed[:1], result.num_bytes // self.rows.shape[1]
        return Served(
            # The rest of the result's `num_peer` was in memory, behind blocks that were not.
            memory=result.num_blocks - result.num_disk - num_peer,
            disk=result.num_disk,
            peer=num_peer,
            num_peer_bytes=result.num_bytes,
            load_s=load_s,
            reason="" if not missed or missed[0].reason is MissReason.NOT_FOUND else missed[0].detail,
        )


def wrong_byte(got: npt.NDArray[np.uint8], wanted: npt.NDArray[np.uint8]) -> str:
    """Return what is wrong with the bytes of a block, or ""."""
    if np.array_equal(got, wanted):
        return ""
    wrong = np.flatnonzero(got != wanted)
    at = int(wrong[0])
    return f"wanted {wanted[at]:#04x} at byte {at}, got {got[at]:#04x}, and {len(wrong)} wrong bytes in all"

"""An engine whose every block can be checked: its bytes follow from its hash and the version of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvstore.blocks.hashing import BlockHashes, Namespace
from kvstore.client.client import Client
from kvstore.client.lease import Lease
from tests.soak.plan import NUM_RANKS, SHAPE

POISON, MINE = 0x5A5A, 0x3C3C
#: [layer, plane, token, head, dim], in which stamps are made.
_DIMS = (SHAPE.num_layers, SHAPE.num_planes, SHAPE.block_size, SHAPE.num_kv_heads, SHAPE.head_dim)
_BASE = np.random.default_rng(20).integers(0, 1 << 64, SHAPE.block_bytes // 8, np.uint64)
#: Layouts that engines take in turn, so that a block written from one is read into another.
LAYOUTS = ("PBTHD", "BHLPTD", "BLPTHD")


def stamp(block_hash: bytes, version: int = 0) -> np.ndarray:
    """Return the bits of the block of this hash: [layer, plane, token, head, dim] int16."""
    factor, summand, of_version = np.frombuffer(block_hash[:24], np.uint64)
    with np.errstate(over="ignore"):
        summand = summand + np.uint64(version) * (of_version | np.uint64(1))
    return (_BASE * (factor | np.uint64(1)) + summand).view(np.int16).reshape(_DIMS)


def stored_stamp(block_hash: bytes) -> bytes:
    """Return the same in the order of a slot: head, layer, plane, token, dim."""
    return stamp(block_hash).transpose(3, 0, 1, 2, 4).tobytes()


class Cache:
    """The paged cache of an engine in one of the layouts, all poison at first.

    Args:
        layout: one of LAYOUTS.
        num_blocks: blocks of the engine.
        heads: those that it has; all when None.
    """

    def __init__(self, layout: str, num_blocks: int, heads: slice | None = None) -> None:
        self.layout, self._heads = layout, slice(0, SHAPE.num_kv_heads) if heads is None else heads
        sizes = {"B": num_blocks, **dict(zip("LPTHD", _DIMS, strict=True))}
        sizes["H"] = len(range(SHAPE.num_kv_heads)[self._heads])
        axes = layout if "L" in layout else f"L{layout}"
        memory = torch.zeros([sizes[axis] for axis in axes], dtype=torch.bfloat16)
        #: What is registered: one tensor for each layer, or one for all.
        self.tensors = memory if axes == layout else list(memory)
        #: [block, layer, plane, token, head, dim] int16, whatever the order in memory.
        self.bits = memory.view(torch.int16).numpy().transpose([axes.index(axis) for axis in "BLPTHD"])
        self.bits[:] = POISON

    def write(self, hashes: BlockHashes, ids: Sequence[int], version: int = 0) -> None:
        """Make blocks those of the hashes."""
        for block_hash, block in zip(hashes, ids, strict=True):
            self.bits[block] = self._stamp(block_hash, version)

    def _stamp(self, block_hash: bytes, version: int) -> np.ndarray:
        return stamp(block_hash, version)[:, :, :, self._heads]

    def fill(self, ids: Sequence[int], value: int) -> None:
        """Make every element of blocks one value."""
        self.bits[list(ids)] = value

    def holds_only(self, ids: Sequence[int], value: int) -> bool:
        """Whether blocks are as `fill` left them."""
        return all(bool((self.bits[block] == value).all()) for block in ids)

    def wrong_blocks(
        self, hashes: BlockHashes, ids: Sequence[int], num_usable: int, skip_tokens: int = 0, version: int = 0
    ) -> list[str]:
        """Check what a load into poisoned blocks left behind; returns what is wrong, block by block.

        Args:
            hashes: what was loaded.
            ids: into which blocks.
            num_usable: how many leading blocks the load called usable.
            skip_tokens: tokens at the front that it must not have touched.
            version: of the weights that the blocks are of.
        """
        found = []
        whole, part = divmod(skip_tokens, SHAPE.block_size)
        for i, (block_hash, block) in enumerate(zip(hashes, ids, strict=True)):
            first = SHAPE.block_size if i < whole else part if i == whole else 0
            bits = self.bits[block]
            if not (bits[:, :, :first] == POISON).all():
                found.append(f"block {i}: bytes below skip_prefix_tokens={skip_tokens} were written")
            if i < num_usable and not np.array_equal(
                bits[:, :, first:], self._stamp(block_hash, version)[:, :, first:]
            ):
                poisoned = float((bits[:, :, first:] == POISON).mean())
                found.append(f"block {i}: wrong in tokens from {first} on, {poisoned:.0%} of it still poison")
        return found

    def version_of(self, hashes: BlockHashes, ids: Sequence[int], versions: Sequence[int]) -> int | None:
        """Return the one version that all blocks are of, None when they are of none or of several."""
        for version in versions:
            if not self.wrong_blocks(hashes, ids, len(ids), version=version):
                return version
        return None


class Engine:
    """A cache, and a client of one node's store.

    Args:
        control_path: the node store's socket.
        space: what the blocks mean.
        layout: one of LAYOUTS.
        num_blocks: of the cache.
        rank: which of two ranks it is, each with half of the heads; None for an engine that has all.
    """

    def __init__(
        self, control_path: str, space: Namespace, layout: str, num_blocks: int, rank: int | None = None
    ) -> None:
        half = SHAPE.num_kv_heads // NUM_RANKS
        heads = None if rank is None else slice(rank * half, (rank + 1) * half)
        self.cache = Cache(layout, num_blocks, heads)
        self.client = Client(control_path, space, None if rank is None else (rank, NUM_RANKS, 0, 1))
        self.client.register_kv_caches(self.cache.tensors, axes=layout)

    def close(self) -> None:
        """Close the client."""
        self.client.close()


def wrong_in_lease(lease: Lease) -> list[str]:
    """Compare the bytes of a held lease in place; returns what is wrong.

    Raises:
        LeaseExpired: it ended meanwhile.
    """
    return [
        f"block {i} (slot {lease.slots[i]}): wrong bytes"
        for i, block_hash in enumerate(lease.hashes)
        if lease.block(i) != stored_stamp(block_hash) and lease.held()
    ]

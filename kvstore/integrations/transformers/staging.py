"""Copies of blocks between a store and a cache without blocks, through a buffer of limited size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from kvstore.blocks.hashing import BlockHashes
from kvstore.blocks.shape import KVShape
from kvstore.client.client import Client
from kvstore.client.job import Job
from kvstore.client.results import LoadResult, MissReason
from kvstore.errors import ChainBroken, StoreUnavailable

Write: TypeAlias = "Callable[[int, torch.Tensor], None]"
"""Takes the index of a first block, and blocks [n, num_kv_heads, num_layers, 2, block_size, head_dim]."""

_GRACE_S = 5.0
"""A job ends by its own timeouts; it is abandoned this much later."""


class Staging:
    """A buffer in two halves, registered with a client: one half is copied while a job uses the other.

    Not for several threads. After an error it must not be used again: a job may still be using the buffer.

    Args:
        client: of this buffer alone; closed with it.
        num_blocks: blocks of each half.
        device: of the KV.
    """

    def __init__(self, client: Client, num_blocks: int, device: torch.device) -> None:
        shape: KVShape = client.space.shape
        self._client, self._num_blocks = client, num_blocks
        dims = (2 * num_blocks, shape.num_kv_heads, shape.num_layers, 2, shape.block_size, shape.head_dim)
        # The stored order, so that each block is copied as one run.
        with torch.inference_mode(False):  # A buffer made in inference mode could not be written outside of it.
            self._blocks = torch.empty(dims, dtype=getattr(torch, shape.dtype), device=device)
        client.register_kv_caches(self._blocks, "BHLPTD")
        self._limit_s = client.config.transfer_timeout_s + client.config.call_timeout_s + _GRACE_S

    def close(self) -> None:
        """Close the client; it waits a little for running jobs."""
        self._client.close(1.0)

    def num_stored(self, hashes: BlockHashes) -> int:
        """Return how many leading blocks of a chain some node has."""
        return self._client.lookup(hashes).num_blocks if len(hashes) else 0

    def load(self, hashes: BlockHashes, write: Write, timeout_s: float | None) -> int:
        """Load a chain from its root.

        Args:
            hashes: the blocks wanted.
            write: called for the blocks in order, with a view that is valid during the call.
            timeout_s: of each job for blocks of other nodes; the store's own when None.

        Returns:
            How many leading blocks were written.

        Raises:
            KVStoreError: the store cannot be used; blocks written before are right.
        """
        following: Job[Any] | None = None
        for start in range(0, len(hashes), self._num_blocks):
            running = self._load_job(hashes, start, timeout_s) if following is None else following
            is_last = start + self._num_blocks >= len(hashes)
            following = None if is_last else self._load_job(hashes, start + self._num_blocks, timeout_s)
            result: LoadResult = self._wait(running)
            if any(failure.reason is MissReason.STORE_LOST for failure in result.failed):
                raise StoreUnavailable(f"wanted the node's store, it is lost: {result.failed[0].detail}")
            half = self._half(start)
            if result.num_blocks:
                write(start, self._blocks[half.start : half.start + result.num_blocks])
            if result.num_blocks < min(self._num_blocks, len(hashes) - start):
                if following is not None:
                    self._wait(following)
                return start + result.num_blocks
        return len(hashes)

    def save(self, hashes: BlockHashes, first: int, read: Write) -> tuple[int, int]:
        """Save blocks [first, len(hashes)) of a chain whose earlier blocks are stored.

        Args:
            hashes: a chain from its root.
            first: index of the first block; if earlier blocks turn out not to be stored, they are saved, too.
            read: called to fill blocks, with the index of the first one.

        Returns:
            (blocks that this wrote, blocks for which the store had no room).

        Raises:
            KVStoreError: the store cannot be used; blocks saved before stay.
        """
        try:
            return self._save(hashes, first, read)
        except ChainBroken:
            if first == 0:
                raise
            return self._save(hashes, 0, read)  # Earlier blocks were evicted meanwhile.

    def _save(self, hashes: BlockHashes, first: int, read: Write) -> tuple[int, int]:
        num_written, num_at_once = 0, len(self._blocks)
        for start in range(first, len(hashes), num_at_once):
            run = hashes[start : start + num_at_once]
            read(start, self._blocks[: len(run)])
            result = self._wait(self._client.save(run, range(len(run))))
            num_written += result.num_written
            if result.num_blocks < len(run):
                return num_written, len(hashes) - start - result.num_blocks
        return num_written, 0

    def _load_job(self, hashes: BlockHashes, start: int, timeout_s: float | None) -> Job[Any]:
        run, half = hashes[start : start + self._num_blocks], self._half(start)
        return self._client.load(run, half[: len(run)], timeout_s=timeout_s)

    def _half(self, start: int) -> range:
        begin = self._num_blocks * (start // self._num_blocks % 2)
        return range(begin, begin + self._num_blocks)

    def _wait(self, job: Job[Any]) -> Any:
        try:
            return job.result(self._limit_s)
        except BaseException:
            # On an interrupt too: no caller waits for the job now, and it must not store what the buffer holds later.
            if not job.done():
                job.abandon(0.0)
            raise


@dataclass(frozen=True, slots=True)
class CacheRow:
    """A row of per-layer (K, V), as blocks.

    Args:
        planes: (K, V) of each layer, [rows, heads, tokens, head_dim].
        row: index of the row.
        offset: column of the row's first token.
        block_size: tokens of a block.
    """

    planes: Sequence[tuple[torch.Tensor, torch.Tensor]]
    row: int
    offset: int
    block_size: int

    def write(self, first: int, blocks: torch.Tensor) -> None:
        """Write blocks into the row, from its block `first` on."""
        for view, piece in self._pairs(first, blocks):
            view.copy_(piece)

    def read(self, first: int, blocks: torch.Tensor) -> None:
        """Fill blocks from the row, from its block `first` on."""
        for view, piece in self._pairs(first, blocks):
            piece.copy_(view)

    def _pairs(self, first: int, blocks: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each plane's blocks in the row and in `blocks`: [block, head, token, head_dim], without a copy."""
        begin, num_blocks = self.offset + first * self.block_size, len(blocks)
        for layer, pair in enumerate(self.planes):
            for plane, cache in enumerate(pair):
                tokens = cache[self.row, :, begin : begin + num_blocks * self.block_size]
                view = tokens.view(len(tokens), num_blocks, self.block_size, -1).transpose(0, 1)
                yield view, blocks[:, :, layer, plane]

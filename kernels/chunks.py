"""How a copy through a staging ring is cut: which spans share a buffer, and which bytes the copy engines move for them.

Nothing here is done twice for a chunk: small copies wait for the host, and two rings share its interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.kernels.driver import merge_runs
from kvstore.kernels.spans import I64, Spans


@dataclass(frozen=True, slots=True)
class Chunk:
    """Spans [begin, end) of a list, in positions from `first` on, through buffer `buffer`.

    A partial one is a slot of which only some tokens are saved: the kernel writes those across the link.
    """

    begin: int
    end: int
    first: int
    buffer: int
    partial: bool


def partial_positions(spans: Spans, num_positions: int) -> I64 | None:
    """Return the positions of which spans cover some tokens but not all, ascending; None when there are none."""
    size = spans.paging.stored_block_size
    if spans.num_tokens == num_positions * size:
        return None
    covered = np.bincount(spans.rows[:, 1], weights=spans.rows[:, 4], minlength=num_positions)
    found = np.flatnonzero((covered > 0) & (covered < size))
    return found if len(found) else None


def cut_spans(spans: Spans, per_chunk: int, partial: I64 | None, first_buffer: int, num_buffers: int) -> list[Chunk]:
    """Cut a list, whose positions ascend, so that each chunk fits a buffer.

    Args:
        spans: the list; its slots are positions.
        per_chunk: positions that a buffer holds.
        partial: positions, ascending, that are chunks by themselves and take no buffer.
        first_buffer: the buffer of the first chunk; they take turns.
        num_buffers: buffers.
    """
    positions, begin, turn = spans.rows[:, 1], 0, first_buffer
    chunks: list[Chunk] = []
    while begin < len(positions):
        first = int(positions[begin])
        stop, alone = first + per_chunk, False
        if partial is not None and (later := partial[partial.searchsorted(first) :][:1].tolist()):
            alone = later[0] == first
            stop = first + 1 if alone else min(stop, later[0])
        end = int(positions.searchsorted(stop))
        chunks.append(Chunk(begin, end, first, turn % num_buffers, alone))
        begin, turn = end, turn + (not alone)
    return chunks


class Moves:
    """Which runs of bytes the copy engines move for each chunk of a list.

    Args:
        spans: the list.
        slots: int64 `[num_positions]`, address of the slot of each position on the host.
        block_bytes: bytes of a block, and distance of two in a buffer.
        runs: (offset, bytes) of what is moved of each slot.
        pieces: int64 `[num_positions]`, the piece of registered memory that each slot lies in; default one for all.
    """

    def __init__(
        self,
        spans: Spans,
        slots: I64,
        block_bytes: int,
        runs: Sequence[tuple[int, int]],
        pieces: I64 | None = None,
    ) -> None:
        positions = spans.rows[:, 1]
        self._positions, self._slots, self._block_bytes, self._pieces = positions, slots, block_bytes, pieces
        again = positions[1:] == positions[:-1]
        self._again = again if again.any() else None
        self._offsets, lengths = np.array(runs, np.int64).T
        self._lengths = np.tile(lengths, len(slots))
        whole = len(runs) == 1 and runs[0][1] == block_bytes
        self._mergeable = whole and bool((slots[1:] - slots[:-1] == block_bytes).any())

    def of(self, chunk: Chunk, buffer: int) -> tuple[I64, I64, I64]:
        """Return addresses on the host and in the buffer, and lengths, of the runs of a chunk."""
        used = self._positions[chunk.begin : chunk.end]
        if self._again is not None:  # the spans of a slot follow each other
            again = self._again[chunk.begin : chunk.end - 1]
            used = used[np.concatenate(([True], ~again))]
        host = self._slots[used] + self._offsets[0]
        device = used * self._block_bytes + (buffer - chunk.first * self._block_bytes + int(self._offsets[0]))
        if len(self._offsets) > 1:
            inside = self._offsets - self._offsets[0]
            host, device = (host[:, None] + inside).ravel(), (device[:, None] + inside).ravel()
        lengths = self._lengths[: len(host)]
        if not self._mergeable:
            return host, device, lengths
        return merge_runs(host, device, lengths, None if self._pieces is None else self._pieces[used])

"""A ring of staging buffers in device memory: kernels on one stream, copy engines on another, overlapped.

    engine cache ◄─ kernels ─► chunk 0 | chunk 1 | chunk 2 ◄─ copy engines ─► slots in pinned host memory

While the copy engines move chunk i, the kernels work on chunk i + 1. Each chunk has two events: `ready` when its
writer is done, `drained` when its reader is. A ring serves one direction at a time; both at once take two rings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvstore.kernels.driver import copy_runs, merge_runs, on_device
from kvstore.kernels.gpu import GpuCopier, PlacedSpans
from kvstore.kernels.launch import check_slots, check_window
from kvstore.kernels.spans import I64, Ids, Spans, slots_of_positions
from kvstore.kernels.streams import own_stream

_NONE: I64 = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Spans [begin, end) of the list, in positions [first, stop) of the list of slots, through buffer `buffer`."""

    begin: int
    end: int
    first: int
    stop: int
    buffer: int


class StagingRing:
    """Copy between a CUDA cache and slots in pinned host memory at the speed of the link.

    Everything is asynchronous. Work starts after what is on the caller's stream, and the event that comes back is
    done when all bytes are in place; arguments have to live until then.

    Args:
        copier: of the engine's cache.
        layers: layers of the block that the engine holds.
        heads: heads of the block that the engine holds.
        chunk_bytes: aim for the bytes of one chunk; at least one block goes into one.
        num_chunks: chunks of the ring.
        max_ctas: cap on the thread blocks of a kernel, so that copies leave multiprocessors to the model.
        slots_per_piece: host slots are registered in pieces of so many, from slot 0 on, and no copy may go from one
            into the next; default all in one. The first piece has to be there before the first copy.

    Raises:
        ValueError: fewer than two chunks, or layers that are no whole groups.
    """

    def __init__(
        self,
        copier: GpuCopier,
        *,
        layers: range | None = None,
        heads: range | None = None,
        chunk_bytes: int = 32 << 20,
        num_chunks: int = 3,
        max_ctas: int | None = None,
        slots_per_piece: int | None = None,
    ) -> None:
        stored, device = copier.plan.stored, copier.plan.device
        if num_chunks < 2:
            raise ValueError(f"StagingRing: wanted at least 2 chunks, got {num_chunks}; one cannot overlap with itself")
        self._copier, self._max_ctas, self._num_chunks = copier, max_ctas, num_chunks
        self._slots_per_piece = slots_per_piece
        self._runs = stored.runs(layers or range(stored.num_layers), heads or range(stored.num_heads))
        self._per_chunk = max(1, chunk_bytes // stored.block_bytes)
        size = (num_chunks, self._per_chunk, stored.block_bytes)
        # Zeros, so that what aligns side tensors in a slot is never another request's bytes.
        self._buffers = torch.zeros(size, dtype=torch.uint8, device=device)
        # Before the model's kernels: a short copy kernel that waited behind them would leave the link idle.
        self._kernels, self._copies = own_stream(device, -1), own_stream(device)
        for stream in (self._kernels, self._copies):
            stream.wait_stream(torch.cuda.current_stream(device))
        self._ready = [_event() for _ in range(num_chunks)]
        self._drained = [_event() for _ in range(num_chunks)]
        self._addresses = [buffer.data_ptr() for buffer in self._buffers]
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._next = 0
        self._started = _event()
        self._rows: Tensor | None = None
        self._known: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Device memory that the ring takes."""
        return self._buffers.numel()

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """All streams that the ring queues work on: once they are through, it touches nothing any more."""
        return self._kernels, self._copies

    def save(self, spans: Spans, slots: Tensor, slot_ids: Ids) -> torch.cuda.Event:
        """Copy tokens from the engine into host slots.

        Slots of which spans cover a part only are written by the kernel across the link, token by token; their
        other bytes stay.

        Args:
            spans: slots in it are positions in `slot_ids`.
            slots: uint8 `[S, slot_bytes]` in pinned host memory, written.
            slot_ids: the slot of each position, on the host.

        Returns:
            An event that is done when all bytes are in place.

        Raises:
            ValueError: ids or slots do not fit; nothing was written.
        """
        ids = self._check(spans, slots, slot_ids)
        with on_device(self._index):
            placed = self._start(spans)
            partial = _partial_positions(spans, len(ids))
            moves: _Moves | None = None
            for chunk in self._chunks(spans, partial):
                if len(partial) and chunk.first in partial:
                    slot = int(ids[chunk.first])
                    self._launch(True, placed, slots[slot : slot + 1], chunk)
                    continue
                self._kernels.wait_event(self._drained[chunk.buffer])
                self._launch(True, placed, self._buffers[chunk.buffer], chunk)
                self._ready[chunk.buffer].record(self._kernels)
                self._copies.wait_event(self._ready[chunk.buffer])
                # Only now, while the first kernel runs.
                moves = moves or self._moves(slots, ids)
                host, device, lengths = moves.of(spans, chunk, self._addresses[chunk.buffer])
                copy_runs(host, device, lengths, self._copies.cuda_stream)
                self._drained[chunk.buffer].record(self._copies)
        if len(partial):
            self._copies.wait_stream(self._kernels)
        return _recorded(self._copies)

    def load(self, slots: Tensor, slot_ids: Ids, spans: Spans) -> torch.cuda.Event:
        """Copy tokens from host slots into the engine; arguments as for `save`.

        No byte of the engine that is in no span is written.
        """
        ids = self._check(spans, slots, slot_ids)
        with on_device(self._index):
            self._join()
            moves, placed = self._moves(slots, ids), None
            for chunk in self._chunks(spans, _NONE):
                self._copies.wait_event(self._drained[chunk.buffer])
                host, device, lengths = moves.of(spans, chunk, self._addresses[chunk.buffer])
                copy_runs(device, host, lengths, self._copies.cuda_stream)
                self._ready[chunk.buffer].record(self._copies)
                # Only now, while the first bytes are on their way.
                placed = placed or self._place(spans)
                self._kernels.wait_event(self._ready[chunk.buffer])
                self._launch(False, placed, self._buffers[chunk.buffer], chunk)
                self._drained[chunk.buffer].record(self._kernels)
        return _recorded(self._kernels)

    def _launch(self, to_slots: bool, placed: PlacedSpans, slots: Tensor, chunk: _Chunk) -> None:
        self._copier.launch_checked(
            to_slots, placed, slots, chunk.begin, chunk.end, chunk.first, self._kernels.cuda_stream, self._max_ctas
        )

    def _check(self, spans: Spans, slots: Tensor, slot_ids: Ids) -> I64:
        """Check everything that a copy is given; return the slot of each position."""
        if slots is not self._known:  # Asking the driver what memory this is takes longer than the rest.
            check_slots(self._copier.plan, slots)
            self._known = slots
        ids = slots_of_positions(spans, slot_ids, len(slots))
        positions = spans.rows[:, 1]
        if bool((positions[1:] < positions[:-1]).any()):
            raise ValueError("wanted spans in the order of their positions; make them with slot_ids that ascend")
        check_window(self._copier.plan, spans, len(ids), 0, None, 0, self._max_ctas)
        return ids

    def _join(self) -> None:
        """Let both streams begin after what is on the caller's."""
        self._started.record(torch.cuda.current_stream(self._index))
        self._kernels.wait_event(self._started)
        self._copies.wait_event(self._started)

    def _place(self, spans: Spans) -> PlacedSpans:
        placed = self._copier.place(spans, self._kernels, self._rows)
        self._rows = placed.memory
        return placed

    def _start(self, spans: Spans) -> PlacedSpans:
        self._join()
        return self._place(spans)

    def _chunks(self, spans: Spans, alone: I64) -> Iterator[_Chunk]:
        """Cut the list at chunk boundaries; positions in `alone`, which ascend, are chunks by themselves."""
        positions, begin = spans.rows[:, 1], 0
        while begin < len(positions):
            first = int(positions[begin])
            stop = first + self._per_chunk
            if len(alone) and (later := alone[np.searchsorted(alone, first) :][:1].tolist()):
                stop = min(stop, max(first + 1, later[0]))
            end = int(positions.searchsorted(stop))
            yield _Chunk(begin, end, first, stop, self._next)
            self._next = (self._next + 1) % self._num_chunks
            begin = end

    def _moves(self, slots: Tensor, ids: I64) -> _Moves:
        stride, block_bytes = slots.stride(0), self._copier.plan.stored.block_bytes
        mergeable = len(self._runs) == 1 and self._runs[0][1] == stride == block_bytes
        mergeable = mergeable and bool((np.diff(ids) == 1).any())
        pieces = ids // self._slots_per_piece if mergeable and self._slots_per_piece else None
        return _Moves(slots.data_ptr() + ids * stride, block_bytes, self._runs, mergeable, pieces)


@dataclass(frozen=True, slots=True)
class _Moves:
    """Where the slot of every position lies on the host, and which runs of it are moved."""

    addresses: I64
    block_bytes: int
    runs: list[tuple[int, int]]
    mergeable: bool
    pieces: I64 | None

    def of(self, spans: Spans, chunk: _Chunk, buffer: int) -> tuple[I64, I64, I64]:
        """Return addresses on the host and in the buffer, and lengths, of the runs of a chunk."""
        used = spans.rows[chunk.begin : chunk.end, 1]
        if (again := used[1:] == used[:-1]).any():  # The spans of a slot follow each other.
            used = used[np.concatenate(([True], ~again))]
        host, device = self.addresses[used], buffer + (used - chunk.first) * self.block_bytes
        if len(self.runs) == 1:
            offset, length = self.runs[0]
            moves = (host + offset, device + offset, np.full(len(used), length, np.int64))
            pieces = None if self.pieces is None else self.pieces[used]
            return merge_runs(*moves, pieces) if self.mergeable else moves
        offsets, lengths = np.array(self.runs, np.int64).T
        return (host[:, None] + offsets).ravel(), (device[:, None] + offsets).ravel(), np.tile(lengths, len(used))


def _partial_positions(spans: Spans, num_positions: int) -> I64:
    """Return the positions of which spans cover some tokens but not all."""
    size = spans.paging.stored_block_size
    if spans.num_tokens == num_positions * size:
        return _NONE
    covered = np.bincount(spans.rows[:, 1], weights=spans.rows[:, 4], minlength=num_positions)
    return np.flatnonzero((covered > 0) & (covered < size))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    done = _event()
    done.record(stream)
    return done

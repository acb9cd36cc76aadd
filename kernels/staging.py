"""A ring of staging buffers in device memory: kernels on one stream, copy engines on another, overlapped.

    engine cache ◄─ kernels ─► chunk 0 | chunk 1 | chunk 2 ◄─ copy engines ─► slots in pinned host memory

While the copy engines move chunk i, the kernels work on chunk i + 1. Each chunk has two events: `ready` when its
writer is done, `drained` when its reader is. A ring serves one direction at a time; both at once take two rings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvstore.kernels.chunks import Chunk, Memory, Moves, by_slot, cut_spans, list_moves, partial_positions
from kvstore.kernels.driver import Runs, on_device, record, wait
from kvstore.kernels.gpu import GpuCopier, PlacedSpans
from kvstore.kernels.launch import check_slots, check_window
from kvstore.kernels.merging import I64
from kvstore.kernels.spans import Ids, Spans, slots_of_positions
from kvstore.kernels.streams import index_of, own_stream

#: The first chunk of a save and the last of a load overlap with nothing, so they are at most this part of a chunk.
_SHORT_CHUNK = 4


class StagingRing:
    """Copy between a CUDA cache and slots in pinned host memory at the speed of the link.

    Everything is asynchronous. Work starts after the work on the caller's stream, and the returned event is done when
    all bytes are in place; arguments must live until then. Blocks are copied in the order of their slots, so that
    neighbours are one run for the copy engines.

    Args:
        copier: of the engine's cache.
        layers: layers of the block that the engine holds.
        heads: heads of the block that the engine holds.
        chunk_bytes: wanted bytes of one chunk; a chunk holds at least one block.
        num_chunks: chunks of the ring. If the model's kernels fill the device, each of ours waits for theirs to end;
            the default keeps the link busy for more than 2 ms meanwhile.
        max_ctas: cap on the thread blocks of a kernel. Default none: with large matrix products on the device, caps
            cost between a tenth and two thirds of the speed of loads (docs/performance-notes.md).
        slots_per_piece: host slots are registered in pieces of this many, from slot 0 on, and no copy may cross from
            one piece into the next; default one piece. The first piece must be registered before the first copy.

    Raises:
        ValueError: fewer than two chunks, or layers that are not whole groups.
    """

    def __init__(
        self,
        copier: GpuCopier,
        *,
        layers: range | None = None,
        heads: range | None = None,
        chunk_bytes: int = 32 << 20,
        num_chunks: int = 4,
        max_ctas: int | None = None,
        slots_per_piece: int | None = None,
    ) -> None:
        stored, device = copier.plan.stored, copier.plan.device
        if num_chunks < 2:
            raise ValueError(f"StagingRing: wanted at least 2 chunks, got {num_chunks}; one cannot overlap with itself")
        self._copier, self._max_ctas, self._slots_per_piece = copier, max_ctas, slots_per_piece
        self._runs = stored.runs(layers or range(stored.num_layers), heads or range(stored.num_heads))
        self._per_chunk = max(1, chunk_bytes // stored.block_bytes)
        self._short = max(1, self._per_chunk // _SHORT_CHUNK)
        size = (num_chunks, self._per_chunk, stored.block_bytes)
        # Zeros, so that the padding of side tensors in a slot never holds another request's bytes.
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._buffers = list(self._memory)
        # Higher priority than the model's kernels: a short copy kernel that waits for them would leave the link idle.
        self._kernels, self._copies = own_stream(device, -1), own_stream(device)
        for stream in (self._kernels, self._copies):
            stream.wait_stream(torch.cuda.current_stream(device))
        self._events = [_recorded(self._kernels) for _ in range(2 * num_chunks)]
        handles = [event.cuda_event for event in self._events]
        self._ready, self._drained = handles[:num_chunks], handles[num_chunks:]
        self._addresses = [buffer.data_ptr() for buffer in self._buffers]
        self._index = index_of(device)
        self._next = 0
        self._started = _event()
        self._rows: Tensor | None = None
        self._known: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of device memory that the ring uses."""
        return self._memory.numel()

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """Return all streams with the ring's work; once they are done, it touches nothing any more."""
        return self._kernels, self._copies

    def save(self, spans: Spans, slots: Tensor, slot_ids: Ids) -> torch.cuda.Event:
        """Copy tokens from the engine into host slots.

        If spans cover only a part of a slot, the kernel writes it across the link, token by token; its other bytes stay
        unchanged.

        Args:
            spans: slots in it are positions in `slot_ids`.
            slots: uint8 `[S, slot_bytes]` in pinned host memory, written.
            slot_ids: the slot of each position, on the host.

        Returns:
            An event that is done when all bytes are in place.

        Raises:
            ValueError: ids or slots do not fit; nothing was written.
        """
        spans, ids = self._check(spans, slots, slot_ids)
        chunks = self._cut(spans, partial_positions(spans, len(ids)), most_first=self._short)
        with on_device(self._index):
            self._join()
            placed, runs, ends = self._place(spans), None, [0]
            for at, chunk in enumerate(chunks):
                if chunk.partial:
                    slot = int(ids[chunk.first])
                    self._launch(True, placed, slots[slot : slot + 1], chunk)
                    continue
                ready, drained = self._ready[chunk.buffer], self._drained[chunk.buffer]
                wait(self._kernels.cuda_stream, drained)
                self._launch(True, placed, self._buffers[chunk.buffer], chunk)
                record(ready, self._kernels.cuda_stream)
                wait(self._copies.cuda_stream, ready)
                if runs is None:  # Only now, while the first kernel runs.
                    moves = self._moves(spans, chunks, slots, ids)
                    runs, ends = Runs(moves.host, moves.device, moves.lengths), [0, *moves.ends]
                runs.copy(ends[at], ends[at + 1], self._copies.cuda_stream)
                record(drained, self._copies.cuda_stream)
        if any(chunk.partial for chunk in chunks):
            self._copies.wait_stream(self._kernels)
        return _recorded(self._copies)

    def load(self, slots: Tensor, slot_ids: Ids, spans: Spans) -> torch.cuda.Event:
        """Copy tokens from host slots into the engine; arguments as for `save`.

        Only bytes of the engine that are in a span are written.
        """
        spans, ids = self._check(spans, slots, slot_ids)
        chunks = self._cut(spans, None, most_last=self._short)
        with on_device(self._index):
            self._join()
            moves, placed = self._moves(spans, chunks, slots, ids), None
            runs, ends = Runs(moves.device, moves.host, moves.lengths), [0, *moves.ends]
            for at, chunk in enumerate(chunks):
                ready, drained = self._ready[chunk.buffer], self._drained[chunk.buffer]
                wait(self._copies.cuda_stream, drained)
                runs.copy(ends[at], ends[at + 1], self._copies.cuda_stream)
                record(ready, self._copies.cuda_stream)
                # Only now, while the first bytes are on their way.
                placed = placed or self._place(spans)
                wait(self._kernels.cuda_stream, ready)
                self._launch(False, placed, self._buffers[chunk.buffer], chunk)
                record(drained, self._kernels.cuda_stream)
        return _recorded(self._kernels)

    def _launch(self, to_slots: bool, placed: PlacedSpans, slots: Tensor, chunk: Chunk) -> None:
        work = self._copier.prepare(to_slots, placed, slots, chunk.begin, chunk.end, chunk.first, self._max_ctas)
        self._copier.launch_prepared(work, self._kernels.cuda_stream)

    def _check(self, spans: Spans, slots: Tensor, slot_ids: Ids) -> tuple[Spans, I64]:
        """Check a copy's arguments; return the spans in slot order, and the slot of each position."""
        if slots is not self._known:  # Asking the driver for the kind of memory takes longer than the rest.
            check_slots(self._copier.plan, slots)
            self._known = slots
        ids = slots_of_positions(spans, slot_ids, len(slots))
        check_window(self._copier.plan, spans, len(ids), 0, None, 0, self._max_ctas)
        return by_slot(spans, ids)

    def _join(self) -> None:
        """Make both streams wait for the work on the caller's stream."""
        self._started.record(torch.cuda.current_stream(self._index))
        self._kernels.wait_event(self._started)
        self._copies.wait_event(self._started)

    def _place(self, spans: Spans) -> PlacedSpans:
        placed = self._copier.place(spans, self._kernels, self._rows)
        self._rows = placed.memory
        return placed

    def _cut(self, spans: Spans, partial: I64 | None, **ends: int | None) -> list[Chunk]:
        chunks = cut_spans(spans, self._per_chunk, partial, self._next, len(self._buffers), **ends)
        self._next += sum(not chunk.partial for chunk in chunks)
        return chunks

    def _moves(self, spans: Spans, chunks: list[Chunk], slots: Tensor, ids: I64) -> Moves:
        pieces = ids // self._slots_per_piece if self._slots_per_piece else None
        addresses, block_bytes = slots.data_ptr() + ids * slots.stride(0), self._copier.plan.stored.block_bytes
        return list_moves(spans, chunks, Memory(addresses, self._addresses, block_bytes, self._runs, pieces))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    done = _event()
    done.record(stream)
    return done

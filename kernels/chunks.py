"""Cut a copy through a staging ring into chunks, and list the bytes that the copy engines move for each.

Nothing here is done twice for a chunk: small copies wait for the host, and two rings share its interpreter.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstore.kernels.merging import I64, merge_runs
from kvstore.kernels.spans import Spans

#: Up to this many runs are listed one by one, which is then faster than a few dozen calls of numpy.
_FEW_RUNS = 256


class Chunk(NamedTuple):
    """Spans [begin, end) of a list, in positions from `first` on, through buffer `buffer`.

    A partial chunk is a slot of which only some tokens are saved: the kernel writes these across the link.
    """

    begin: int
    end: int
    first: int
    buffer: int
    partial: bool


def partial_positions(spans: Spans, num_positions: int) -> I64 | None:
    """Return the positions that spans cover only in part, ascending; None when there are none."""
    size = spans.paging.stored_block_size
    if spans.num_tokens == num_positions * size:
        return None
    covered = np.bincount(spans.rows[:, 1], weights=spans.rows[:, 4], minlength=num_positions)
    found = np.flatnonzero((covered > 0) & (covered < size))
    return found if len(found) else None


def by_slot(spans: Spans, slot_ids: I64) -> tuple[Spans, I64]:
    """Renumber the positions of a list by their slots, so that neighbours on the host move as one run.

    Args:
        spans: the list; its slots are positions in `slot_ids`.
        slot_ids: the slot of each position, each once.

    Returns:
        The same spans in the order of their slots, and the slots of the new positions.
    """
    order = np.argsort(slot_ids, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    rows = spans.rows.copy()
    rows[:, 1] = rank[rows[:, 1]]
    rows = rows[np.argsort(rows[:, 1], kind="stable")]
    return dataclasses.replace(spans, rows=rows), slot_ids[order]


def cut_spans(
    spans: Spans,
    per_chunk: int,
    partial: I64 | None,
    first_buffer: int,
    num_buffers: int,
    *,
    most_first: int | None = None,
    most_last: int | None = None,
) -> list[Chunk]:
    """Cut a list with ascending positions into chunks that each fit a buffer.

    Args:
        spans: the list; its slots are positions.
        per_chunk: positions that a buffer holds.
        partial: positions, ascending, that are chunks by themselves and use no buffer.
        first_buffer: the buffer of the first chunk; the buffers take turns.
        num_buffers: number of buffers.
        most_first: most positions of the first chunk, because nothing overlaps with the kernel that fills it.
        most_last: most positions of the last chunk, because nothing overlaps with the kernel that empties it.
    """
    positions, begin, turn = spans.rows[:, 1].tolist(), 0, first_buffer
    alone = [] if partial is None else partial.tolist()
    chunks: list[Chunk] = []
    while begin < len(positions):
        first = positions[begin]
        left = positions[-1] + 1 - first
        size = per_chunk
        if most_first is not None and not chunks:
            size = min(size, most_first)
        if most_last is not None and most_last < left <= per_chunk:
            size = left - most_last
        at = bisect.bisect_left(alone, first)
        next_alone = alone[at] if at < len(alone) else positions[-1] + 1
        is_alone = next_alone == first
        end = bisect.bisect_left(positions, first + 1 if is_alone else min(first + size, next_alone), begin)
        chunks.append(Chunk(begin, end, first, turn % num_buffers, is_alone))
        begin, turn = end, turn + (not is_alone)
    return chunks


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """The runs of bytes that the copy engines move, chunk after chunk.

    Args:
        host: int64 `[n]`, addresses in the slots.
        device: int64 `[n]`, addresses in the buffers.
        lengths: int64 `[n]`, bytes.
        ends: for each chunk, the index after its last run; a partial chunk has no runs.
    """

    host: I64
    device: I64
    lengths: I64
    ends: list[int]


class Memory(NamedTuple):
    """The slots and the buffers of a copy, and the bytes that move between them.

    Args:
        slots: int64 `[num_positions]`, address of the slot of each position on the host.
        buffers: address of each buffer.
        block_bytes: bytes of a block, and the distance of two blocks in a buffer.
        runs: (offset, bytes) of the runs that move in each slot.
        pieces: int64 `[num_positions]`, the piece of registered memory that each slot lies in; default one for all.
    """

    slots: I64
    buffers: Sequence[int]
    block_bytes: int
    runs: Sequence[tuple[int, int]]
    pieces: I64 | None = None


def list_moves(spans: Spans, chunks: Sequence[Chunk], memory: Memory) -> Moves:
    """List the runs that the copy engines move for all chunks of a list, from `cut_spans`."""
    if len(spans) * len(memory.runs) <= _FEW_RUNS:
        return _list_few(spans, chunks, memory)
    slots, buffers, block_bytes, runs, pieces = memory
    bounds = np.array([(chunk.end, chunk.first, buffers[chunk.buffer], chunk.partial) for chunk in chunks], np.int64)
    ends, first, buffer, partial = bounds.reshape(-1, 4).T
    positions = spans.rows[:, 1]
    in_chunk = np.repeat(np.arange(len(chunks)), np.diff(ends, prepend=0))
    # The spans of a slot follow each other, and a slot is moved once.
    used = np.flatnonzero((np.diff(positions, prepend=-1) != 0) & (partial[in_chunk] == 0))
    positions, in_chunk = positions[used], in_chunk[used]
    offsets, sizes = np.array(runs, np.int64).T
    host = (slots[positions, None] + offsets).ravel()
    device = ((buffer[in_chunk] + (positions - first[in_chunk]) * block_bytes)[:, None] + offsets).ravel()
    apart = in_chunk if pieces is None else in_chunk * (int(pieces.max(initial=0)) + 1) + pieces[positions]
    host, device, lengths = merge_runs(host, device, np.tile(sizes, len(positions)), np.repeat(apart, len(runs)))
    num_bytes = np.bincount(in_chunk, minlength=len(chunks)) * sizes.sum()
    return Moves(host, device, lengths, lengths.cumsum().searchsorted(num_bytes.cumsum(), side="right").tolist())


def _list_few(spans: Spans, chunks: Sequence[Chunk], memory: Memory) -> Moves:
    positions, addresses = spans.rows[:, 1].tolist(), memory.slots.tolist()
    piece_of = memory.pieces.tolist() if memory.pieces is not None else [0] * len(addresses)
    host: list[int] = []
    device: list[int] = []
    lengths: list[int] = []
    ends: list[int] = []
    for chunk in chunks:
        follows, position = (-1, -1, -1), -1  # begin of a run that joins the last one
        for span in () if chunk.partial else range(chunk.begin, chunk.end):
            if positions[span] == position:
                continue  # The spans of a slot follow each other, and a slot is moved once.
            position = positions[span]
            piece = piece_of[position]
            in_host = addresses[position]
            in_buffer = memory.buffers[chunk.buffer] + (position - chunk.first) * memory.block_bytes
            for offset, num_bytes in memory.runs:
                begin = (in_host + offset, in_buffer + offset, piece)
                if begin == follows:
                    lengths[-1] += num_bytes
                else:
                    host.append(begin[0])
                    device.append(begin[1])
                    lengths.append(num_bytes)
                follows = (begin[0] + num_bytes, begin[1] + num_bytes, piece)
        ends.append(len(lengths))
    return Moves(np.array(host, np.int64), np.array(device, np.int64), np.array(lengths, np.int64), ends)

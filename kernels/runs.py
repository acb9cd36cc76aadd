"""The runs of contiguous bytes of spans on both sides: the parts of a copy without kernels.

Plain arithmetic over a plan, so it holds for any strides, block sizes, parts and skipped prefix. The mean length of a
cache's runs shows whether copying it without kernels is worthwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvstore.kernels.merging import I64, merge_runs
from kvstore.kernels.plan import CopyPlan
from kvstore.kernels.spans import Spans


@dataclass(frozen=True, slots=True, eq=False)
class SpanRuns:
    """The runs of one kind of span: all spans with the same first tokens and number of tokens.

    Args:
        engine_addresses: int64 `[n]`, address of each run in engine block 0.
        block_strides: int64 `[n]`, bytes from there to the same run in engine block 1.
        slot_offsets: int64 `[n]`, ascending, distance of each run from the beginning of its slot.
        lengths: int64 `[n]`, bytes of each run.
    """

    engine_addresses: I64
    block_strides: I64
    slot_offsets: I64
    lengths: I64


def span_runs(plan: CopyPlan, engine_token: int, slot_token: int, num_tokens: int) -> SpanRuns:
    """List the runs of a span of `num_tokens`, from these first tokens of its engine block and slot."""
    columns = []
    for section in plan.sections:
        engine, slot = section.rows(engine_token, slot_token, num_tokens)
        stride, row = (np.full(len(slot), size, np.int64) for size in (section.engine_block_stride, section.row_bytes))
        columns.append(np.stack((engine, slot, row, stride)))
    rows = np.concatenate(columns, axis=1)
    engine, slot, lengths, strides = rows[:, np.argsort(rows[1])]
    # Neighbours with different block strides are not neighbours in the next block.
    engine, offsets, lengths = merge_runs(engine, slot, lengths, strides)
    return SpanRuns(engine, strides[np.searchsorted(slot, offsets)], offsets, lengths)


class RunTable:
    """Lists the runs of copies of one plan; runs of whole blocks are computed once.

    Args:
        plan: of the engine's cache.
        slots_per_piece: host slots are registered in pieces of this many, from slot 0 on, and no run crosses from one
            piece into the next; default one piece.
    """

    def __init__(self, plan: CopyPlan, slots_per_piece: int | None = None) -> None:
        self._plan, self._slots_per_piece = plan, slots_per_piece
        self._step = min(plan.paging.engine_block_size, plan.paging.stored_block_size)
        self._whole: dict[tuple[int, int], SpanRuns] = {}

    @property
    def mean_run_bytes(self) -> int:
        """Return the mean bytes of a run, in a block of the smaller of both sizes."""
        return int(self._of(0, 0, self._step).lengths.mean())

    def runs(self, spans: Spans, slots: Tensor, slot_ids: I64) -> tuple[I64, I64, I64]:
        """Return the engine addresses, host addresses and lengths of all runs of a list of spans.

        Args:
            spans: slots in it are positions in `slot_ids`.
            slots: uint8 `[S, slot_bytes]`.
            slot_ids: int64, the slot of each position.
        """
        kinds, kind_of = np.unique(spans.rows[:, 2:5], axis=0, return_inverse=True)
        engine, host, lengths, pieces = [], [], [], []
        for index, kind in enumerate(kinds.tolist()):
            rows, one = spans.rows[kind_of.ravel() == index], self._of(*kind)
            ids = slot_ids[rows[:, 1], None]
            engine.append((one.engine_addresses + rows[:, :1] * one.block_strides).ravel())
            host.append((slots.data_ptr() + ids * slots.stride(0) + one.slot_offsets).ravel())
            lengths.append(np.tile(one.lengths, len(rows)))
            pieces.append(np.repeat(ids // (self._slots_per_piece or len(slots)), len(one.lengths)))
        if not engine:
            return (np.empty(0, np.int64),) * 3
        return merge_runs(*(np.concatenate(parts) for parts in (engine, host, lengths, pieces)))

    def _of(self, engine_token: int, slot_token: int, num_tokens: int) -> SpanRuns:
        if num_tokens != self._step:
            return span_runs(self._plan, engine_token, slot_token, num_tokens)
        key = (engine_token, slot_token)
        if key not in self._whole:
            self._whole[key] = span_runs(self._plan, *key, num_tokens)
        return self._whole[key]

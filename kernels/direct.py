"""Copies between an engine's cache and host slots by the copy engines alone: no kernel, no staging.

Best where an engine block is a few long runs in the slot's order, as in a cross-layer cache in the stored order, whose
blocks are one run each. It takes no multiprocessor from the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvstore.kernels.driver import copy_runs, on_device
from kvstore.kernels.launch import check_slots, check_window
from kvstore.kernels.merging import I64
from kvstore.kernels.plan import CopyPlan
from kvstore.kernels.runs import RunTable
from kvstore.kernels.spans import Ids, Spans, slots_of_positions
from kvstore.kernels.streams import index_of, own_stream


class DirectCopies:
    """Copy between a CUDA cache and slots in pinned host memory, run by run, on its own stream.

    Everything is asynchronous. Work starts after the work on the caller's stream, and the returned event is done when
    all bytes are in place; arguments must live until then. One thread at a time.

    Args:
        plan: of the engine's cache.
        slots_per_piece: as for `RunTable`. The first piece has to be registered before the first copy.
    """

    def __init__(self, plan: CopyPlan, *, slots_per_piece: int | None = None) -> None:
        self._plan, self._table = plan, RunTable(plan, slots_per_piece)
        device = plan.device
        self._index = index_of(device)
        self._copies = own_stream(device)
        self._known: Tensor | None = None

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """Return all streams with queued work; once they are done, nothing is touched any more."""
        return (self._copies,)

    def save(self, spans: Spans, slots: Tensor, slot_ids: Ids) -> torch.cuda.Event:
        """Copy tokens from the engine into host slots; other bytes of a slot stay unchanged.

        Args:
            spans: slots in it are positions in `slot_ids`.
            slots: uint8 `[S, slot_bytes]` in pinned host memory, written.
            slot_ids: the slot of each position, on the host.

        Returns:
            An event that is done when all bytes are in place.

        Raises:
            ValueError: ids or slots do not fit; nothing was written.
            RuntimeError: the driver refused; some runs may have been queued.
        """
        engine, host, lengths = self._listed(spans, slots, slot_ids)
        return self._queue(host, engine, lengths)

    def load(self, slots: Tensor, slot_ids: Ids, spans: Spans) -> torch.cuda.Event:
        """Copy tokens from host slots into the engine; arguments as for `save`.

        Only bytes of the engine that are in a span are written.
        """
        engine, host, lengths = self._listed(spans, slots, slot_ids)
        return self._queue(engine, host, lengths)

    def _listed(self, spans: Spans, slots: Tensor, slot_ids: Ids) -> tuple[I64, I64, I64]:
        if slots is not self._known:  # Asking the driver for the kind of memory takes longer than the rest.
            check_slots(self._plan, slots)
            self._known = slots
        ids = slots_of_positions(spans, slot_ids, len(slots))
        check_window(self._plan, spans, len(ids), 0, None, 0, None)
        return self._table.runs(spans, slots, ids)

    def _queue(self, targets: I64, sources: I64, lengths: I64) -> torch.cuda.Event:
        self._copies.wait_stream(torch.cuda.current_stream(self._index))
        if len(lengths):
            with on_device(self._index):
                copy_runs(targets, sources, lengths, self._copies.cuda_stream)
        done: torch.cuda.Event = self._copies.record_event()
        return done

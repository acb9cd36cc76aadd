"""Copies between a cache on a GPU and the stage of that GPU, by kernels alone.

The stage belongs to the mover of the node, which reads into it and lets other nodes read from it. Its memory stays
mapped here when the mover dies, so a copy that runs then does no harm; the store refuses the next one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import numpy as np
import torch

from kvstore.engine.copier import CopyOrder, EngineCopier, EnginePages, job_spans, position_job_spans
from kvstore.engine.cuda_order import CudaOrder, await_before, await_copies, order_after_current, order_of
from kvstore.engine.layout import EngineLayout
from kvstore.engine.registered import RegisteredCache
from kvstore.kernel_errors import kernel_errors
from kvstore.kernels.driver import on_device
from kvstore.kernels.gpu import GpuCopier, PlacedSpans, PreparedCopy
from kvstore.kernels.launch import check_window
from kvstore.kernels.merging import I64
from kvstore.kernels.streams import own_stream
from kvstore.kernels.vram import MappedSlab, gpu_uuids
from kvstore.rpc.handoff_messages import StageFound

#: Packing takes a fraction of a millisecond, less than a pause and the return to the interpreter.
_EAGER_S = 2e-3
#: Number of span lists whose memory is kept, and of prepared copies that are kept.
_MOST_LISTS = 8


class StageCopier(EngineCopier):
    """An `EngineCopier` whose slots are in the stage of the cache's own GPU.

    Raises:
        LayoutMismatch: the registered tensors were replaced.
        KernelError: the stage could not be mapped, or the kernels could not be built.
    """

    def __init__(self, cache: RegisteredCache, stage: StageFound) -> None:
        self.cache, self.plan = cache, cache.plan
        self.check_unchanged()  # A stage is attached long after registration, and again when its mover died.
        device = self.plan.device
        assert device.index is not None, "a tensor's device has an index"
        self._device_index = device.index
        num_slots, slot_bytes = stage.num_slots, stage.slot_bytes
        self.num_slots = num_slots
        with kernel_errors("mapping the stage of a GPU"), torch.cuda.device(device):
            self._mapped = MappedSlab(device.index, stage.handle)
            self.slots = _as_tensor(self._mapped.address, num_slots * slot_bytes, device).view(num_slots, slot_bytes)
            self.kernels = GpuCopier(self.plan)
            # One for each direction: publications do not wait for fetches.
            self.streams = {to_slots: own_stream(device, -1) for to_slots in (True, False)}
        self._lock = threading.Lock()
        #: Memory for the lists of later jobs; no copy reads it any more.
        self.lists: list[torch.Tensor] = []
        #: Prepared copies into slots, by their number of spans.
        self._packs: dict[int, PreparedCopy] = {}

    def order(self) -> CopyOrder:
        """Record an event that a job's copies come after; see `CudaCopier.order`."""
        return order_after_current(self.plan.device)

    def expect(self, pages: EnginePages, ends: Sequence[int], *, to_slots: bool) -> None:
        """Prepare the copies of all blocks of a job before their slots or bytes are there.

        Args:
            pages: where the job's tokens lie.
            ends: ends of the pieces in which the job will probably be copied, in blocks, ascending.
            to_slots: the direction.
        """
        order, stream, paging = order_of(pages), self.streams[to_slots], self.plan.paging
        num_blocks, per_block = ends[-1], self._spans_per_block
        with self._lock, kernel_errors("preparing copies of a hand-off"):
            # Positions instead of slots: consecutive slots, the usual case, then all need the same list.
            spans = position_job_spans(paging, pages, np.arange(num_blocks, dtype=np.int64))
            if paging.engine_block_size != paging.stored_block_size:
                check_window(self.plan, spans, num_blocks, 0, None, 0, None)
            stream.wait_event(order.after)
            order.placed = self.kernels.place(spans, stream, self.lists.pop() if self.lists else None)
            for first, end in itertools.pairwise((0, *(block * per_block for block in ends))):
                order.prepared[first, end] = self._prepared(to_slots, order.placed, first, end)

    def _prepared(self, to_slots: bool, placed: PlacedSpans, first: int, end: int) -> PreparedCopy:
        paging = self.plan.paging
        if not to_slots or first or paging.engine_block_size != paging.stored_block_size:
            return self.kernels.prepare(to_slots, placed, self.slots, first, end)
        # Packing whole blocks from the first one differs between jobs only in addresses.
        if end not in self._packs:
            if len(self._packs) == _MOST_LISTS:
                self._packs.clear()
            self._packs[end] = self.kernels.prepare(to_slots, placed, self.slots, first, end)
        return self._packs[end]

    def into_slots(self, pages: EnginePages, indexes: I64, slots: I64) -> None:
        """Copy out of the engine into slots, and wait until they hold the bytes. See `EngineCopier`."""
        self.begin_into_slots(pages, indexes, slots)
        self.finish(pages)

    def begin_into_slots(self, pages: EnginePages, indexes: I64, slots: I64) -> None:
        """Queue copies out of the engine into slots; `finish` waits for their end.

        Raises:
            KernelError: they could not all be queued, and none runs any more.
            CopyStuck: they could not all be queued, and some may still run.
        """
        self._queue(True, pages, indexes, slots, 0)

    def out_of_slots(self, pages: EnginePages, indexes: I64, slots: I64, skip_tokens: int = 0) -> None:
        """Queue copies out of slots into the engine; see `EngineCopier`."""
        self._queue(False, pages, indexes, slots, skip_tokens)

    def await_begun(self, pages: EnginePages) -> bool:
        """Wait until the device has done all work that a job's copies come after.

        Returns:
            Whether it waited. False when the work was already done, or takes too long, which `finish` reports.

        Raises:
            KernelError: the device failed.
        """
        return await_before(pages)

    def finish(self, pages: EnginePages) -> None:
        """Wait until all queued copies of a job are in place; see `EngineCopier`."""
        order = order_of(pages)
        order.end()
        await_copies(pages, _EAGER_S)
        placed, order.placed = order.placed, None
        with self._lock:
            if placed is not None and order.last is not None and len(self.lists) < _MOST_LISTS:
                self.lists.append(placed.memory)

    def close(self) -> None:
        """Unmap the stage; no copies may follow."""
        del self.slots
        self._mapped.close()

    def _queue(self, to_slots: bool, pages: EnginePages, indexes: I64, slots: I64, skip_tokens: int) -> None:
        order, stream = order_of(pages), self.streams[to_slots]
        first, base = int(indexes[0]), int(slots[0]) - int(indexes[0])
        try:
            with self._lock, kernel_errors("queueing copies of a hand-off"):
                try:
                    if order.placed is not None and not skip_tokens and (slots - indexes == base).all():
                        self._copy_expected(to_slots, order, order.placed, first, first + len(indexes), base)
                    else:
                        spans = job_spans(self.plan.paging, pages, indexes, slots, len(self.slots), skip_tokens)
                        stream.wait_event(order.after)
                        copy = self.kernels.pack if to_slots else self.kernels.unpack
                        copy(self.kernels.place(spans, stream), self.slots, stream=stream)
                    order.last = stream.record_event()
                except BaseException:
                    order.mark_end((stream,))
                    raise
        except BaseException:
            await_copies(pages)  # After the failure the caller may reuse blocks and slots.
            raise

    def _copy_expected(
        self, to_slots: bool, order: CudaOrder, placed: PlacedSpans, first: int, end: int, base: int
    ) -> None:
        """Copy blocks [first, end) of an expected job. Block i lies in slot base + i."""
        if not 0 <= base + first < base + end <= len(self.slots):
            raise ValueError(f"wanted slots below {len(self.slots)}, got {base + first} to {base + end - 1}")
        first, end = first * self._spans_per_block, end * self._spans_per_block
        work = order.prepared.pop((first, end), None)
        if work is None:
            work = self._prepared(to_slots, placed, first, end)
        with on_device(self._device_index):
            self.kernels.launch_prepared(
                work, self.streams[to_slots].cuda_stream, placed.address, base * self.slots.stride(0)
            )

    @property
    def _spans_per_block(self) -> int:
        paging = self.plan.paging
        return paging.stored_block_size // min(paging.stored_block_size, paging.engine_block_size)


def stage_uuid(layout: EngineLayout) -> str:
    """Return the UUID of the GPU that a cache is on, or "" if it is on none."""
    device = torch.device(layout.device)
    if device.type != "cuda" or device.index is None:
        return ""
    return gpu_uuids()[device.index]


def _as_tensor(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    view = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}
    holder = type("Mapped", (), {"__cuda_array_interface__": view})()
    return torch.as_tensor(holder, device=device)

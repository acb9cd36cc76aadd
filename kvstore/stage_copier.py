"""Copies between a cache on a GPU and the stage of that GPU: kernels alone, inside the GPU's memory.

The stage belongs to the mover of the node, which reads into it and lets others read from it. Its memory stays mapped
here when that process dies, so a copy that runs then harms nobody; the store refuses the next one.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from kvstore.cuda_copier import await_copies, order_after_current, order_of
from kvstore.engine_copy import I64, CopyOrder, EngineCopier, EnginePages, engine_plan, job_spans
from kvstore.kernel_errors import kernel_errors
from kvstore.kernels.gpu import GpuCopier
from kvstore.kernels.streams import own_stream
from kvstore.kernels.vram import MappedSlab, gpu_uuids
from kvstore.layout import EngineLayout, same_layout
from kvstore.shape import KVShape


class StageCopier:
    """An `EngineCopier` whose slots are in the stage of the cache's own GPU.

    Args:
        caches: as they were registered, on a GPU.
        layout: of the caches.
        shape: of the stored block.
        stage: what the store says of the stage.

    Raises:
        KernelError: the stage could not be mapped, or the kernels not be built.
    """

    def __init__(self, caches: Any, layout: EngineLayout, shape: KVShape, stage: dict[str, Any]) -> None:
        self._layout, self._caches = layout, caches
        self._plan = engine_plan(caches, layout, shape)
        device = self._plan.device
        assert device.index is not None, "a tensor's device has an index"
        num_slots, slot_bytes = int(stage["num_slots"]), int(stage["slot_bytes"])
        with kernel_errors("mapping the stage of a GPU"), torch.cuda.device(device):
            self._mapped = MappedSlab(device.index, bytes.fromhex(stage["handle"]))
            self._slots = _as_tensor(self._mapped.address, num_slots * slot_bytes, device).view(num_slots, slot_bytes)
            self._kernels = GpuCopier(self._plan)
            # One for each direction: what is published does not wait for what is fetched.
            self._streams = {to_slots: own_stream(device, -1) for to_slots in (True, False)}
        self._lock = threading.Lock()

    @property
    def layout(self) -> EngineLayout:
        """How the cache is arranged."""
        return self._layout

    def check_unchanged(self) -> None:
        """Refuse tensors that were resized or restrided; see `EngineCopier`."""
        same_layout(self._caches, self._layout)

    def order(self) -> CopyOrder:
        """Record what copies of a job come after; see `CudaCopier.order`."""
        return order_after_current(self._plan.device)

    def into_slots(self, pages: EnginePages, indexes: I64, slots: I64) -> None:
        """Copy out of the engine into slots; returns when they hold the bytes; see `EngineCopier`."""
        self._queue(True, pages, indexes, slots, 0)
        await_copies(pages)

    def out_of_slots(self, pages: EnginePages, indexes: I64, slots: I64, skip_tokens: int = 0) -> None:
        """Queue copies out of slots into the engine; see `EngineCopier`."""
        self._queue(False, pages, indexes, slots, skip_tokens)

    def finish(self, pages: EnginePages) -> None:
        """Return when all that was queued for a job is in place; see `EngineCopier`."""
        order_of(pages).end()
        await_copies(pages)

    def close(self) -> None:
        """Unmap the stage; nothing may be copied any more."""
        del self._slots
        self._mapped.close()

    def _queue(self, to_slots: bool, pages: EnginePages, indexes: I64, slots: I64, skip_tokens: int) -> None:
        order, stream = order_of(pages), self._streams[to_slots]
        # The list and the window name the same slots, from the first to the last of this job.
        first = int(slots.min())
        window = self._slots[first : int(slots.max()) + 1]
        spans = job_spans(self._plan.paging, pages, indexes, slots - first, len(window), skip_tokens)
        with self._lock, kernel_errors("queueing copies of a hand-off"):
            stream.wait_event(order.after)
            placed = self._kernels.place(spans, stream)
            copy = self._kernels.pack if to_slots else self._kernels.unpack
            copy(placed, window, stream=stream)
            order.last = stream.record_event()


def make_stage_copier(caches: Any, layout: EngineLayout, shape: KVShape, stage: dict[str, Any]) -> EngineCopier:
    """Return a copier between caches and a stage; see `StageCopier`."""
    return StageCopier(caches, layout, shape, stage)


def stage_uuid(layout: EngineLayout) -> str:
    """Return the UUID of the GPU that a cache is on, empty when it is on none."""
    device = torch.device(layout.device)
    if device.type != "cuda" or device.index is None:
        return ""
    return gpu_uuids()[device.index]


def _as_tensor(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    view = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}
    holder = type("Mapped", (), {"__cuda_array_interface__": view})()
    return torch.as_tensor(holder, device=device)

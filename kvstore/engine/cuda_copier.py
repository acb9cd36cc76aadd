"""The copier of caches in GPU memory. It queues copies on its own streams, beside the engine's.

    engine's stream ──► event `after` ──► this copier's streams: kernels + staging, or the copy engines alone
                                                  │ event `last`
    engine's stream ◄── wait_on(stream) ──────────┴──► finish(): the job's thread, by polling with a deadline

A job's copies wait for the event that was recorded when it was asked for: a save waits for the forward pass before it,
a load for earlier uses of its blocks. No device is ever synchronised, and nothing waits for an engine's later work.
Reasons: docs/adr/0007-copies-of-cuda-caches.md.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from kvstore.engine.copier import CopyOrder, EngineCopier, EnginePages, position_job_spans
from kvstore.engine.cuda_order import await_copies, order_after_current, order_of
from kvstore.engine.registered import RegisteredCache
from kvstore.errors import CopyStuck, KernelError
from kvstore.kernel_errors import kernel_errors
from kvstore.kernels.direct import DirectCopies
from kvstore.kernels.gpu import GpuCopier
from kvstore.kernels.merging import I64
from kvstore.kernels.runs import RunTable
from kvstore.kernels.staging import StagingRing
from kvstore.kernels.streams import own_stream
from kvstore.memory.arena import Arena
from kvstore.memory.pinning import ArenaPinning


class CopyPath(Enum):
    """How the bytes of a CUDA cache are copied."""

    AUTO = "auto"
    """The faster path for the length of a block's runs."""

    STAGED = "staged"
    """Kernels copy between the cache and a ring of buffers on the GPU, copy engines between ring and host."""

    DIRECT = "direct"
    """Copy engines alone copy run by run."""


#: Runs of at least this many bytes are copied directly; measured by benchmarks/gpu_client.py, see docs/gpu.md.
DIRECT_FROM_BYTES = 1 << 20
#: Size of one buffer of a ring. A client uses GPU memory for one ring per direction.
CHUNK_BYTES = 32 << 20
#: A load of more than twice this size is queued in two parts; the first part has this size.
FIRST_BYTES = 4 * CHUNK_BYTES

_PIN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Lane:
    """One direction: its copies, the stream on which a job begins, and a lock, so that one thread queues at a time."""

    copies: StagingRing | DirectCopies
    begin: torch.cuda.Stream
    lock: threading.Lock


class CudaCopier(EngineCopier):
    """An `EngineCopier` of CUDA tensors; arguments and errors as for `make_copier`.

    Saves and loads have separate streams and buffers.
    """

    def __init__(
        self,
        cache: RegisteredCache,
        arena: Arena,
        slot_bytes: int,
        num_slots: int,
        pinning: ArenaPinning,
        path: CopyPath = CopyPath.AUTO,
    ) -> None:
        self.cache, self._plan, self._pinning = cache, cache.plan, pinning
        self.num_slots = num_slots
        self._slots = torch.from_numpy(arena.bytes_view())[: slot_bytes * num_slots].view(num_slots, slot_bytes)
        self.path = chosen_path(path, RunTable(self._plan).mean_run_bytes)
        self._broken: str = ""
        with kernel_errors("preparing copies of a CUDA cache"), torch.cuda.device(self._plan.device):
            self.saves, self._loads = self._lane(), self._lane()

    def _lane(self) -> _Lane:
        device, per_piece = self._plan.device, self._pinning.slots_per_piece
        copies: StagingRing | DirectCopies
        if self.path is CopyPath.DIRECT:
            copies = DirectCopies(self._plan, slots_per_piece=per_piece)
        else:
            layers, heads = self.cache.layout.part.ranges(self.cache.shape)
            copies = StagingRing(
                GpuCopier(self._plan), layers=layers, heads=heads, chunk_bytes=CHUNK_BYTES, slots_per_piece=per_piece
            )
        return _Lane(copies, own_stream(device), threading.Lock())

    def order(self) -> CopyOrder:
        """Record an event on the calling thread's current stream; see `order_after_current`."""
        self._check_usable()
        return order_after_current(self._plan.device)

    def into_slots(self, pages: EnginePages, indexes: I64, slots: I64) -> None:
        """Copy out of the engine into slots, and wait until they hold the bytes. See `EngineCopier`."""
        self._queue(self.saves, pages, indexes, slots, 0)
        self._await(pages)

    def out_of_slots(self, pages: EnginePages, indexes: I64, slots: I64, skip_tokens: int = 0) -> None:
        """Queue copies out of slots into the engine; see `EngineCopier`."""
        first = max(1, FIRST_BYTES // self._slots.shape[1])
        cuts = [first] if len(slots) > 2 * first else []
        # The link copies the first part while the rest is planned, which takes milliseconds for thousands of blocks.
        for part, its_slots in zip(np.split(indexes, cuts), np.split(slots, cuts), strict=True):
            self._queue(self._loads, pages, part, its_slots, skip_tokens)

    def finish(self, pages: EnginePages) -> None:
        """Wait until all queued copies of a job are in place; see `EngineCopier`."""
        order_of(pages).end()
        self._await(pages)

    def close(self) -> None:
        """Release the arena; see `EngineCopier`."""
        del self._slots, self.saves, self._loads  # Rings remember the slots that they checked.

    def _queue(self, lane: _Lane, pages: EnginePages, indexes: I64, slots: I64, skip_tokens: int) -> None:
        order = order_of(pages)
        self._check_usable()
        self._pinning.wait(slots, _PIN_TIMEOUT_S)
        spans = position_job_spans(self._plan.paging, pages, indexes, skip_tokens)
        try:
            with lane.lock, kernel_errors("queueing copies of a CUDA cache"), torch.cuda.stream(lane.begin):
                # The device waits, not the host: work queued behind these copies need not wait for this thread.
                lane.begin.wait_event(order.after)
                try:
                    if lane is self.saves:
                        order.last = lane.copies.save(spans, self._slots, slots)
                    else:
                        order.last = lane.copies.load(self._slots, slots, spans)
                except BaseException:
                    order.mark_end((lane.begin, *lane.copies.streams))
                    raise
        except BaseException:
            self._await(pages)  # After the failure the caller may reuse blocks and slots.
            raise

    def _await(self, pages: EnginePages) -> None:
        try:
            await_copies(pages)
        except (KernelError, CopyStuck) as error:
            self._broken = str(error)
            raise

    def _check_usable(self) -> None:
        if self._broken:
            raise KernelError(f"copies of this CUDA cache failed before ({self._broken}); restart this process")


def chosen_path(path: CopyPath, mean_run_bytes: int) -> CopyPath:
    """Return the path for runs of this mean length; never AUTO."""
    if path is not CopyPath.AUTO:
        return path
    return CopyPath.DIRECT if mean_run_bytes >= DIRECT_FROM_BYTES else CopyPath.STAGED

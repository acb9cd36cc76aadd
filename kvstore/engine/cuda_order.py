"""The order of CUDA copies and an engine's work: events before and after a job's copies.

Nothing here copies. Waiting means polling with a deadline, so that a device that never reaches the copies holds no
thread forever, and no device is synchronised for one job.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch

from kvstore.engine.copier import EnginePages
from kvstore.errors import CopyStuck, InvalidRequest
from kvstore.kernel_errors import kernel_errors
from kvstore.kernels.gpu import PlacedSpans, PreparedCopy
from kvstore.runtime.latch import Latch
from kvstore.runtime.pauses import give_way

_DEVICE_TIMEOUT_S = 120.0
_LEAST_POLL_S, _MOST_POLL_S = 20e-6, 500e-6
#: Poll interval for the begin of copies, which may take only a quarter of a millisecond.
_BEGIN_POLL_S = 200e-6
#: Poll interval where a stream waits for the copies: no thread needs their end at once, and polls disturb launches.
_CALM_POLL_S = 2e-3


class CudaOrder:
    """The `CopyOrder` of one job of a `CudaCopier`. Made in the thread that asks for the job.

    Args:
        stream: the engine's stream.
        after: an event recorded on it; copies wait for it.
    """

    def __init__(self, stream: torch.cuda.Stream, after: torch.cuda.Event) -> None:
        self._stream, self.after = stream, after
        self.last: torch.cuda.Event | None = None
        #: Streams that may have copies of the job, but on which no event could be recorded.
        self.unmarked: tuple[torch.cuda.Stream, ...] = ()
        #: The list of the expected copies on the device, if `StageCopier.expect` made one.
        self.placed: PlacedSpans | None = None
        #: Its prepared copies, by their first and end span.
        self.prepared: dict[tuple[int, int], PreparedCopy] = {}
        #: Whether a stream waits for the copies.
        self.is_calm = False
        self._queued = Latch()

    def end(self) -> None:
        """See `CopyOrder`."""
        self._queued.set()

    def wait_on(self, stream: Any, timeout_s: float) -> bool:
        """See `CopyOrder`."""
        if not self._queued.wait(timeout_s):
            return False
        if self.last is not None:
            with kernel_errors("waiting for the copies of a job"):
                (torch.cuda.current_stream() if stream is None else stream).wait_event(self.last)
        self.is_calm = True
        return True

    def hold_engine(self) -> None:
        """See `CopyOrder`."""
        if self.last is not None:
            with kernel_errors("having the engine wait for the copies of a job"):
                self._stream.wait_event(self.last)

    def settle(self, timeout_s: float) -> bool:
        """See `CopyOrder`."""
        try:
            return all(_reached(mark, timeout_s) for mark in self.end_marks())
        except RuntimeError:
            return True  # After a device error nothing runs on it any more.

    def mark_end(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """Record `last` after everything queued on some streams: a part of failed copies may be queued."""
        first, *others = streams
        try:
            for stream in others:
                first.wait_stream(stream)
            self.last = first.record_event()
        except RuntimeError:
            self.unmarked = (*self.unmarked, *streams)

    def end_marks(self) -> tuple[torch.cuda.Event | torch.cuda.Stream, ...]:
        """Return the marks that the device has passed once no copy of the job runs."""
        return self.unmarked if self.last is None else (*self.unmarked, self.last)


def order_after_current(device: torch.device) -> CudaOrder:
    """Return the order of a job whose copies follow the calling thread's current stream.

    Raises:
        InvalidRequest: a graph is being captured on it; copies cannot be part of one.
        KernelError: the device failed before.
    """
    index = device.index
    chosen = contextlib.nullcontext() if index == torch.cuda.current_device() else torch.cuda.device(index)
    with kernel_errors("recording an event on the engine's stream"), chosen:
        if torch.cuda.is_current_stream_capturing():
            raise InvalidRequest(
                "a CUDA graph is being captured on the current stream, and copies cannot be part of one; save and "
                "load before or after it"
            )
        stream = torch.cuda.current_stream(index)  # Without the number torch asks the driver which devices there are.
        return CudaOrder(stream, stream.record_event())


def await_before(pages: EnginePages) -> bool:
    """Wait for the work that a job's copies come after; see `StageCopier.await_begun`."""
    order = order_of(pages)
    with kernel_errors("waiting for what copies of a CUDA cache come after"):
        if order.after.query():  # type: ignore[no-untyped-call]
            return False
        return _reached(order.after, _DEVICE_TIMEOUT_S, most_poll_s=_BEGIN_POLL_S)


def await_copies(pages: EnginePages, eager_s: float = 0.0) -> None:
    """Wait until the job's last queued copies are in place.

    Polls without pauses for `eager_s`, for copies that take less than a pause.

    Raises:
        KernelError: the device failed.
        CopyStuck: they did not end in time.
    """
    order = order_of(pages)
    with kernel_errors("copying a CUDA cache"):
        is_reached = all(_reached(mark, _DEVICE_TIMEOUT_S, eager_s, order) for mark in order.end_marks())
    if not is_reached:
        raise CopyStuck(
            f"wanted copies of a CUDA cache done within {_DEVICE_TIMEOUT_S} s, got a device that has not come to "
            "them or not through; they may still run, so blocks and slots stay taken: end this process"
        )


def order_of(pages: EnginePages) -> CudaOrder:
    """Return the order that a copier of a CUDA cache made for a job."""
    assert isinstance(pages.order, CudaOrder), "a job of a CUDA cache has the order that its copier made"
    return pages.order


def _reached(
    mark: torch.cuda.Event | torch.cuda.Stream,
    timeout_s: float,
    eager_s: float = 0.0,
    order: CudaOrder | None = None,
    most_poll_s: float = _MOST_POLL_S,
) -> bool:
    """Poll an event or a stream's end at growing intervals. Return False if not reached in time."""
    began_s = time.monotonic()
    while not mark.query():
        waited_s = time.monotonic() - began_s
        if waited_s > timeout_s:
            return False
        if order is not None and order.is_calm:
            time.sleep(_CALM_POLL_S)
        elif waited_s < eager_s:
            give_way()
        else:
            time.sleep(min(most_poll_s, max(_LEAST_POLL_S, waited_s / 200)))
    return True

"""The few calls of the CUDA driver that a copy makes, without a general binding's cost per call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.kernels.merging import I64

_SUCCESS = 0
_SOURCE_IN_STREAM_ORDER = 1
#: Below this many runs, one call for each run is as fast as a batch.
_BATCH_FROM = 3


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    """The driver's CUmemcpyAttributes; the locations are hints for managed memory alone."""

    _fields_ = [
        ("source_access_order", ctypes.c_int),
        ("source_location", _Location),
        ("target_location", _Location),
        ("flags", ctypes.c_uint),
    ]


#: One set of attributes, for all runs. Never written.
_IN_STREAM_ORDER = _Attributes(_SOURCE_IN_STREAM_ORDER, _Location(0, 0), _Location(0, 0), 0)
_FIRST = ctypes.c_size_t(0)
_ATTRIBUTES, _FIRST_RUN = ctypes.byref(_IN_STREAM_ORDER), ctypes.byref(_FIRST)


class on_device:
    """Make a device's primary context, which torch uses, current in the calling thread."""

    __slots__ = ("_index",)

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> None:
        check(libcuda().cuCtxPushCurrent_v2(_primary_context(self._index)), "cuCtxPushCurrent")

    def __exit__(self, *error: object) -> None:
        libcuda().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def launch(function: int, num_ctas: int, num_threads: int, args: Sequence[Any], stream: int) -> None:
    """Launch a kernel; `args` are ctypes objects of its parameters' types, copied when this returns.

    Raises:
        RuntimeError: the driver refused; nothing was launched.
    """
    pointers = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, args))
    status = _queueing().cuLaunchKernel(function, num_ctas, 1, 1, num_threads, 1, 1, 0, stream, pointers, None)
    check(status, "cuLaunchKernel")


def copy_run(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Copy one run of bytes on a stream. Host memory that is not pinned has been read at return.

    Raises:
        RuntimeError: the driver refused; nothing was queued.
    """
    check(libcuda().cuMemcpyAsync(target, source, num_bytes, stream), "cuMemcpyAsync")


def record(event: int, stream: int) -> None:
    """Record an event on a stream; both are handles."""
    check(_queueing().cuEventRecord(event, stream), "cuEventRecord")


def wait(stream: int, event: int) -> None:
    """Make later work on a stream wait for an event; both are handles."""
    check(_queueing().cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent")


class Runs:
    """Runs of bytes to copy, in an array that the driver reads.

    The caller should merge runs that follow each other on both sides. Host memory must be pinned, or a copy is neither
    fast nor asynchronous.

    Args:
        targets: int64 `[n]`, addresses.
        sources: int64 `[n]`, addresses.
        lengths: int64 `[n]`, bytes.
    """

    def __init__(self, targets: I64, sources: I64, lengths: I64) -> None:
        self._table = np.array((targets, sources, lengths), np.int64)
        self._targets, row_bytes = self._table.ctypes.data, self._table.strides[0]
        self._sources, self._lengths = self._targets + row_bytes, self._targets + 2 * row_bytes
        # Version 2 of the batch call came with CUDA 13; an older driver takes one call for each run.
        self._batch = getattr(libcuda(), "cuMemcpyBatchAsync_v2", None)

    def copy(self, begin: int, end: int, stream: int) -> None:
        """Queue copies of runs [begin, end) on a stream, in one call if the driver has one for batches.

        Args:
            begin: the first run.
            end: the run after the last.
            stream: handle of a stream that is not the default one, of the current device.

        Raises:
            RuntimeError: the driver refused; runs may or may not have been queued.
        """
        if self._batch is None or end - begin < _BATCH_FROM:
            for target, source, length in self._table[:, begin:end].T.tolist():
                copy_run(target, source, length, stream)
            return
        skip = begin * self._table.itemsize
        status = self._batch(
            self._targets + skip, self._sources + skip, self._lengths + skip, end - begin,
            _ATTRIBUTES, _FIRST_RUN, 1, stream,
        )  # fmt: skip
        check(status, "cuMemcpyBatchAsync")


def copy_runs(targets: I64, sources: I64, lengths: I64, stream: int) -> None:
    """Copy runs of bytes on a stream; see `Runs`."""
    Runs(targets, sources, lengths).copy(0, len(lengths), stream)


def check(status: int, call: str) -> None:
    """Raise RuntimeError unless a call of the driver returned success."""
    if status != _SUCCESS:
        name = ctypes.c_char_p()
        libcuda().cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
        shown = name.value.decode() if name.value else str(status)
        raise RuntimeError(
            f"{call}: the driver answered {shown}; host memory has to be pinned or registered, and the stream and "
            "device memory have to belong to the current device"
        )


@functools.cache
def _primary_context(index: int) -> ctypes.c_void_p:
    # Retained for the life of the process, as torch does.
    context = ctypes.c_void_p()
    check(libcuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), ctypes.c_int(index)), "cuDevicePrimaryCtxRetain")
    return context


@functools.cache
def libcuda() -> ctypes.CDLL:
    """Return the driver's library; the caller makes a device current first, and checks each status."""
    driver = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_void_p
    driver.cuMemcpyAsync.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, pointer)
    if hasattr(driver, "cuMemcpyBatchAsync_v2"):
        size = ctypes.c_size_t
        driver.cuMemcpyBatchAsync_v2.argtypes = (*(pointer,) * 3, size, pointer, pointer, size, pointer)
    return driver


@functools.cache
def _queueing() -> ctypes.PyDLL:
    """Return the library for calls that queue one command and return within a microsecond or two.

    They keep the interpreter lock: with a busy thread, releasing it costs a hundred times as much, because taking it
    again means waiting in a queue. Copies of many runs release it.
    """
    driver = ctypes.PyDLL("libcuda.so.1")
    pointer, count = ctypes.c_void_p, ctypes.c_uint
    driver.cuLaunchKernel.argtypes = (pointer, *(count,) * 7, pointer, pointer, pointer)
    driver.cuEventRecord.argtypes = (pointer, pointer)
    driver.cuStreamWaitEvent.argtypes = (pointer, pointer, count)
    return driver

"""Copies of many runs of bytes by the copy engines, in one driver call: device to host and back."""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from kvstore.kernels.spans import I64

_SUCCESS = 0
_SOURCE_IN_STREAM_ORDER = 1
#: Below this many runs a call for each is as fast as a batch.
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


def merge_runs(targets: I64, sources: I64, lengths: I64) -> tuple[I64, I64, I64]:
    """Join runs that follow each other on both sides; order and bytes stay the same."""
    if len(lengths) < 2:
        return targets, sources, lengths
    breaks = (targets[1:] != targets[:-1] + lengths[:-1]) | (sources[1:] != sources[:-1] + lengths[:-1])
    first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return targets[first], sources[first], np.add.reduceat(lengths, first)


def copy_runs(targets: I64, sources: I64, lengths: I64, stream: int) -> None:
    """Copy runs of bytes on a stream; nothing is waited for.

    Host memory must be pinned, or the copy is neither fast nor asynchronous.

    Args:
        targets: int64 `[n]`, addresses.
        sources: int64 `[n]`, addresses.
        lengths: int64 `[n]`, bytes.
        stream: handle of a stream that is not the default one, of the current device.

    Raises:
        RuntimeError: the driver refused; runs may or may not have been queued.
    """
    targets, sources, lengths = merge_runs(targets, sources, lengths)
    driver = _driver()
    batch = getattr(driver, "cuMemcpyBatchAsync_v2", None)
    if batch is None or len(lengths) < _BATCH_FROM:
        for target, source, length in zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True):
            _check(
                driver.cuMemcpyAsync(_u64(target), _u64(source), _u64(length), ctypes.c_void_p(stream)), "cuMemcpyAsync"
            )
        return
    held = [np.ascontiguousarray(array) for array in (targets, sources, lengths)]
    attributes = _Attributes(_SOURCE_IN_STREAM_ORDER, _Location(0, 0), _Location(0, 0), 0)
    first = ctypes.c_size_t(0)
    status = batch(
        *(ctypes.c_void_p(array.ctypes.data) for array in held), _u64(len(lengths)),
        ctypes.byref(attributes), ctypes.byref(first), _u64(1), ctypes.c_void_p(stream),
    )  # fmt: skip
    _check(status, "cuMemcpyBatchAsync")


def _check(status: int, call: str) -> None:
    if status != _SUCCESS:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
        shown = name.value.decode() if name.value else str(status)
        raise RuntimeError(
            f"{call}: the driver answered {shown}; host memory has to be pinned or registered, and the stream and "
            "device memory have to belong to the current device"
        )


def _u64(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


@functools.cache
def _driver() -> ctypes.CDLL:
    # Version 2 of the batch call came with CUDA 13; an older driver takes one call for each run.
    return ctypes.CDLL("libcuda.so.1")

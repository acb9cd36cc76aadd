"""Unshared CUDA streams: torch reuses the same 32 for all callers, so two of its streams may be one."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch

from kvstore.kernels.driver import check, libcuda, on_device

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: it does not wait for the default stream


class _Owner:
    """Its finalizer ends the stream that holds it."""


def own_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """Make a stream; it ends when nothing refers to it and its work is done.

    Args:
        device: a CUDA device.
        priority: lower numbers are served first; 0 is the default.

    Raises:
        RuntimeError: the driver refused.
    """
    index = index_of(device)
    handle = ctypes.c_void_p()
    with on_device(index):
        status = libcuda().cuStreamCreateWithPriority(
            ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(priority)
        )
        check(status, "cuStreamCreateWithPriority")
    assert handle.value is not None
    stream: Any = torch.cuda.ExternalStream(handle.value, device=torch.device("cuda", index))  # type: ignore[no-untyped-call]
    # Not a weak reference to the stream itself: torch.cuda.Stream does not clear those when it ends (torch 2.11,
    # pytorch/pytorch#183403), so this one would never be destroyed, and the interpreter crash at its own end.
    stream.raykv_owner = _Owner()
    weakref.finalize(stream.raykv_owner, _destroy, handle.value, index).atexit = False
    owned: torch.cuda.Stream = stream
    return owned


def index_of(device: torch.device) -> int:
    """Return the index of a CUDA device; of the current device when it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def _destroy(handle: int, index: int) -> None:
    with on_device(index):
        libcuda().cuStreamDestroy_v2(ctypes.c_void_p(handle))

"""A CPU in place of a GPU: what is on a CUDA device is in this machine's memory, and all work is done at once."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time

import pytest
import torch
from torch.overrides import TorchFunctionMode

from cpu_shim import build_shim
from kvstore.kernels import driver, gpu
from kvstore.kernels.module import KERNELS

NAMES = [name for names in KERNELS.values() for name in names]
#: Handle of a kernel that is not of kernels/: its launch does nothing.
OTHER_KERNEL = 0


class CpuTensors(TorchFunctionMode):
    """Tensors that are asked for on a CUDA device are made on the CPU, and pinned ones at the begin of a page."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        is_pinned = kwargs.pop("pin_memory", False)
        made = func(*("cpu" if isinstance(arg, str) and arg == "cuda" else arg for arg in args), **kwargs)
        if is_pinned and made.numel():
            return torch.frombuffer(mmap.mmap(-1, made.nbytes), dtype=made.dtype).view(made.shape)
        return made


class Driver:
    """The calls of libcuda.so.1 that a copy makes; those that are not here have nothing to do, and succeed."""

    cuMemcpyBatchAsync_v2 = None

    def __init__(self, shim):
        shim.library.allow(ctypes.c_void_p(0), ctypes.c_longlong(1 << 62), 1)  # the tests of kernels check accesses
        self._launch, self._lock = shim.library.launch, threading.Lock()

    def __getattr__(self, name):
        return lambda *args: 0

    def cuStreamCreateWithPriority(self, stream, flags, priority):
        ctypes.cast(stream, ctypes.POINTER(ctypes.c_void_p))[0] = 1
        return 0

    def cuMemcpyAsync(self, target, source, num_bytes, stream):
        ctypes.memmove(target, source, num_bytes)
        return 0

    def cuLaunchKernel(self, kernel, num_ctas, y, z, num_threads, *rest):
        if kernel == OTHER_KERNEL:
            return 0
        with self._lock:  # One thread's index is the whole library's.
            return self._launch(NAMES[kernel - 1].encode(), num_ctas, num_threads, rest[-2])


class Event:
    cuda_event = 1

    def __init__(self, enable_timing=False):
        self.at_s = 0.0

    def record(self, stream=None):
        self.at_s = time.perf_counter()

    def elapsed_time(self, end):
        return 1e3 * (end.at_s - self.at_s)

    def synchronize(self):
        """All work is done."""


class Stream:
    cuda_stream = 1

    def __init__(self, *args, **kwargs):
        """All streams are alike."""

    def wait_stream(self, other):
        """All work is done."""

    wait_event = wait_stream

    def synchronize(self):
        """All work is done."""

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event


@pytest.fixture(scope="session")
def shim(tmp_path_factory, repo_root):
    return build_shim(tmp_path_factory.mktemp("shim"), repo_root)


@pytest.fixture
def cpu_as_gpu(shim, monkeypatch):
    """Run the code for GPUs on the CPU: tables, plans, rings, kernels and the comparison of bytes, not its speed."""
    if torch.cuda.is_available():
        pytest.skip("the real thing runs here")
    fake = Driver(shim)
    for name in ("libcuda", "_queueing"):
        monkeypatch.setattr(driver, name, lambda: fake)
    monkeypatch.setattr("kvstore.kernels.streams.libcuda", lambda: fake)
    monkeypatch.setattr(gpu, "load", lambda file, index: {name: NAMES.index(name) + 1 for name in KERNELS[file]})
    monkeypatch.setattr(gpu, "_cuda_index", lambda device: 0)
    plain = {
        "is_available": lambda: True, "current_device": lambda: 0, "current_stream": Stream, "Stream": Stream,
        "ExternalStream": Stream, "Event": Event, "stream": contextlib.nullcontext, "device": contextlib.nullcontext,
        **dict.fromkeys(("synchronize", "empty_cache", "_sleep"), lambda *args: None),
    }  # fmt: skip
    for name, replacement in plain.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(driver, "_primary_context", lambda index: None)
    with CpuTensors():
        yield

"""Device memory that other processes map. Uses only the CUDA driver, so allocating it needs no torch.

A process allocates and exports memory; other processes of this machine open the handle. An opened mapping cannot be
exported again, so the process that offers memory to NIXL must be the one that allocated it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

HANDLE_BYTES = 64
_UUID_BYTES = 16
_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


def gpu_uuids() -> list[str]:
    """Return the UUID of every GPU that this process may use, as 32 hex digits, in the order of their ordinals.

    Raises:
        RuntimeError: there is no driver, or it answers with an error.
    """
    driver, count = _driver(), ctypes.c_int()
    _check(driver.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    found = []
    for ordinal in range(count.value):
        uuid = (ctypes.c_ubyte * _UUID_BYTES)()
        _check(driver.cuDeviceGetUuid_v2(ctypes.byref(uuid), ctypes.c_int(ordinal)), "cuDeviceGetUuid")
        found.append(bytes(uuid).hex())
    return found


class DeviceSlab:
    """Device memory of this process, zeroed, that others may map.

    Args:
        ordinal: of the GPU.
        num_bytes: its size.

    Raises:
        RuntimeError: the GPU has too little memory, or the driver refused; nothing is held.
    """

    def __init__(self, ordinal: int, num_bytes: int) -> None:
        driver, address, handle = _driver(), ctypes.c_uint64(), _IpcHandle()
        self.ordinal, self.num_bytes = ordinal, num_bytes
        with _current(ordinal):
            _check(driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes)), "cuMemAlloc")
            self.address = address.value
            try:
                # No process sees bytes that another process left in it.
                _check(driver.cuMemsetD8_v2(address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes)), "cuMemsetD8")
                _check(driver.cuCtxSynchronize(), "cuCtxSynchronize")
                _check(driver.cuIpcGetMemHandle(ctypes.byref(handle), address), "cuIpcGetMemHandle")
            except BaseException:
                driver.cuMemFree_v2(address)
                raise
        #: The handle for `MappedSlab` in another process.
        self.handle = bytes(bytearray(handle))

    def close(self) -> None:
        """Free the memory; processes that map it must no longer use it. May be called again."""
        address, self.address = self.address, 0
        if address:
            with _current(self.ordinal):
                _driver().cuMemFree_v2(ctypes.c_uint64(address))


class MappedSlab:
    """Another process's device memory, mapped here.

    Args:
        ordinal: the GPU of this process that uses it.
        handle: from `DeviceSlab`.

    Raises:
        RuntimeError: its process has ended or is this one, or the GPUs cannot reach each other.
    """

    def __init__(self, ordinal: int, handle: bytes) -> None:
        driver, address, opened = _driver(), ctypes.c_uint64(), _IpcHandle.from_buffer_copy(handle)
        self.ordinal = ordinal
        with _current(ordinal):
            status = driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), opened, ctypes.c_uint(_LAZY_PEER_ACCESS))
            _check(status, "cuIpcOpenMemHandle")
        self.address = address.value

    def close(self) -> None:
        """Unmap it; may be called again."""
        address, self.address = self.address, 0
        if address:
            with _current(self.ordinal):
                _driver().cuIpcCloseMemHandle(ctypes.c_uint64(address))


class CopyQueue:
    """A stream of copies into one GPU's memory, from its own and from other GPUs'.

    Args:
        ordinal: of the GPU.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._stream = ctypes.c_void_p()
        self._sources = {ordinal}
        self._events: dict[int, ctypes.c_void_p] = {}
        self._next = 0
        with _current(ordinal):
            status = _driver().cuStreamCreate(ctypes.byref(self._stream), ctypes.c_uint(_NON_BLOCKING))
            _check(status, "cuStreamCreate")

    def copy(self, runs: list[tuple[int, int, int]], source: int) -> int:
        """Queue copies of (target, source, bytes) from memory of GPU `source`; return a mark after them.

        Raises:
            RuntimeError: the driver refused. Copies that were queued before have ended: this waits for them.
        """
        driver = _driver()
        with _current(self.ordinal):
            if source not in self._sources:
                # Without peer access, or if it is refused, copies go through host memory.
                driver.cuCtxEnablePeerAccess(_primary_context(source), ctypes.c_uint(0))
                self._sources.add(source)
            try:
                event = self._queue(runs)
            except RuntimeError:
                # If this fails the device failed, and nothing runs on it. A device that hangs blocks the mover; its
                # store then abandons the READ and ends the mover.
                driver.cuStreamSynchronize(self._stream)
                raise
        self._next += 1
        self._events[self._next] = event
        return self._next

    def _queue(self, runs: list[tuple[int, int, int]]) -> ctypes.c_void_p:
        """Queue copies, and return an event after them."""
        driver, event = _driver(), ctypes.c_void_p()
        for target, at, num_bytes in runs:
            status = driver.cuMemcpyAsync(
                ctypes.c_uint64(target), ctypes.c_uint64(at), ctypes.c_size_t(num_bytes), self._stream
            )
            _check(status, "cuMemcpyAsync")
        _check(driver.cuEventCreate(ctypes.byref(event), ctypes.c_uint(_NO_TIMING)), "cuEventCreate")
        try:
            _check(driver.cuEventRecord(event, self._stream), "cuEventRecord")
        except RuntimeError:
            driver.cuEventDestroy_v2(event)
            raise
        return event

    def reached(self, mark: int) -> bool:
        """Return whether all copies before a mark are in place; if so, forget the mark.

        Raises:
            RuntimeError: the device failed.
        """
        with _current(self.ordinal):
            status = _driver().cuEventQuery(self._events[mark])
            if status == _NOT_READY:
                return False
            _driver().cuEventDestroy_v2(self._events.pop(mark))
            _check(status, "cuEventQuery")
        return True


def copy_to_host(ordinal: int, target: int, source: int, num_bytes: int) -> None:
    """Copy device memory to host memory of any kind, by address, and wait for the copy.

    Raises:
        RuntimeError: the driver refused.
    """
    with _current(ordinal):
        status = _driver().cuMemcpyDtoH_v2(ctypes.c_void_p(target), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes))
        _check(status, "cuMemcpyDtoH")


@contextlib.contextmanager
def _current(ordinal: int) -> Iterator[None]:
    driver = _driver()
    _check(driver.cuCtxPushCurrent_v2(_primary_context(ordinal)), "cuCtxPushCurrent")
    try:
        yield
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@functools.cache
def _primary_context(ordinal: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    status = _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), ctypes.c_int(ordinal))
    _check(status, "cuDevicePrimaryCtxRetain")
    return context


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"no CUDA driver here: {error}") from error
    if (status := driver.cuInit(0)) != 0:
        raise RuntimeError(f"cuInit: the driver answered {status}; is there a GPU that this process may use?")
    return driver


def _check(status: int, call: str) -> None:
    if status != 0:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
        raise RuntimeError(f"{call}: the driver answered {name.value.decode() if name.value else status}")

"""Make and map the arena, one shared-memory slab per node. It is an anonymous file that every worker maps.

The node store creates the file and owns it; workers get its descriptor over the control socket.
All pages are allocated at creation, so that no process dies of SIGBUS later. The size is sealed,
so that no process can shrink it under a reader. Mappings are kept out of forked children: a child
that outlives its parent must not read slots whose lease ended with the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
from dataclasses import dataclass
from io import FileIO

import numpy as np

from kvstore.errors import ConfigError
from kvstore.memory.room import check_room
from kvstore.runtime.forks import unmapped, withhold

logger = logging.getLogger(__name__)

_ADVISE_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_HUGE_PAGE_BYTES = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_madvise, _mmap = _libc.madvise, _libc.mmap
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_mmap.restype = ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class Arena:
    """A mapping of the slab in this process.

    `memory` is a writable view of the slab inside the `reserved` addresses; this object owns both. Callers must drop
    their views of it before `close`. `fd` is -1 if another process owns the slab.
    """

    fd: int
    num_bytes: int
    memory: memoryview
    reserved: mmap.mmap

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        return int(self.bytes_view().ctypes.data)

    def bytes_view(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return the whole slab, `[num_bytes]` uint8, writable, backed by the shared pages."""
        return np.frombuffer(self.memory, dtype=np.uint8)

    def populate(self) -> None:
        """Enter every page into this process's page table now, in pieces, without the interpreter lock.

        The first access to a page of a mapping costs a fault; a READ through the kernel costs one on both
        sides for each page. Measured: 20 times slower than the copy itself.
        """
        with contextlib.suppress(ValueError):  # The arena was closed before this began.
            self.advise(_MADV_POPULATE_WRITE)

    def advise(self, advice: int) -> bool:
        """Apply an madvise to the whole mapping, in pieces; False when the kernel declines one of them."""
        view = self.bytes_view()  # Keeps the mapping: after a close, its addresses could belong to other memory.
        address = int(view.ctypes.data)
        for start in range(0, self.num_bytes, _ADVISE_BYTES):
            if _madvise(address + start, min(_ADVISE_BYTES, self.num_bytes - start), advice) != 0:
                logger.info("madvise %d declined at byte %d (errno %d)", advice, start, ctypes.get_errno())
                return False
        return True

    def close(self) -> None:
        """Unmap and close the descriptor; the pages exist as long as any process maps them."""
        # If a view is still alive in this process, the memory is unmapped when its owner drops it.
        with contextlib.suppress(BufferError):
            self.memory.release()
            self.reserved.close()
            unmapped(self.reserved)
        if self.fd >= 0:
            os.close(self.fd)


def create_arena(num_bytes: int, *, huge_pages: bool = True) -> Arena:
    """Allocate a slab of exactly `num_bytes`, all pages at once, and map it.

    Args:
        num_bytes: size of the slab.
        huge_pages: join its pages into huge pages where the kernel can (Linux 6.1 and newer, with any
            `shmem_enabled`); this makes reads of another process's slab much faster.

    Raises:
        ConfigError: this machine or container does not have that much memory left; nothing is allocated.
    """
    check_room(num_bytes)
    fd = os.memfd_create("raykv-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        arena = Arena(fd, num_bytes, *_map(fd, num_bytes))
        if huge_pages:
            arena.advise(_MADV_COLLAPSE)
        return arena
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"could not allocate {num_bytes} bytes of shared memory: {error}; lower capacity=") from error


def check_memory(fd: int) -> None:
    """Check that a file is sealed memory of this user. No process can shrink it under a reader.

    Raises:
        ConfigError: the file is of another user, or not sealed.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    owner = os.fstat(fd).st_uid
    if owner != os.geteuid() or not seals & fcntl.F_SEAL_SHRINK:
        raise ConfigError(
            f"wanted sealed memory of user {os.geteuid()}, got a file of user {owner} with seals {seals:#x}; "
            "this is no store of this version"
        )


def keep_arena(fd: int, num_bytes: int) -> Arena:
    """Map the slab of a store that has ended, and own its descriptor. After an error the descriptor is closed.

    Raises:
        ConfigError: the file has another size than was said, is not a store's memory, or cannot be mapped.
    """
    try:
        check_memory(fd)
        if (got := os.fstat(fd).st_size) != num_bytes:
            raise ConfigError(f"arena: wanted {num_bytes} bytes of the old store, got a file of {got}")
        return Arena(fd, num_bytes, *_map(fd, num_bytes))
    except (ConfigError, OSError) as error:
        os.close(fd)
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"could not map {num_bytes} bytes of the old store's memory: {error}") from error


def attach_arena(file: FileIO, num_bytes: int) -> Arena:
    """Map a slab from the descriptor that its node store sent. The descriptor is closed in any case.

    So a forked child has neither the mapping nor a descriptor, and keeps none of the slab's pages.

    Raises:
        ConfigError: the file has another size than the store says, or is not a store's memory.
    """
    with file:
        fd = file.fileno()
        check_memory(fd)
        got = os.fstat(fd).st_size
        if got != num_bytes:
            raise ConfigError(f"arena: wanted {num_bytes} bytes, got a file of {got}; reconnect to the store")
        return Arena(-1, num_bytes, *_map(fd, num_bytes))


def _map(fd: int, num_bytes: int) -> tuple[memoryview, mmap.mmap]:
    # A page table uses a file's huge pages only if address and offset are equal modulo their size. The kernel does
    # not ensure this for memory files. So reserve more addresses, and map the file at an aligned one.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=flags)
    start = int(np.frombuffer(reserved, dtype=np.uint8).ctypes.data)
    offset = -start % _HUGE_PAGE_BYTES
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _mmap(start + offset, num_bytes, protection, flags, fd, 0) != start + offset:
        error = ctypes.get_errno()
        reserved.close()
        raise OSError(error, os.strerror(error))
    try:
        withhold(reserved, start, num_bytes + _HUGE_PAGE_BYTES)
    except OSError:
        reserved.close()
        raise
    return memoryview(reserved)[offset : offset + num_bytes], reserved

"""Keep a forked child from using its parent's connections and shared-memory addresses.

After a fork both processes share sockets and request numbers, so answers would reach the wrong one. Shared memory is
kept out of children, because its leases are the parent's. But a child has a copy of each mapping object, which unmaps
its addresses when it is deleted. So the child keeps these addresses reserved, or other memory could be unmapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from weakref import WeakKeyDictionary

from kvstore.errors import ForkedClient

_MAP_FIXED_NOREPLACE = 0x100000
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _madvise = _libc.mmap, _libc.madvise
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_mmap.restype = ctypes.c_void_p
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

#: Global, because a fork copies the whole process: (address, bytes) of each live mapping that children do not get.
_withheld: WeakKeyDictionary[mmap.mmap, tuple[int, int]] = WeakKeyDictionary()

#: The id of this process, cached because asking the kernel takes longer than the rest of a check.
_here_pid = os.getpid()


def this_process() -> int:
    """Return the id of this process."""
    return _here_pid


def check_process(pid: int) -> None:
    """Refuse the use of an object that another process made.

    Args:
        pid: of the process that made the object.

    Raises:
        ForkedClient: this process is a child of that one.
    """
    if _here_pid != pid:
        raise ForkedClient(
            f"wanted to be used in process {pid}, which made it, got process {_here_pid}, a fork; make a new client "
            "in the child, or start children with the 'spawn' method and make the client there"
        )


def withhold(mapping: mmap.mmap, address: int, num_bytes: int) -> None:
    """Keep a mapping out of forked children, and its addresses reserved in them.

    Args:
        mapping: the object that unmaps the addresses when it is deleted.
        address: of its first byte.
        num_bytes: its length.

    Raises:
        OSError: the kernel refuses; nothing changed.
    """
    if _madvise(address, num_bytes, mmap.MADV_DONTFORK) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    _withheld[mapping] = address, num_bytes


def unmapped(mapping: mmap.mmap) -> None:
    """Forget a closed mapping: its addresses may belong to another mapping by now."""
    _withheld.pop(mapping, None)


def _begin_child() -> None:
    global _here_pid
    _here_pid = os.getpid()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE | _MAP_NORESERVE
    for address, num_bytes in list(_withheld.values()):
        # The kernel refuses if the child has another mapping there; then there is nothing to reserve.
        _mmap(address, num_bytes, _PROT_NONE, flags, -1, 0)


os.register_at_fork(after_in_child=_begin_child)

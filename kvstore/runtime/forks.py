"""What a forked child must not do with what it has copied from its parent: speak for it, or reuse its addresses.

Sockets and the numbers of questions are one for both after a fork, so answers would go to the wrong one. Shared memory
is kept out of children, since its leases are the parent's. But an object that maps it is copied, and unmaps its
addresses when it goes: in a child that would be the memory of something else, were the addresses not kept.
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

#: Of the whole process, as forks are: where each living mapping lies that children do not get.
_withheld: WeakKeyDictionary[mmap.mmap, tuple[int, int]] = WeakKeyDictionary()


#: Of the whole process too: its number, kept because the kernel takes longer than all else that a check does.
_here_pid = os.getpid()


def this_process() -> int:
    """Return the number of this process."""
    return _here_pid


def check_process(pid: int) -> None:
    """Refuse what belongs to another process than this one.

    Args:
        pid: of the process that made it.

    Raises:
        ForkedClient: this is a child of that.
    """
    if _here_pid != pid:
        raise ForkedClient(
            f"wanted to be used in process {pid}, which made it, got process {_here_pid}, a fork; make a new client "
            "in the child, or start children with the 'spawn' method and make the client there"
        )


def withhold(mapping: mmap.mmap, address: int, num_bytes: int) -> None:
    """Keep a mapping out of forked children, and its addresses free in them.

    Args:
        mapping: the object that unmaps the addresses when it goes.
        address: of its first byte.
        num_bytes: of all of it.

    Raises:
        OSError: the kernel refuses; nothing changed.
    """
    if _madvise(address, num_bytes, mmap.MADV_DONTFORK) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    _withheld[mapping] = address, num_bytes


def unmapped(mapping: mmap.mmap) -> None:
    """Forget a mapping that was closed: its addresses may be those of another one by now."""
    _withheld.pop(mapping, None)


def _begin_child() -> None:
    global _here_pid
    _here_pid = os.getpid()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE | _MAP_NORESERVE
    for address, num_bytes in list(_withheld.values()):
        # Refused where the child has something by now, and then there is nothing to keep.
        _mmap(address, num_bytes, _PROT_NONE, flags, -1, 0)


os.register_at_fork(after_in_child=_begin_child)

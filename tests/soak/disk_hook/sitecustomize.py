"""Make the disk of a soak's stores fail, be full or hang, as a control file says.

The soak puts this folder first on PYTHONPATH of its cluster, so that each Python process imports this file when it
starts. It replaces the calls of `os` that the disk tier uses, so everything above them is as in real life. Only calls
for files below the folders that the control file names are changed.
"""

import contextlib
import errno
import functools
import os
import time

CONTROL = os.environ.get("RAYKV_SOAK_DISK_CONTROL", "")
_READS = ("preadv", "pread")
_WRITES = ("pwritev", "pwrite", "write", "fsync", "fdatasync", "posix_fallocate", "ftruncate")
_LOOK_AGAIN_S = 0.02


def order_for(fd):
    """Return the kind of fault that the file of a descriptor is to meet now, or ""."""
    with contextlib.suppress(OSError, ValueError):
        with open(CONTROL) as file:
            kind, until_s, folder = file.read().split(" ", 2)
        if time.monotonic() < float(until_s) and os.readlink(f"/proc/self/fd/{fd}").startswith(folder):
            return kind
    return ""


def _note(kind):
    # One byte for each call that met a fault: the soak reports their number.
    note = os.open(f"{CONTROL}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        _write(note, b".")
    finally:
        os.close(note)


def _faulty(name, call):
    @functools.wraps(call)
    def wrapper(fd, *args, **keywords):
        kind = order_for(fd)
        if kind == "hang":
            _note(kind)
            while order_for(fd) == "hang":
                time.sleep(_LOOK_AGAIN_S)
        elif kind == "fail" or (kind == "fill" and name in _WRITES):
            _note(kind)
            number = errno.EIO if kind == "fail" else errno.ENOSPC
            raise OSError(number, os.strerror(number))
        return call(fd, *args, **keywords)

    return wrapper


_write = os.write
if CONTROL:
    for _name in (*_READS, *_WRITES):
        setattr(os, _name, _faulty(_name, getattr(os, _name)))

"""The files of Unix sockets: there once somebody listens, and removed by their own store, or who finds it dead."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

#: Until a socket listens this ends the name of its file, which is nobody's to remove then. Paths have to be short.
_UNFINISHED = ".new"
#: A store takes microseconds for that.
_UNFINISHED_FOR_S = 3600.0


class SocketFile:
    """The file of one socket.

    Args:
        path: where it will be once the socket listens.
        sock: bound now.
    """

    def __init__(self, path: str, sock: socket.socket) -> None:
        self._path, self._unfinished = path, os.path.splitext(path)[0] + _UNFINISHED
        self._made: tuple[int, int, int] | None = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._unfinished)
        sock.bind(self._unfinished)
        os.chmod(self._unfinished, 0o600)

    def finish(self) -> None:
        """Put the file at its place, since the socket listens; one that is there is replaced."""
        os.rename(self._unfinished, self._path)
        self._made = _identity(self._path)

    def remove(self) -> None:
        """Remove the file, unless another store has put its own there; may be called again."""
        with contextlib.suppress(FileNotFoundError):
            if _identity(self._path) == self._made:
                os.unlink(self._path)


def _identity(path: str) -> tuple[int, int, int]:
    info = os.lstat(path)
    # A number of a file that is gone is soon another's.
    return info.st_dev, info.st_ino, info.st_ctime_ns


def remove_stale_sockets(folder: Path) -> int:
    """Unlink sockets in `folder` on which nobody listens: their stores were killed. Returns how many."""
    long_ago_s = time.time() - _UNFINISHED_FOR_S
    stale = [path for path in folder.glob("*.sock") if _is_refused(path)]
    for path in folder.glob(f"*{_UNFINISHED}"):
        with contextlib.suppress(OSError):
            if path.lstat().st_ctime < long_ago_s and _is_refused(path):
                stale.append(path)
    for path in stale:
        path.unlink(missing_ok=True)
    return len(stale)


def _is_refused(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as probe:
        # A store that hangs with as many waiting as it takes has all others wait, too.
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False

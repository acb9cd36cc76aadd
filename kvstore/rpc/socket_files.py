"""Manage the files of Unix sockets. Each appears once its store listens. The store removes it; others after a kill."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

#: Suffix of the file's name until the socket listens: other stores must not remove it. Short, because paths must be.
_UNFINISHED = ".new"
#: Suffixes of the files of stores, and of processes that hold a store's memory.
_FINISHED = (".sock", ".hand")
#: After this time others may remove such a file; a store needs it for microseconds.
_UNFINISHED_FOR_S = 3600.0


class SocketFile:
    """The file of one socket, which is bound here. It is at `path` once the socket listens."""

    def __init__(self, path: str, sock: socket.socket) -> None:
        self._path, self._unfinished = path, os.path.splitext(path)[0] + _UNFINISHED
        self._made: tuple[int, int, int] | None = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._unfinished)
        sock.bind(self._unfinished)
        os.chmod(self._unfinished, 0o600)

    def finish(self) -> None:
        """Move the file to its path, now that the socket listens; replaces an existing file."""
        os.rename(self._unfinished, self._path)
        self._made = _identity(self._path)

    def remove(self) -> None:
        """Remove the file, unless another store has replaced it; may be called again."""
        with contextlib.suppress(FileNotFoundError):
            if _identity(self._path) == self._made:
                os.unlink(self._path)


def _identity(path: str) -> tuple[int, int, int]:
    info = os.lstat(path)
    # Not the inode number alone: the number of a removed file is soon reused.
    return info.st_dev, info.st_ino, info.st_ctime_ns


def remove_stale_sockets(folder: Path) -> int:
    """Unlink sockets of killed stores in `folder`, on which no process listens; return how many."""
    long_ago_s = time.time() - _UNFINISHED_FOR_S
    stale = [path for suffix in _FINISHED for path in folder.glob(f"*{suffix}") if _is_refused(path)]
    for path in folder.glob(f"*{_UNFINISHED}"):
        with contextlib.suppress(OSError):
            if path.lstat().st_ctime < long_ago_s and _is_refused(path):
                stale.append(path)
    for path in stale:
        path.unlink(missing_ok=True)
    return len(stale)


def _is_refused(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as probe:
        # Non-blocking: connecting to a store that hangs with a full backlog would wait.
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False

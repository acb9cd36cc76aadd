"""Processes that a failed start of Ray leaves: this process began them, and Ray no longer knows them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

import ray

#: How long they may take to end before they are killed, and how long to end after that.
_END_S, _GONE_S = 5.0, 5.0
#: Fields of /proc/PID/stat after the name in brackets: the parent's id, and the process's start time.
_PARENT, _BEGAN = 1, 19

#: A process: its id, and its start time, which distinguishes it from a later process with the same id.
Child = tuple[int, int]


def ray_children() -> set[Child]:
    """Return the processes of Ray that this process began itself, and that have not ended."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return {child for pid in pids if (child := _ray_child(pid)) is not None}


def end_children(children: set[Child]) -> None:
    """End processes that this one began: send SIGTERM, and SIGKILL to those that do not end in time."""
    with contextlib.ExitStack() as opened:
        fds = []
        for child in children:
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(child[0])
                opened.callback(os.close, fd)
                # Check after the open: the descriptor always names the same process.
                if _ray_child(child[0]) == child:
                    fds.append(fd)
        for number, within_s in ((signal.SIGTERM, _END_S), (signal.SIGKILL, _GONE_S)):
            for fd in fds:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, number)
            fds = _still_there(fds, within_s)


def _still_there(fds: list[int], within_s: float) -> list[int]:
    """Wait for the end of processes, reap them, and return those that have not ended in time."""
    left, until_s = list(fds), time.monotonic() + within_s
    while left:
        ended, _, _ = select.select(left, (), (), max(0.0, until_s - time.monotonic()))
        if not ended:
            break
        for fd in ended:
            with contextlib.suppress(ChildProcessError):  # Already reaped elsewhere.
                os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG)
            left.remove(fd)
    return left


def _ray_child(pid: int) -> Child | None:
    """Return a process if this one began it and it runs Ray's package; never the program's own children."""
    folder = Path("/proc") / str(pid)
    try:
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        words = (folder / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None  # It has ended.
    package = os.fsencode(os.path.dirname(ray.__file__)) + b"/"
    if int(fields[_PARENT]) != os.getpid() or not any(word.startswith(package) for word in words):
        return None
    return pid, int(fields[_BEGAN])

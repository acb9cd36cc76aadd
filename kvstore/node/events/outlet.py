"""The store's end of the process that has the sockets for subscribers (sockets.py)."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import mmap
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from kvstore.errors import ConfigError
from kvstore.node.events import sockets
from kvstore.runtime import clock

#: How long the process may take to start.
_START_S = 30.0
#: How long it may take to end by itself: somewhat longer than its last batch may be on its way.
_END_S = 1.0
#: Pauses before it is started again. They grow while it ends soon after its start.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONG_LIFE_S = 0.25, 60.0, 120.0
_MOST_ANSWER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the process may keep, and what it may take of its node.

    Args:
        num_unread: batches that may wait for one subscriber; a slower one loses the next ones, and sees that by their
            numbers.
        num_kept: batches kept for replays.
        num_kept_bytes: of these.
        most_memory_bytes: of the process, beyond which it ends.
        num_descriptors: of the process, beyond which it accepts no connection.
        take_s: how long it may take for a batch; then it counts as lost.
    """

    num_unread: int = 1_000
    num_kept: int = 10_000
    num_kept_bytes: int = 64 << 20
    most_memory_bytes: int = 512 << 20
    num_descriptors: int = 1_024
    take_s: float = 5.0


class Outlet:
    """Where batches go: a process with the sockets, started here and again by `begin` after it was lost.

    It ends when the store's process does, however that ends. One thread uses it, except for `counts` and `kill`.

    Args:
        endpoint: where subscribers connect.
        replay_endpoint: where they ask for old batches; "" for nowhere.
        topic: of all batches.
        limits: of the process.

    Raises:
        ConfigError: pyzmq is missing, or an endpoint cannot be used; nothing is left behind.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str, limits: Limits) -> None:
        if importlib.util.find_spec("zmq") is None:
            raise ConfigError(
                "events_endpoint: wanted the package pyzmq on every node, got none; install it there (raykv's extra "
                "`events`), or leave events_endpoint out"
            )
        self.endpoints = {"events_endpoint": endpoint}
        if replay_endpoint:
            self.endpoints["events_replay_endpoint"] = replay_endpoint
        self.num_lost, self._pause_s, self._began_s = 0, _FIRST_PAUSE_S, 0.0
        self._topic, self._limits = topic, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        with contextlib.ExitStack() as undo:
            self._page_fd = os.memfd_create("raykv-events", os.MFD_CLOEXEC)
            undo.callback(os.close, self._page_fd)
            os.ftruncate(self._page_fd, mmap.PAGESIZE)
            self._page = mmap.mmap(self._page_fd, mmap.PAGESIZE)
            self.begin()
            undo.pop_all()

    def begin(self) -> None:
        """Start the process; `endpoints` has the ports that it got, and it takes them again when it is started again.

        Raises:
            ConfigError: an endpoint cannot be used, or the process does not start; it is not there.
        """
        self._began_s = clock.now_s()
        self._page[:8] = bytes(8)  # It keeps no batch yet.
        try:
            self._socket, its = socket.socketpair()
            with its:
                self._process = self._start(its.fileno())
            self.endpoints = self._answer(self._socket)
            self._socket.settimeout(self._limits.take_s)
        except BaseException:
            self.end(0.0)
            raise

    def _start(self, socket_fd: int) -> subprocess.Popen[bytes]:
        settings = {
            "path": sys.path,
            "socket_fd": socket_fd,
            "page_fd": self._page_fd,
            "endpoints": self.endpoints,
            "topic": self._topic,
            **asdict(self._limits),
        }
        return subprocess.Popen(
            [sys.executable, "-P", sockets.__file__, json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(socket_fd, self._page_fd),
            start_new_session=True,  # Ctrl-C in a terminal is for the store, which ends it in order.
        )

    def _answer(self, ours: socket.socket) -> dict[str, str]:
        ours.settimeout(_START_S)
        answer = b""
        with contextlib.suppress(OSError):
            while not answer.endswith(b"\n") and len(answer) < _MOST_ANSWER_BYTES:
                piece = ours.recv(_MOST_ANSWER_BYTES)
                if not piece:
                    break
                answer += piece
        if not answer.endswith(b"\n"):
            raise ConfigError(
                f"events_endpoint: wanted a process with its sockets within {_START_S:g} s, got none; its errors are "
                "in the log of the store"
            )
        told: dict[str, Any] = json.loads(answer)
        if "endpoints" not in told:
            setting = told["setting"]
            why = "another process has it" if told["errno"] == errno.EADDRINUSE else told["why"]
            raise ConfigError(
                f"{setting}: wanted an address that is free on this node, got {self.endpoints[setting]!r}: {why}; "
                "choose another port, or port 0 where several nodes share a machine"
            )
        return dict(told["endpoints"])

    def fileno(self) -> int:
        """Return a descriptor that is readable when the process is gone; -1 where there is none."""
        return -1 if self._socket is None else self._socket.fileno()

    def send(self, number: int, payload: bytes) -> None:
        """Give a batch to the process, in order.

        Raises:
            OSError: it is gone, or did not take the batch in time; the batch is lost, and `lost` has to be called.
        """
        if self._socket is None:
            raise ConnectionError("events: wanted the process with the sockets, got none; it is being started again")
        self._socket.sendall(sockets.HEADER.pack(number, len(payload)) + payload)

    def lost(self) -> tuple[int | None, float]:
        """Note that the process is gone, and end it if it is not.

        Returns:
            Its exit status, and how many seconds to wait before `begin`.
        """
        self.num_lost += 1
        if clock.now_s() - self._began_s > _LONG_LIFE_S:
            self._pause_s = _FIRST_PAUSE_S
        status, pause_s = self.end(0.0), self._pause_s
        self._pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return status, pause_s

    def counts(self) -> dict[str, Any]:
        """Return counts of all lives of the process, the pid of the present one or None, and how many were lost."""
        num_kept, num_replays, num_malformed = sockets.COUNTS.unpack_from(self._page)
        process = self._process
        return {
            "pid": None if process is None else process.pid,
            "num_kept": num_kept,
            "num_replays": num_replays,
            "num_malformed": num_malformed,
            "num_lost": self.num_lost,
        }

    def end(self, within_s: float = _END_S) -> int | None:
        """Let the process send what it has, and end it; may be called again. `begin` starts another.

        Returns:
            Its exit status; None where there was none.
        """
        process, self._process = self._process, None
        ours, self._socket = self._socket, None
        if ours is not None:
            ours.close()
        if process is None:
            return None
        try:
            return process.wait(within_s)
        except subprocess.TimeoutExpired:
            return self._killed(process)

    def close(self) -> None:
        """End the process for good; `counts` goes on."""
        self.end()
        os.close(self._page_fd)

    @staticmethod
    def _killed(process: subprocess.Popen[bytes]) -> int | None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        return process.returncode

    def kill(self) -> None:
        """End the process at once, so that a thread that waits for it goes on; any thread may call it."""
        process = self._process
        if process is not None:
            process.kill()

"""Accept connections from listening sockets, and survive a lack of descriptors."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable
from functools import partial

from kvstore.runtime.guard import LogLimit
from kvstore.runtime.loop import ControlLoop

logger = logging.getLogger(__name__)

_SO_PEERPIDFD = 77
_OUT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: How long accepting stops when there is no descriptor; longer each time in a row.
_PAUSES_S = (0.1, 0.25, 0.5, 1.0)


class Acceptor:
    """Accepts connections; without descriptors it stops for a while. Only on the server's thread.

    A listening socket stays readable as long as a connection waits, so a connection that cannot be accepted would keep
    the thread awake forever.

    Args:
        loop: watches the listening sockets.
        take: called with a socket and the host of its other side, empty for this host. Raises OSError when it lacks
            a descriptor; the socket is closed then.
        make_room: ends a connection that can be spared; False when there is none.
    """

    def __init__(
        self, loop: ControlLoop, take: Callable[[socket.socket, str], None], make_room: Callable[[], bool]
    ) -> None:
        self._loop, self.take, self._make_room = loop, take, make_room
        self._listeners: list[socket.socket] = []
        self._paused_until_s = 0.0
        self.num_pauses_in_row = 0
        self._limit = LogLimit()

    def listen(self, sock: socket.socket) -> None:
        """Listen on a bound socket, and take ownership of it."""
        sock.setblocking(False)
        sock.listen(128)
        self._listeners.append(sock)
        self.watch(sock)

    @property
    def is_paused(self) -> bool:
        """Whether accepting has stopped until a tick resumes it."""
        return self._paused_until_s > 0

    def tick(self, now_s: float) -> None:
        """Accept again when the pause has ended."""
        if self.is_paused and now_s >= self._paused_until_s:
            for listener in self._listeners:
                self._loop.unwatch(listener.fileno())  # An earlier, failed tick may have watched it.
                self.watch(listener)
            self._paused_until_s = 0.0  # Last, so that the next tick tries again after an error.

    def close(self) -> None:
        """Stop listening."""
        for listener in self._listeners:
            listener.close()

    def watch(self, listener: socket.socket) -> None:
        """Have the loop tell of new connections of `listener`."""
        self._loop.watch(listener.fileno(), partial(self._accept, listener))

    def _accept(self, listener: socket.socket) -> None:
        if self.is_paused:
            return
        try:
            sock, address = listener.accept()
            try:
                self.take(sock, address[0] if listener.family == socket.AF_INET else "")
            except BaseException:
                sock.close()
                raise
        except (BlockingIOError, ConnectionError):
            return  # The client is gone already.
        except OSError as error:
            if error.errno not in _OUT_OF:
                if self._limit.passes():
                    logger.warning("control: a connection could not be accepted: %s", error)
            elif not self._make_room():
                self._pause(error)
            return
        except Exception as error:  # noqa: BLE001 - e.g. no memory; if raised, the loop would unwatch this forever.
            self._pause(error)
            return
        self.num_pauses_in_row = 0

    def _pause(self, error: Exception) -> None:
        pause_s = _PAUSES_S[min(self.num_pauses_in_row, len(_PAUSES_S) - 1)]
        self.num_pauses_in_row += 1
        self._paused_until_s = self._loop.now_s() + pause_s
        for listener in self._listeners:
            self._loop.unwatch(listener.fileno())
        if self._limit.passes():
            advice = "; raise the limit (ulimit -n)" if isinstance(error, OSError) else ""
            logger.error("control: no connection can be accepted now: %r%s", error, advice)


def peer_pidfd(sock: socket.socket, pid: int) -> int:
    """Return a descriptor of the process that connected; -1 when the kernel cannot name it.

    Raises:
        OSError: there is no descriptor left.
    """
    try:
        return int(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError as error:
        if error.errno in _OUT_OF:
            raise
    # Kernels before 6.5: open by pid. A process in an invisible PID namespace has none.
    if pid <= 0:
        return -1
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _OUT_OF:
            raise
        return -1
    # The pid could belong to another process by now, but only if the client has ended and closed its socket.
    with contextlib.suppress(BlockingIOError):
        if not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            os.close(pidfd)
            return -1
    return pidfd

"""One client of a control server: who it is, and what is sent to it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.wire import FRAGMENT_BYTES, Decoder, Flag, Message, Op, encode, encode_short

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Connection:
    """One client of the server. `role` is set by its HELLO, and `owner` where several share one; else it is its own.

    `verbs` serve what a client asks most; the server's handler serves all else.
    `pidfd` watches the process that connected, whoever else holds the socket by now; -1 when there is none
    (a remote one) or the kernel cannot name it. `ended` says that the process is gone, or said goodbye.
    `gave` is the last question that was answered with something to hold, and what takes that back: the client asks
    one thing at a time, so of no other question can the answer be lost with this connection.
    """

    sock: socket.socket
    owner: str
    local: bool
    pid: int = 0
    pidfd: int = -1
    role: str = ""
    closed: bool = False
    ended: bool = False
    decoder: Decoder = field(default_factory=Decoder)
    verbs: dict[Op, Handler] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    gave: tuple[int, Callable[[], object]] | None = None
    #: Stays its own when the owner becomes that of others.
    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or self.owner

    def send(self, op: Op, flag: Flag, request: int, payload: bytes, fds: tuple[int, ...] = ()) -> bool:
        """Send a message from any thread; False when the client is gone or does not read.

        Part of the message may be out then, so the connection is shut down: the other side sees its end.
        """
        try:
            if not fds and len(payload) <= FRAGMENT_BYTES:
                packet = encode_short(op, flag, request, payload)
                with self.lock:
                    self.sock.sendall(packet)
                return True
            with self.lock:
                for packet in encode(Message(op, flag, request, payload)):
                    if fds:
                        socket.send_fds(self.sock, [packet], list(fds))
                        fds = ()
                    else:
                        self.sock.sendall(packet)
        except OSError as error:
            logger.debug("%s: could not send %s: %s", self.owner, op.name, error)
            self.shut_down()
            return False
        return True

    def shut_down(self) -> None:
        """End the connection but keep its descriptor, so that no other connection can have the same number."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def kill(self) -> bool:
        """Kill the process behind a local connection, by its pidfd and never by a number.

        Only on the server's thread, which closes the pidfd.

        Returns:
            False when the kernel cannot name the process, or when it is this one.
        """
        if self.pidfd < 0 or self.pid == os.getpid():
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        return True


#: Serves one message; returns the answer's payload, or None when it answers later or there is no answer.
Handler = Callable[[Connection, Message], bytes | None]

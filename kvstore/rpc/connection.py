"""One client of a control server: who it is, and what is sent to it."""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.rpc.framing import FRAGMENT_BYTES, STRANGER_BYTES, Decoder, Flag, Message, Op, encode_short, packets_of
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

#: What may wait here for a client that does not read, besides what its socket holds; then it is cut. A message goes
#: out whole when nothing waits before it.
MAX_UNSENT_BYTES = 4 << 20
#: What one packet costs here besides its bytes.
_PACKET_BYTES = 128


class Role(StrEnum):
    """What a connection is to the server, as its HELLO says; as a truth value only a stranger's is False."""

    STRANGER = ""
    CLIENT = "client"
    #: Only reads the presence table.
    PRESENCE = "presence"
    MOVER = "mover"
    #: The store of another node.
    PEER = "peer"
    #: The store of a node, at the directory.
    STORE = "store"


def _ignore(wanted: bool) -> None:
    pass


@dataclass(slots=True, eq=False)
class Connection:
    """One client of the server. `role` is set by its HELLO, and `owner` where several share one; else it is its own.

    `routes` serve what it may ask; what is in none of them goes to the server's handler.
    `pidfd` watches the process that connected, whoever else holds the socket by now; -1 when there is none
    (a remote one) or the kernel cannot name it. `ended` says that the process is gone, or said goodbye.
    `gave` is the last question that was answered with something to hold, and what takes that back: the client asks
    one thing at a time, so of no other question can the answer be lost with this connection.
    `want_writable` has the server call `flush` when the socket takes more, or no more; any thread may call it, with
    the lock held. While answers wait, nothing more is read from the client, unless it `reads_on`: one that does not
    read its answers asks for nothing more.
    """

    sock: socket.socket
    owner: str
    local: bool
    host: str = ""
    want_writable: Callable[[bool], None] = _ignore
    pid: int = 0
    pidfd: int = -1
    role: Role = Role.STRANGER
    reads_on: bool = False
    #: Answers wait for the client; only the server's thread ends that.
    is_blocked: bool = False
    #: When the client took something of them last.
    taken_s: float = 0.0
    closed: bool = False
    ended: bool = False
    decoder: Decoder = field(default_factory=lambda: Decoder(STRANGER_BYTES))
    #: Messages that came and were not served yet.
    pending: deque[Message] = field(default_factory=deque)
    routes: Mapping[Op, Handler] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _unsent: deque[memoryview] = field(default_factory=deque)
    _num_unsent_bytes: int = 0
    gave: tuple[int, Callable[[], object]] | None = None
    #: Stays its own when the owner becomes that of others.
    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or self.owner

    def send(self, op: Op, flag: Flag, request: int, payload: bytes, fds: tuple[int, ...] = ()) -> bool:
        """Send a message from any thread, without waiting; False when the client is gone or does not read.

        What the socket does not take waits here, and goes out when it does. Descriptors do not wait: a client gets
        them in the first answer. Part of the message may be out when this fails, so the connection is shut down: the
        other side sees its end.
        """
        try:
            if not fds and len(payload) <= FRAGMENT_BYTES:
                packet = encode_short(op, flag, request, payload)
                with self.lock:
                    if self.closed:  # Its descriptor's number may be another file's by now.
                        return False
                    try:
                        sent = 0 if self._unsent else self.sock.send(packet)
                    except BlockingIOError:
                        sent = 0
                    if sent != len(packet):
                        self._keep([packet], sent)
                return True
            packets = packets_of(Message(op, flag, request, payload))
            with self.lock:
                if self.closed:
                    return False
                if fds:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                    sent = self.sock.sendmsg(packets[:1], [rights])
                    if sent != len(packets.pop(0)):
                        raise BlockingIOError(errno.EAGAIN, "the socket took part of a packet with descriptors")
                num_out, sent = self._send_now(packets)
                if num_out < len(packets):
                    self._keep(packets[num_out:], sent)
        except OSError as error:
            logger.debug("%s: could not send %s: %s", self.owner, op.name, error)
            self.shut_down()
            return False
        return True

    def _send_now(self, packets: list[bytes]) -> tuple[int, int]:
        """Send what the socket takes; returns how many packets went out, and bytes of the next one."""
        if not self._unsent:
            for i, packet in enumerate(packets):
                try:
                    sent = self.sock.send(packet)
                except BlockingIOError:
                    return i, 0
                if sent != len(packet):
                    return i, sent
            return len(packets), 0
        return 0, 0

    def _keep(self, packets: list[bytes], sent: int) -> None:
        """Keep packets, the first without the bytes of it that were sent; with the lock held."""
        num_bytes = sum(len(packet) + _PACKET_BYTES for packet in packets) - sent
        if self._unsent and self._num_unsent_bytes + num_bytes > MAX_UNSENT_BYTES:
            raise OSError(errno.ENOBUFS, f"{self._num_unsent_bytes} bytes wait for it already")
        if not self._unsent:
            self.is_blocked, self.taken_s = True, clock.now_s()
            self.want_writable(True)
        for packet in packets:
            self._unsent.append(memoryview(packet)[sent:])
            sent = 0
        self._num_unsent_bytes += num_bytes

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it; on the server's thread.

        Raises:
            OSError: the client is gone.
        """
        with self.lock, contextlib.suppress(BlockingIOError):
            while self._unsent:
                packet = self._unsent[0]
                sent = self.sock.send(packet)
                self.taken_s = clock.now_s()
                if sent != len(packet):
                    self._unsent[0] = packet[sent:]
                    self._num_unsent_bytes -= sent
                    continue
                self._unsent.popleft()
                self._num_unsent_bytes -= sent + _PACKET_BYTES
            self._unblock()

    def drop_unsent(self) -> None:
        """Forget what waits: the client is gone; on the server's thread."""
        with self.lock:
            self._unsent.clear()
            self._num_unsent_bytes = 0
            self._unblock()

    def _unblock(self) -> None:
        if self.is_blocked:
            self.is_blocked = False
            self.want_writable(False)

    def shut_down(self) -> None:
        """End the connection but keep its descriptor, so that no other connection can have the same number."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; on the server's thread, which watches it no more."""
        # Shut down first, so that the other side sees its end whatever else holds the socket; closed under the lock,
        # or the next packet of a thread that is sending could go to another client with the same descriptor.
        self.shut_down()
        with self.lock:
            self._unsent.clear()
            self.sock.close()
            # It knows this connection: what came of a message, millions of bytes, would wait for a collection.
            self.want_writable = _ignore
        self.pending.clear()

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

"""Hold one client of a control server: its identity, and the messages for it."""

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

#: The most bytes that wait here for a client that does not read, besides its socket's buffer; beyond, the connection is
#: cut. A message is accepted whole when nothing waits before it.
MAX_UNSENT_BYTES = 4 << 20
#: Memory of one waiting packet besides its bytes.
_PACKET_BYTES = 128


class Role(StrEnum):
    """The role of a connection, as its HELLO says; only STRANGER is false as a truth value."""

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
    """One client of the server. Its HELLO sets `role`, and `owner` if several connections share one owner.

    `routes` serve its ops; an op without a route goes to the server's handler.
    `pidfd` watches the process that connected, even if another process holds the socket by now; -1 for a remote
    process, or if the kernel cannot name it. `ended`: the process is gone, or said goodbye.
    `gave` is (number, undo) of the last question whose answer gave something to hold. The client asks one question at
    a time, so no other answer can be lost with this connection.
    `want_writable(True)` makes the server call `flush` when the socket takes more, False ends that; any thread may call
    it, with the lock held. While answers wait, the server reads nothing more from the client, unless `reads_on`: a
    client that does not read its answers gets no more of its questions served.
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
    #: Whether answers wait for the client; only the server's thread clears it.
    is_blocked: bool = False
    #: When the client last took some of the waiting bytes.
    taken_s: float = 0.0
    closed: bool = False
    ended: bool = False
    #: Once it has `ended`: whether its client has closed it; else the process is gone.
    said_goodbye: bool = False
    decoder: Decoder = field(default_factory=lambda: Decoder(STRANGER_BYTES))
    #: Received messages that were not served yet.
    pending: deque[Message] = field(default_factory=deque)
    routes: Mapping[Op, Handler] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _unsent: deque[memoryview] = field(default_factory=deque)
    _num_unsent_bytes: int = 0
    gave: tuple[int, Callable[[], object]] | None = None
    #: Its first owner: stays the same when the connection joins another one.
    name: str = ""
    #: Of a client, as its HELLO says, once the store knows that it has this tenant.
    tenant: str = ""
    #: Of the slots that a client knows; 0 before it has attached.
    slot_bytes: int = 0

    def send(self, op: Op, flag: Flag, request: int, payload: bytes, fds: tuple[int, ...] = ()) -> bool:
        """Send a message from any thread, without waiting; False when the client is gone or does not read.

        Bytes that the socket does not take wait here until it does. Descriptors do not wait: a client gets them in
        the first answer. A failure may leave part of the message sent, so the connection is shut down, and the other
        side sees its end.
        """
        try:
            if len(payload) <= FRAGMENT_BYTES:
                packets = [encode_short(op, flag, request, payload)]
            else:
                packets = packets_of(Message(op, flag, request, payload))
            with self.lock:
                if self.closed:  # Its descriptor's number may belong to another file by now.
                    return False
                if fds:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                    if self.sock.sendmsg(packets[:1], [rights]) != len(packets.pop(0)):
                        raise BlockingIOError(errno.EAGAIN, "the socket took part of a packet with descriptors")
                left = iter(packets)
                for packet in left:
                    try:
                        sent = 0 if self._unsent else self.sock.send(packet)
                    except BlockingIOError:
                        sent = 0
                    if sent != len(packet):
                        self._keep([packet, *left], sent)
        except OSError as error:
            logger.debug("%s: could not send %s: %s", self.owner, op.name, error)
            self.shut_down()
            return False
        return True

    def _keep(self, packets: list[bytes], sent: int) -> None:
        """Keep packets to send later, without the first `sent` bytes; with the lock held."""
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
        """Send the waiting bytes, as far as the socket takes them; on the server's thread.

        Raises:
            OSError: the client is gone.
        """
        with self.lock, contextlib.suppress(BlockingIOError):
            while self._unsent:
                packet = self._unsent[0]
                sent = self.sock.send(packet)
                self.taken_s = clock.now_s()
                self._num_unsent_bytes -= sent
                if sent != len(packet):
                    self._unsent[0] = packet[sent:]
                else:
                    self._unsent.popleft()
                    self._num_unsent_bytes -= _PACKET_BYTES
            self._unblock()

    def drop_unsent(self) -> None:
        """Drop the waiting bytes, because the client is gone; on the server's thread."""
        with self.lock:
            self._unsent.clear()
            self._num_unsent_bytes = 0
            self._unblock()

    def _unblock(self) -> None:
        if self.is_blocked:
            self.is_blocked = False
            self.want_writable(False)

    def shut_down(self) -> None:
        """End the connection but keep its descriptor, so that no other connection gets the same number."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, which must be unwatched; on the server's thread."""
        # Shut down first, so that the other side sees the end even if another process holds the socket. Close under
        # the lock, or a sending thread's next packet could go to another client with the same descriptor.
        self.shut_down()
        with self.lock:
            self._unsent.clear()
            self.sock.close()
            # Break the reference cycle, or megabytes of a received message would stay until garbage collection.
            self.want_writable = _ignore
        self.pending.clear()

    def kill(self) -> bool:
        """Kill the process of a local connection by its pidfd, never by its pid; on the server's thread.

        Returns:
            False when the kernel cannot name the process, or when it is this one.
        """
        if self.pidfd < 0 or self.pid == os.getpid():
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        return True


#: Serves one message; returns the answer's payload, or None if the answer comes later or there is none.
Handler = Callable[[Connection, Message], bytes | None]

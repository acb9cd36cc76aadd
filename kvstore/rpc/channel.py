"""Send and receive packets at the client's end of a socket, by polling or with a time limit."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from typing import NoReturn

from kvstore.errors import PeerLost, TransferTimeout
from kvstore.rpc.framing import (
    FRAGMENT_BYTES,
    RECEIVE_BYTES,
    REQUEST,
    Decoder,
    Flag,
    Message,
    Op,
    encode_short,
    packets_of,
    short_reply,
)
from kvstore.runtime import clock
from kvstore.runtime.forks import this_process

#: A host that vanished sends nothing, so an idle connection is probed: after this time, this often, so many times.
KEEP_IDLE_S, KEEP_INTERVAL_S, KEEP_PROBES = 5, 2, 5


def prepare_remote(sock: socket.socket) -> None:
    """Send small messages at once, and fail within 15 s when the other host is gone. Both sides call this.

    A stopped process does not count as gone: its kernel still answers probes.
    """
    tcp = socket.IPPROTO_TCP
    sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(tcp, socket.TCP_KEEPIDLE, KEEP_IDLE_S)
    sock.setsockopt(tcp, socket.TCP_KEEPINTVL, KEEP_INTERVAL_S)
    sock.setsockopt(tcp, socket.TCP_KEEPCNT, KEEP_PROBES)
    sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, 1000 * (KEEP_IDLE_S + KEEP_INTERVAL_S * KEEP_PROBES))


def set_timeout(sock: socket.socket, option: int, timeout_s: float) -> None:
    """Bound the time of one system call, by SO_SNDTIMEO or SO_RCVTIMEO; 0 is no bound."""
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6)))


class Channel:
    """Sends and receives for one question at a time. Its owner decides which, and closes the socket afterwards.

    Attributes:
        closed: set permanently by the first failure, or by the owner.
        request: the number of the last message that was sent.
        unheard: the first question whose whole answer was not taken; 0 while there is none.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.sock, self.name, self.closed = sock, name, False
        self.request = self.unheard = 0
        self._pid, self._is_stream = this_process(), sock.family != socket.AF_UNIX
        self._decoder = Decoder()
        # Reused: the kernel would provide a new buffer for each answer page by page.
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._backlog: list[Message] = []
        self._timeout_s = -1.0  # Differs from every real timeout, 0 included: the socket's present timeout is unknown.

    def shut_down(self) -> bool:
        """End the connection but keep its descriptor; False in a forked child, which only closes its copy."""
        self.closed = True
        if this_process() != self._pid:
            self.sock.close()  # The connection stays open for the process that made it.
            return False
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        return True

    def send(self, op: Op, flag: Flag, payload: bytes) -> int:
        """Send a message, and return its number.

        Raises:
            PeerLost: the connection broke; it is shut down.
        """
        self.request += 1
        if flag is REQUEST:
            self.unheard = self.unheard or self.request
        try:
            if len(payload) <= FRAGMENT_BYTES:
                self.sock.sendall(encode_short(op, flag, self.request, payload))
            else:
                for packet in packets_of(Message(op, flag, self.request, payload)):
                    self.sock.sendall(packet)
        except OSError as error:
            self.shut_down()
            raise PeerLost(f"{self.name}: connection lost while sending {op.name}: {error}") from error
        return self.request

    def has_room(self) -> bool:
        """Whether a short message can be sent without waiting for the other side to read."""
        if (fd := self.sock.fileno()) < 0:  # Another thread has just closed it.
            return False
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        return bool(poll.poll(0))

    def receive(
        self, request: int, timeout_s: float, data: memoryview | None = None, *, awake_s: float = 0.0
    ) -> Message:
        """Return the next message of an answer; `data` came already. Raises as `wait` does."""
        deadline_s = clock.now_s() + timeout_s
        while (message := self.take(request, data)) is None:
            # Checked here too: `wait` never times out on a server that keeps sending other messages.
            if (left_s := deadline_s - clock.now_s()) <= 0.0 and data is not None:
                self._give_up()
            data = self.wait(left_s, awake_s)
        return message

    def _give_up(self) -> NoReturn:
        self.shut_down()
        raise TransferTimeout(f"{self.name}: no answer in time; the connection was closed")

    def receive_soon(self, request: int, wait_s: float, awake_s: float) -> Message | None:
        """Return the next message of an answer, or None. Polls for `awake_s`, then sleeps up to `wait_s`."""
        until_s = clock.now_s() + awake_s
        end_s = until_s + wait_s
        while True:
            is_awake = (now_s := clock.now_s()) < until_s
            data = self.read(None if is_awake or end_s <= now_s else min(wait_s, end_s - now_s))
            if data is not None and (message := self.take(request, data)) is not None:
                return message
            if not is_awake and (data is None or clock.now_s() >= end_s):
                return None

    def short(self, data: memoryview, request: int) -> bytes | None:
        """Return the payload if `data` is exactly the whole answer, the usual case; otherwise None."""
        return short_reply(data, request) if self._decoder.is_between and not self._backlog else None

    def take(self, request: int, data: memoryview | None) -> Message | None:
        """Return the next message of an answer from the received bytes, `data` last; None if it is not complete."""
        if data is not None:
            came = self._decoder.stream(data) if self._is_stream else self._decoder.packets(data)
            if any(message.request > self.request for message in came):
                self.shut_down()
                raise PeerLost(f"{self.name}: it answers what was not asked; the connection was closed")
            # No caller waits for messages of earlier questions; if kept, each call would search through them.
            self._backlog += [message for message in came if message.request >= request]
        for i, message in enumerate(self._backlog):
            if message.request == request:
                return self._backlog.pop(i)
        return None

    def wait(self, timeout_s: float, awake_s: float = 0.0) -> memoryview:
        """Return the next received bytes, valid until the next wait; polls for `awake_s`, then sleeps.

        Raises:
            PeerLost: as for `read`.
            TransferTimeout: no bytes came in time; the connection is shut down.
        """
        awake_s = min(awake_s, timeout_s)
        until_s = clock.now_s() + awake_s if awake_s > 0 else 0.0
        while until_s and clock.now_s() < until_s:
            if (data := self.read(None)) is not None:
                return data
        data = self.read(timeout_s - awake_s)
        if data is None:
            self._give_up()
        return data

    def read(self, timeout_s: float | None) -> memoryview | None:
        """Return bytes that come within a time, or are here now if that is None; otherwise None.

        Raises:
            PeerLost: the connection broke; it is shut down.
        """
        try:
            if timeout_s is not None and not timeout_s <= self._timeout_s <= 1.2 * timeout_s:
                self._set_timeout(timeout_s)
            flags = socket.MSG_DONTWAIT if timeout_s is None else 0
            data = self._received[: self.sock.recv_into(self._received, 0, flags)]
        except (BlockingIOError, TimeoutError):
            return None
        except OSError as error:
            self.shut_down()
            raise PeerLost(f"{self.name}: connection lost: {error}") from error
        if not data:
            self.shut_down()
            raise PeerLost(f"{self.name}: closed the connection; is the node store still running?")
        return data

    def _set_timeout(self, left_s: float) -> None:
        # A kernel-side receive timeout saves the poll() per call that settimeout() needs. It is set a little longer
        # than wanted, so that calls with the same timeout set it only once.
        self._timeout_s = 1.1 * max(left_s, 1e-3)
        set_timeout(self.sock, socket.SO_RCVTIMEO, self._timeout_s)

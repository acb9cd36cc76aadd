"""Where frames go: the sockets of a store and a directory, and the answers that a store gets from others."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import struct
import threading

import msgspec

from kvstore.blocks.codec import encode, encode_object
from kvstore.config import PROTOCOL_VERSION
from kvstore.remote.messages import decode_peer_transport
from kvstore.remote.peers import PeerAddress
from kvstore.rpc.connection import Connection
from kvstore.rpc.framing import Flag, Message, Op, encode_short
from kvstore.rpc.server import ControlServer
from tests.fuzz.mutate import answered, mutated

#: So long a store may leave a socket full before that is a finding.
_STUCK_S = 20.0


class StuckError(Exception):
    """A store that reads nothing any more."""


class Door:
    """One way in: connects, says a HELLO where it is given one, and sends frames until it is cut.

    Args:
        address: the path of a Unix socket, or where a TCP port is.
        hello: what is said first; nothing for a stranger, which gets a new connection for each frame.
        frames: that are made wrong.
    """

    def __init__(self, address: str | PeerAddress, hello: dict[str, object] | None, frames: list[Message]) -> None:
        self._address, self._frames = address, frames
        self._hello = None if hello is None else hello | {"protocol": PROTOCOL_VERSION}
        self._sock: socket.socket | None = None
        self.num_connections = 0

    def send(self, rng: random.Random) -> None:
        """Send one frame.

        Raises:
            StuckError: nobody reads it.
        """
        data = mutated(rng, self._frames)
        while not self._put(data):
            self._leave()
        if self._hello is None or rng.random() < 0.01:
            self.leave()

    def leave(self) -> None:
        """Say goodbye, so that nothing is kept for this door, and close."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.send(encode_short(Op.GOODBYE, Flag.ONE_WAY, 0, b""))
            self._leave()

    def _leave(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock = None

    def _connect(self) -> socket.socket:
        self.num_connections += 1
        if isinstance(self._address, str):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.settimeout(_STUCK_S)
            sock.connect(self._address)
        else:
            sock = socket.create_connection((self._address.host, self._address.port), timeout=_STUCK_S)
            # Closed without waiting: thousands of connections would else use up the ports.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock = sock
        if self._hello is not None:
            sock.sendall(encode_short(Op.HELLO, Flag.REQUEST, 0, encode_object(self._hello)))
            if not self._drain():
                raise ConnectionResetError("refused")
        sock.setblocking(False)
        return sock

    def _drain(self) -> int:
        assert self._sock is not None
        data, fds, _, _ = socket.recv_fds(self._sock, 1 << 18, 4)
        for fd in fds:
            os.close(fd)
        return len(data)

    def _put(self, data: bytes) -> bool:
        """Send; False when the connection was cut meanwhile."""
        try:
            sock = self._sock or self._connect()
            with contextlib.suppress(BlockingIOError):
                while self._drain():
                    pass
                return False
            while data:
                try:
                    data = data[sock.send(data) :]
                except BlockingIOError:
                    if not select.select([], [sock], [], _STUCK_S)[1]:
                        raise StuckError(f"{self._address}: nothing was read for {_STUCK_S} s") from None
                    with contextlib.suppress(BlockingIOError):
                        self._drain()
        except TimeoutError as error:
            raise StuckError(f"{self._address}: no answer within {_STUCK_S} s") from error
        except OSError:
            return False
        return True


class Liar:
    """A store, or a directory, that answers what it is asked with frames made wrong.

    It names an agent that no engine knows: whatever else it says, no byte can be read from it.
    """

    def __init__(self, seed: int, hello: dict[str, object], frames: list[Message]) -> None:
        self._rng, self._hello, self._frames = random.Random(seed), hello, frames
        self._lock = threading.Lock()
        self.num_answers = 0
        self._server = ControlServer(self._serve, lambda connection: None)
        self._server.listen_remote("127.0.0.1")
        self._server.start()

    def address(self) -> PeerAddress:
        """Return where it listens."""
        return PeerAddress("127.0.0.1", self._server.port, "token")

    def stop(self) -> None:
        """End it."""
        self._server.stop()

    def _serve(self, connection: Connection, message: Message) -> bytes | None:
        connection.role = "store"
        if message.op is Op.HELLO and self._rng.random() < 0.9:
            return encode_object(self._hello)
        with self._lock:
            self.num_answers += 1
            data = answered(self._rng, self._frames, message)
        with contextlib.suppress(OSError):
            connection.sock.send(data)
        if self._rng.random() < 0.05:
            connection.shut_down()
        return None


def without_agents(frames: list[Message]) -> list[Message]:
    """Return answers in which no engine is named that could be read from."""
    changed = []
    for frame in frames:
        payload = frame.payload
        if frame.op is Op.PEER_TRANSPORT and frame.flag is Flag.REPLY:
            payload = encode(msgspec.structs.replace(decode_peer_transport(payload), agent=b"nobody"))
        changed.append(frame._replace(payload=payload))
    return changed

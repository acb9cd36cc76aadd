"""The serving side of control connections: one thread, one epoll, for workers, movers and peers alike.

The kernel names the process behind a local connection (peer credentials and peer pidfd), so that what a dead
worker held comes back, and what a live one holds never does. An owner may have several connections, of one process.
A closed connection only stops grants; the owner counts as gone when its process is gone, or when it said goodbye.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvstore.control_connection import Connection, Handler
from kvstore.control_loop import ControlLoop
from kvstore.errors import InvalidRequest, KVStoreError, ProtocolError
from kvstore.wire import (
    RECEIVE_BYTES,
    REPLY,
    REQUEST,
    SOCKET_BUFFER_BYTES,
    Flag,
    Message,
    Op,
    decode_short,
    pack_error,
)

logger = logging.getLogger(__name__)

_SO_PEERPIDFD = 77
_GOODBYE = Op.GOODBYE


class ControlServer:
    """Listens and dispatches.

    Args:
        handler: called on the server's thread for each message; must not block.
        on_gone: called once with a connection of which nothing more will be heard: its owner is gone for good
            (`ended`), or nobody will say when it is, because it is remote or cannot be watched.
        on_tick: called about every `tick_s` seconds while `wants_ticks()` is true.
        holds: whether anything has to be kept for the owner of a closed connection until its process is gone.
    """

    def __init__(
        self,
        handler: Handler,
        on_gone: Callable[[Connection], None],
        on_tick: Callable[[], None] = lambda: None,
        wants_ticks: Callable[[], bool] = lambda: False,
        tick_s: float = 0.25,
        holds: Callable[[Connection], bool] = lambda connection: True,
    ) -> None:
        self._handler, self._on_gone, self._holds = handler, on_gone, holds
        self._on_tick = on_tick
        self._loop = ControlLoop(self._tick, wants_ticks, tick_s, self._shut_down)
        self.watch, self.unwatch = self._loop.watch, self._loop.unwatch
        self.wake, self.stay_awake, self.is_serving = self._loop.wake, self._loop.stay_awake, self._loop.is_serving
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._num_connections = 0
        self._path = ""
        self._listeners: list[socket.socket] = []
        self._connections: set[Connection] = set()
        self.port = 0
        self.num_served: Counter[Op] = Counter()

    def listen_local(self, path: str) -> None:
        """Listen on a Unix SEQPACKET socket; replaces a stale file of that name."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        sock.bind(path)
        os.chmod(path, 0o600)
        self._path = path
        self._listen(sock)

    def listen_remote(self, host: str, port: int = 0) -> None:
        """Listen on TCP; port 0 lets the system choose, see `port`."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        self.port = sock.getsockname()[1]
        self._listen(sock)

    def _listen(self, sock: socket.socket) -> None:
        sock.listen(128)
        self._listeners.append(sock)
        self.watch(sock.fileno(), partial(self._accept, sock))

    def start(self) -> None:
        """Begin to serve."""
        self._loop.start()

    @property
    def num_failures(self) -> int:
        """How often something that nobody expected was raised on the thread."""
        return self._loop.num_failures

    def stop(self, timeout_s: float = 2.0) -> None:
        """Close all connections and end the thread; may be called again."""
        self._loop.stop(timeout_s)

    def _tick(self) -> None:
        try:
            self._on_tick()
        finally:
            self._let_go_of_closed()

    def _accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        local = listener.family == socket.AF_UNIX
        self._num_connections += 1
        connection = Connection(sock, f"{'local' if local else 'peer'}-{self._num_connections}", local)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 1, 0))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        if local:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            connection.pid = struct.unpack("3i", credentials)[0]
            connection.pidfd = _peer_pidfd(sock, connection.pid)
            if connection.pidfd >= 0:
                self.watch(connection.pidfd, partial(self._owner_died, connection))
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.add(connection)
        self.watch(sock.fileno(), partial(self._read, connection))

    def _read(self, connection: Connection) -> None:
        if connection.closed:
            return
        try:
            data = self._received[: connection.sock.recv_into(self._received, 0, socket.MSG_DONTWAIT)]
            if not data:
                self._close(connection)
                return
            if not connection.local:
                for each in connection.decoder.stream(data):
                    self._serve(connection, each)
                return
            message = decode_short(data) if connection.decoder.is_between else None
            if message is None:
                message = connection.decoder.packet(data)
            if message is not None:
                self._serve(connection, message)
        except BlockingIOError:
            return
        except ConnectionResetError as error:
            # Of a local client that closed with an answer unread. The kernel says so once, before what the client
            # had sent until then, which may be that it is gone for good.
            if not connection.local:
                logger.debug("%s: %s", connection.owner, error)
                self._close(connection)
            return
        except (OSError, ProtocolError) as error:
            logger.debug("%s: %s", connection.owner, error)
            self._close(connection)
        except Exception:
            logger.exception("control: unexpected error; the connection is closed")
            self._close(connection)

    def _serve(self, connection: Connection, message: Message) -> None:
        op = message.op
        if op is _GOODBYE:
            self._owner_died(connection)
            return
        self.num_served[op] += 1
        try:
            answer = connection.verbs.get(op, self._handler)(connection, message)
        except KVStoreError as error:
            answer, flag = pack_error(error), Flag.ERROR
        except struct.error as error:
            text = f"{op.name}: {len(message.payload)} bytes are not a request of this version: {error}"
            answer, flag = pack_error(InvalidRequest(text)), Flag.ERROR
        except Exception as error:
            logger.exception("control: %s failed", op.name)
            answer, flag = pack_error(error), Flag.ERROR
        else:
            flag = REPLY
        if answer is not None and message.flag is REQUEST and not connection.send(op, flag, message.request, answer):
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        if connection.closed:
            return
        connection.closed = True
        self.unwatch(connection.sock.fileno())
        # Shut down first, so that a thread that is sending ends; closed only then, or its next packet could go
        # to another client whose connection got the same descriptor.
        connection.shut_down()
        with connection.lock:
            connection.sock.close()
        if connection.ended or not self._is_needed(connection):
            self._forget(connection)

    def _is_needed(self, closed: Connection) -> bool:
        """Whether a closed connection has to be kept, to see its owner's end or for what its last answer gave."""
        # An owner that holds nothing is not watched: a live process may come and go any number of times.
        if not self._holds(closed):
            return False
        if any(c.owner == closed.owner and c is not closed and c.pidfd >= 0 for c in self._connections):
            self._watch_no_more(closed)
        return closed.pidfd >= 0 or closed.gave is not None

    def join(self, connection: Connection, owner: str) -> None:
        """Count a local connection as one more of an owner; on the server's thread.

        Raises:
            InvalidRequest: the owner is another process.
        """
        if any(c.owner == owner and c.pid != connection.pid for c in self._connections):
            raise InvalidRequest(
                f"this owner is another process than {connection.pid}; make a new client in each process"
            )
        connection.owner = owner

    def end_replaced(self, name: str, since: int, successor: Connection) -> None:
        """Serve a connection of the same owner no more, and take back what it gave; on the server's thread.

        Args:
            name: of the connection that the client has given up.
            since: the first of its questions whose answer counts for nothing.
            successor: that says so.
        """
        for connection in self._connections:
            if connection.name == name and connection is not successor and connection.owner == successor.owner:
                gave, connection.gave = connection.gave, None
                if gave is not None and gave[0] >= since:
                    gave[1]()
                if connection.closed:
                    self._forget(connection)
                else:
                    self._close(connection)
                return

    def _let_go_of_closed(self) -> None:
        for connection in [c for c in self._connections if c.closed and not self._holds(c)]:
            self._forget(connection)

    def _owner_died(self, connection: Connection) -> None:
        # All its connections at once: what it asked over another before is not granted to nobody.
        theirs = [c for c in self._connections if connection.local and c.owner == connection.owner]
        for each in theirs or [connection]:
            each.ended = True
            if each.closed:
                self._forget(each)
            else:
                self._close(each)

    def _watch_no_more(self, connection: Connection) -> None:
        pidfd, connection.pidfd = connection.pidfd, -1
        if pidfd >= 0:
            self.unwatch(pidfd)
            os.close(pidfd)

    def _forget(self, connection: Connection) -> None:
        self._watch_no_more(connection)
        if connection in self._connections:
            self._connections.remove(connection)
            self._on_gone(connection)

    def _shut_down(self) -> None:
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.sock.close()
            if connection.pidfd >= 0:
                os.close(connection.pidfd)
        self._connections.clear()
        if self._path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


def remove_stale_sockets(folder: Path) -> int:
    """Unlink sockets in `folder` on which nobody listens: their stores were killed. Returns how many."""
    removed = 0
    for path in folder.glob("*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
                removed += 1
            except OSError:
                continue
    return removed


def _peer_pidfd(sock: socket.socket, pid: int) -> int:
    try:
        return int(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError:
        pass
    # Kernels before 6.5: open by pid. A process of a namespace that cannot be seen from here has none.
    if pid <= 0:
        return -1
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return -1
    # The pid could be somebody else's by now, but only if its process has ended, and its socket with it.
    with contextlib.suppress(BlockingIOError):
        if not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            os.close(pidfd)
            return -1
    return pidfd

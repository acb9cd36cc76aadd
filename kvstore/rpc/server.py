"""Serve control connections: one thread and one epoll, for workers, movers and peers alike."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from kvstore.bounds import clip
from kvstore.errors import KVStoreError, ProtocolError
from kvstore.rpc.acceptor import Acceptor, peer_pidfd
from kvstore.rpc.channel import prepare_remote
from kvstore.rpc.connection import Connection, Handler, Role
from kvstore.rpc.framing import (
    MAX_MESSAGE_BYTES,
    RECEIVE_BYTES,
    REPLY,
    REQUEST,
    SOCKET_BUFFER_BYTES,
    Flag,
    Message,
    Op,
    pack_error,
)
from kvstore.rpc.limits import Strangers, Unread
from kvstore.rpc.owners import Owners
from kvstore.rpc.socket_files import SocketFile
from kvstore.runtime import clock
from kvstore.runtime.guard import LogLimit
from kvstore.runtime.loop import ControlLoop

logger = logging.getLogger(__name__)

_GOODBYE, _HELLO = Op.GOODBYE, Op.HELLO
#: Limits on one connection's messages in a round, before others are served.
_MESSAGES_A_ROUND = 32
_ROUND_S = 5e-4
#: Read from a stream at once. It may hold thousands of small messages, and all others wait while it is decoded.
_STREAM_BYTES = 32 << 10


class ControlServer:
    """Listens, and has each message served on one thread.

    Args:
        handler: called on the server's thread for each message; must not block. It sets the role of a connection
            whose HELLO it accepts; all others are cut.
        on_gone: called once per connection that is forgotten; see `Owners`.
        on_tick: called about every `tick_s` seconds while `wants_ticks()` is true.
        holds: whether the store keeps anything for the owner of a closed connection until its process has ended.
        max_bytes: longest accepted message, by role; for other roles kvstore.rpc.framing.MAX_MESSAGE_BYTES.
    """

    def __init__(
        self,
        handler: Handler,
        on_gone: Callable[[Connection], None],
        on_tick: Callable[[], None] = lambda: None,
        wants_ticks: Callable[[], bool] = lambda: False,
        tick_s: float = 0.25,
        holds: Callable[[Connection], bool] = lambda connection: True,
        max_bytes: Mapping[Role, int] = MappingProxyType({}),
    ) -> None:
        self.handler, self._max_bytes = handler, max_bytes
        self._on_tick, self._is_tick_wanted = on_tick, wants_ticks
        self.loop = ControlLoop(self._tick, self._wants_ticks, tick_s, self._shut_down)
        self.watch, self.unwatch = self.loop.watch, self.loop.unwatch
        self.wake, self.stay_awake, self.is_serving = self.loop.wake, self.loop.stay_awake, self.loop.is_serving
        self.start = self.loop.start
        self.owners = Owners(self.loop, self._let_go, on_gone, holds)
        self._close, self.connections = self.owners.close, self.owners.connections
        self.join, self.end_replaced = self.owners.join, self.owners.end_replaced
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._num_connections = 0
        self._file: SocketFile | None = None
        self.strangers = Strangers(self._close)
        self.unread = Unread(self._close)
        self.acceptor = Acceptor(self.loop, self._take, self.strangers.cut_oldest)
        self._log = LogLimit()
        #: Messages that were not of this protocol.
        self.num_malformed = 0
        self.port = 0
        self.num_served: Counter[Op] = Counter()

    def listen_local(self, path: str) -> None:
        """Listen on a Unix SEQPACKET socket; replaces a stale file of that name."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._file = SocketFile(path, sock)
        self.acceptor.listen(sock)
        self._file.finish()

    def listen_remote(self, host: str, port: int = 0) -> None:
        """Listen on TCP; with port 0 the system chooses, see `port`."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        self.port = sock.getsockname()[1]
        self.acceptor.listen(sock)

    def stop(self, timeout_s: float = 2.0) -> None:
        """Close all connections and end the thread; may be called again."""
        self.loop.stop(timeout_s)

    def end(self, timeout_s: float) -> bool:
        """Stop, and return whether the thread has ended, so that no message is served any more."""
        self.stop(timeout_s)
        return self.loop.has_ended

    def _wants_ticks(self) -> bool:
        has_own = len(self.strangers) > 0 or len(self.unread) > 0 or self.acceptor.is_paused
        return has_own or self._is_tick_wanted()

    def _tick(self) -> None:
        with contextlib.ExitStack() as parts:
            # Called from last to first; each is called even if others raise.
            parts.callback(self.owners.forget_closed)
            if self._is_tick_wanted():
                parts.callback(self._on_tick)
            parts.callback(self.strangers.tick, self.loop.now_s())
            parts.callback(self.unread.tick, self.loop.now_s())
            parts.callback(self.acceptor.tick, self.loop.now_s())

    def _take(self, sock: socket.socket, host: str) -> None:
        """Begin to serve an accepted connection; `host` is empty for this host."""
        self._num_connections += 1
        fd, local = sock.fileno(), not host
        owner = f"{'local' if local else 'peer'}-{self._num_connections}"
        connection = Connection(sock, owner, local, host or "this host", name=owner)
        connection.want_writable = partial(self._want_writable, connection)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        if local:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            connection.pid = struct.unpack("3i", credentials)[0]
            connection.pidfd = peer_pidfd(sock, connection.pid)
        else:
            prepare_remote(sock)
        try:
            self.owners.watch(connection)
            self.watch(fd, partial(self._read, connection), partial(self._flush, connection))
        except BaseException:
            self.owners.unwatch(connection)  # The acceptor closes the socket.
            raise
        self.owners.add(connection)
        self.strangers.came(connection)

    def _want_writable(self, connection: Connection, wanted: bool) -> None:
        (self.unread.came if wanted else self.unread.left)(connection)
        self.loop.want(connection.sock.fileno(), readable=not wanted or connection.reads_on, writable=wanted)

    def _flush(self, connection: Connection) -> None:
        if connection.closed:
            return
        try:
            connection.flush()
        except OSError as error:
            logger.debug("%s: %s", connection.owner, error)
            connection.drop_unsent()
            connection.shut_down()  # An earlier goodbye may still be unread, so it is not closed yet.
        if connection.pending and not connection.is_blocked:
            self.loop.call_again(connection.sock.fileno())

    def _read(self, connection: Connection) -> None:
        if connection.closed:
            return
        if connection.is_blocked and not connection.reads_on:
            self._flush(connection)  # Reads are off, so this is its end, or an event from before answers waited.
            if connection.is_blocked:
                return
        try:
            local = connection.local
            if connection.pending:
                self._serve_pending(connection)
                return
            data = self._received[: connection.sock.recv_into(self._received, 0 if local else _STREAM_BYTES)]
            if not data:
                self._close(connection)
                return
            if not local:
                connection.pending.extend(connection.decoder.stream(data))
                self._serve_pending(connection)
            elif (message := connection.decoder.packet(data)) is not None:
                self.serve(connection, message)
        except BlockingIOError:
            return
        except ProtocolError as error:
            self._turn_away(connection, error)
        except OSError as error:
            # A local client closed with an answer unread if this is a reset. The kernel reports this once, before the
            # client's last messages, which may have its goodbye: so go on reading.
            if not connection.local or not isinstance(error, ConnectionResetError):
                logger.debug("%s: %s", connection.owner, error)
                self._close(connection)
        except Exception:
            self._close(connection)
            raise

    def _serve_pending(self, connection: Connection) -> None:
        """Serve received messages, up to a limit, so that others do not wait for long."""
        until_s = clock.now_s() + _ROUND_S
        for _ in range(min(len(connection.pending), _MESSAGES_A_ROUND)):
            self.serve(connection, connection.pending.popleft())
            if connection.closed or (connection.is_blocked and not connection.reads_on):
                return
            if clock.now_s() > until_s:
                break
        if connection.pending:
            self.loop.call_again(connection.sock.fileno())

    def serve(self, connection: Connection, message: Message) -> None:
        """Answer one message: with its handler's answer, with a typed error, or later."""
        op = message.op
        serve = connection.routes.get(op)
        if serve is None:
            if op is _GOODBYE:
                self.owners.died(connection, said_so=True)
                return
            if op is _HELLO or not connection.role:
                self._hear_hello(connection, message)
                return
            serve = self.handler
        self.num_served[op] += 1
        flag, malformed = REPLY, None
        try:
            answer = serve(connection, message)
        except Exception as error:
            if not isinstance(error, KVStoreError):
                logger.exception("control: %s failed", op.name)
            answer, flag = pack_error(error), Flag.ERROR
            malformed = error if isinstance(error, ProtocolError) else None
        if answer is not None and message.flag is REQUEST and not connection.send(op, flag, message.request, answer):
            self._close(connection)
        if malformed is not None:
            self._turn_away(connection, malformed)

    def _hear_hello(self, connection: Connection, message: Message) -> None:
        """Serve the HELLO of a stranger, which has to be its first message."""
        self.num_served[message.op] += 1
        try:
            if message.op is not _HELLO:
                raise ProtocolError(f"wanted HELLO first, got {message.op.name}")
            if connection.role:
                raise ProtocolError(f"wanted one HELLO on a connection, got another one of a {connection.role}")
            answer = self.handler(connection, message)
            if not connection.role:
                raise ProtocolError("wanted a HELLO that names a role")
        except KVStoreError as error:
            if message.flag is REQUEST:
                connection.send(message.op, Flag.ERROR, message.request, pack_error(error))
            self._turn_away(connection, error)
            return
        self.strangers.left(connection)
        connection.decoder.max_bytes = self._max_bytes.get(connection.role, MAX_MESSAGE_BYTES)
        if answer is not None and not connection.send(_HELLO, REPLY, message.request, answer):
            self._close(connection)

    def _turn_away(self, connection: Connection, error: Exception) -> None:
        """Cut a connection on which a malformed message came."""
        self.num_malformed += 1
        if not connection.role:
            self.strangers.refused(connection, error)
        elif self._log.passes():
            text = "control: the connection of %s, a %s, is cut: %s (%d more not logged)"
            trace = None if isinstance(error, KVStoreError) else error
            more = self._log.take_held_back()
            logger.warning(text, connection.owner, connection.role, clip(error, 300), more, exc_info=trace)
        self._close(connection)

    def _let_go(self, connection: Connection) -> None:
        self.strangers.left(connection)
        self.unwatch(connection.sock.fileno())
        connection.close()
        self.unread.left(connection)  # Last: until its lock was taken, another thread may have noted it.

    def _shut_down(self) -> None:
        self.acceptor.close()
        self.owners.clear()
        if self._file is not None:
            self._file.remove()

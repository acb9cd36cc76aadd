"""A client's connections to the store of its node.

The store gives back what it granted over a connection when that ends, so who must not lose anything by the timeout of
another has one of its own: leases and pins the first, each thread that runs jobs one, lookups one, each fetch one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from kvstore.arena import attach_arena
from kvstore.config import PROTOCOL_VERSION, StoreConfig
from kvstore.control_client import ControlClient
from kvstore.control_connect import connect_local
from kvstore.errors import KVStoreError, StoreNotRunning, StoreUnavailable
from kvstore.idle_connections import IdleConnections
from kvstore.wire import Op

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 5.0


class StoreConnections:
    """Connections to one life of a node's store; all but `of_thread` are for any thread.

    Args:
        path: the store's socket.
        on_lost: called when that life of the store turns out to be over; on any thread, and perhaps more than once.

    Attributes:
        node_id, epoch, config: of the store.
        call_timeout_s: for the answer to one call.
        arena: the store's memory, mapped; the caller unmaps it.
        for_fetches: those that no fetch has now.

    Raises:
        StoreNotRunning: nobody answers at the path.
        IncompatibleStore: the store runs another protocol version.
    """

    def __init__(self, path: str, on_lost: Callable[[], None]) -> None:
        self.path, self._on_lost = path, on_lost
        self.has_ended = False
        self._lock = threading.Lock()
        self._open: list[ControlClient] = []
        self._local = threading.local()
        self._lookups: ControlClient | None = None
        self.for_fetches = IdleConnections(self.connect, lambda: self.has_ended)
        self.call_timeout_s = _HELLO_TIMEOUT_S
        self._calls, fd = self._connect()
        hello = self._calls.hello
        self.node_id, self.epoch = str(hello["node"]), str(hello["epoch"])
        self.config = StoreConfig.from_json(str(hello["config"]))
        self.call_timeout_s = self.config.call_timeout_s
        self.arena = attach_arena(fd, int(hello["arena_bytes"]))

    def _connect(self, replaces: str = "") -> tuple[ControlClient, int]:
        hello = {"role": "client", "protocol": PROTOCOL_VERSION, "replaces": replaces}
        connection, fd = connect_local(self.path, hello, timeout_s=self.call_timeout_s)
        with self._lock:
            # Those that a timeout or an abandoned load closed are of no use to anybody any more.
            self._open = [*(known for known in self._open if not known.closed), connection]
        return connection, fd

    def connect(self, replaces: str = "") -> ControlClient:
        """Open one more connection.

        Args:
            replaces: the owner of a broken one that is at its end: what that held is given back.

        Raises:
            StoreUnavailable: the store is gone, or was restarted; `on_lost` was called.
        """
        try:
            connection, fd = self._connect(replaces)
        except StoreNotRunning as error:
            if isinstance(error.__cause__, (FileNotFoundError, ConnectionRefusedError)):
                self._on_lost()
            raise
        os.close(fd)
        if connection.hello["epoch"] != self.epoch:
            connection.close()
            self._on_lost()
            raise StoreUnavailable(
                "the node store was restarted: its memory is another one; close this client and make a new one"
            )
        return connection

    def of_thread(self) -> ControlClient:
        """Return the connection of the calling thread's jobs, of which one runs at a time.

        Raises:
            StoreUnavailable: there is none yet, or it broke, and none can be opened.
        """
        connection: ControlClient | None = getattr(self._local, "connection", None)
        if connection is None or connection.closed:
            # One job at a time uses it, and that job is over: what it held can go.
            replaces = "" if connection is None else str(connection.hello["owner"])
            connection = self._local.connection = self.connect(replaces)
        return connection

    def leave_of_thread(self) -> None:
        """Let the calling thread's connection keep what it holds while this process lives; its next job has another."""
        self._local.connection = None

    def for_lookups(self) -> ControlClient:
        """Return the connection of lookups: one of them that times out closes it, and leases must not go with it.

        Raises:
            StoreUnavailable: this client was closed, or none can be opened.
        """
        connection = self._lookups
        if connection is None or connection.closed:
            self.check_open()
            connection = self._lookups = self.connect()
        return connection

    def call(self, op: Op, payload: bytes, meanwhile: Callable[[], None] | None = None, awake_s: float = 0.0) -> bytes:
        """Ask over the connection that lives as long as the client; see `ControlClient.call` for what is raised."""
        self.check_open()
        if self._calls.closed:
            # Leases taken over the old one are held on until their deadline: their blocks may be in use.
            self._calls = self.connect()
        return self._calls.call(op, payload, timeout_s=self.call_timeout_s, meanwhile=meanwhile, awake_s=awake_s)

    def say(self, op: Op, payload: bytes) -> None:
        """Tell the store over that connection what has no answer."""
        self.check_open()
        self._calls.send(op, payload)

    def ask(self, op: Op, payload: bytes, timeout_s: float) -> bytes:
        """Ask over a connection of its own, for what takes longer than a call."""
        self.check_open()
        connection = self.connect()
        try:
            return connection.call(op, payload, timeout_s=timeout_s)
        finally:
            connection.close()

    def check_open(self) -> None:
        """Refuse to go on after `end`.

        Raises:
            StoreUnavailable: the client was closed.
        """
        if self.has_ended:
            raise StoreUnavailable("wanted an open client, got a closed one; make a new one")

    def end(self) -> None:
        """Refuse everything new; jobs that run keep their connections."""
        self.has_ended = True

    def close(self, *, jobs_are_over: bool) -> None:
        """Close every connection; without `jobs_are_over` the store keeps what they hold until this process ends."""
        with self._lock:
            connections, self._open = self._open, []
        for connection in connections:
            if jobs_are_over and not connection.closed:
                try:
                    connection.send(Op.GOODBYE)
                except KVStoreError:
                    logger.debug("the node store was gone before this client")
            connection.close()

"""Know which connections belong to which process, and close all of them when it ends.

The kernel names the process of a local connection (peer credentials and peer pidfd). So the store takes back what a
dead worker held, and never what a live one holds. An owner may have several connections, all of one process. A
closed connection only stops grants; the owner counts as gone when its process has ended, or when it said goodbye.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from kvstore.errors import InvalidRequest
from kvstore.rpc.connection import Connection
from kvstore.runtime.loop import ControlLoop


class Owners:
    """The connections of one server, by owner. Only on the server's thread.

    Args:
        loop: watches the processes.
        let_go: closes the socket of a connection.
        on_gone: called once per connection that is forgotten. Either its owner has ended permanently (`ended`), or
            the end cannot be noticed, because the owner is remote or cannot be watched, or holds nothing.
        holds: as for `ControlServer`.
    """

    def __init__(
        self,
        loop: ControlLoop,
        let_go: Callable[[Connection], None],
        on_gone: Callable[[Connection], None],
        holds: Callable[[Connection], bool],
    ) -> None:
        self._loop, self._let_go, self.on_gone, self._holds = loop, let_go, on_gone, holds
        self.connections: set[Connection] = set()
        #: Of this host, by their owner.
        self._owned: dict[str, set[Connection]] = {}

    def watch(self, connection: Connection) -> None:
        """Notice the end of the process of a new connection, if the kernel named it. Raises as `ControlLoop.watch`."""
        if connection.pidfd >= 0:
            self._loop.watch(connection.pidfd, partial(self.died, connection))

    def unwatch(self, connection: Connection) -> None:
        """Watch the process of a connection no more."""
        pidfd, connection.pidfd = connection.pidfd, -1
        if pidfd >= 0:
            self._loop.unwatch(pidfd)
            os.close(pidfd)

    def add(self, connection: Connection) -> None:
        """Take a new connection, which is its own owner until it joins another."""
        self.connections.add(connection)
        if connection.local:
            self._owned[connection.owner] = {connection}

    def join(self, connection: Connection, owner: str) -> None:
        """Add a local connection to an owner.

        Raises:
            InvalidRequest: the owner is another process.
        """
        if any(other.pid != connection.pid for other in self._owned.get(owner, ())):
            text = f"this owner is another process than {connection.pid}; make a new client in each process"
            raise InvalidRequest(text)
        self._disown(connection)
        connection.owner = owner
        self._owned.setdefault(owner, set()).add(connection)

    def _disown(self, connection: Connection) -> None:
        if (owned := self._owned.get(connection.owner)) is not None:
            owned.discard(connection)
            if not owned:
                del self._owned[connection.owner]

    def close(self, connection: Connection) -> None:
        """Close a connection, and forget it unless something is held for its owner; may be called again."""
        if connection.closed:
            return
        connection.closed = True
        self._let_go(connection)
        if connection.ended or not self._is_needed(connection):
            self._forget(connection)

    def _is_needed(self, closed: Connection) -> bool:
        """Return whether to keep a closed connection: to notice its owner's end, or undo its last answer."""
        # An owner that holds nothing is not watched: a live process may connect any number of times.
        if not self._holds(closed):
            return False
        if any(c is not closed and c.pidfd >= 0 for c in self._owned.get(closed.owner, ())):
            self.unwatch(closed)
        return closed.pidfd >= 0 or closed.gave is not None

    def _end(self, connection: Connection) -> None:
        if connection.closed:
            self._forget(connection)
        else:
            self.close(connection)

    def end_replaced(self, name: str, since: int, successor: Connection) -> None:
        """Close a replaced connection of the same owner, and undo its lost answer.

        Args:
            name: of the connection that the client has given up.
            since: its first question whose answer the client did not get.
            successor: the connection that reports this.
        """
        for connection in self._owned.get(successor.owner, ()):
            if connection.name == name and connection is not successor:
                gave, connection.gave = connection.gave, None
                if gave is not None and gave[0] >= since:
                    gave[1]()
                self._end(connection)
                return

    def died(self, connection: Connection, *, said_so: bool = False) -> None:
        """End all connections of the owner of `connection`: its process has ended, or it `said_so` before."""
        # All its connections at once: otherwise a question over another one could be granted after this end.
        for each in list(self._owned.get(connection.owner, ())) or [connection]:
            each.ended, each.said_goodbye = True, said_so
            self._end(each)

    def forget_closed(self) -> None:
        """Forget closed connections for whose owners nothing is held any more."""
        for connection in [c for c in self.connections if c.closed and not self._holds(c)]:
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        self.unwatch(connection)
        if connection in self.connections:
            self.connections.remove(connection)
            self._disown(connection)
            self.on_gone(connection)

    def clear(self) -> None:
        """Close all connections without a callback, because the server ends."""
        for connection in self.connections:
            connection.closed = True
            connection.close()
            self.unwatch(connection)
        self.connections.clear()
        self._owned.clear()

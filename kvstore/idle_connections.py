"""Connections to the node store that one job after the other has for itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kvstore.control_client import ControlClient
from kvstore.errors import CopyStuck, KVStoreError

#: More are closed when they come back: those of a thousand fetches that waited at once are not kept for the next time.
_MOST_IDLE = 64


class IdleConnections:
    """Those that no job has now.

    Args:
        connect: opens another one; its arguments are a broken one that it replaces, and since which question nothing
            that the store gave over that is wanted any more.
        is_closed: whether the client is, so that nobody else will close a connection that comes back.
    """

    def __init__(
        self, connect: Callable[[ControlClient | None, int], ControlClient], is_closed: Callable[[], bool]
    ) -> None:
        self._connect, self._is_closed = connect, is_closed
        self._idle: list[ControlClient] = []
        self._broken: list[tuple[ControlClient, int]] = []

    def __len__(self) -> int:
        return len(self._idle)

    def take(self) -> ControlClient:
        """Return a connection that nobody else has until `keep`; it is opened if there is none.

        Raises:
            StoreUnavailable: it could not be opened.
        """
        try:
            return self._idle.pop()
        except IndexError:
            return self._open()

    def keep(self, connection: ControlClient) -> None:
        """Take a connection of `take` back, over which the store gave nothing that is still held."""
        if self._is_closed() or len(self._idle) >= _MOST_IDLE:
            connection.close()
        elif not connection.closed:
            self._idle.append(connection)

    @contextlib.contextmanager
    def taken(self) -> Iterator[ControlClient]:
        """Have a connection; see `take` for what is raised."""
        connection = self.take()
        since, is_stuck = connection.next_question, False
        try:
            yield connection
        except CopyStuck:
            is_stuck = True  # What the store gave stays taken.
            raise
        finally:
            # One that broke is replaced, which tells the store at once that nobody holds what it gave.
            with contextlib.suppress(KVStoreError):
                if connection.closed:
                    if not is_stuck:
                        self._broken.append((connection, since))
                    connection = self._open()
                self.keep(connection)

    def _open(self) -> ControlClient:
        try:
            broken = self._broken.pop()
        except IndexError:
            return self._connect(None, 0)
        try:
            return self._connect(*broken)
        except BaseException:
            self._broken.append(broken)  # Named by the next one: the store may only have been late.
            raise

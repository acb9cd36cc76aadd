"""Connections to the node store that one job after the other has for itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kvstore.control_client import ControlClient
from kvstore.errors import KVStoreError


class IdleConnections:
    """Those that no job has now.

    Args:
        connect: opens another one; its argument names the owner of a broken one that it replaces.
        is_closed: whether the client is, so that nobody else will close a connection that comes back.
    """

    def __init__(self, connect: Callable[[str], ControlClient], is_closed: Callable[[], bool]) -> None:
        self._connect, self._is_closed = connect, is_closed
        self._idle: list[ControlClient] = []

    def __len__(self) -> int:
        return len(self._idle)

    @contextlib.contextmanager
    def taken(self) -> Iterator[ControlClient]:
        """Have a connection; it is opened if there is none.

        Raises:
            StoreUnavailable: it could not be opened.
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect("")
        try:
            yield connection
        finally:
            # One that broke is replaced, which tells the store at once that nobody holds what it gave.
            with contextlib.suppress(KVStoreError):
                if connection.closed:
                    connection = self._connect(str(connection.hello["owner"]))
                if self._is_closed():
                    connection.close()
                self._idle.append(connection)

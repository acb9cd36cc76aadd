"""Connections to the node store that one job after the other has for itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kvstore.control_client import ControlClient
from kvstore.errors import CopyStuck, KVStoreError


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

    @contextlib.contextmanager
    def taken(self) -> Iterator[ControlClient]:
        """Have a connection; it is opened if there is none.

        Raises:
            StoreUnavailable: it could not be opened.
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._open()
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
                if self._is_closed():
                    connection.close()
                self._idle.append(connection)

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

"""Connections to the node store that one job after the other has for itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType

from kvstore.errors import CopyStuck, KVStoreError
from kvstore.rpc.client import ControlClient
from kvstore.runtime import clock

#: More are closed when they come back: those of a thousand fetches that waited at once are not kept for the next time.
_MOST_IDLE = 64
#: After a broken one could not be replaced.
_PAUSE_S = 1.0


class IdleConnections:
    """Those that no job has now.

    Args:
        connect: opens another one; its arguments are a broken one that it replaces, and since which question nothing
            that the store gave over that is wanted any more.

    Attributes:
        is_closed: set when the client is: nobody else will close a connection that comes back.
    """

    def __init__(self, connect: Callable[[ControlClient | None, int], ControlClient]) -> None:
        self._connect, self.is_closed = connect, False
        self._idle: list[ControlClient] = []
        self._broken: list[tuple[ControlClient, int]] = []
        self._name_again_s = 0.0

    def __len__(self) -> int:
        return len(self._idle)

    def take(self) -> ControlClient:
        """Return a connection that nobody else has until `keep`; it is opened if there is none.

        Raises:
            StoreUnavailable: it could not be opened.
        """
        if self._broken and clock.now_s() >= self._name_again_s:
            # Though others are idle: until it is named the store keeps what it gave over it.
            try:
                return self._open()
            except KVStoreError:
                self._name_again_s = clock.now_s() + _PAUSE_S
        try:
            return self._idle.pop()
        except IndexError:
            return self._open()

    def keep(self, connection: ControlClient) -> None:
        """Take a connection of `take` back, over which the store gave nothing that is still held."""
        if self.is_closed or len(self._idle) >= _MOST_IDLE:
            connection.close()
        elif not connection.closed:
            self._idle.append(connection)

    def taken(self) -> Taken:
        """Have a connection, as a context; see `take` for what is raised when it is entered."""
        return Taken(self)

    def replace(self, connection: ControlClient, since: int, *, is_stuck: bool) -> None:
        """Open another connection for one that broke, which tells the store at once that nobody holds what it gave.

        Args:
            connection: closed.
            since: the first question over it of which the store takes back what it gave.
            is_stuck: what the store gave stays taken.
        """
        if not is_stuck:
            self._broken.append((connection, since))
        with contextlib.suppress(KVStoreError):
            self.keep(self._open())

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


class Taken:
    """One of the connections, for as long as this context lasts. No generator: each save and load enters it."""

    def __init__(self, idle: IdleConnections) -> None:
        self._idle = idle

    def __enter__(self) -> ControlClient:
        self._connection = connection = self._idle.take()
        self._since = connection.next_question
        return connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, KVStoreError):
            # It came anywhere, an interrupt behind the question, too: the answer would be met by the next job.
            self._connection.close()
        if self._connection.closed:
            self._idle.replace(self._connection, self._since, is_stuck=isinstance(error, CopyStuck))
        else:
            self._idle.keep(self._connection)

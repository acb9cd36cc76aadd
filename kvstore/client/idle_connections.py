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
#: For a broken one to be named where nothing else needs the answer: a store that stands still must not hold up results.
_NAME_WITHIN_S = 0.25


class BrokenConnections:
    """Those of one client that broke: until a new connection names one the store keeps what it gave over it."""

    def __init__(self) -> None:
        self.untold: list[tuple[ControlClient, int]] = []
        self.name_again_s = 0.0

    def is_due(self) -> bool:
        """Whether one is to be named, though idle connections would do."""
        return bool(self.untold) and clock.now_s() >= self.name_again_s


class IdleConnections:
    """Those that no job has now.

    Args:
        connect: opens another one; its arguments are a broken one that it replaces, since which question nothing
            that the store gave over that is wanted any more, and the longest wait in seconds, or None for a call's.
        broken: shared by all of one client.

    Attributes:
        is_closed: set when the client is: nobody else will close a connection that comes back.
    """

    def __init__(
        self, connect: Callable[[ControlClient | None, int, float | None], ControlClient], broken: BrokenConnections
    ) -> None:
        self._connect, self.is_closed = connect, False
        self._idle: list[ControlClient] = []
        self._broken = broken

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, timeout_s: float | None = None) -> ControlClient:
        """Return a connection that nobody else has until `keep`; it is opened if there is none.

        Args:
            timeout_s: for a new one to be answered; that of a call when None.

        Raises:
            StoreUnavailable: it could not be opened.
            TransferTimeout: the store did not answer in time.
        """
        if self._idle and self._broken.is_due():
            self.name_broken(timeout_s)
        try:
            return self._idle.pop()
        except IndexError:
            return self._open(timeout_s)

    def name_broken(self, timeout_s: float | None = None) -> None:
        """Name a broken connection to the store, if it answers, by one that is idle from then on."""
        with contextlib.suppress(KVStoreError):
            self.keep(self._open(_NAME_WITHIN_S if timeout_s is None else min(timeout_s, _NAME_WITHIN_S)))

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
            self._broken.untold.append((connection, since))
        self.name_broken()

    def _open(self, timeout_s: float | None = None) -> ControlClient:
        try:
            broken = self._broken.untold.pop()
        except IndexError:
            return self._connect(None, 0, timeout_s)
        try:
            return self._connect(*broken, timeout_s)
        except BaseException:
            self._broken.untold.append(broken)  # Named by a later one: the store may only have been late.
            self._broken.name_again_s = clock.now_s() + _PAUSE_S
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

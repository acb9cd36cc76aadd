"""Connections to the node store, each used by one job at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType

from kvstore.errors import CopyStuck, KVStoreError
from kvstore.rpc.client import ControlClient
from kvstore.runtime import clock

#: Connections above this number are closed when they come back: those of a thousand waiting fetches are not kept.
_MOST_IDLE = 64
#: Pause after a broken connection could not be replaced.
_PAUSE_S = 1.0
#: Limit for naming a broken connection when nothing needs the answer: a blocked store must not delay results.
_NAME_WITHIN_S = 0.25


class BrokenConnections:
    """One client's broken connections. The store keeps what it gave over one until a new connection names it."""

    def __init__(self) -> None:
        self.untold: list[tuple[ControlClient, int]] = []
        self.name_again_s = 0.0

    def is_due(self) -> bool:
        """Return whether one is to be named now, even if an idle connection is free."""
        return bool(self.untold) and clock.now_s() >= self.name_again_s


class IdleConnections:
    """Connections that no job uses now.

    Args:
        connect: opens another one. Arguments: a broken connection that it replaces; the first question whose grants are
            not wanted any more; the longest wait in seconds, or None for a call's.
        broken: shared by all `IdleConnections` of one client.
    """

    def __init__(
        self, connect: Callable[[ControlClient | None, int, float | None], ControlClient], broken: BrokenConnections
    ) -> None:
        self.connect = connect
        self.is_closed = False  # Set when the client is closed: then `keep` closes a connection that comes back.
        self.idle: list[ControlClient] = []
        self.broken = broken

    def __len__(self) -> int:
        return len(self.idle)

    def take(self, timeout_s: float | None = None) -> ControlClient:
        """Return a connection for the caller alone until `keep`. Open one within `timeout_s` if none is idle.

        Raises:
            StoreUnavailable: it could not be opened.
            TransferTimeout: the store did not answer in time.
        """
        if self.idle and self.broken.is_due():
            self.name_broken(timeout_s)
        try:
            return self.idle.pop()
        except IndexError:
            return self._open(timeout_s)

    def name_broken(self, timeout_s: float | None = None) -> None:
        """Open a connection that names a broken one to the store, and keep it idle. Errors are ignored."""
        with contextlib.suppress(KVStoreError):
            self.keep(self._open(_NAME_WITHIN_S if timeout_s is None else min(timeout_s, _NAME_WITHIN_S)))

    def keep(self, connection: ControlClient) -> None:
        """Take back a connection of `take`. Nothing that the store gave over it may still be held."""
        if self.is_closed or len(self.idle) >= _MOST_IDLE:
            connection.close()
        elif not connection.closed:
            self.idle.append(connection)

    def taken(self) -> Taken:
        """Return a context that holds a connection; entering it raises what `take` raises."""
        return Taken(self)

    def replace(self, connection: ControlClient, since: int, *, is_stuck: bool) -> None:
        """Replace a closed connection. The store takes back at once what it gave over it from `since` on.

        With `is_stuck` the grants stay taken, because a copy may still run.
        """
        if not is_stuck:
            self.broken.untold.append((connection, since))
        self.name_broken()

    def _open(self, timeout_s: float | None = None) -> ControlClient:
        try:
            broken = self.broken.untold.pop()
        except IndexError:
            return self.connect(None, 0, timeout_s)
        try:
            return self.connect(*broken, timeout_s)
        except BaseException:
            self.broken.untold.append(broken)  # A later connection names it: the store may only have been late.
            self.broken.name_again_s = clock.now_s() + _PAUSE_S
            raise


class Taken:
    """Context that holds one connection. Not a generator, for speed: each save and load enters it."""

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
            # It may have come after a question was sent, and the next job would read the answer.
            self._connection.close()
        if self._connection.closed:
            self._idle.replace(self._connection, self._since, is_stuck=isinstance(error, CopyStuck))
        else:
            self._idle.keep(self._connection)

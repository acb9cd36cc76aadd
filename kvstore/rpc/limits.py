"""Cut connections that cost too much: strangers, and clients that do not read their answers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore.rpc.connection import Connection
from kvstore.runtime import clock
from kvstore.runtime.guard import LogLimit
from kvstore.runtime.life import log_life

logger = logging.getLogger(__name__)

#: Time from the connection until its HELLO is accepted.
HELLO_WITHIN_S = 5.0
#: The most strangers at once: of all remote hosts together, of one remote host, and of this host's processes.
MAX_REMOTE, MAX_PER_HOST, MAX_LOCAL = 64, 32, 256
#: A client that takes no bytes for this long hangs or is malicious.
READ_WITHIN_S = 10.0


class Strangers:
    """The connections of one server before their HELLO is accepted, oldest first. Only on the server's thread.

    All costs of a stranger are bounded: kvstore.rpc.framing.STRANGER_BYTES of memory, one message, some seconds. If
    there is one stranger too many, the oldest is cut and not the newest, because a real client sends its HELLO at once.
    `cut` closes a connection.
    """

    def __init__(self, cut: Callable[[Connection], None]) -> None:
        self._cut = cut
        self._until_s: dict[Connection, float] = {}
        self._limit = LogLimit()
        self.num_cut = 0

    def __len__(self) -> int:
        return len(self._until_s)

    def came(self, connection: Connection) -> None:
        """Note a new connection."""
        self._until_s[connection] = clock.now_s() + HELLO_WITHIN_S
        if connection.local:
            self._make_room([c for c in self._until_s if c.local], MAX_LOCAL)
            return
        remote = [c for c in self._until_s if not c.local]
        self._make_room([c for c in remote if c.host == connection.host], MAX_PER_HOST)
        self._make_room(remote, MAX_REMOTE)

    def left(self, connection: Connection) -> None:
        """Remove a connection from the strangers: its HELLO was accepted, or it is closed."""
        self._until_s.pop(connection, None)

    def tick(self, now_s: float) -> None:
        """Cut the strangers that took too long."""
        for connection in [c for c, until_s in self._until_s.items() if until_s < now_s]:
            self._end(connection, f"it sent no HELLO within {HELLO_WITHIN_S} s")

    def cut_oldest(self) -> bool:
        """Cut the oldest stranger; False when there is none."""
        for connection in self._until_s:
            self._end(connection, "its descriptor is needed")
            return True
        return False

    def refused(self, connection: Connection, reason: object) -> None:
        """Count and log a refused stranger; the caller closes the connection."""
        self.num_cut += 1
        log_life("client_refused", level=logging.WARNING, limit=self._limit, host=connection.host, reason=reason)

    def _make_room(self, found: list[Connection], most: int) -> None:
        for connection in found[: max(0, len(found) - most)]:
            if connection in self._until_s:
                self._end(connection, f"there are {most} younger ones")

    def _end(self, connection: Connection, reason: str) -> None:
        self.left(connection)
        self.refused(connection, reason)
        self._cut(connection)


class Unread:
    """The connections of one server for which answers wait; `cut` closes one."""

    def __init__(self, cut: Callable[[Connection], None]) -> None:
        self._cut = cut
        self._found: set[Connection] = set()
        self._limit = LogLimit()
        self.num_cut = 0

    def __len__(self) -> int:
        return len(self._found)

    def came(self, connection: Connection) -> None:
        """Note that answers wait; from any thread."""
        self._found.add(connection)

    def left(self, connection: Connection) -> None:
        """Note that no answers wait any more, or that the connection is closed; from any thread."""
        self._found.discard(connection)

    def tick(self, now_s: float) -> None:
        """Cut the connections whose clients took no bytes for too long; on the server's thread."""
        for connection in [c for c in self._found.copy() if c.taken_s + READ_WITHIN_S < now_s and not c.reads_on]:
            self.left(connection)
            self.num_cut += 1
            if self._limit.passes():
                more = self._limit.take_held_back()
                text = "control: the connection of %s, a %s, is cut: it read no answer for %.0f s (%d more not logged)"
                logger.warning(text, connection.owner, connection.role or "stranger", READ_WITHIN_S, more)
            self._cut(connection)

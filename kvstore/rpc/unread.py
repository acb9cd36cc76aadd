"""Track connections whose clients do not read their answers, and cut them after a while."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore.rpc.connection import Connection
from kvstore.runtime.guard import LogLimit

logger = logging.getLogger(__name__)

#: A client that takes no bytes for this long hangs or is malicious.
READ_WITHIN_S = 10.0


class Unread:
    """Keeps the connections of one server for which answers wait.

    Args:
        cut: closes a connection.
    """

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

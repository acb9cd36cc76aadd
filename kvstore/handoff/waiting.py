"""Claims on blocks that are being written. They are answered later, so that readers need not poll."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.rpc.connection import Connection
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

#: Most waiting claims of one node: each tick looks at all. The same bound as for fetches.
_MOST_WAITING = 4096


@dataclass(frozen=True, slots=True, eq=False)
class _Claim:
    connection: Connection
    until_s: float
    serve: Callable[[bool], bool]
    soon: Callable[[], object]


class WaitingClaims:
    """The claims that wait for blocks, by ticket. On the control thread alone."""

    def __init__(self) -> None:
        self._claims: dict[bytes, list[_Claim]] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return len(self._claims)

    def serve(
        self,
        key: bytes,
        connection: Connection,
        wait_s: float,
        serve: Callable[[bool], bool],
        soon: Callable[[], object] = lambda: None,
    ) -> None:
        """Answer a claim now or later; now in any case if too many wait already.

        Args:
            key: of the ticket.
            connection: carries the answer; nothing is claimed for a connection that was closed.
            wait_s: the longest time until the answer.
            serve: answers, and returns whether it did. If its argument (is it the last time?) is True, it must answer.
            soon: tells the reader that the answer comes soon, so that it stays awake.
        """
        if not serve(wait_s <= 0 or self._num_waiting >= _MOST_WAITING):
            self._num_waiting += 1
            claim = _Claim(connection, clock.now_s() + wait_s, serve, soon)
            self._claims.setdefault(key, []).append(claim)

    def forget(self, connection: Connection) -> None:
        """Drop the claims of a connection: its reader gave up, and answers would claim blocks for nobody."""
        for key, waiting in list(self._claims.items()):
            if left := [claim for claim in waiting if claim.connection is not connection]:
                self._claims[key] = left
            else:
                del self._claims[key]
            self._num_waiting -= len(waiting) - len(left)

    def num_by_ticket(self) -> dict[bytes, int]:
        """Return how many claims wait for each ticket. Any thread may call."""
        return {key: len(waiting) for key, waiting in list(self._claims.items())}  # A copy, made in one step.

    def are_soon(self, key: bytes) -> None:
        """Notify the readers that a ticket's blocks will be there in a millisecond or two."""
        for claim in self._claims.get(key, ()):
            claim.soon()

    def look_again(self, key: bytes) -> None:
        """Answer the claims on a ticket, because the state of its blocks changed."""
        if key in self._claims:
            self._serve_all(key, clock.now_s())

    def tick(self, now_s: float) -> None:
        """Answer the claims that waited long enough, and those on tickets whose state changed."""
        for key in list(self._claims):
            self._serve_all(key, now_s)

    def _serve_all(self, key: bytes, now_s: float) -> None:
        waiting = self._claims.pop(key)
        self._num_waiting -= len(waiting)
        left = [claim for claim in waiting if not claim.connection.closed and not _is_served(claim, now_s)]
        if left:
            self._claims[key] = left
            self._num_waiting += len(left)


def _is_served(claim: _Claim, now_s: float) -> bool:
    is_last = now_s >= claim.until_s
    try:
        return claim.serve(is_last)
    except Exception:
        # This claim is tried again later, and the others now: an error raised here would make them wait forever.
        logger.exception("a claim that waits could not be answered")
        return is_last

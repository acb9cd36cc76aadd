"""Claims on blocks that are still being written: answered when they are there, and not asked for again and again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.rpc.connection import Connection
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

#: Of one node at once: all are looked at in each tick. As many fetches may be under way.
_MOST_WAITING = 4096


@dataclass(frozen=True, slots=True, eq=False)
class _Claim:
    connection: Connection
    until_s: float
    serve: Callable[[bool], bool]
    soon: Callable[[], object]


class WaitingClaims:
    """Who waits for which ticket's blocks. On the control thread alone."""

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
        """Answer a claim now, or later; now in any case when too many wait already.

        Args:
            key: of the ticket.
            connection: over which it is answered; nothing is claimed for one that was closed.
            wait_s: the most that the answer may take.
            serve: answers, and returns whether it did, which it has to when it is told that it is the last time.
            soon: says that the answer is not far, so that nobody has to be woken who needs it.
        """
        if not serve(wait_s <= 0 or self._num_waiting >= _MOST_WAITING):
            self._num_waiting += 1
            claim = _Claim(connection, clock.now_s() + wait_s, serve, soon)
            self._claims.setdefault(key, []).append(claim)

    def are_soon(self, key: bytes) -> None:
        """A ticket's blocks will be there in less than a millisecond or two."""
        for claim in self._claims.get(key, ()):
            claim.soon()

    def look_again(self, key: bytes) -> None:
        """Something became of a ticket's blocks."""
        if key in self._claims:
            self._serve_all(key, clock.now_s())

    def tick(self, now_s: float) -> None:
        """Answer those that waited long enough, and those to whose ticket something else happened."""
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
        # It is asked again, and the others in any case: raised here, they would wait for ever.
        logger.exception("a claim that waits could not be answered")
        return is_last

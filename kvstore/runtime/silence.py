"""How long another process has left questions without an answer."""

from __future__ import annotations

from kvstore.runtime import clock


class Silence:
    """Seconds that questions to one process waited in vain, those of each kind since its last answer.

    An answer of one kind says nothing of another: a store may grant leases and hang where its mover is asked.
    Any thread may call. Two that call at once may lose one of their waits; a process that hangs makes others.
    """

    def __init__(self) -> None:
        self._waited_s: dict[str, float] = {}
        self._until_s = 0.0

    def add(self, kind: str, asked_s: float) -> None:
        """Count a question that was asked at `asked_s` and timed out now.

        Of questions that waited at the same time, each second counts once.
        """
        now_s = clock.now_s()
        waited_s = max(now_s - max(asked_s, self._until_s), 0.0)
        self._waited_s[kind], self._until_s = self._waited_s.get(kind, 0.0) + waited_s, now_s

    def end(self, *kinds: str) -> None:
        """Note an answer that ends the silence of these kinds."""
        for kind in kinds:
            self._waited_s.pop(kind, None)

    def total_s(self) -> float:
        """Return how long questions of all kinds waited."""
        return sum([*self._waited_s.values()])

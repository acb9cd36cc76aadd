"""What a replay gives: the hits of each request, and where it went."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One replay of a trace.

    Args:
        hits: number of leading blocks that were there, of each request.
        num_evictions: blocks that were dropped to make room.
        node_references: number of blocks in the requests that each node was given.
    """

    hits: array[int]
    num_evictions: int
    node_references: tuple[int, ...] = field(default=())

    @property
    def num_hits(self) -> int:
        """Hits of all requests."""
        return sum(self.hits)

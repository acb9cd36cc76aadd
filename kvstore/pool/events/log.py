"""The changes of a pool that no reader has taken yet."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from kvstore.pool.events.roots import RootKeys

#: Whether blocks became findable or no longer are, their hashes, and their root keys if these are known.
RootedChange = tuple[bool, Collection[bytes], RootKeys | None]


@dataclass(slots=True)
class EventLog:
    """Hashes that became findable (True) or unfindable (False), in order, each added together with its change.

    With more than `max_hashes` hashes since the last `take`, none is kept: then the reader needs a snapshot.
    `on_change` hears of each change at once, with the slots of blocks that became findable. `roots` has the root keys
    of each event's blocks, or None where they are not known.
    """

    max_hashes: int
    events: list[tuple[bool, Collection[bytes]]] = field(default_factory=list)
    roots: list[RootKeys | None] = field(default_factory=list)
    on_change: Callable[[Collection[bytes], list[int] | None], None] | None = None
    _num_hashes: int = 0

    def add(
        self,
        present: bool,
        hashes: Collection[bytes],
        slots: list[int] | None = None,
        *,
        roots: RootKeys | None = None,
    ) -> None:
        """Note that some blocks became findable or unfindable."""
        if self.on_change is not None:
            self.on_change(hashes, slots)
        self._num_hashes += len(hashes)
        if self._num_hashes <= self.max_hashes:
            self.events.append((present, hashes))
            self.roots.append(roots)
        else:
            self.events.clear()
            self.roots.clear()

    def take(self) -> list[RootedChange] | None:
        """Return and forget all events, with their root keys; None when there were too many to keep."""
        events, was_too_much = zip(self.events, self.roots, strict=True), self._num_hashes > self.max_hashes
        self.events, self.roots, self._num_hashes = [], [], 0
        return None if was_too_much else [(*event, roots) for event, roots in events]

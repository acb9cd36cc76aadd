"""The changes of one pool since the publisher looked last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from kvstore.node.events.schema import Event, in_chains, removed, stored
from kvstore.pool.pool import Pool

#: The changes kept are at least this many blocks; in larger pools, as many as there are slots.
_FEWEST_KEPT = 1 << 14

#: Hashes that became findable and the hash before each, or hashes that went and None.
_Change = tuple[Collection[bytes], list[bytes] | None]


@dataclass(slots=True, eq=False)
class PoolChanges:
    """The changes of one pool, from `follow` on. The pool adds to them under its lock, and never waits.

    If the publisher is too slow, they are dropped as a whole, and it has to begin anew with `all_stored`.

    Args:
        pool: of memory or disk.
        medium: "CPU" or "STORAGE".
        wake: called when there is something to take; under the pool's lock, so it must not wait.
    """

    pool: Pool
    medium: str
    wake: Callable[[], None]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _kept: list[_Change] = field(default_factory=list)
    _num_hashes: int = 0
    _is_lost: bool = True

    def follow(self) -> None:
        """Begin; the first `take` returns None."""
        self.pool.tell_changes(self._changed)

    def end(self) -> None:
        """End; after the return `wake` is not called any more."""
        self.pool.tell_changes(None)

    def take(self) -> list[_Change] | None:
        """Return and forget the changes since the last call, in order; None when some were lost."""
        with self._lock:
            kept, self._kept, self._num_hashes = self._kept, [], 0
            return None if self._is_lost else kept

    def events(self, changes: list[_Change]) -> Iterator[Event]:
        """Yield the events of changes."""
        for hashes, parents in changes:
            if parents is None:
                yield from removed(hashes, self.medium)
            else:
                yield from stored(list(hashes), parents, self.medium)

    def all_stored(self) -> Iterator[Event]:
        """Yield the events of all blocks that are here; changes until now are in them, and are kept again from now."""
        for hashes, parents in self.pool.found_blocks(self._begin_anew):
            yield from stored(*in_chains(hashes, parents), self.medium)

    def _begin_anew(self) -> None:
        with self._lock:
            self._kept, self._num_hashes, self._is_lost = [], 0, False

    def _changed(self, hashes: Collection[bytes], parents: list[bytes] | None) -> None:
        with self._lock:
            self._num_hashes += len(hashes)
            if self._is_lost:
                return
            if self._num_hashes > max(_FEWEST_KEPT, self.pool.num_slots):
                self._kept, self._is_lost = [], True
            else:
                self._kept.append((hashes, parents))
        self.wake()

"""Who waits for blocks that somebody else is writing. No locking here: the pool holds its lock."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import takewhile

#: Of all watches together: each takes some 170 bytes, and a caller may name any blocks that it likes.
_MOST_BLOCKS = 1 << 22


@dataclass(slots=True)
class _Watch:
    hashes: list[bytes]
    pending: set[bytes]
    lost: set[bytes]
    then: Callable[[int], None]


@dataclass(slots=True)
class WatchTable:
    """The watches of one pool. What they say is said after the pool's lock is let go, see `take_calls`."""

    _watches: dict[int, _Watch] = field(default_factory=dict)
    _calls: list[Callable[[], None]] = field(default_factory=list)
    _num_blocks: int = 0

    def __len__(self) -> int:
        return len(self._watches)

    def __contains__(self, watch_id: int) -> bool:
        return watch_id in self._watches

    def add(
        self, watch_id: int, hashes: list[bytes], pending: set[bytes], lost: set[bytes], then: Callable[[int], None]
    ) -> None:
        """Wait until none of `pending` is being written; see `Pool.watch`. Where too many wait it says so at once."""
        self._watches[watch_id] = _Watch(hashes, pending, lost, then)
        self._num_blocks += len(hashes)
        if not pending:
            self._fire(watch_id)
        elif self._num_blocks > _MOST_BLOCKS:
            self.drop(watch_id)

    def drop(self, watch_id: int) -> None:
        """End a watch before its time: it says how things stand."""
        if watch_id in self._watches:
            self._watches[watch_id].lost |= self._watches[watch_id].pending
            self._fire(watch_id)

    def settled(self, hashes: Collection[bytes], published: bool) -> None:
        """Note that blocks are not being written any more."""
        if not self._watches:
            return
        known = hashes if isinstance(hashes, dict) else set(hashes)
        for watch_id, watch in list(self._watches.items()):
            mine = {own for own in watch.pending if own in known}
            watch.pending -= mine
            if not published:
                watch.lost |= mine
            if mine and not watch.pending:
                self._fire(watch_id)

    def take_calls(self) -> list[Callable[[], None]]:
        """Return what has to be said now; the caller says it without the lock."""
        calls, self._calls = self._calls, []
        return calls

    def _fire(self, watch_id: int) -> None:
        watch = self._watches.pop(watch_id)
        self._num_blocks -= len(watch.hashes)
        count = sum(1 for _ in takewhile(lambda own: own not in watch.lost, watch.hashes))
        self._calls.append(lambda: watch.then(count))

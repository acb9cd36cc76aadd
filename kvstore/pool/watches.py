"""Who waits for blocks that somebody else is writing. No locking here: the pool holds its lock."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import takewhile

#: Each takes about a kilobyte, and a caller may ask for any number of them.
_MOST_WATCHES = 4096
#: Of all watches together: each takes some 500 bytes, and a caller may name any blocks that it likes.
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
    #: Dictionaries, because a watch leaves them at once however many others wait for the block; in order.
    _by_hash: dict[bytes, dict[int, None]] = field(default_factory=dict)
    _calls: list[Callable[[], None]] = field(default_factory=list)
    _num_blocks: int = 0

    def __contains__(self, watch_id: int) -> bool:
        return watch_id in self._watches

    def add(
        self, watch_id: int, hashes: list[bytes], pending: set[bytes], lost: set[bytes], then: Callable[[int], None]
    ) -> None:
        """Wait until none of `pending` is being written; see `Pool.watch`. Where too many wait it says so at once."""
        self._watches[watch_id] = watch = _Watch(hashes, pending, lost, then)
        self._num_blocks += len(hashes)
        if len(self._watches) > _MOST_WATCHES or self._num_blocks > _MOST_BLOCKS:
            watch.lost |= pending
            pending = set()
        if not pending:
            self._fire(watch_id)
        for own in pending:
            self._by_hash.setdefault(own, {})[watch_id] = None

    def drop(self, watch_id: int) -> None:
        """End a watch before its time: it says how things stand."""
        if (watch := self._watches.get(watch_id)) is None:
            return
        for own in watch.pending:
            watching = self._by_hash[own]
            del watching[watch_id]
            if not watching:
                del self._by_hash[own]
        watch.lost |= watch.pending
        self._fire(watch_id)

    def settled(self, hashes: Collection[bytes], published: bool) -> None:
        """Note that blocks are not being written any more."""
        if not self._by_hash:
            return
        for own in hashes:
            for watch_id in self._by_hash.pop(own, ()):
                watch = self._watches[watch_id]
                watch.pending.discard(own)
                if not published:
                    watch.lost.add(own)
                if not watch.pending:
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

"""Keep the callers that wait for blocks of another writer. No locking here: the pool holds its lock."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from kvstore.blocks.chain import BlockHashes
from kvstore.pool.block_index import BlockIndex

#: Bounded because each takes about a kilobyte, and a caller may add any number of watches.
_MOST_WATCHES = 4096
#: Of all watches together: a caller may name any blocks that it likes.
_MOST_BLOCKS = 1 << 22


@dataclass(slots=True)
class _Watch:
    """A run, of which all blocks before `at` are here, and the block at `at` is being written."""

    chain: BlockHashes
    then: Callable[[int], None]
    at: int = 0


@dataclass(slots=True)
class WatchTable:
    """The watches of one pool. Their callbacks run after the pool's lock is let go, see `take_calls`.

    A watch waits for one block at a time, the first of its run that is being written: when that block is settled, the
    blocks behind it are compared run by run. So many watches of one long run end in a few comparisons each.
    """

    _index: BlockIndex
    _watches: dict[int, _Watch] = field(default_factory=dict)
    #: By the block that each waits for. Dictionaries, because a watch leaves them at once however many others wait.
    _by_hash: dict[bytes, dict[int, None]] = field(default_factory=dict)
    _calls: list[Callable[[], None]] = field(default_factory=list)
    _num_blocks: int = 0

    def __contains__(self, watch_id: int) -> bool:
        return watch_id in self._watches

    def add(self, watch_id: int, chain: BlockHashes, then: Callable[[int], None]) -> None:
        """Wait for a run; see `Pool.watch`. Above the bounds on watches the callback is due at once."""
        self._watches[watch_id] = watch = _Watch(chain, then)
        self._num_blocks += len(chain)
        self._go_on(watch_id, watch)
        if len(self._watches) > _MOST_WATCHES or self._num_blocks > _MOST_BLOCKS:
            self.drop(watch_id)

    def drop(self, watch_id: int) -> None:
        """End a watch early: only the blocks count that are here before the first that is being written."""
        if (watch := self._watches.get(watch_id)) is None:
            return
        own = watch.chain.hash_at(watch.at)
        watching = self._by_hash[own]
        del watching[watch_id]
        if not watching:
            del self._by_hash[own]
        self._fire(watch_id)

    def settled(self, hashes: Collection[bytes]) -> None:
        """Look again for the watches of blocks that are not being written any more."""
        if not self._by_hash:
            return
        for own in hashes:
            for watch_id in self._by_hash.pop(own, ()):
                self._go_on(watch_id, self._watches[watch_id])

    def take_calls(self) -> list[Callable[[], None]]:
        """Return the callbacks that are due; the caller runs them without the lock."""
        calls, self._calls = self._calls, []
        return calls

    def _go_on(self, watch_id: int, watch: _Watch) -> None:
        chain, index = watch.chain, self._index
        watch.at = index.num_ready(chain.namespace, chain.data, watch.at)
        own = chain.hash_at(watch.at)
        if own in index.space_of(chain.namespace).writing:
            self._by_hash.setdefault(own, {})[watch_id] = None
        else:
            self._fire(watch_id)

    def _fire(self, watch_id: int) -> None:
        watch = self._watches.pop(watch_id)
        self._num_blocks -= len(watch.chain)
        # Counted again: a clearing takes blocks away that were here.
        count = self._index.num_ready(watch.chain.namespace, watch.chain.data)
        self._calls.append(lambda: watch.then(count))

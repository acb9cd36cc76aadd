"""Divide the changes of a node's blocks among the shards of the directory, by the roots of their chains.

A pool gives each change once. The links to the shards take what is theirs at their own time, so what is not theirs is
kept here for the others: a bounded number of changes, after which a link needs a full announcement.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Protocol

import numpy as np

from kvstore.pool.events.log import RootedChange
from kvstore.pool.events.roots import RootKeys

#: More changes than this, in the pool and in the split, are replaced by a full announcement.
MOST_KEPT = 1 << 17


class RootedBlocks(Protocol):
    """The blocks of a node with the root keys of their chains: a pool, or the pools of its tiers together."""

    def drain_rooted(self) -> list[RootedChange] | None:
        """Return and forget the changes since the last call; None if they were too many."""

    def resident_rooted(self) -> list[tuple[list[bytes], RootKeys | None]]:
        """Return all hashes. Changes that were not drained stay, and may be in the result already."""


class Split:
    """The blocks of a node, as one part for each shard. Any thread may call.

    A block whose root is not known belongs to every part. That such a block is gone is told to every part, too.

    Args:
        num_shards: at least 2.
        most_kept: changes that are kept for one part.
    """

    def __init__(self, num_shards: int, most_kept: int = MOST_KEPT) -> None:
        self._lock = threading.Lock()
        self._num_shards, self._most_kept = num_shards, most_kept
        self._blocks: RootedBlocks | None = None
        #: Changes that each part has not taken yet; None if some of them were lost.
        self._kept: list[list[tuple[bool, bytes]] | None] = [[] for _ in range(num_shards)]
        #: Blocks that were told to every part. Another tier of the node may know their roots when they go.
        self._everywhere = set[bytes]()
        self.parts = [Part(self, number) for number in range(num_shards)]

    def follow(self, blocks: RootedBlocks | None) -> None:
        """Divide these blocks from now on; none if it is None. Every part needs a full announcement then."""
        with self._lock:
            self._blocks = blocks
            self._kept = [[] for _ in range(self._num_shards)]
            self._everywhere.clear()

    def drain(self, number: int) -> list[tuple[bool, bytes]] | None:
        """Return and forget the changes of one part; None if some were lost."""
        with self._lock:
            self._take()
            found, self._kept[number] = self._kept[number], []
            return found

    def snapshot(self, number: int) -> list[bytes]:
        """Return the hashes of one part, and forget its changes until now."""
        with self._lock:
            self._take()
            self._kept[number] = []
            found = list[bytes]()
            for hashes, roots in () if self._blocks is None else self._blocks.resident_rooted():
                if roots is None:
                    roots = np.zeros(len(hashes), np.uint32)
                self._everywhere.update(hashes[at] for at in np.flatnonzero(roots == 0).tolist())
                found += [hashes[at] for at in self._of(number, roots)]
            return found

    def _take(self) -> None:
        changes = [] if self._blocks is None else self._blocks.drain_rooted()
        if changes is None:
            self._kept = [None] * self._num_shards
            self._everywhere.clear()
            return
        for is_here, hashes, roots in changes:
            self._divide(is_here, hashes, roots)
        for number, kept in enumerate(self._kept):
            if kept is not None and len(kept) > self._most_kept:
                self._kept[number] = None

    def _divide(self, is_here: bool, hashes: Collection[bytes], roots: RootKeys | None) -> None:
        # After a clearing the roots of blocks that go are not known.
        keys, blocks = np.zeros(len(hashes), np.uint32) if roots is None else roots, list(hashes)
        if not self._everywhere.isdisjoint(blocks):
            keys = np.where([own in self._everywhere for own in blocks], np.uint32(0), keys)
        unknown = [blocks[at] for at in np.flatnonzero(keys == 0).tolist()]
        (self._everywhere.update if is_here else self._everywhere.difference_update)(unknown)
        for number, kept in enumerate(self._kept):
            if kept is not None:
                kept += [(is_here, blocks[at]) for at in self._of(number, keys)]

    def _of(self, number: int, keys: RootKeys) -> list[int]:
        """Return which of these blocks belong to a part."""
        found: list[int] = np.flatnonzero((keys % self._num_shards == number) | (keys == 0)).tolist()
        return found


class Part:
    """What one shard is told of the blocks of a node; see `kvstore.remote.announcements.Blocks`."""

    def __init__(self, split: Split, number: int) -> None:
        self._split, self._number = split, number

    def drain_events(self) -> list[tuple[bool, bytes]] | None:
        """Return and forget the changes since the last call; None if some of them were lost."""
        return self._split.drain(self._number)

    def resident_hashes(self) -> list[bytes]:
        """Return all hashes, and forget pending changes."""
        return self._split.snapshot(self._number)

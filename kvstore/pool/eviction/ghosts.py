"""Remember evicted blocks by their hash, in arrays of a fixed size. No locking here.

A place is found by a hash's set: `_WAYS` places that are filled in turn. So each ghost stays until so many others came
to its set, and to find one is one comparison of a few numbers, for all blocks of a chain at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.blocks.chain import HASH_BYTES

_WAYS = 8
#: Places per ghost that has to be remembered: sets do not fill evenly.
_PLACES_PER_GHOST = 1.5
#: No row.
NONE = -1

Rows = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint64]


def keys_of(hashes: Sequence[bytes]) -> Keys:
    """Return the first 8 bytes of each hash as a number. Two blocks with one key are one ghost, which does no harm."""
    return np.frombuffer(b"".join(hashes), np.uint64)[:: HASH_BYTES // 8]


class GhostTable:
    """Rows of evicted blocks by the keys of their hashes. What a row holds is the caller's.

    Args:
        num_ghosts: how many of the last evicted blocks have to be remembered, nearly all of them.
    """

    def __init__(self, num_ghosts: int) -> None:
        self._num_sets = max(1, int(num_ghosts * _PLACES_PER_GHOST) // _WAYS)
        # Filled, not just reserved: else the first evictions would pay for the system to bring the memory.
        self._rows = np.full((self._num_sets, _WAYS), NONE, np.int32)
        self._keys = np.full((self._num_sets, _WAYS), 1, np.uint64)
        self._next_way = np.full(self._num_sets, 1, np.uint8)

    @property
    def num_places(self) -> int:
        """The most ghosts that there can be."""
        return self._num_sets * _WAYS

    def take(self, keys: Keys) -> Rows:
        """Return the row of each key, `NONE` where there is no ghost of it, and forget these ghosts.

        Each row is returned once, also if two keys are equal.
        """
        sets = keys % np.uint64(self._num_sets)
        rows = self._rows[sets]
        is_it = (self._keys[sets] == keys[:, None]) & (rows != NONE)
        found = is_it.any(1)
        taken = np.full(len(keys), NONE, np.int32)
        at = np.flatnonzero(found)
        if len(at):
            ways = is_it[at].argmax(1)
            of_found = rows[at, ways]
            self._rows[sets[at], ways] = NONE
            if len(set(of_found.tolist())) < len(at):
                of_found, first = np.unique(of_found, return_index=True)
                at = at[first]
            taken[at] = of_found
        return taken

    def put(self, keys: Keys, rows: Rows) -> Rows:
        """Remember blocks that were evicted; return the rows of ghosts that lost their place to them."""
        sets = keys % np.uint64(self._num_sets)
        ways = self._next_way[sets]
        if len(set(sets.tolist())) < len(sets):
            ranks = _ranks(sets)
            if int(ranks.max()) >= _WAYS:
                # More blocks of one set than it has places: some of these displace others of these.
                half = len(keys) // 2
                return np.concatenate([self.put(keys[:half], rows[:half]), self.put(keys[half:], rows[half:])])
            ways = (ways + ranks) % _WAYS
        displaced: Rows = self._rows[sets, ways]
        self._keys[sets, ways], self._rows[sets, ways] = keys, rows
        # Of several in one set, the last assignment is that of the highest rank.
        self._next_way[sets] = (ways + 1) % _WAYS
        return np.compress(displaced != NONE, displaced)

    def rows(self) -> Rows:
        """Return the rows of all ghosts."""
        return np.compress(self._rows.reshape(-1) != NONE, self._rows.reshape(-1))


def _ranks(sets: Keys) -> npt.NDArray[np.intp]:
    """Return for each element how many equal ones are before it."""
    order = np.argsort(sets, kind="stable")
    ordered = sets[order]
    places = np.arange(len(sets))
    is_first = np.ones(len(sets), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    ranks = np.empty(len(sets), np.intp)
    ranks[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return ranks

"""A hash table of fixed width: 8 bytes of a block's hash, and a bit for each holder.

A Python dict takes 146 bytes for such an entry, and handles each hash by itself. Here NumPy handles all hashes of a
call together. Two hashes with equal first 8 bytes share an entry: a wrong hint, which costs a question. Among 64
million entries the chance that any two do is one in ten thousand.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.blocks.chain import HASH_BYTES

U64 = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

MIN_PLACES = 1 << 10
#: Of all places; above that, probes get long.
MAX_LOAD = 0.7
_EMPTY = np.uint64(0)
#: Bits of half a key, and the odd numbers of splitmix64.
_HALF, _MIXERS = np.uint64(32), (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
#: The same as Python's integers, for one key: NumPy takes longer for one key than for ten.
_ALL_BITS, _LOW_BITS, _INT_MIXERS = (1 << 64) - 1, (1 << 32) - 1, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
#: One element in each page of memory, also of the smallest.
_PAGE_PLACES = 4096 // 8


def keys_of(packed: bytes) -> U64:
    """Return the keys of hashes that lie back to back."""
    keys = np.frombuffer(packed, "<u8")[:: HASH_BYTES // 8].astype(np.uint64)
    return np.where(keys == _EMPTY, ~_EMPTY, keys)


def key_of(block_hash: bytes) -> int:
    """Return the key of one hash."""
    return int.from_bytes(block_hash[:8], "little") or _ALL_BITS


def _as_ints(words: U64) -> memoryview[int]:
    return memoryview(words)  # type: ignore[arg-type]


class HintTable:
    """One table; it never grows. Not for several threads.

    Args:
        num_places: a power of two.
        num_words: 64 holders each.
        secret: odd; places of keys are not known without it.
    """

    def __init__(self, num_places: int, num_words: int, secret: int) -> None:
        self.num_places = num_places
        self.num_used = 0
        """Places with a key, whether it has a holder or not."""
        self.num_live = 0
        """Places with a holder."""
        self._keys = np.zeros(num_places, np.uint64)
        #: For each 64 holders, their bits at each place; and one that `widen` takes next.
        self._rows = [np.zeros(num_places, np.uint64) for _ in range(num_words)]
        self._spare: U64 | None = None
        self._secret, self._shift = np.uint64(secret | 1), np.uint64(64 - num_places.bit_length() + 1)
        # The same as Python reads them, for one key.
        self._key_at, self._words_at = _as_ints(self._keys), [_as_ints(row) for row in self._rows]
        self._int_secret, self._int_shift = secret | 1, 64 - num_places.bit_length() + 1
        self._num_touched = self._num_spare_touched = 0

    @property
    def num_bytes(self) -> int:
        """Return the memory of the table."""
        return self._keys.nbytes * (1 + len(self._rows) + (self._spare is not None))

    @property
    def room(self) -> int:
        """Return how many more keys may come."""
        return int(self.num_places * MAX_LOAD) - self.num_used

    def widen(self, num_words: int) -> None:
        """Make room for the bits of more holders. Nothing is copied."""
        while len(self._rows) < num_words:
            row, self._spare = self._spare, None
            self._rows.append(np.zeros(self.num_places, np.uint64) if row is None else row)
        self._words_at = [_as_ints(row) for row in self._rows]
        self._num_touched = self._num_spare_touched = 0

    @property
    def is_ready_to_widen(self) -> bool:
        """Whether `touch_spare` has touched all that the next `widen` needs."""
        return self._num_spare_touched == self.num_places

    def touch_spare(self, num_places: int) -> None:
        """Have the system give memory for so many places more of what the next `widen` needs; see `touch`."""
        if self._spare is None:
            self._spare = np.zeros(self.num_places, np.uint64)
        start = self._num_spare_touched
        self._num_spare_touched = min(start + num_places, self.num_places)
        self._spare[start : self._num_spare_touched : _PAGE_PLACES] |= _EMPTY

    def touch(self, num_places: int) -> bool:
        """Have the system give memory for the next so many places of a new table; return whether all have theirs.

        Memory is given at the first access, which takes some seconds for a gigabyte. Keys go everywhere at once: so the
        first batch would wait for all of it.
        """
        start, stop = self._num_touched, min(self._num_touched + num_places, self.num_places)
        for column in (self._keys, *self._rows):
            column[start:stop:_PAGE_PLACES] |= _EMPTY
        self._num_touched = stop
        return stop == self.num_places

    @property
    def num_untouched(self) -> int:
        """Return for how many places of a new table `touch` was not called yet."""
        return self.num_places - self._num_touched

    def holders(self, key: int) -> int:
        """Return the holders of one key, as a number with a bit for each."""
        mixed = key * self._int_secret & _ALL_BITS
        for mixer in _INT_MIXERS:
            mixed = (mixed ^ (mixed >> 32)) * mixer & _ALL_BITS
        mixed ^= mixed >> 32
        place, step, last, key_at = mixed >> self._int_shift, (mixed & _LOW_BITS) | 1, self.num_places - 1, self._key_at
        while (seen := key_at[place]) != key:
            if not seen:
                return 0
            place = (place + step) & last
        found = 0
        for number, words in enumerate(self._words_at):
            found |= words[place] << 64 * number
        return found

    def bits(self, keys: U64) -> U64:
        """Return the holders of each key, [words, keys]."""
        places = self._find(keys)
        found = self._at(places)
        found[:, places < 0] = 0
        return found

    def _at(self, places: Places | slice) -> U64:
        return np.stack([row[places] for row in self._rows])

    def _set(self, places: Places | slice, before: U64, after: U64) -> None:
        for row, old, new in zip(self._rows, before, after, strict=True):
            if (old != new).any():  # Else memory that nobody uses would be touched.
                row[places] = new

    def add(self, keys: U64, bits: U64) -> None:
        """Add holders to keys, all of which are different.

        Args:
            keys: no more new ones than there is room.
            bits: [words, keys], or [words, 1] for the same holders of all.
        """
        places = self._claim(keys)
        before = self._at(places)
        self.num_live += int(len(keys) - before.any(axis=0).sum())
        self._set(places, before, before | bits)

    def remove(self, keys: U64, bits: U64) -> None:
        """Remove holders, [words, keys] or [words, 1], from keys, all of which are different."""
        places = self._find(keys)
        found = places >= 0
        self._clear(places[found], bits if bits.shape[1] == 1 else bits[:, found])

    def clear(self, start: int, stop: int, bits: U64) -> None:
        """Remove holders, [words, 1], from all keys in a range of places."""
        self._clear(slice(start, stop), bits)

    def entries(self, start: int, stop: int) -> tuple[U64, U64]:
        """Return keys with a holder in a range of places, and their holders [words, keys]."""
        bits = self._at(slice(start, stop))
        lives = bits.any(axis=0)
        return self._keys[start:stop][lives], bits[:, lives]

    def _clear(self, places: Places | slice, bits: U64) -> None:
        before = self._at(places)
        after = before & ~bits
        self._set(places, before, after)
        self.num_live -= int(before.any(axis=0).sum() - after.any(axis=0).sum())

    def _start(self, keys: U64) -> tuple[Places, Places]:
        """Return the first place of each key, and the way from one place to the next."""
        # A product alone would keep keys at equal distances at equal distances: all their ways would meet somewhere.
        mixed = keys * self._secret
        for mixer in _MIXERS:
            mixed = (mixed ^ (mixed >> _HALF)) * mixer
        mixed ^= mixed >> _HALF
        return (mixed >> self._shift).astype(np.int64), (mixed & np.uint64(0xFFFFFFFF)).astype(np.int64) | 1

    def _find(self, keys: U64) -> Places:
        """Return the place of each key; -1 if it has none."""
        (place, step), found = self._start(keys), np.full(len(keys), -1, np.int64)
        left = np.arange(len(keys))
        while len(left):
            seen, wanted = self._keys[place], keys[left]
            hits = seen == wanted
            found[left[hits]] = place[hits]
            goes_on = ~hits & (seen != _EMPTY)
            left, step = left[goes_on], step[goes_on]
            place = (place[goes_on] + step) & (self.num_places - 1)
        return found

    def _claim(self, keys: U64) -> Places:
        """Return the place of each key; those that have none get one."""
        (place, step), found = self._start(keys), np.full(len(keys), -1, np.int64)
        left = np.arange(len(keys))
        while len(left):
            empty = np.flatnonzero(self._keys[place] == _EMPTY)
            if len(empty):  # Several keys may come to one place; the last one written has it.
                self._keys[place[empty]] = keys[left[empty]]
            hits = self._keys[place] == keys[left]
            if len(empty):
                self.num_used += int(hits[empty].sum())
            found[left[hits]] = place[hits]
            goes_on = ~hits
            left, step = left[goes_on], step[goes_on]
            place = (place[goes_on] + step) & (self.num_places - 1)
        return found

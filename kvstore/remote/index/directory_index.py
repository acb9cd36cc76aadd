"""Which nodes hold which blocks: a table of hashes with a bit for each life of a node's store."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.blocks.chain import HASH_BYTES
from kvstore.remote.index.hint_table import MIN_PLACES, U64, HintTable, key_of, keys_of
from kvstore.remote.index.prefixes import cuts_of

#: Places of the table that one step looks at; a step takes about a millisecond.
SWEEP_PLACES = 1 << 15
#: Most entries of an index of 64 lives: about 5 GB. More lives make an entry larger, and then there are fewer of them.
#: Further blocks are not noted; their nodes are not asked for them.
MAX_ENTRIES = 100_000_000
_GROWTH = 2
_ALL = 1 << 62
#: Places of the old table that are moved for each key that comes, at least.
_MOVED_PER_KEY = 8
#: A table is followed by one of at least this share of its places. Else a small one would be full before it has all
#: entries of a large one, and one call would have to move the rest.
_LEAST_SHARE = 8
#: Shorter prompts are walked: that takes no longer than probes.
_WALKED_BLOCKS = 32
#: From this size on, the next table is made before it is needed, when a smaller share of the places than `_AHEAD` is
#: left, and its memory is touched in pieces of at least `_TOUCHED_PLACES` (1 MiB) meanwhile.
_LARGE_PLACES, _AHEAD, _TOUCHED_PLACES = 1 << 20, 8, 1 << 16
#: When fewer lives than this have room in a large table, what makes it wider is touched in steps.
_SPARE_LIVES = 8


@dataclass(slots=True)
class _Holder:
    node_id: str
    bit: int


@dataclass(slots=True)
class _Pass:
    """Removes the bits of forgotten lives from a table, place by place."""

    table: HintTable
    place: int = 0


class DirectoryIndex:
    """The blocks of each node, by the lives of its store. Any thread may call.

    A node may have several lives here at once: an announcement under way beside the one before it, or a store that
    falsely uses a node's id beside the real one. No life changes the entries of another.
    A forgotten life is not found any more; its bits are removed in steps, and a table that is full is moved to a larger
    one in steps. Memory that a table will need is touched in steps before. Hashes may be given as a list, or as bytes
    back to back.

    Args:
        max_entries: blocks that are noted at most.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._lock = threading.RLock()
        self._max_entries = max_entries
        self._secret = secrets.randbits(64)
        self._num_words = 1
        self._table = self._make_table(MIN_PLACES)
        #: A full table whose entries are moved into the other one, and the first that was not moved yet.
        self._old: HintTable | None = None
        self._num_moved = 0
        #: Will follow a table that is nearly full.
        self._next: HintTable | None = None
        self._holders: dict[tuple[str, int], _Holder] = {}
        self._by_bit: dict[int, _Holder] = {}
        #: Bits of forgotten lives. A pass removes those that were here when it began.
        self._leaving = self._passing = 0
        self._passes: list[_Pass] = []
        self._used_bits = self._live_bits = 0
        self.num_dropped = 0
        """Blocks that were not noted, because the index was full."""
        self.num_walked = 0
        """Long prompts that were walked, because nodes lacked blocks in their midst or had too many different cuts."""

    def __len__(self) -> int:
        with self._lock:
            return self._table.num_live + (0 if self._old is None else self._old.num_live)

    @property
    def num_bytes(self) -> int:
        """Return the memory of the tables."""
        with self._lock:
            return sum(table.num_bytes for table in (self._table, self._old, self._next) if table is not None)

    def nodes(self) -> list[str]:
        """Return the nodes that ever published and were not forgotten."""
        with self._lock:
            return sorted({node_id for node_id, _ in self._holders})

    def add(self, node_id: str, hashes: bytes | Iterable[bytes], life: int = 0) -> None:
        """Note that a node holds blocks."""
        with self._lock:
            bits = self._words(self._holder(node_id, life).bit)
            keys, first = np.unique(_keys(hashes), return_index=True)
            keys = keys[np.argsort(first)]  # As they came: what has no room is the end of a chain.
            for start in range(0, len(keys), SWEEP_PLACES):
                self._add(keys[start : start + SWEEP_PLACES], bits)

    def remove(self, node_id: str, hashes: bytes | Iterable[bytes], life: int = 0) -> None:
        """Note that a node no longer holds blocks."""
        with self._lock:
            bits, keys = self._words(self._holder(node_id, life).bit), np.unique(_keys(hashes))
            for table in self._tables():
                table.remove(keys, bits)

    def forget(self, node_id: str, life: int = 0) -> None:
        """Drop all blocks of one life of a node; do nothing if it has none."""
        with self._lock:
            holder = self._holders.pop((node_id, life), None)
            if holder is not None:
                del self._by_bit[holder.bit]
                self._live_bits &= ~holder.bit
                self._leaving |= holder.bit
                self.sweep()

    @property
    def is_sweeping(self) -> bool:
        """Whether steps are left: bits of forgotten lives, entries in an old table, or memory to be touched."""
        return bool(self._leaving) or self._old is not None or self._is_nearly_wide()

    def _is_nearly_wide(self) -> bool:
        table, num_lives = self._table, self._used_bits.bit_length()
        is_near = table.num_places >= _LARGE_PLACES and num_lives > 64 * self._num_words - _SPARE_LIVES
        return is_near and not table.is_ready_to_widen

    def sweep(self, num_places: int = SWEEP_PLACES) -> None:
        """Look for bits of forgotten lives in so many places, and move or touch as many."""
        with self._lock:
            self._move(num_places)
            if self._is_nearly_wide():
                self._table.touch_spare(max(num_places, _TOUCHED_PLACES))
            if self._leaving and not self._passing:
                # What is moved or added later has no bit of these lives.
                self._passing, self._passes = self._leaving, [_Pass(table) for table in self._tables()]
            while self._passes and num_places > 0:
                at = self._passes[-1]
                stop = min(at.place + num_places, at.table.num_places)
                at.table.clear(at.place, stop, self._words(self._passing))
                num_places -= stop - at.place
                at.place = stop
                if stop == at.table.num_places:
                    self._passes.pop()
            if not self._passes:
                self._used_bits &= ~self._passing
                self._leaving &= ~self._passing
                self._passing = 0

    def locate(self, hashes: bytes | Sequence[bytes]) -> list[tuple[str, int]]:
        """Return (node, length of the prefix it holds), longest first. Nodes that hold none are left out.

        A long prompt is not walked: see `cuts_of`. If a node lacks blocks in the midst of one, its prefix may be said
        to be longer than `walk` says, never shorter.
        """
        count = len(hashes) // HASH_BYTES if isinstance(hashes, bytes) else len(hashes)
        if count > _WALKED_BLOCKS:
            with self._lock:
                cuts = cuts_of(count, lambda number: self._holders_of(hashes, number))
                if cuts is not None:
                    return self._answer(cuts)
                self.num_walked += 1
        return self.walk(hashes)

    def walk(self, hashes: bytes | Sequence[bytes]) -> list[tuple[str, int]]:
        """Return what `locate` returns, after a look at all blocks: each prefix ends where the first one is lacking."""
        keys = _keys(hashes)
        if not len(keys):
            return []
        cuts = list[tuple[int, int]]()
        with self._lock:
            found = self._table.bits(keys)
            if self._old is not None:
                found |= self._old.bits(keys)
            held = np.bitwise_and.accumulate(found & self._words(self._live_bits), axis=1)
            changes = np.flatnonzero((held[:, 1:] != held[:, :-1]).any(axis=0)) + 1
            alive = _number(held[:, 0])
            for count in (*changes.tolist(), len(keys)):
                still = _number(held[:, count]) if count < len(keys) else 0
                cuts.append((count, alive & ~still))
                alive = still
            return self._answer(cuts)

    def _holders_of(self, hashes: bytes | Sequence[bytes], number: int) -> int:
        start = number * HASH_BYTES
        key = key_of(hashes[start : start + HASH_BYTES] if isinstance(hashes, bytes) else hashes[number])
        found = self._table.holders(key)
        if self._old is not None:
            found |= self._old.holders(key)
        return found & self._live_bits

    def _answer(self, cuts: list[tuple[int, int]]) -> list[tuple[str, int]]:
        lengths = dict[str, int]()
        for count, bits in sorted(cuts):  # So the longest of a node's lives is written last.
            for bit in _bits_of(bits):
                lengths[self._by_bit[bit].node_id] = count
        return sorted(lengths.items(), key=lambda item: (-item[1], item[0]))

    def _tables(self) -> list[HintTable]:
        return [self._table] if self._old is None else [self._table, self._old]

    def _make_table(self, num_places: int) -> HintTable:
        return HintTable(num_places, self._num_words, self._secret)

    def _add(self, keys: U64, bits: U64) -> None:
        if self._old is not None:
            num_left = self._old.num_places - self._num_moved
            self._move(len(keys) * max(_MOVED_PER_KEY, num_left // max(1, self._room()) + 1))
        had = self._table.bits(keys)
        if self._old is not None:
            had |= self._old.bits(keys)
        num_free = max(0, self._most_entries() - len(self))
        is_new = ~had.any(axis=0)
        num_new = int(is_new.sum())
        if num_new > num_free:
            chosen = ~is_new | (np.cumsum(is_new) <= num_free)
            self.num_dropped += num_new - num_free
            keys, had, num_new = keys[chosen], had[:, chosen], num_free
        if num_new > self._room():
            self._move(_ALL)
            if num_new > self._room():
                self._grow(num_new)
        if self._old is not None:
            self._old.remove(keys, had)  # A hash has its bits in one table.
        # As in `_move`: a pass that began before this table was made does not come to it.
        self._table.add(keys, (had & ~self._words(self._leaving)) | bits)
        if self._old is None:
            self._prepare(len(keys))

    def _most_entries(self) -> int:
        return self._max_entries * 2 // (1 + self._num_words)

    def _room(self) -> int:
        return self._table.room - (0 if self._old is None else self._old.num_live)

    def _grow(self, num_keys: int) -> None:
        """Begin to move all entries into a new table, at least twice as large as they need.

        Places without holder are left.
        """
        num_places, made = self._places_for(num_keys), self._next
        if made is None or not num_places <= made.num_places <= _GROWTH * num_places:
            made = self._make_table(num_places)
        self._old, self._table, self._next, self._num_moved = self._table, made, None, 0

    def _places_for(self, num_keys: int) -> int:
        num_places = max(MIN_PLACES, self._table.num_places // _LEAST_SHARE)
        while num_places < _GROWTH * (self._table.num_live + num_keys):
            num_places *= 2
        return num_places

    def _prepare(self, num_keys: int) -> None:
        """Touch as much of the next table as this step has used of the room that is left."""
        table, room = self._table, self._room()
        if self._next is None:
            is_near = table.num_places >= _LARGE_PLACES and room < table.num_places // _AHEAD
            if not is_near or self._most_entries() - len(self) <= room:
                return
            self._next = self._make_table(self._places_for(room))
        share = self._next.num_untouched * num_keys // max(1, room) + 1
        self._next.touch(max(_TOUCHED_PLACES, share))

    def _move(self, num_places: int) -> None:
        """Move the entries of so many places of the old table, without the bits of forgotten lives."""
        old = self._old
        if old is None:
            return
        stop = min(old.num_places, self._num_moved + num_places)
        for start in range(self._num_moved, stop, SWEEP_PLACES):
            end = min(start + SWEEP_PLACES, stop)
            keys, bits = old.entries(start, end)
            old.clear(start, end, self._words(self._used_bits))
            bits &= ~self._words(self._leaving)
            lives = bits.any(axis=0)
            self._table.add(keys[lives], bits[:, lives])
        self._num_moved = stop
        if stop == old.num_places:
            self._old = None
            self._passes = [each for each in self._passes if each.table is not old]

    def _holder(self, node_id: str, life: int) -> _Holder:
        holder = self._holders.get((node_id, life))
        if holder is None:
            bit = self._free_bit()
            # Bits of forgotten lives come back before a table gets wider for good, as when a node flaps.
            while self._leaving and bit.bit_length() > 64 * self._num_words:
                self.sweep()
                bit = self._free_bit()
            holder = self._holders[node_id, life] = self._by_bit[bit] = _Holder(node_id, bit)
            self._used_bits |= bit
            self._live_bits |= bit
            if bit.bit_length() > 64 * self._num_words:
                self._num_words += 1
                for table in (*self._tables(), *([self._next] if self._next is not None else ())):
                    table.widen(self._num_words)
        return holder

    def _free_bit(self) -> int:
        return ~self._used_bits & (self._used_bits + 1)

    def _words(self, bits: int) -> U64:
        """Return bits as [words, 1]."""
        return np.frombuffer(bits.to_bytes(8 * self._num_words, "little"), "<u8").astype(np.uint64)[:, None]


def _keys(hashes: bytes | Iterable[bytes]) -> U64:
    return keys_of(hashes if isinstance(hashes, bytes) else b"".join(hashes))


def _number(words: U64) -> int:
    return int.from_bytes(np.ascontiguousarray(words, "<u8").tobytes(), "little")


def _bits_of(bits: int) -> Iterable[int]:
    while bits:
        bit = bits & -bits
        yield bit
        bits ^= bit

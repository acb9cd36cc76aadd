"""Know where the blocks of the disk's pool are in the slot file, and as what they were written."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.disk.records import Record


class Places:
    """For each slot of the disk's pool: its place in the file, and the record of the block that is there.

    The pool numbers its slots itself, from 0 on when a new store fills it again. So each slot has a place. It changes
    only while the pool is filled, before anything is written.

    A slot's record is changed by the one that writes the slot, and read by holders of a pin on it, so never at the
    same time. No lock is needed.
    """

    def __init__(self, num_slots: int) -> None:
        self.place = list(range(num_slots))
        self._slot_at = list(range(num_slots))
        self.record: list[Record | None] = [None] * num_slots
        self.next_generation = 1

    def assign(self, slot: int, record: Record) -> None:
        """Say that a slot has a block that is in the file already; another slot gets the place that it had."""
        other = self._slot_at[record.place]
        self.place[other], self.place[slot] = self.place[slot], record.place
        self._slot_at[self.place[other]], self._slot_at[record.place] = other, slot
        self.record[slot] = record
        self.next_generation = max(self.next_generation, record.generation + 1)

    def take_generation(self) -> int:
        """Return a number that no block of this tier had before; the caller holds the writer's lock."""
        self.next_generation += 1
        return self.next_generation - 1


def neighbours(places: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return the stretches [begin, end) of positions whose places follow each other, each of at most `most`."""
    found, begin = list[tuple[int, int]](), 0
    for at in range(1, len(places) + 1):
        if at == len(places) or places[at] != places[at - 1] + 1 or at - begin == most:
            found.append((begin, at))
            begin = at
    return found

"""Keep the soft pins of slots, and the soft-pinned slots that came up for eviction. No locking here."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator


class SoftPins:
    """How many soft pins each slot has.

    A soft-pinned slot that comes up is held back, with the stamp of its touch, and evicted when no other slot is left.
    """

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.held_back: OrderedDict[int, int] = OrderedDict()

    def add(self, slots: Iterable[int]) -> None:
        """Add a soft pin to each slot."""
        self.counts.update(slots)

    def remove(self, slots: Iterable[int]) -> Iterator[int]:
        """Remove a soft pin from each slot that has one; yield those held back that have none left."""
        counts = self.counts
        for slot in slots:
            if counts.get(slot, 0) > 1:
                counts[slot] -= 1
            elif counts.pop(slot, 0) and self.held_back.pop(slot, 0):
                yield slot

    def forget(self, slots: Iterable[int]) -> None:
        """Drop all soft pins of slots."""
        if self.counts:
            for slot in slots:
                self.counts.pop(slot, 0)
                self.held_back.pop(slot, 0)

    def hold_back(self, slot: int, stamp: int) -> None:
        """Keep a soft-pinned slot that came up, after those that came up before it."""
        self.held_back[slot] = stamp
        self.held_back.move_to_end(slot)

    def placed(self, stamp: array[int]) -> set[int]:
        """Return the slots that are held back and were not touched since, by the last touch of each slot; for tests."""
        return {slot for slot, touched in self.held_back.items() if stamp[slot] == touched}

    def check(self) -> None:
        """Assert that only soft-pinned slots are held back; for tests."""
        assert self.held_back.keys() <= self.counts.keys(), "held back without a soft pin"
        assert min(self.counts.values(), default=1) > 0, "soft pins of none"

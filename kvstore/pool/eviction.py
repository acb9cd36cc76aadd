"""Which blocks a pool gives up first: what it tells an eviction policy, and what it asks. No locking here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from kvstore.pool.slot_lists import SlotList


class EvictionPolicy(Protocol):
    """Keeps the order of eviction and the soft pins of the slots of one pool.

    The pool alone knows which blocks can go: it skips a victim that is read, or being written, or has children. So a
    policy may name too many slots, never too few: a block that can go and was not offered yet must come up.
    """

    @property
    def soft_pins(self) -> Mapping[int, int]:
        """Slots with a soft pin, and how many each has."""

    def touched(self, slots: SlotList) -> int:
        """Note that a chain was claimed, read or pinned; its slots come in chain order.

        Returns:
            The stamp of this touch, above 0. The pool gives it back with `stored` and `released`.
        """

    def stored(self, slots: Iterable[int], stamp: int) -> None:
        """Note that blocks were written and can go from now on.

        Args:
            slots: of the blocks.
            stamp: of the touch that came with their claim or pin, the earliest of several; 0 when not known.
        """

    def released(self, slots: Iterable[int], stamp: int) -> None:
        """Note that blocks lost a reader or their last child; arguments as for `stored`."""

    def soft_pinned(self, slots: Iterable[int]) -> None:
        """Add a soft pin to each slot: those go last."""

    def soft_unpinned(self, slots: Iterable[int]) -> None:
        """Remove a soft pin from each slot that has one."""

    def freed(self, slots: SlotList) -> None:
        """Forget slots and their soft pins: their blocks were evicted, cleared or aborted."""

    def victims(self) -> Iterator[int]:
        """Offer slots, the first to go first; the pool stops when it has enough.

        A slot that is offered and cannot go loses its place, until `released` or `touched` names it.
        """

    def last_touch(self, slot: int) -> int:
        """Return when a slot was touched last: of two blocks the one with more is the hotter one."""

    def check(self, evictable: set[int]) -> None:
        """Assert that all these slots would come up as victims; for tests."""

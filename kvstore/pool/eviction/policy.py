"""Define the interface between a pool and its eviction policy. No locking here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from kvstore.pool.slot_lists import SlotList


class EvictionPolicy(Protocol):
    """Keeps the order of eviction and the soft pins of the slots of one pool.

    Only the pool knows which blocks can be evicted: it skips a victim that is read, being written, or has children. So
    a policy may offer too many slots, never too few: an evictable block that was not offered yet must come up.
    """

    @property
    def soft_pins(self) -> Mapping[int, int]:
        """Slots with a soft pin, and the number of soft pins of each."""

    def claimed(self, slots: SlotList, hashes: Sequence[bytes]) -> None:
        """Note that blocks with these hashes are written to free slots: a prompt uses them.

        `touched` follows in the same step, with these slots among others.
        """

    def touched(self, slots: SlotList, *, is_use: bool) -> int:
        """Note that a chain was claimed, read or pinned; return the stamp of this touch, above 0.

        Slots come in chain order. The pool passes the stamp to `stored` and `released`. `is_use` is False for a save
        that finds its blocks here: mostly the prompt that it belongs to has loaded them, which was its use of them.
        """

    def stored(self, slots: Iterable[int], stamp: int) -> None:
        """Note that blocks were written and can be evicted from now on.

        `stamp` is of the touch at their claim or pin, the earliest of several; 0 when not known.
        """

    def released(self, slots: Iterable[int], stamp: int) -> None:
        """Note that blocks lost a reader or their last child; arguments as for `stored`."""

    def soft_pinned(self, slots: Iterable[int]) -> None:
        """Add a soft pin to each slot; these slots are evicted last."""

    def soft_unpinned(self, slots: Iterable[int]) -> None:
        """Remove a soft pin from each slot that has one."""

    def evicted(self, slots: SlotList, hashes: Sequence[bytes]) -> None:
        """Note that blocks with these hashes were evicted; `freed` follows in the same step, with these slots."""

    def freed(self, slots: SlotList) -> None:
        """Forget slots and their soft pins: their blocks were evicted, cleared or aborted."""

    def victims(self) -> Iterator[int]:
        """Yield slots in the order of eviction; the pool stops when it has enough.

        An offered slot that cannot be evicted loses its place, until `released` or `touched` names it.
        """

    def last_touch(self, slot: int) -> int:
        """Return the stamp of a slot's last touch. Of two blocks, the one with the larger stamp is hotter."""

    def check(self, evictable: set[int]) -> None:
        """Assert that all these slots would come up as victims; for tests."""

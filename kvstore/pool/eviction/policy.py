"""Define the interface between a pool and its eviction policy. No locking here."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.pool.slot_lists import SlotList

#: Of slots: how often each block was used, 0 where that is not known; when last; when it was touched last.
History = tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64], npt.NDArray[np.float64]]


class EvictionPolicy(Protocol):
    """Keeps the order of eviction of the slots of one pool; `PriorityOrder` puts priorities and soft pins above it.

    Only the pool knows which blocks can be evicted: it skips a victim that is read, being written, or has children. So
    a policy may offer too many slots, never too few: an evictable block that was not offered yet must come up.
    """

    @property
    def stamp(self) -> array[int]:
        """Last touch of each slot, 0 for one that is not in the order. The greater, the hotter. Only to be read."""

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
        """Note that blocks lost a reader or their last child, or are held back no more; arguments as for `stored`."""

    def evicted(self, slots: SlotList, hashes: Sequence[bytes]) -> None:
        """Note that blocks with these hashes were evicted; `freed` follows in the same step, with these slots."""

    def freed(self, slots: SlotList) -> None:
        """Forget slots: their blocks were evicted, cleared or aborted."""

    def victims(self) -> Iterator[int]:
        """Yield slots in the order of eviction; the pool stops when it has enough.

        An offered slot loses its place, until `released` or `touched` names it. If none is left, a later call has those
        that were named since.
        """

    def history(self, slots: npt.NDArray[np.intp]) -> History:
        """Return what is known of the blocks of slots, for the policy of another life."""

    def recall_uses(self, slots: SlotList, uses: npt.NDArray[np.uint8]) -> None:
        """Take over the uses of blocks that another life had, between their `claimed` and the first `touched`."""

    def recall_times(
        self, slots: SlotList, used_s: npt.NDArray[np.float64], touched_s: npt.NDArray[np.float64]
    ) -> None:
        """Take over when these blocks were used and touched last, after `recall_uses` and `touched`."""

    def check(self, evictable: set[int]) -> None:
        """Assert that all these slots would come up as victims; for tests."""

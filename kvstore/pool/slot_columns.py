"""Keep the state and the holders of a pool's slots, not their blocks. No locking here: the pool holds its lock."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt

from kvstore.pool.slot_lists import SlotList
from kvstore.pool.tenants.readers import ReaderCounts
from kvstore.pool.tenants.table import TenantTable


class SlotColumns(ReaderCounts):
    """The slots of a pool, one column per attribute. So a chain is handled in a few passes.

    Each slot is free, being written, ready or quarantined. Only ready slots have readers: with a reader a slot is
    pinned, without one idle. Free slots are given out lowest index first, so that the blocks of one request become
    neighbours and merge into few transfer descriptors.

    `generation` grows each time a slot is claimed. `ref_count` counts readers. `aborted` slots are being written and
    will never be published. `cleared` slots were cleared while pinned, and become free after their last reader. A
    transfer may still write to `quarantined` slots, listed by name. `tenants` hears of slots that become free; None in
    a pool without tenants.
    """

    def __init__(self, num_slots: int, tenants: TenantTable | None = None) -> None:
        super().__init__(num_slots)
        self._tenants = tenants
        self.generation = array("I", bytes(4 * num_slots))
        # The same memory, for all slots of a chain at once.
        self._generations = np.frombuffer(self.generation, np.uint32)
        self.aborted: set[int] = set()
        self.cleared: set[int] = set()
        self.quarantined: dict[str, list[int]] = {}
        self.num_writing = self.num_quarantined = 0
        # Highest index first, so that taking from the end hands out the lowest; sorted again when needed.
        self.free = list(range(num_slots - 1, -1, -1))
        self._free_is_sorted = True

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self.free)

    def lives(self, slots: SlotList) -> bytes:
        """Return the generation of each slot as little-endian uint32."""
        return self._generations[slots.index].tobytes()

    def still_living(self, slots: SlotList, lives: bytes) -> Iterator[int]:
        """Yield each slot whose generation is still the one in `lives`."""
        return (slot for slot, life in zip(slots, array("I", lives), strict=True) if self.generation[slot] == life)

    def take_free(self, wanted: int) -> list[int]:
        """Take up to `wanted` free slots, the lowest ones, in ascending order."""
        free = self.free
        if not self._free_is_sorted:
            free.sort(reverse=True)
            self._free_is_sorted = True
        taken = free[: -wanted - 1 : -1]
        del free[len(free) - len(taken) :]
        return taken

    def take(self, slots: Collection[int]) -> None:
        """Take these free slots."""
        taken = set(slots)
        self.free = [slot for slot in self.free if slot not in taken]

    def continue_generations(self, generations: npt.NDArray[np.uint32]) -> None:
        """Go on from the generations of the pool's last life, which had the first slots of these."""
        self._generations[: len(generations)] = generations

    def begin_writing(self, slots: SlotList) -> None:
        """Begin a new generation of slots without holders; they count as being written."""
        self._generations[slots.index] += 1
        self.num_writing += len(slots)

    def end_aborted(self, slots: Collection[int], quarantine: str = "") -> None:
        """End the writing of aborted slots. They become free, or quarantined under a name if it is given."""
        self.aborted.difference_update(slots)
        self.num_writing -= len(slots)
        if quarantine and slots:
            self.num_quarantined += len(slots)
            self.quarantined.setdefault(quarantine, []).extend(slots)
        else:
            self._free_up(slots)

    def end_quarantine(self, name: str) -> int:
        """Free the slots that are quarantined under `name`; return how many."""
        slots = self.quarantined.pop(name, [])
        self.num_quarantined -= len(slots)
        self._free_up(slots)
        return len(slots)

    def _free_up(self, slots: Collection[int]) -> None:
        self.free += slots
        self._free_is_sorted = False
        if self._tenants is not None and slots:
            self._tenants.freed(slots)

    def unpin(self, slots: SlotList) -> None:
        """Remove a reader from each slot, as given to `pin`; cleared slots without readers become free."""
        super().unpin(slots)
        if self.cleared:
            unread = [slot for slot in self.cleared.intersection(slots) if not self.ref_count[slot]]
            self.cleared.difference_update(unread)
            self._free_up(unread)

    def clear(self, slots: list[int], listed: SlotList) -> None:
        """Free ready slots that were cleared, each with its last reader; `listed` are the same."""
        is_read = self.ref_counts[listed.index] > 0
        if is_read.any():
            index = np.array(slots, np.intp)
            self.cleared.update(index[is_read].tolist())
            slots = index[~is_read].tolist()
        self._free_up(slots)

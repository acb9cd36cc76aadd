"""The parts that the writer and the readers of one disk tier share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.disk.index_file import IndexFile
from kvstore.disk.places import Places
from kvstore.disk.slot_file import SlotFile
from kvstore.pool.pool import Pool


@dataclass(frozen=True, slots=True, eq=False)
class TierContext:
    """The parts that the writer and the readers of one disk tier share.

    Args:
        tier_id: repeated by every record.
        memory_pool: the blocks in memory.
        memory: the arena; slot i begins at i times `slot_bytes`.
        disk_pool: the blocks on disk, under the same rules.
        places: where they are.
        slots: the file of blocks.
        index: the file of records.
        num_bytes_of: returns the bytes of a block of a namespace; raises InvalidRequest if no client has it.
        version_of: returns the version of a namespace's last clearing.
        changed: called when blocks became findable, or no longer are.
    """

    tier_id: bytes
    memory_pool: Pool
    memory: memoryview
    disk_pool: Pool
    places: Places
    slots: SlotFile
    index: IndexFile
    num_bytes_of: Callable[[bytes], int]
    version_of: Callable[[bytes], int]
    changed: Callable[[], object]

    def bytes_of(self, slot: int, num_bytes: int) -> memoryview:
        """Return the first bytes of a slot of memory, writable; its owner must have the slot pinned or claimed."""
        begin = slot * self.slots.slot_bytes
        return self.memory[begin : begin + num_bytes]

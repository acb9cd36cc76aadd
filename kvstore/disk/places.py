"""Know where the blocks of a disk tier are: in memory, in the pools, in the files; and as what they were written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.blocks.grants import HeldBlock
from kvstore.disk.index_file import IndexFile
from kvstore.disk.records import Record, checksum_of, pack_record
from kvstore.disk.room import Room
from kvstore.disk.slot_file import RunPages, SlotFile
from kvstore.pool.pool import Pool
from kvstore.quotas import tag_of


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

    def take_generations(self, count: int) -> range:
        """Return numbers that no block of this tier had before; the caller holds the writer's lock."""
        self.next_generation += count
        return range(self.next_generation - count, self.next_generation)


@dataclass(frozen=True, slots=True, eq=False)
class TierContext:
    """The parts that the writer and the readers of one disk tier share.

    Args:
        tier_id: repeated by every record.
        memory_pool: the blocks in memory.
        memory: the arena; slot i begins at i times `slot_bytes`.
        disk_pool: the blocks on disk, under the same rules.
        places: where they are.
        room: the files of both, and how much they may take.
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
    room: Room
    slots: SlotFile
    index: IndexFile
    num_bytes_of: Callable[[bytes], int]
    version_of: Callable[[bytes], int]
    changed: Callable[[], object]

    def bytes_of(self, slot: int, num_bytes: int) -> memoryview:
        """Return the first bytes of a slot of memory, writable; its owner must have the slot pinned or claimed."""
        begin = slot * self.slots.slot_bytes
        return self.memory[begin : begin + num_bytes]


def records_of(
    context: TierContext,
    blocks: Sequence[HeldBlock],
    disk_slots: Sequence[int],
    generations: Iterable[int],
    version: int,
) -> list[Record]:
    """Return the records of blocks of one namespace that are about to be written, and note them as their slots'.

    Args:
        context: of the tier.
        blocks: pinned in memory, where their bytes are read.
        disk_slots: claimed for them.
        generations: new ones.
        version: of the namespace's last clearing before the blocks were pinned.
    """
    num_bytes, records = context.num_bytes_of(blocks[0].namespace), list[Record]()
    for block, disk_slot, generation in zip(blocks, disk_slots, generations, strict=True):
        record = Record(
            place=context.places.place[disk_slot],
            generation=generation,
            depth=block.depth,
            version=version,
            num_bytes=num_bytes,
            block_hash=block.block_hash,
            parent=block.parent,
            namespace=block.namespace,
            checksum=checksum_of(context.bytes_of(block.slot, num_bytes)),
            tenant_tag=tag_of(block.tenant),
        )
        context.places.record[disk_slot] = record
        records.append(record)
    return records


def write_blocks(
    context: TierContext, pages: RunPages, records: Sequence[Record], slots: Sequence[int], *, sync: bool
) -> None:
    """Write blocks from slots of memory to their places, and then their records to the index.

    Raises:
        OSError: the disk refused.
    """
    context.room.hold(1 + max(record.place for record in records))
    packed = [pack_record(context.tier_id, record) for record in records]
    places, num_bytes = [record.place for record in records], context.slots.slot_bytes
    pages.write(context.slots, places, packed, lambda at: context.bytes_of(slots[at], num_bytes))
    if sync:
        context.slots.sync()
    context.index.write_all(records, packed)
    if sync:
        context.index.sync()

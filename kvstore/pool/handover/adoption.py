"""Fill an empty pool from the image of its last life. No locking here: the pool holds its lock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.blocks.priority import Priority, Retention
from kvstore.errors import InvalidRequest
from kvstore.pool.handover.image import PoolImage, split
from kvstore.pool.leases import LeaseTable
from kvstore.pool.runs import Run
from kvstore.pool.slot_lists import SlotList
from kvstore.pool.slots import SlotTable
from kvstore.pool.writes import WriteTable

#: Owners of what readers and writers of the last life still use, with a number after it.
OLD_READER, OLD_WRITER = "old-reader-", "old-writer-"


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Places of blocks in the image that become one claim: of one touch and namespace, with ascending slots."""

    first: int
    end: int


def adopt(table: SlotTable, leases: LeaseTable, writes: WriteTable, image: PoolImage) -> int:
    """Take over the blocks of an image, which `PoolImage.check` has passed; return how many.

    A block stays its tenant's. Of a tenant that has more than its quota in this life, the blocks go that are next in
    its order; those that old readers may still read stay, beyond the quota.

    Slots that old writers may still write to belong to the owners `OLD_WRITER` plus their number in the image, until
    `Pool.release_owner`. Blocks that old readers may still read have a lease until the end of theirs, with the owners
    `OLD_READER` plus their number, or until `Pool.release_owner`.

    Raises:
        InvalidRequest: the pool was used already, or has fewer slots; nothing changed.
    """
    if table.columns.num_free < table.num_slots or image.num_slots > table.num_slots:
        raise InvalidRequest(
            f"wanted an unused pool of at least {image.num_slots} slots, got one of {table.num_slots} with "
            f"{table.columns.num_free} free; start cold"
        )
    columns = table.columns
    columns.continue_generations(image.generations)
    taken = {*image.blocks.slot.tolist(), *(slot for held in image.writers for slot in held.slots.tolist())}
    columns.take(taken)
    if table.tenants is not None:
        table.tenants.adopt(image.tenants, image.owners, sorted(taken))
    _adopt_blocks(table, image)
    for number, held in enumerate(image.writers):
        writes.adopt(held.slots.tolist(), f"{OLD_WRITER}{number}")
    for number, read in enumerate(image.readers):
        leases.adopt(read.slots.tolist(), f"{OLD_READER}{number}", read.until_s)
    return len(image.blocks) - table.trim()


def _adopt_blocks(table: SlotTable, image: PoolImage) -> None:
    blocks, index, eviction = image.blocks, table.index, table.eviction
    slots, hashes, parents = blocks.slot.tolist(), split(blocks.hashes), split(blocks.parents)
    for stretch in _stretches(image, slots, parents):
        first, end = stretch.first, stretch.end
        own, mine = hashes[first:end], slots[first:end]
        namespace = image.namespaces[int(blocks.space[first])]
        listed = SlotList.of(mine, ascending=True)
        retention = Retention(Priority(int(blocks.priority[first])), float(blocks.until_s[first]))
        table.columns.begin_writing(listed)
        run = Run(b"".join(own), mine, listed)
        index.claim(run, own, parents[first:end], namespace, blocks.depth[first:end])
        index.roots.restore(mine, blocks.roots[first:end])
        eviction.claimed(listed, own, retention)
        # Before the touch, which gives each block a place by its uses, and counts as none so soon after the claim.
        eviction.policy.recall_uses(listed, blocks.uses[first:end])
        stamp = eviction.touched(listed, is_use=False, retention=retention)
        eviction.policy.recall_times(listed, blocks.used_s[first:end], blocks.touched_s[first:end])
        table.publish(index.spaces[namespace], own, mine, stamp)


def _stretches(image: PoolImage, slots: list[int], parents: list[bytes]) -> Iterator[_Stretch]:
    """Yield the blocks in the order of eviction; of one touch, the end of a chain before its beginning."""
    blocks, names = image.blocks, image.namespaces
    terms = zip(blocks.priority.tolist(), blocks.until_s.tolist(), strict=True)
    keys = list(zip(blocks.touch.tolist(), blocks.space.tolist(), terms, strict=True))
    of_touch, begin = list[_Stretch](), 0
    for at in range(1, len(slots) + 1):
        is_end = at == len(slots)
        is_new = is_end or keys[at][:2] != keys[begin][:2]
        is_root = not is_end and parents[at] == names[keys[at][1]]
        if is_new or is_root or keys[at] != keys[begin] or slots[at] < slots[at - 1]:
            of_touch.append(_Stretch(begin, at))
            begin = at
            if is_new:
                yield from reversed(of_touch)
                of_touch.clear()

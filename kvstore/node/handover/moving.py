"""Copy the blocks of a store's last life to new memory, if the old memory does not fit the settings."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore.blocks.chain import HASH_BYTES
from kvstore.blocks.indexes import IndexArray
from kvstore.config import StoreConfig
from kvstore.disk.records import PAGE_BYTES
from kvstore.memory.arena import Arena, create_arena
from kvstore.memory.slot_layout import SLOT_ALIGNMENT_BYTES, divided
from kvstore.node.handover.message import Message
from kvstore.pool.handover.image import BlockColumns, PoolImage, split
from kvstore.pool.tenants.make import slots_in


def fits(message: Message, config: StoreConfig) -> bool:
    """Return whether a store with these settings can use the old memory as it is."""
    has_pages = not config.disk_path or message.slot_bytes % PAGE_BYTES == 0
    return message.capacity_bytes == config.capacity_bytes and config.block_bytes <= message.slot_bytes and has_pages


def move(old: Arena, message: Message, image: PoolImage, config: StoreConfig) -> tuple[Arena, Message, PoolImage]:
    """Copy blocks to a new arena, which the caller owns; return it, and what describes it.

    Without room for all of them, those that would be evicted first are left out: of each tenant those beyond its
    new quota, so that they cost the others nothing, and then of all. Nobody of the old life knows the new
    memory, so no reader or writer has to be waited for.

    Raises:
        ConfigError: there is no memory for both at once, or the blocks do not fit these settings; nothing is left.
    """
    alignment = PAGE_BYTES if config.disk_path else SLOT_ALIGNMENT_BYTES
    largest = max([config.block_bytes, *message.block_bytes.values()])
    slot_bytes, num_slots = divided(config.capacity_bytes, largest, alignment)
    arena = create_arena(config.capacity_bytes)
    try:
        whose = _owners_now(image, [quota.name for quota in config.tenants])
        limits = [slots_in(quota.max_bytes, slot_bytes, num_slots) for quota in config.tenants]
        kept = _last_to_go(image.blocks, num_slots, whose[image.blocks.slot], limits)
        slots = image.blocks.slot[kept]
        # Neighbours stay neighbours.
        order = np.argsort(slots, kind="stable")
        places = np.empty(len(kept), np.int32)
        places[order] = np.arange(len(kept), dtype=np.int32)
        num_bytes = min(slot_bytes, message.slot_bytes)
        for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
            piece = old.memory[slot * message.slot_bytes :][:num_bytes]
            arena.memory[place * slot_bytes : place * slot_bytes + num_bytes] = piece
    except BaseException:
        arena.close()
        raise
    owners = np.zeros(num_slots, np.uint8)
    owners[places] = image.owners[slots]
    moved = PoolImage(
        generations=np.zeros(num_slots, np.uint32),
        tenants=image.tenants,
        owners=owners,
        namespaces=image.namespaces,
        blocks=_picked(image.blocks, kept, places),
        writers=(),
        readers=(),
    )
    changes = {"capacity_bytes": config.capacity_bytes, "slot_bytes": slot_bytes, "writers": (), "readers": ()}
    return arena, msgspec.structs.replace(message, **changes), moved


def _owners_now(image: PoolImage, names: list[str]) -> npt.NDArray[np.intp]:
    """Return for each slot the number of its tenant among these names, from 1 on; 0 for the shared one."""
    numbers = {name: number for number, name in enumerate(names, 1)}
    return np.array([0, *(numbers.get(name, 0) for name in image.tenants)], np.intp)[image.owners]


def _last_to_go(blocks: BlockColumns, most: int, owners: npt.NDArray[np.intp], limits: list[int | None]) -> IndexArray:
    """Return the positions of the blocks that stay, in their order: without those that are evicted first."""
    # Of one touch, the end of a chain goes before its beginning.
    order = np.lexsort((-blocks.depth, blocks.touch, blocks.priority))
    counts = np.bincount(owners, minlength=len(limits) + 1).tolist()[1:]
    is_over = [limit is not None and count > limit for count, limit in zip(counts, limits, strict=True)]
    if len(blocks) > most and any(is_over):
        is_kept = _has_others_below(blocks, owners)
        for tenant, limit in enumerate(limits, 1):
            if limit is not None and is_over[tenant - 1]:
                mine = np.flatnonzero((owners[order] == tenant) & ~is_kept[order])
                order = np.delete(order, mine[: counts[tenant - 1] - limit])
    return np.sort(order[max(len(order) - most, 0) :]).astype(np.int32)


def _has_others_below(blocks: BlockColumns, owners: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Return for each block whether a block of another tenant hangs on it; it cannot go before that one."""
    spaces, found = blocks.space.tolist(), np.zeros(len(blocks), np.bool_)
    place = {(spaces[at], own): at for at, own in enumerate(split(blocks.hashes))}
    parents = split(blocks.parents)
    for at in np.argsort(-blocks.depth, kind="stable").tolist():
        above = place.get((spaces[at], parents[at]))
        if above is not None and (found[at] or owners[at] != owners[above]):
            found[above] = True
    return found


def _picked(blocks: BlockColumns, kept: IndexArray, places: IndexArray) -> BlockColumns:
    def hashes(packed: bytes) -> bytes:
        return np.frombuffer(packed, f"V{HASH_BYTES}")[kept].tobytes()

    return BlockColumns(
        slot=places, space=blocks.space[kept], hashes=hashes(blocks.hashes), parents=hashes(blocks.parents),
        depth=blocks.depth[kept], touch=blocks.touch[kept], priority=blocks.priority[kept],
        until_s=blocks.until_s[kept], uses=blocks.uses[kept], used_s=blocks.used_s[kept],
        touched_s=blocks.touched_s[kept], roots=blocks.roots[kept],
    )  # fmt: skip

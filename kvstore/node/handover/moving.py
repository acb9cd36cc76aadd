"""Copy the blocks of a store's last life to new memory, if the old memory does not fit the settings."""

from __future__ import annotations

import msgspec
import numpy as np

from kvstore.blocks.chain import HASH_BYTES
from kvstore.blocks.indexes import IndexArray
from kvstore.config import StoreConfig
from kvstore.disk.records import PAGE_BYTES
from kvstore.memory.arena import Arena, create_arena
from kvstore.memory.slot_layout import SLOT_ALIGNMENT_BYTES, divided
from kvstore.node.handover.message import Message
from kvstore.pool.handover.image import BlockColumns, PoolImage


def fits(message: Message, config: StoreConfig) -> bool:
    """Return whether a store with these settings can use the old memory as it is."""
    has_pages = not config.disk_path or message.slot_bytes % PAGE_BYTES == 0
    return message.capacity_bytes == config.capacity_bytes and config.block_bytes <= message.slot_bytes and has_pages


def move(old: Arena, message: Message, image: PoolImage, config: StoreConfig) -> tuple[Arena, Message, PoolImage]:
    """Copy blocks to a new arena, which the caller owns; return it, and what describes it.

    Without room for all of them, those that would be evicted first are left out. Nobody of the old life knows the new
    memory, so no reader or writer has to be waited for.

    Raises:
        ConfigError: there is no memory for both at once, or the blocks do not fit these settings; nothing is left.
    """
    alignment = PAGE_BYTES if config.disk_path else SLOT_ALIGNMENT_BYTES
    largest = max([config.block_bytes, *message.block_bytes.values()])
    slot_bytes, num_slots = divided(config.capacity_bytes, largest, alignment)
    arena = create_arena(config.capacity_bytes)
    try:
        kept = _last_to_go(image.blocks, num_slots)
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


def _last_to_go(blocks: BlockColumns, most: int) -> IndexArray:
    """Return the positions of the blocks that stay, in their order: without those that are evicted first."""
    if len(blocks) <= most:
        return np.arange(len(blocks), dtype=np.int32)
    # Of one touch, the end of a chain goes before its beginning.
    order = np.lexsort((-blocks.depth, blocks.touch, blocks.priority))
    return np.sort(order[len(blocks) - most :]).astype(np.int32)


def _picked(blocks: BlockColumns, kept: IndexArray, places: IndexArray) -> BlockColumns:
    def hashes(packed: bytes) -> bytes:
        return np.frombuffer(packed, f"V{HASH_BYTES}")[kept].tobytes()

    return BlockColumns(
        slot=places, space=blocks.space[kept], hashes=hashes(blocks.hashes), parents=hashes(blocks.parents),
        depth=blocks.depth[kept], touch=blocks.touch[kept], priority=blocks.priority[kept],
        until_s=blocks.until_s[kept], uses=blocks.uses[kept], used_s=blocks.used_s[kept],
        touched_s=blocks.touched_s[kept], roots=blocks.roots[kept],
    )  # fmt: skip

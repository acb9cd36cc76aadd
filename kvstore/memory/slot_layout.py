"""Divide the arena into slots of one size."""

from __future__ import annotations

from kvstore.bounds import MAX_SLOTS
from kvstore.errors import ConfigError

#: Slots begin at multiples of this, so that copies in machine words are always aligned.
SLOT_ALIGNMENT_BYTES = 64


def divided(capacity_bytes: int, block_bytes: int, alignment: int) -> tuple[int, int]:
    """Return the bytes of a slot for blocks of up to `block_bytes`, and how many slots there are.

    Args:
        capacity_bytes: of the arena.
        block_bytes: of the largest block.
        alignment: slots begin at multiples of it, in bytes.

    Raises:
        ConfigError: these are too few slots, or too many.
    """
    slot_bytes = -(-block_bytes // alignment) * alignment
    num_slots = capacity_bytes // slot_bytes
    if num_slots < 2:
        raise ConfigError(
            f"wanted room for at least 2 blocks of {slot_bytes} bytes, got a capacity of {capacity_bytes}; raise "
            "capacity="
        )
    if num_slots > MAX_SLOTS:
        raise ConfigError(
            f"wanted at most {MAX_SLOTS} slots, got room for {num_slots} of {slot_bytes} bytes in {capacity_bytes}; "
            "give block_bytes= the size of the largest block, or lower capacity="
        )
    return slot_bytes, num_slots

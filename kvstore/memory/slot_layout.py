"""Divide the arena into slots of one size, and say which blocks fit them."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.bounds import MAX_SLOTS
from kvstore.errors import ConfigError, LayoutMismatch

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


def check_known(block_bytes: int, known: int) -> None:
    """Raise LayoutMismatch if the blocks of a namespace have another size here."""
    if known != block_bytes:
        raise LayoutMismatch(
            f"blocks of this namespace have {known} bytes here, got a client with {block_bytes}; "
            "run one version of raykv everywhere"
        )


def check_fits(block_bytes: int, slot_bytes: int, held: Mapping[bytes, int]) -> None:
    """Raise ConfigError if blocks do not fit slots that are in use; `held` has the size of blocks by namespace."""
    if block_bytes > slot_bytes:
        holder = max(held, key=held.__getitem__)
        raise ConfigError(
            f"the slots of this store hold {slot_bytes} bytes and are in use: the largest blocks are those of "
            f"namespace {holder.hex()[:12]}, {held[holder]} bytes. Got a namespace with blocks of {block_bytes}; start "
            f"another store (name=) for it, or this one again with block_bytes={block_bytes}, which every block then "
            "takes. `kvstore restart` keeps what is saved"
        )

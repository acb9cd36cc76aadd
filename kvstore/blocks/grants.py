"""What a pool hands out: grants of pinned blocks, tickets for blocks to write, and its counts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvstore.blocks.codec import U32, U64, Epoch, Record
from kvstore.blocks.indexes import IndexArray, PackedInts, check_below, checked_slots, ints_in
from kvstore.errors import ProtocolError


class PinKind(Enum):
    """How strongly blocks are held.

    LEASE: read now, until a deadline. HARD: never evicted, counted against a quota of its own. SOFT: a
    preference, evicted last, when nothing else is left.
    """

    LEASE = 0
    HARD = 1
    SOFT = 2


class Grant(Record, frozen=True):
    """Pinned blocks: a prefix of what was asked for.

    Args:
        lease_id: names the pin to `release`; 0 when nothing was pinned.
        packed_slots: slot of each pinned block, in chain order, from `pack_ints`.
        generations: the life of each slot, little-endian uint32.
        num_refused: readable blocks behind them that the budget of pins had no room for.
        epoch: the life of the pool; leases of another one are void.
    """

    lease_id: U64 = 0
    packed_slots: bytes = b""
    generations: bytes = b""
    num_refused: U32 = 0
    epoch: Epoch = bytes(8)

    @property
    def slots(self) -> PackedInts:
        """The slots, one by one.

        Raises:
            ProtocolError: these are no whole integers.
        """
        ints_in(self.packed_slots)
        return PackedInts(self.packed_slots)

    def slots_of(self, num_blocks: int, num_slots: int) -> PackedInts:
        """Return the slots of a grant that another process made; arguments as for `checked_slots`.

        Raises:
            ProtocolError: these are not of those blocks and that memory.
        """
        checked_slots(ints_in(self.packed_slots), num_blocks, num_slots)
        return PackedInts(self.packed_slots)


class StoreTicket(Record, frozen=True, kw_only=True):
    """What `prepare_store` claimed.

    Args:
        write_id: names the write to `complete_store` and `abort_store`; 0 when there is nothing to write.
        packed_indexes: positions in the chain that the caller has to write, ascending, from `pack_ints`.
        packed_slots: slot of each of them.
        num_resident: blocks that were there already, or are just being written by somebody else.
        num_refused: blocks at the end of the chain for which no slot could be had.
        num_awaited: how many of the resident ones are still being written by somebody else, who may yet give
            them up; `Pool.watch` tells how that ended.
        num_clears: how often the namespace had been cleared, or another that shares its counter. Where that is
            another count than the caller named, nothing was claimed.
        generations: the life of each slot, little-endian uint32; `complete_store` can be given them back.
        epoch: the life of the pool; tickets of another one are void.
    """

    write_id: U64
    packed_indexes: bytes = b""
    packed_slots: bytes = b""
    num_resident: U32 = 0
    num_refused: U32 = 0
    num_awaited: U32 = 0
    num_clears: U64 = 0
    generations: bytes = b""
    epoch: Epoch = bytes(8)

    @property
    def indexes(self) -> PackedInts:
        """The positions, one by one."""
        return PackedInts(self.packed_indexes)

    @property
    def slots(self) -> PackedInts:
        """The slots, one by one."""
        return PackedInts(self.packed_slots)

    def arrays(self, num_blocks: int, num_slots: int) -> tuple[IndexArray, IndexArray]:
        """Return (positions, slots) of a ticket that another process made.

        Args:
            num_blocks: that were asked for.
            num_slots: of the memory that the slots are in.

        Raises:
            ProtocolError: these are not as many, or not of those blocks and that memory, or the counts do not add up.
        """
        if len(self.packed_indexes) != len(self.packed_slots):
            raise ProtocolError(
                f"wanted as many slots as positions, got {len(self.packed_slots)} bytes of them and "
                f"{len(self.packed_indexes)}"
            )
        indexes, slots = ints_in(self.packed_indexes), ints_in(self.packed_slots)
        counts = (len(indexes), self.num_resident, self.num_refused)
        if sum(counts) != num_blocks or self.num_awaited > self.num_resident or bool(self.write_id) != bool(counts[0]):
            raise ProtocolError(
                f"wanted a ticket for {num_blocks} blocks, got one for {counts[0]} to write, {counts[1]} that are "
                f"here ({self.num_awaited} of them awaited) and {counts[2]} refused, as write {self.write_id}; run one "
                "version of raykv everywhere"
            )
        check_below("positions", indexes, num_blocks - self.num_refused)
        if np.any(indexes[1:] <= indexes[:-1]):
            raise ProtocolError("wanted ascending positions, got others; run one version of raykv everywhere")
        return indexes, checked_slots(slots, len(indexes), num_slots, is_whole=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Counts of one snapshot, taken under the lock; the five slot counts add up to `num_slots`."""

    num_slots: int
    num_free: int
    num_writing: int
    num_idle: int
    num_pinned: int
    num_quarantined: int
    num_leases: int
    num_writes: int
    num_evicted: int
    num_published: int
    num_hard_pinned: int = 0
    num_soft_pinned: int = 0
    #: Of `num_leases`, how many are soft pins.
    num_soft_pins: int = 0

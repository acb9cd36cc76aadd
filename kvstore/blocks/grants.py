"""Define a pool's results: grants of pinned blocks, tickets for writes, and its counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.codec import U32, U64, Epoch, Record
from kvstore.blocks.indexes import INT_BYTES, IndexArray, check_below, checked_slots, ints_in
from kvstore.errors import ProtocolError

_FEW_SLOTS = 512


class PinKind(Enum):
    """How strongly blocks are held.

    LEASE: read now, until a deadline. HARD: never evicted, counted against its own quota. SOFT: only a
    preference; evicted last, when no other block is left.
    """

    LEASE = 0
    HARD = 1
    SOFT = 2


class Grant(Record, frozen=True):
    """Pinned blocks: a prefix of the requested run.

    Args:
        lease_id: names the pin to `release`; 0 when nothing was pinned.
        packed_slots: slot of each pinned block, in chain order, from `pack_ints`.
        generations: generation of each slot, little-endian uint32.
        num_refused: readable blocks after the prefix for which the budget of pins had no room.
        epoch: the life of the pool; leases of another epoch are void.
    """

    lease_id: U64 = 0
    packed_slots: bytes = b""
    generations: bytes = b""
    num_refused: U32 = 0
    epoch: Epoch = bytes(8)

    @property
    def num_blocks(self) -> int:
        """Number of pinned blocks."""
        return len(self.packed_slots) // INT_BYTES

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots, one by one.

        Raises:
            ProtocolError: the bytes are not whole integers.
        """
        return tuple(ints_in(self.packed_slots).tolist())

    def slots_of(self, num_blocks: int, num_slots: int) -> Sequence[int]:
        """Return the slots of another process's grant, checked; arguments as for `checked_slots`.

        Raises:
            ProtocolError: there are more slots than blocks, or a slot is outside that memory.
        """
        packed, is_whole = self.packed_slots, not len(self.packed_slots) % INT_BYTES
        # A few slots are checked without NumPy, which a lease asks for nothing else: between two switches of the
        # process its own code costs more. As unsigned integers, those below 0 are too large.
        are_few = 0 < self.num_blocks <= min(num_blocks, _FEW_SLOTS)
        if not (is_whole and are_few and max(memoryview(packed).cast("I")) < num_slots):
            checked_slots(ints_in(packed), num_blocks, num_slots)
        return memoryview(packed).cast("i")


class HeldBlock(NamedTuple):
    """A pinned block of a pool, named by its slot: what another tier needs to store the same block."""

    slot: int
    namespace: bytes
    parent: bytes
    depth: int
    block_hash: bytes
    is_low: bool = False
    root_key: int = 0
    tenant: str = ""


class Victims(NamedTuple):
    """Blocks that were about to be evicted, pinned so that they can be written to another tier before.

    Args:
        lease_id: of their pin.
        slots: of the blocks, in the order of eviction: each after those that build on it.
        namespaces: of each.
        touches: the stamp of each one's last touch; a block with a later one was used meanwhile.
    """

    lease_id: int
    slots: list[int]
    namespaces: list[bytes]
    touches: list[int]


class StoreTicket(Record, frozen=True, kw_only=True):
    """The claim that `prepare_store` made.

    Args:
        write_id: names the write to `complete_store` and `abort_store`; 0 when there is nothing to write.
        packed_indexes: positions in the chain that the caller has to write, ascending, from `pack_ints`.
        packed_slots: slot of each position.
        num_resident: blocks that were here already, or that another writer is writing now.
        num_refused: blocks at the end of the chain for which there was no slot.
        num_awaited: how many of the resident blocks another writer is still writing. It may yet give them
            up; `Pool.watch` reports the outcome.
        num_clears: the count of clearings of the namespace, or of another one that shares its counter. If the caller
            named another count, nothing was claimed.
        generations: generation of each slot, little-endian uint32; the caller may pass them to `complete_store`.
        epoch: the life of the pool; tickets of another epoch are void.
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
    def indexes(self) -> tuple[int, ...]:
        """The positions, one by one."""
        return tuple(ints_in(self.packed_indexes).tolist())

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots, one by one."""
        return tuple(ints_in(self.packed_slots).tolist())

    def arrays(self, num_blocks: int, num_slots: int) -> tuple[IndexArray, IndexArray]:
        """Return (positions, slots) of another process's ticket, checked.

        Args:
            num_blocks: blocks that were asked for.
            num_slots: size of the memory that holds the slots.

        Raises:
            ProtocolError: positions and slots differ in number, one is out of range, or the counts do not add up.
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
        if not counts[0]:
            return indexes, slots
        check_below("positions", indexes, num_blocks - self.num_refused)
        if (indexes[1:] <= indexes[:-1]).any():
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
    #: Part of `num_leases`: leases that are soft pins.
    num_soft_pins: int = 0
    #: Blocks of that priority, with those whose time has ended but whose turn to go has not come since.
    num_low: int = 0
    num_high: int = 0


def chain_of(run: list[HeldBlock]) -> BlockHashes:
    """Return the names of blocks that follow each other."""
    first = run[0]
    data = b"".join([block.block_hash for block in run])
    return BlockHashes(first.namespace, first.parent, first.depth, data, first.root_key)


def runs_of_held(blocks: list[HeldBlock]) -> Iterator[list[HeldBlock]]:
    """Cut blocks where one does not follow the one before, or is another tenant's."""
    run = list[HeldBlock]()
    for block in blocks:
        if run:
            last = run[-1]
            follows = block.parent == last.block_hash and block.depth == last.depth + 1
            if not follows or block.tenant != last.tenant:
                yield run
                run = []
        run.append(block)
    if run:
        yield run

"""Messages between a client and the store of its node, except for hand-offs."""

from __future__ import annotations

import struct

import msgspec

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.codec import U16, U32, U64, Epoch, NodeId, Record, decoder
from kvstore.blocks.grants import Grant, StoreTicket
from kvstore.blocks.indexes import IndexArray, checked_slots, ints_in
from kvstore.errors import ProtocolError

#: By which a store knows the owner of the leases of another.
OWNER_KEY_BYTES = 8
#: Lease id, epoch of the store that granted it, key of its owner, which read: what a finished READ notifies. Not
#: a message: it travels through NIXL, and each 24 bytes are one, so that a peer cannot send what breaks a mover.
NOTIFICATION = struct.Struct("<Q8s8s")
#: Set in the id of a fetch or a claim whose slots are in the client's stage and not in the arena.
STAGE_BIT = 1 << 62


class Attach(Record, frozen=True):
    """Make room for blocks of a namespace."""

    namespace: bytes
    block_bytes: int


class Ask(Record, frozen=True):
    """Ask about a run, for so many seconds: a lease, word of a save by others, or which nodes have it."""

    chain: BlockHashes
    seconds: float


class AskLoad(Record, frozen=True):
    """Ask for a pin of a run, fetching from peers what is missing."""

    chain: BlockHashes
    ttl_s: float
    timeout_s: float


class AskPin(Record, frozen=True):
    """Ask for a pin of a run's readable prefix, hard or soft."""

    chain: BlockHashes
    is_soft: bool
    ttl_s: float


class Prepare(Record, frozen=True):
    """Ask for slots to write one part of each block of a run into, of KV from before a later clearing than that."""

    chain: BlockHashes
    num_parts: U16 = 1
    part: U16 = 0
    num_clears: U64 | None = None


class WriteEnd(Record, frozen=True):
    """Complete or abort the write of a ticket, naming the lives of its slots and of the store."""

    write_id: U64
    epoch: Epoch
    generations: bytes = b""

    @staticmethod
    def of(ticket: StoreTicket) -> WriteEnd:
        """Return the end of the write of a ticket."""
        return WriteEnd(ticket.write_id, ticket.epoch, ticket.generations)


class Renew(Record, frozen=True):
    """Ask for more time for a lease."""

    lease_id: U64
    ttl_s: float


class Found(Record, frozen=True):
    """Which nodes have how much of a run, the own one first; or a directory's hints.

    Args:
        nodes: (node, blocks from the start of the run on).
        only: the only node that has anything, as far as the directory knows.
    """

    nodes: list[tuple[NodeId, U64]]
    only: str = ""


class LoadReport(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """What one load or fetch cost.

    Args:
        num_local: blocks that were in this node's memory.
        num_peer: blocks that were read from other nodes.
        reason: why it ended early, or nothing.
        peers: the nodes that were read from.
        num_bytes: that were read from them.
        num_descriptors: that the engine needed for it.
        read_s: from the first question to a peer to the last byte.
        num_locate_calls: how often the directory was asked.
        num_lease_calls: how often a peer was.
        note: why a hand-off did not go the faster way.
        waited_s: that a fetch had waited here when its blocks were claimed for it; the claim was made no earlier.
    """

    num_local: U64 = 0
    num_peer: U64 = 0
    reason: str = ""
    peers: list[str] = []
    num_bytes: U64 = 0
    num_descriptors: U64 = 0
    read_s: float = 0.0
    num_locate_calls: U64 = 0
    num_lease_calls: U64 = 0
    note: str = ""
    waited_s: float = 0.0


class Progress(Record, frozen=True):
    """One piece of the answer to a load: the slots of the blocks that became readable from `first` on.

    They are packed by `pack_ints`. The last piece carries the report.
    """

    lease_id: U64
    first: U32
    packed_slots: bytes = b""
    report: LoadReport | None = None

    @property
    def slots(self) -> IndexArray:
        """The slots.

        Raises:
            ProtocolError: these are no whole integers.
        """
        return ints_in(self.packed_slots)

    def slots_after(self, num_ready: int, num_blocks: int, num_slots: int) -> IndexArray:
        """Return the slots, of an answer that goes on where the last piece ended.

        Args:
            num_ready: blocks of the pieces before.
            num_blocks: that were asked for.
            num_slots: of the memory that the slots are in.

        Raises:
            ProtocolError: these are not of the next blocks and that memory.
        """
        slots = self.slots
        if len(slots) and self.first != num_ready:
            raise ProtocolError(f"wanted slots from block {num_ready} on, got some from block {self.first} on")
        return checked_slots(slots, num_blocks - num_ready, num_slots)


decode_attach = decoder(Attach)
decode_ask = decoder(Ask)
decode_ask_load = decoder(AskLoad)
decode_ask_pin = decoder(AskPin)
decode_prepare = decoder(Prepare)
decode_write_end = decoder(WriteEnd)
decode_renew = decoder(Renew)
decode_found = decoder(Found)
decode_grant = decoder(Grant)
decode_ticket = decoder(StoreTicket)
decode_progress = decoder(Progress)

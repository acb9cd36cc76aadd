"""Define the messages between a client and the store of its node, except hand-offs."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.codec import U16, U32, U64, Epoch, NodeId, Record, decoder
from kvstore.blocks.grants import Grant, StoreTicket
from kvstore.blocks.indexes import IndexArray, checked_slots, ints_in
from kvstore.blocks.priority import Priority
from kvstore.errors import ProtocolError

#: Length of the key that names another store as the owner of leases.
OWNER_KEY_BYTES = 8
#: The notification of a finished READ: lease id, epoch of the granting store, key of the owner that read. It travels
#: through NIXL and is no message: any 24 bytes are a valid one, so that a peer's notification cannot break a mover.
NOTIFICATION = struct.Struct("<Q8s8s")
#: Set in the id of a fetch or a claim if its slots are in the client's stage, not in the arena.
STAGE_BIT = 1 << 62


class Attach(Record, frozen=True):
    """Make room for blocks of a namespace."""

    namespace: bytes
    block_bytes: int


class Ask(Record, frozen=True):
    """Ask about a run, with a time: for a lease, or the end of others' saves."""

    chain: BlockHashes
    seconds: float


class AskLookup(Record, frozen=True):
    """Ask how much of a run is stored.

    Args:
        chain: the run.
        seconds: how long the directory may take.
        save_wait_s: how long the store waits for blocks that are being saved on this node.
    """

    chain: BlockHashes
    seconds: float
    save_wait_s: float


class AskLoad(Record, frozen=True):
    """Ask for a pin of a run; the store fetches missing blocks from peers.

    With the priority LOW, blocks that are LOW stay so.
    """

    chain: BlockHashes
    ttl_s: float
    timeout_s: float
    priority: Priority = Priority.NORMAL


class AskPin(Record, frozen=True):
    """Ask for a pin of a run's readable prefix, hard or soft."""

    chain: BlockHashes
    is_soft: bool
    ttl_s: float


class Prepare(Record, frozen=True):
    """Ask for slots to write one part of each block of a run; refused if `num_clears` is not the present count.

    The blocks have the priority for `priority_s` seconds from now, or as long as they are here when that is None.
    """

    chain: BlockHashes
    num_parts: U16 = 1
    part: U16 = 0
    num_clears: U64 | None = None
    priority: Priority = Priority.NORMAL
    priority_s: float | None = None


class WriteEnd(Record, frozen=True):
    """Complete or abort a ticket's write. Has the generations of its slots and the store's epoch."""

    write_id: U64
    epoch: Epoch
    generations: bytes = b""

    @staticmethod
    def of(ticket: StoreTicket) -> WriteEnd:
        """Return the message that ends the write of a ticket."""
        return WriteEnd(ticket.write_id, ticket.epoch, ticket.generations)


class Renew(Record, frozen=True):
    """Ask for more time for a lease."""

    lease_id: U64
    ttl_s: float


class Found(Record, frozen=True):
    """How much of a run each node has: a directory's hints.

    Args:
        nodes: (node, leading blocks of the run that it has).
        only: the only node that has any blocks, as far as the directory knows.
    """

    nodes: list[tuple[NodeId, U64]]
    only: str = ""


class FoundByStore(Record, frozen=True):
    """How much of a run each node has, as a store answers its workers.

    Args:
        nodes: (node, leading blocks of the run that it has); the worker's own node first, with those in its memory.
        num_disk: blocks after these on the disk of the worker's node.
        disk_bytes_per_s: how fast that disk was read lately; 0 if it was not.
    """

    nodes: list[tuple[NodeId, U64]]
    num_disk: U64
    disk_bytes_per_s: U64


class LoadReport(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """The costs of one load or fetch.

    Args:
        num_local: blocks that were in this node's memory.
        num_peer: blocks that were read from other nodes.
        reason: why it ended early, or empty.
        peers: the nodes that were read from.
        num_bytes: bytes that were read from peers.
        num_descriptors: descriptors that NIXL needed for it.
        read_s: time from the first request to a peer until the last byte.
        num_locate_calls: how often the directory was asked.
        num_lease_calls: how often a peer was asked for a lease.
        note: why a hand-off did not use the faster way.
        waited_s: how long a fetch had waited here before its blocks were claimed; the claim was made no earlier.
        num_disk: blocks that were read from this node's disk.
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
    num_disk: U64 = 0


class Progress(Record, frozen=True):
    """One piece of a load's answer: slots of newly readable blocks, from block `first` on.

    The slots are packed by `pack_ints`. The last piece has the report.
    """

    lease_id: U64
    first: U32
    packed_slots: bytes = b""
    report: LoadReport | None = None

    @property
    def slots(self) -> IndexArray:
        """The slots; raises ProtocolError if the bytes are not whole integers."""
        return ints_in(self.packed_slots)

    def slots_after(self, num_ready: int, num_blocks: int, num_slots: int) -> IndexArray:
        """Return the slots after a check that this piece continues the answer.

        Args:
            num_ready: blocks of the earlier pieces.
            num_blocks: blocks that were asked for.
            num_slots: size of the memory that holds the slots.

        Raises:
            ProtocolError: the slots are not for the next blocks, are too many, or are outside that memory.
        """
        slots = self.slots
        if len(slots) and self.first != num_ready:
            raise ProtocolError(f"wanted slots from block {num_ready} on, got some from block {self.first} on")
        return checked_slots(slots, num_blocks - num_ready, num_slots)


decode_attach = decoder(Attach)
decode_ask = decoder(Ask)
decode_ask_lookup = decoder(AskLookup)
decode_ask_load = decoder(AskLoad)
decode_ask_pin = decoder(AskPin)
decode_prepare = decoder(Prepare)
decode_write_end = decoder(WriteEnd)
decode_renew = decoder(Renew)
decode_found = decoder(Found)
decode_found_by_store = decoder(FoundByStore)
#: Of LOOKUP: leading blocks in this node's memory, those after them on its disk, and its bytes per second.
decode_held: Callable[[bytes], tuple[int, int, int]] = decoder(tuple[U64, U64, U64])
decode_grant = decoder(Grant)
decode_ticket = decoder(StoreTicket)
decode_progress = decoder(Progress)

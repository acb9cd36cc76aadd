"""Messages between a store and its mover: READs, how they end, stages, and the mover's own transport."""

from __future__ import annotations

from kvstore.blocks.codec import U32, U64, Record, decoder
from kvstore.blocks.indexes import IndexArray
from kvstore.mover.transport import PeerDescription, ReadRequest


class Slots(Record, frozen=True):
    """Tell how the arena is divided."""

    slot_bytes: U64
    num_slots: U64


class AddPeer(Record, frozen=True):
    """Name a peer, and tell how to read its slab."""

    peer: str
    description: PeerDescription


class MoverRead(Record, frozen=True):
    """Ask for one READ, done and reported in chunks; `chunk_ends` are their ends, ascending."""

    read_id: U64
    request: ReadRequest
    chunk_ends: IndexArray
    timeout_s: float


class MoverWake(Record, frozen=True):
    """Tell the mover which READ to do when it gets `word`."""

    word: bytes
    request: ReadRequest


class MoverDone(Record, frozen=True):
    """Report on a READ: its first `num_blocks` blocks are in place.

    `last` marks the last report. With an `error`, `terminal` says whether NIXL can no longer write to the destination;
    if it still can, a MOVER_TERMINAL follows later.
    """

    read_id: U64
    num_blocks: U32
    last: bool
    terminal: bool
    seconds: float
    num_descriptors: U32
    error: bytes = b""


class MoverReady(Record, frozen=True):
    """Announce a mover, with the data that peers need to read this node's arena through it."""

    agent: bytes
    address: U64


class NewStage(Record, frozen=True):
    """Ask for a stage on a GPU."""

    uuid: str
    slot_bytes: U64
    num_slots: U64


class StageMade(Record, frozen=True):
    """Tell how to reach a stage, and the handle by which a worker maps it."""

    slab: U32
    agent: bytes
    address: U64
    gpu: U32
    handle: bytes


class Spill(Record, frozen=True):
    """Ask for slots of a stage to be copied into slots of the arena."""

    slab: U32
    slots: IndexArray
    into: IndexArray
    block_bytes: U64


class OwnTransport(Record, frozen=True):
    """The data that peers need to read this node's slab through its present mover."""

    generation: int
    agent: bytes
    address: int


decode_slots = decoder(Slots)
decode_add_peer = decoder(AddPeer)
decode_mover_read = decoder(MoverRead)
decode_mover_wake = decoder(MoverWake)
decode_mover_done = decoder(MoverDone)
decode_mover_ready = decoder(MoverReady)
decode_new_stage = decoder(NewStage)
decode_stage_made = decoder(StageMade)
decode_spill = decoder(Spill)

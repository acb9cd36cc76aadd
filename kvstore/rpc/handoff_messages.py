"""Messages that a hand-off needs between a client and its store, and of stages between stores."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.blocks.codec import U32, U64, Digest, Epoch, NodeId, Record, decoder


class PrepareHandoff(Record, frozen=True):
    """Ask for slots of the arena (slab 0), or of a stage of one life of the mover, to publish blocks in.

    `writer` is a number of its own that a publisher tells only its store: with it, it says that its copies have ended.
    `num_clears` is that of the namespace from when it was asked to publish.
    """

    key: Digest
    writer: U64
    namespace: Digest
    num_blocks: U32
    slab: U32 = 0
    generation: U64 = 0
    num_clears: U64 = 0


class CompleteHandoff(Record, frozen=True):
    """Say that the bytes are in place, and how long they are to be kept."""

    key: Digest
    writer: U64
    ttl_s: float


class AbortHandoff(Record, frozen=True):
    """Say that the blocks will not come, and that nothing of their publisher writes to their slots any more."""

    key: Digest
    writer: U64


class FetchRequest(Record, frozen=True):
    """Ask the own store for the blocks of a ticket, on any node.

    Args:
        key: of the ticket.
        namespace: of the ticket, and of the client.
        epoch: of the store that has the blocks.
        node_id: that store's node.
        num_blocks: of the ticket.
        ttl_s: how long the client wants to hold blocks that it copies straight out of the publisher's slots.
        timeout_s: give up after this long.
        from_slab: of the ticket.
        slab: the client's own stage, 0 if it has none.
        generation: the life of the mover that has this stage.
        is_early: of the ticket.
    """

    key: Digest
    namespace: Digest
    epoch: Epoch
    node_id: NodeId
    num_blocks: U32
    ttl_s: float
    timeout_s: float
    from_slab: U32 = 0
    slab: U32 = 0
    generation: U64 = 0
    is_early: bool = False


class Soon(Record, frozen=True):
    """Say that a fetch comes: from a node's stage into one of this node, of one life of its mover.

    A store passes the bytes on to its mover, which was told before what to do when it gets just these.
    """

    node_id: NodeId
    from_slab: int
    slab: int
    generation: int


class End(Record, frozen=True):
    """End a fetch or a claim by its id; `used` says whether the blocks arrived."""

    number: U64
    used: bool


class AskStage(Record, frozen=True):
    """Ask for the stage of a GPU."""

    uuid: str
    num_bytes: U64
    block_bytes: U64


class StageFound(Record, frozen=True):
    """Describe one stage of a node, for one life of its mover.

    Args:
        slab: its number in that mover.
        generation: which life.
        uuid: of the GPU.
        handle: a worker maps it by this.
        agent: of NIXL, for those that read it.
        address: its first byte in the mover.
        gpu: ordinal there.
        slot_bytes: distance between its slots.
        num_slots: with those that hold nothing.
        num_warm: slots at the end that hold nothing: warming a lane up reads them.
    """

    slab: U32
    generation: U64
    uuid: str
    handle: bytes
    agent: bytes
    address: U64
    gpu: U32
    slot_bytes: U64
    num_slots: U64
    num_warm: U64


class WarmUp(Record, frozen=True):
    """Ask for the lanes from a node into the own stage to be warmed up and measured."""

    slab: U32
    generation: U64
    node_id: NodeId


class LaneFound(Record, frozen=True):
    """Say how fast a lane is, or why it is not used."""

    gb_per_s: float
    why_not: str


decode_prepare_handoff = decoder(PrepareHandoff)
decode_complete_handoff = decoder(CompleteHandoff)
decode_abort_handoff = decoder(AbortHandoff)
decode_fetch = decoder(FetchRequest)
decode_end = decoder(End)
decode_key: Callable[[bytes], bytes] = decoder(Digest)
decode_ask_stage = decoder(AskStage)
decode_stage = decoder(StageFound)
decode_stages = decoder(list[StageFound])
decode_warm_up = decoder(WarmUp)
decode_lanes = decoder(list[LaneFound])

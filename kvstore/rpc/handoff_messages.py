"""Define hand-off messages between a client and its store, and messages about stages between stores."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.blocks.codec import U32, U64, Digest, Epoch, NodeId, Record, decoder


class PrepareHandoff(Record, frozen=True):
    """Ask for slots to publish blocks in, of the arena (slab 0) or of a stage.

    `generation` is that of the stage's mover. `writer` is a number that a publisher tells only its store, later to
    report that its copies have ended. `num_clears` is the namespace's count when the publication was requested.
    """

    key: Digest
    writer: U64
    namespace: Digest
    num_blocks: U32
    slab: U32 = 0
    generation: U64 = 0
    num_clears: U64 = 0


class CompleteHandoff(Record, frozen=True):
    """Report that the bytes are in place, and how long to keep them."""

    key: Digest
    writer: U64
    ttl_s: float


class AbortHandoff(Record, frozen=True):
    """Report that the blocks will not come. Their publisher writes to their slots no more."""

    key: Digest
    writer: U64


class FetchRequest(Record, frozen=True):
    """Ask the client's own store for the blocks of a ticket, on any node.

    `epoch` and `node_id` are of the store that has the blocks. The client wants to hold blocks that it copies directly
    from the publisher's slots for `ttl_s`, and gives up after `timeout_s`. `slab` is its own stage, 0 if it has none,
    in the mover of this `generation`. The other fields are those of the ticket.
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
    """Announce a fetch from a node's stage into a stage of this node's mover, of one generation.

    The store forwards these bytes to its mover, which knows in advance what to do when exactly these bytes come.
    """

    node_id: NodeId
    from_slab: int
    slab: int
    generation: int


class End(Record, frozen=True):
    """End a fetch or a claim by its id; `used` is whether the blocks arrived.

    A reader that gave up a question for a claim does not know the id: `number` is that of the question then.
    """

    number: U64
    used: bool


class AskStage(Record, frozen=True):
    """Ask for the stage of a GPU."""

    uuid: str
    num_bytes: U64
    block_bytes: U64


class StageFound(Record, frozen=True):
    """Describe one stage of a node, for one generation of its mover.

    A worker maps it with `handle`. `slab` is its number and `gpu` the GPU's ordinal in that mover. `slot_bytes` is the
    distance between slots. The last `num_warm` of its `num_slots` never hold blocks; warming up a lane reads them.
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
    """Ask to warm up and measure the lanes from a node into the client's own stage."""

    slab: U32
    generation: U64
    node_id: NodeId


class LaneFound(Record, frozen=True):
    """Report the speed of a lane, or why it is not used."""

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

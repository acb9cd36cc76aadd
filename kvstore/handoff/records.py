"""The records of the table of hand-offs: places, claims, and why a ticket is void."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.blocks.indexes import IndexArray
from kvstore.pool.pool import Pool

#: Set in the id of every claim and of no lease, so that a notification can name either.
CLAIM_BIT = 1 << 63
#: The reason for a ticket whose blocks are being written, or will be: ask again.
NOT_READY = "not_ready: the blocks of this ticket are not all there yet"
NOT_READY_IN_TIME = (
    "timeout: the blocks of this ticket were not all there yet at the end of the fetch's timeout_s; fetch again, and "
    "see whether their publisher still works"
)
DRAINING = "draining: the node that was to have the blocks of this ticket is drained, and takes no more"
REASONS = {
    "used": "used: the blocks of this ticket have been fetched, and a ticket is good for one fetch",
    "expired": "expired: nobody fetched the blocks of this ticket in time; publish with a longer ttl_s",
    "withdrawn": "withdrawn: the publisher took the blocks of this ticket back, or could not copy them",
    "owner_gone": "owner_gone: the client that published the blocks of this ticket was closed or died",
    "peer_lost": "peer_lost: the blocks were in the memory of a GPU, and the mover that kept it has died",
    "cleared": "cleared: the namespace was cleared after the blocks were published",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to read published blocks, alone: `slots` keep their bytes until it ends."""

    claim_id: int
    slots: IndexArray
    slab: int = 0
    generation: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where slots for hand-offs are.

    Args:
        pool: of the slots.
        max_slots: how many of them hand-offs may hold at once.
        slab: 0 is the arena, others are stages.
        generation: the life of the mover that a stage ends with.
        tenant: of the publisher; slots of the arena are its own.
    """

    pool: Pool
    max_slots: int
    slab: int = 0
    generation: int = 0
    tenant: str = ""


@dataclass(slots=True)
class Move:
    """The slots to which a claim's blocks are copied. A mover may write to them while they are `busy`."""

    place: Place
    write_id: int
    owner: str
    slots: IndexArray
    busy: bool = True
    over: bool = False


@dataclass(slots=True)
class Handoff:
    """Blocks under one ticket: whose, where, and why they are kept."""

    key: bytes
    writer: int
    place: Place
    namespace: bytes
    version: int
    owner: str
    write_owner: str
    write_id: int
    slots: IndexArray
    began_s: float
    #: Its publisher may still write to the slots.
    is_written: bool = True
    deadline_s: float = float("inf")
    claim_id: int = 0
    claim_owner: str = ""
    claim_deadline_s: float = float("inf")
    #: Why the hand-off ends as soon as no publisher writes it and no reader reads it; empty while it is valid.
    over: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSeen:
    """What can be seen of a fetch that is under way; `waits_for` is for people."""

    key: bytes
    owner: str
    node_id: str
    num_blocks: int
    num_bytes: int
    age_s: float
    left_s: float
    waits_for: str

"""Messages between the stores of two nodes, for a load."""

from __future__ import annotations

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.codec import U32, U64, Epoch, Record, decoder
from kvstore.blocks.indexes import IndexArray


class PeerLease(Record, frozen=True, kw_only=True):
    """Ask a peer for a lease of a run. The other fields say which blocks the asking store can use.

    Args:
        within_s: how long the asking store waits for the answer.
        is_low: whether a job of LOW priority loads them, so that LOW ones stay LOW.
        tenant: whose pins they are; its quotas count on both nodes.
    """

    chain: BlockHashes
    block_bytes: U32
    slot_format: U32
    namespace_version: U64
    ttl_s: float
    within_s: float
    is_low: bool = False
    tenant: str = ""


class PeerGrant(Record, frozen=True, kw_only=True):
    """Grant pinned slots of this node, for its `epoch` and one life of its mover."""

    lease_id: U64
    epoch: Epoch
    namespace_version: U64
    mover_generation: U64
    slots: IndexArray


class PeerTransport(Record, frozen=True):
    """Tell how to read this node's arena, through one life of its mover."""

    generation: U64
    agent: bytes
    address: U64
    slot_bytes: U64
    num_slots: U64


decode_peer_lease = decoder(PeerLease)
decode_peer_grant = decoder(PeerGrant)
decode_peer_transport = decoder(PeerTransport)

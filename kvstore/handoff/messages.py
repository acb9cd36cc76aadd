"""Messages between two stores about a hand-off: the claim of its blocks, and the answer."""

from __future__ import annotations

import msgspec
import numpy as np

from kvstore.blocks.codec import U32, U64, Digest, Epoch, Record, decoder
from kvstore.blocks.indexes import IndexArray
from kvstore.errors import PeerLost
from kvstore.remote.answers import sensible

_MAX_REASON_CHARS = 1000


class PeerClaim(Record, frozen=True):
    """Ask the store that has the blocks for the right to read them, alone.

    The answer may take up to `wait_s` while the blocks are still being written, or, with `is_early`, are not published
    yet. With `to_host` that store first copies blocks of a stage to its arena: the reader cannot reach the stage.
    """

    key: Digest
    namespace: Digest
    num_blocks: U32
    block_bytes: U32
    slot_format: U32
    namespace_version: U64
    ttl_s: float
    wait_s: float = 0.0
    to_host: bool = False
    is_early: bool = False


class PeerClaimed(Record, frozen=True):
    """Answer a claim: where the blocks are, or a `reason`. For one life of the mover."""

    claim_id: U64
    epoch: Epoch
    namespace_version: U64
    mover_generation: U64
    slots: IndexArray = np.empty(0, np.int32)
    slab: U32 = 0
    reason: str = ""


decode_peer_claim = decoder(PeerClaim)
_decode_peer_claimed = decoder(PeerClaimed)


def claimed_of(payload: bytes, num_wanted: int) -> PeerClaimed:
    """Return the answer of a peer to a claim of `num_wanted` blocks.

    Raises:
        PeerLost: the answer is not valid.
    """
    found = sensible(_decode_peer_claimed, payload)
    if not found.reason and len(found.slots) != num_wanted:
        raise PeerLost(f"wanted {num_wanted} slots of a peer, got {len(found.slots)}")
    return msgspec.structs.replace(found, reason=found.reason[:_MAX_REASON_CHARS])

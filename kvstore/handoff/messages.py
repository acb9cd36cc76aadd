"""What a store asks of the one that has a hand-off's blocks, and what that one answers.

Tuples, because to make one takes a fraction of what a frozen dataclass does, and every hand-off waits for it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstore.blocks.grants import IndexArray
from kvstore.errors import ProtocolError
from kvstore.remote.answers import sensible
from kvstore.rpc.messages import pack_ints, unpack_ints

_CLAIM = struct.Struct("<32s32sIIIQddBB")
_CLAIMED = struct.Struct("<Q8sQQII")
_MAX_REASON_CHARS = 1000


class PeerClaim(NamedTuple):
    """What a store asks of the one that has the blocks: the right to read them, alone, for `ttl_s` seconds.

    The answer may take up to `wait_s` while the blocks are still being written, or are `is_early` and not published
    yet. With `to_host` they are copied to its arena first, if they are in a stage that this one cannot reach.
    """

    key: bytes
    namespace: bytes
    num_blocks: int
    block_bytes: int
    slot_format: int
    namespace_version: int
    ttl_s: float
    wait_s: float = 0.0
    to_host: bool = False
    is_early: bool = False


def pack_peer_claim(claim: PeerClaim) -> bytes:
    """Pack a claim."""
    return _CLAIM.pack(
        claim.key, claim.namespace, claim.num_blocks, claim.block_bytes, claim.slot_format, claim.namespace_version,
        claim.ttl_s, claim.wait_s, claim.to_host, claim.is_early,
    )  # fmt: skip


def unpack_peer_claim(payload: bytes) -> PeerClaim:
    """Return what `pack_peer_claim` packed."""
    key, namespace, num_blocks, block_bytes, slot_format, version, ttl_s, wait_s, to_host, is_early = _CLAIM.unpack(
        payload
    )
    return PeerClaim(
        key=key,
        namespace=namespace,
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        slot_format=slot_format,
        namespace_version=version,
        ttl_s=ttl_s,
        wait_s=wait_s,
        to_host=bool(to_host),
        is_early=bool(is_early),
    )


class PeerClaimed(NamedTuple):
    """A peer's answer to a claim: where the blocks are, for one life of its mover; or why not, in `reason`."""

    claim_id: int
    epoch: bytes
    namespace_version: int
    mover_generation: int
    slots: IndexArray | Sequence[int]
    slab: int = 0
    reason: str = ""


def pack_peer_claimed(claimed: PeerClaimed) -> bytes:
    """Pack a peer's answer."""
    head = _CLAIMED.pack(
        claimed.claim_id, claimed.epoch, claimed.namespace_version, claimed.mover_generation, claimed.slab,
        len(claimed.slots),
    )  # fmt: skip
    return head + pack_ints(claimed.slots) + claimed.reason.encode()


def unpack_peer_claimed(payload: bytes) -> PeerClaimed:
    """Return what `pack_peer_claimed` packed."""
    claim_id, epoch, version, generation, slab, count = _CLAIMED.unpack_from(payload)
    end = _CLAIMED.size + 4 * count
    return PeerClaimed(
        claim_id=claim_id,
        epoch=epoch,
        namespace_version=version,
        mover_generation=generation,
        slots=unpack_ints(payload[_CLAIMED.size : end]) if count else np.empty(0, np.int32),
        slab=slab,
        reason=payload[end:].decode(),
    )


def claimed_of(payload: bytes, num_wanted: int) -> PeerClaimed:
    """Return what a peer answered to a claim of `num_wanted` blocks.

    Raises:
        PeerLost: that is nonsense.
    """

    def claimed(data: bytes) -> PeerClaimed:
        found = unpack_peer_claimed(data)
        if not found.reason and len(found.slots) != num_wanted:
            raise ProtocolError(f"wanted {num_wanted} slots, got {len(found.slots)}")
        return found._replace(reason=found.reason[:_MAX_REASON_CHARS])

    return sensible(claimed, payload)

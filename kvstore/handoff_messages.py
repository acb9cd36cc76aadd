"""Payloads of the messages that a hand-off needs: between a client and its store, and between two stores.

Tuples, because to make one takes a fraction of what a frozen dataclass does, and every hand-off waits for it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstore.errors import ProtocolError
from kvstore.grants import IndexArray
from kvstore.messages import pack_ints, unpack_ints

_PREPARE = struct.Struct("<32sQ32sIIQQ")
_COMPLETE = struct.Struct("<32sQd")
_ABORT = struct.Struct("<32sQ")
_FETCH = struct.Struct("<32s32s8sIddIIQB")
_SOON = struct.Struct("<IIQ")
_CLAIM = struct.Struct("<32s32sIIIQddBB")
_CLAIMED = struct.Struct("<Q8sQQII")
#: The id of a fetch or a claim, and whether the blocks arrived.
END = struct.Struct("<QB")
_KEY_BYTES = 32


def check_key(key: bytes) -> None:
    """Make sure that bytes can be the key of a ticket.

    Raises:
        ProtocolError: they are not.
    """
    if len(key) != _KEY_BYTES:
        raise ProtocolError(f"wanted a key of {_KEY_BYTES} bytes, got {len(key)} bytes")


class PrepareHandoff(NamedTuple):
    """What a publisher asks for: slots of the arena (slab 0), or of a stage of one life of the mover.

    `writer` is a number of its own that it tells nobody but its store: with it, it says that its copies have ended.
    `num_clears` is that of the namespace from when it was asked to publish.
    """

    key: bytes
    writer: int
    namespace: bytes
    num_blocks: int
    slab: int = 0
    generation: int = 0
    num_clears: int = 0


def pack_prepare_handoff(wanted: PrepareHandoff) -> bytes:
    """Pack a question for slots."""
    return _PREPARE.pack(*wanted)


def unpack_prepare_handoff(payload: bytes) -> PrepareHandoff:
    """Return what `pack_prepare_handoff` packed."""
    return PrepareHandoff(*_PREPARE.unpack(payload))


def pack_complete_handoff(key: bytes, writer: int, ttl_s: float) -> bytes:
    """Say that the bytes are in place, and how long they are to be kept."""
    return _COMPLETE.pack(key, writer, ttl_s)


def unpack_complete_handoff(payload: bytes) -> tuple[bytes, int, float]:
    """Return (key, writer, seconds) that `pack_complete_handoff` packed."""
    key, writer, ttl_s = _COMPLETE.unpack(payload)
    return key, writer, ttl_s


def pack_abort_handoff(key: bytes, writer: int) -> bytes:
    """Say that the blocks will not come, and that nothing of their publisher writes to their slots any more."""
    return _ABORT.pack(key, writer)


def unpack_abort_handoff(payload: bytes) -> tuple[bytes, int]:
    """Return (key, writer) that `pack_abort_handoff` packed."""
    key, writer = _ABORT.unpack(payload)
    return key, writer


class FetchRequest(NamedTuple):
    """What a client asks of its own store: the blocks of a ticket, wherever they are.

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

    key: bytes
    namespace: bytes
    epoch: bytes
    node_id: str
    num_blocks: int
    ttl_s: float
    timeout_s: float
    from_slab: int = 0
    slab: int = 0
    generation: int = 0
    is_early: bool = False


def pack_fetch(fetch: FetchRequest) -> bytes:
    """Pack a fetch."""
    head = _FETCH.pack(
        fetch.key, fetch.namespace, fetch.epoch, fetch.num_blocks, fetch.ttl_s, fetch.timeout_s, fetch.from_slab,
        fetch.slab, fetch.generation, fetch.is_early,
    )  # fmt: skip
    return head + fetch.node_id.encode()


def unpack_fetch(payload: bytes) -> FetchRequest:
    """Return what `pack_fetch` packed."""
    key, namespace, epoch, num_blocks, ttl_s, timeout_s, from_slab, slab, generation, is_early = _FETCH.unpack_from(
        payload
    )
    return FetchRequest(
        key=key,
        namespace=namespace,
        epoch=epoch,
        node_id=payload[_FETCH.size :].decode(),
        num_blocks=num_blocks,
        ttl_s=ttl_s,
        timeout_s=timeout_s,
        from_slab=from_slab,
        slab=slab,
        generation=generation,
        is_early=bool(is_early),
    )


def pack_soon(node_id: str, from_slab: int, slab: int, generation: int) -> bytes:
    """Say that a fetch comes: from a node's stage into one of this node, of one life of its mover.

    Nobody takes it apart: the store passes it on to its mover, which was told before what to do on just this word.
    """
    return _SOON.pack(from_slab, slab, generation) + node_id.encode()


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

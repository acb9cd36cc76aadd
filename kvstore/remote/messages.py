"""What a store asks of the store of another node for a load, and what that one grants."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvstore.blocks.chain import Chain, decode_chain
from kvstore.blocks.grants import IndexArray
from kvstore.rpc.messages import pack_ints, unpack_ints

_PEER_LEASE = struct.Struct("<IIQd")
_PEER_GRANT = struct.Struct("<Q8sQII")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLease:
    """What a store asks of a peer: a lease of a run, under the terms in which it understands the blocks."""

    chain: Chain
    block_bytes: int
    slot_format: int
    namespace_version: int
    ttl_s: float


def pack_peer_lease(lease: PeerLease) -> bytes:
    """Pack a lease asked of a peer."""
    head = _PEER_LEASE.pack(lease.block_bytes, lease.slot_format, lease.namespace_version, lease.ttl_s)
    return head + lease.chain.encode()


def unpack_peer_lease(payload: bytes) -> PeerLease:
    """Return what `pack_peer_lease` packed."""
    block_bytes, slot_format, version, ttl_s = _PEER_LEASE.unpack_from(payload)
    return PeerLease(
        chain=decode_chain(memoryview(payload)[_PEER_LEASE.size :]),
        block_bytes=block_bytes,
        slot_format=slot_format,
        namespace_version=version,
        ttl_s=ttl_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGrant:
    """A peer's answer: pinned slots there, valid for its `epoch` and for one life of its mover."""

    lease_id: int
    epoch: bytes
    namespace_version: int
    mover_generation: int
    slots: IndexArray


def pack_peer_grant(grant: PeerGrant) -> bytes:
    """Pack a peer's answer."""
    head = _PEER_GRANT.pack(
        grant.lease_id, grant.epoch, grant.namespace_version, grant.mover_generation, len(grant.slots)
    )
    return head + pack_ints(grant.slots)


def unpack_peer_grant(payload: bytes) -> PeerGrant:
    """Return what `pack_peer_grant` packed."""
    lease_id, epoch, version, generation, _ = _PEER_GRANT.unpack_from(payload)
    return PeerGrant(
        lease_id=lease_id,
        epoch=epoch,
        namespace_version=version,
        mover_generation=generation,
        slots=unpack_ints(payload[_PEER_GRANT.size :]),
    )

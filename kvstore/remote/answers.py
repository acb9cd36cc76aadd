"""Decode and check the answers of other nodes' stores. A peer with an invalid answer counts as lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from kvstore.blocks.indexes import IndexArray
from kvstore.bounds import MAX_SLOTS
from kvstore.errors import PeerLost, ProtocolError
from kvstore.mover.transport import PeerDescription
from kvstore.remote.messages import PeerGrant, PeerTransport, decode_peer_grant, decode_peer_transport
from kvstore.rpc.handoff_messages import StageFound, decode_stages

_T = TypeVar("_T")

EPOCH_BYTES = 8
_MAX_AGENT_BYTES, _MAX_GPUS = 3 << 18, 1 << 10
#: The addresses of a process are below this.
_ADDRESS_END = 1 << 57


def grant_of(payload: bytes, num_wanted: int) -> PeerGrant:
    """Return a peer's grant for a run of `num_wanted` blocks.

    Raises:
        PeerLost: the answer is not valid.
    """
    found = sensible(decode_peer_grant, payload)
    if len(found.slots) > num_wanted:
        raise PeerLost(f"wanted at most {num_wanted} slots of a peer, got {len(found.slots)}")
    return found


def bytes_in(hello: dict[str, Any], name: str, num_bytes: int) -> bytes:
    """Return a hexadecimal field of a greeting. It is empty unless it has `num_bytes` bytes."""
    try:
        found = bytes.fromhex(hello[name])
    except (LookupError, TypeError, ValueError):
        return b""
    return found if len(found) == num_bytes else b""


def transport_of(payload: bytes, same_host: bool) -> tuple[int, PeerDescription]:
    """Return (life of the peer's mover, description of its arena).

    Raises:
        PeerLost: the answer is not valid.
    """
    found = sensible(decode_peer_transport, payload)
    return found.generation, _described(found, same_host=same_host)


def stages_of(payload: bytes, into: int) -> list[tuple[int, int, int, PeerDescription]]:
    """Return (slab, mover's life, number of warm slots, description) of each stage.

    Args:
        payload: of the peer's answer.
        into: the stage here that READs from them fill.

    Raises:
        PeerLost: the answer is not valid.
    """
    stages = []
    for found in sensible(decode_stages, payload):
        if not 0 < found.num_warm <= found.num_slots:
            raise PeerLost(f"wanted 1 to {found.num_slots} slots for warming up at a peer, got {found.num_warm}")
        description = _described(found, gpu=found.gpu, into=into)
        stages.append((found.slab, found.generation, found.num_warm, description))
    return stages


def check_slots(slots: IndexArray | Sequence[int], description: PeerDescription, block_bytes: int) -> None:
    """Check that slots are inside a peer's slab, and large enough for blocks.

    Raises:
        PeerLost: they are not.
    """
    found = np.asarray(slots)
    least, most = (found.min(), found.max()) if len(found) else (0, 0)
    if least < 0 or most >= description.num_slots:
        raise PeerLost(f"wanted slots of a peer from 0 to {description.num_slots - 1}, got {least} to {most}")
    if description.slot_bytes < block_bytes:
        raise PeerLost(f"wanted slots of a peer of at least {block_bytes} bytes, got {description.slot_bytes}")


def _described(
    value: PeerTransport | StageFound, *, same_host: bool = False, gpu: int = 0, into: int = 0
) -> PeerDescription:
    address, slot_bytes, num_slots = value.address, value.slot_bytes, value.num_slots
    # A stage has a few more slots than its pool, for warming up.
    sizes_fit = slot_bytes > 0 and 0 < num_slots <= 2 * MAX_SLOTS and slot_bytes * num_slots < _ADDRESS_END
    if not sizes_fit or address > _ADDRESS_END - slot_bytes * num_slots or gpu >= _MAX_GPUS:
        raise PeerLost(
            f"wanted a slab that a peer can have, got {num_slots} slots of {slot_bytes} bytes at {address} on GPU {gpu}"
        )
    if len(value.agent) > _MAX_AGENT_BYTES:
        raise PeerLost(f"agent of a peer: wanted at most {_MAX_AGENT_BYTES} bytes, got {len(value.agent)}")
    return PeerDescription(
        agent=value.agent,
        address=address,
        slot_bytes=slot_bytes,
        num_slots=num_slots,
        same_host=same_host,
        gpu=gpu,
        into=into,
    )


def sensible(decode: Callable[[bytes], _T], payload: bytes) -> _T:
    """Decode a peer's answer.

    Raises:
        PeerLost: the answer is not valid.
    """
    try:
        return decode(payload)
    except ProtocolError as error:
        raise PeerLost(f"a peer answered what no store of this version does: {error}") from error

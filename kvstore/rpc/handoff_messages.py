"""Payloads of the messages that a hand-off needs between a client and its store.

Tuples, because to make one takes a fraction of what a frozen dataclass does, and every hand-off waits for it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kvstore.errors import ProtocolError

_PREPARE = struct.Struct("<32sQ32sIIQQ")
_COMPLETE = struct.Struct("<32sQd")
_ABORT = struct.Struct("<32sQ")
_FETCH = struct.Struct("<32s32s8sIddIIQB")
_SOON = struct.Struct("<IIQ")
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

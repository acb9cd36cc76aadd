"""What a store and its mover say to each other: READs, how they end, and the mover's own transport."""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.errors import ProtocolError
from kvstore.mover.transport import ReadRequest
from kvstore.rpc.framing import unpack_json
from kvstore.rpc.messages import pack_ints, unpack_ints

_READ = struct.Struct("<QIIIdHH")
_DONE = struct.Struct("<QIBBdI")
_WAKE = struct.Struct("<H")


class MoverRead(NamedTuple):
    """One READ asked of the mover, to be done and reported in chunks; `chunk_ends` are their ends, ascending."""

    read_id: int
    request: ReadRequest
    chunk_ends: npt.NDArray[np.int32]
    timeout_s: float


def pack_mover_read(read: MoverRead) -> bytes:
    """Pack a READ for the mover."""
    request = read.request
    peer = request.peer.encode()
    head = _READ.pack(
        read.read_id, request.block_bytes, len(request.local_slots), len(read.chunk_ends), read.timeout_s,
        len(peer), len(request.notification),
    )  # fmt: skip
    ints = (request.local_slots, request.remote_slots, read.chunk_ends)
    return b"".join((head, peer, request.notification, *map(pack_ints, ints)))


def unpack_mover_read(payload: bytes) -> MoverRead:
    """Return what `pack_mover_read` packed.

    Raises:
        ProtocolError: it is not whole.
    """
    read_id, block_bytes, count, num_chunks, timeout_s, peer_len, note_len = _READ.unpack_from(payload)
    at = _READ.size
    peer = payload[at : at + peer_len].decode()
    note = payload[at + peer_len : at + peer_len + note_len]
    slots = unpack_ints(payload[at + peer_len + note_len :])
    if len(slots) != 2 * count + num_chunks:
        raise ProtocolError(f"READ {read_id}: wanted {2 * count + num_chunks} slots and chunk ends, got {len(slots)}")
    request = ReadRequest(
        peer=peer,
        block_bytes=block_bytes,
        local_slots=slots[:count],
        remote_slots=slots[count : 2 * count],
        notification=note,
    )
    ends = slots[2 * count : 2 * count + num_chunks]
    return MoverRead(read_id=read_id, request=request, chunk_ends=ends, timeout_s=timeout_s)


def pack_mover_wake(word: bytes, request: ReadRequest) -> bytes:
    """Tell the mover what to read on a word."""
    read = MoverRead(read_id=0, request=request, chunk_ends=np.empty(0, np.int32), timeout_s=0.0)
    return _WAKE.pack(len(word)) + word + pack_mover_read(read)


def unpack_mover_wake(payload: bytes) -> tuple[bytes, ReadRequest]:
    """Return (word, READ) that `pack_mover_wake` packed.

    Raises:
        ProtocolError: it is not whole.
    """
    end = _WAKE.size + _WAKE.unpack_from(payload)[0]
    return payload[_WAKE.size : end], unpack_mover_read(payload[end:]).request


class MoverDone(NamedTuple):
    """The mover's word on a READ: its first `num_blocks` blocks are in place.

    `last` says that nothing more comes. With an `error`, `terminal` says whether the engine is through
    with the destination; if not, a MOVER_TERMINAL follows some day.
    """

    read_id: int
    num_blocks: int
    last: bool
    terminal: bool
    seconds: float
    num_descriptors: int
    error: bytes = b""


def pack_mover_done(done: MoverDone) -> bytes:
    """Pack the mover's word."""
    head = _DONE.pack(done.read_id, done.num_blocks, done.last, done.terminal, done.seconds, done.num_descriptors)
    return head + done.error


def unpack_mover_done(payload: bytes) -> MoverDone:
    """Return what `pack_mover_done` packed."""
    read_id, num_blocks, last, terminal, seconds, descriptors = _DONE.unpack_from(payload)
    return MoverDone(
        read_id=read_id,
        num_blocks=num_blocks,
        last=bool(last),
        terminal=bool(terminal),
        seconds=seconds,
        num_descriptors=descriptors,
        error=payload[_DONE.size :],
    )


@dataclass(frozen=True, slots=True)
class OwnTransport:
    """What peers need to read this node's slab through its present mover."""

    generation: int
    agent: bytes
    address: int


def own_transport(generation: int, payload: bytes) -> OwnTransport:
    """Return what a mover announced, as that of a generation."""
    value = unpack_json(payload)
    return OwnTransport(generation, base64.b64decode(value["agent"]), int(value["address"]))

"""Payloads of the hot control messages: fixed structs, slot and index lists as little-endian int32 arrays."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstore.blocks.chain import Chain, decode_chain
from kvstore.blocks.grants import Grant, IndexArray, PackedInts, PinKind, StoreTicket
from kvstore.errors import ProtocolError

_INT32 = np.dtype("<i4")
_LEASE = struct.Struct("<d")
_LOAD = struct.Struct("<dd")
_PIN = struct.Struct("<Bd")
_GRANT = struct.Struct("<QII8s")
_PREPARE = struct.Struct("<HHQ")
_TICKET = struct.Struct("<QIIIIQ8s")
_WRITE_END = struct.Struct("<Q8s")
_PROGRESS = struct.Struct("<QII")
#: A write whose KV is of now.
_ANY_CLEARS = (1 << 64) - 1
U64 = struct.Struct("<Q")
_F64 = struct.Struct("<d")
U64_F64 = struct.Struct("<Qd")
#: By which a store knows the owner of the leases of another.
OWNER_KEY_BYTES = 8
#: Lease id, epoch of the store that granted it, key of its owner, which read: what a finished READ notifies.
NOTIFICATION = struct.Struct("<Q8s8s")
#: Set in the id of a fetch or a claim whose slots are in the client's stage and not in the arena.
STAGE_BIT = 1 << 62


def pack_ints(values: Sequence[int] | IndexArray) -> bytes:
    """Return small integers as int32 bytes."""
    if isinstance(values, PackedInts):
        return values.packed
    return np.asarray(values, dtype=_INT32).tobytes()


def unpack_ints(payload: bytes | memoryview) -> IndexArray:
    """Return what `pack_ints` packed."""
    if len(payload) % 4:
        raise ProtocolError(f"wanted whole int32 values, got {len(payload)} bytes")
    return np.frombuffer(payload, dtype=_INT32).astype(np.int32)


def _packed(payload: bytes, count: int) -> PackedInts:
    if len(payload) != 4 * count:
        raise ProtocolError(f"wanted {count} int32 values, got {len(payload)} bytes")
    return PackedInts(payload)


def pack_lease(chain: Chain, ttl_s: float) -> bytes:
    """Ask for a pin of a run's readable prefix."""
    return _LEASE.pack(ttl_s) + chain.encode()


def unpack_lease(payload: bytes) -> tuple[Chain, float]:
    """Return what `pack_lease` packed."""
    return decode_chain(payload[_LEASE.size :]), _LEASE.unpack_from(payload)[0]


def pack_lookup_all(chain: Chain, wait_s: float) -> bytes:
    """Ask who has how much of a chain; the answer is wanted within `wait_s`, with whatever is known then."""
    return _F64.pack(wait_s) + chain.encode()


def unpack_lookup_all(payload: bytes) -> tuple[Chain, float]:
    """Return what `pack_lookup_all` packed."""
    return decode_chain(payload[_F64.size :]), _F64.unpack_from(payload)[0]


def pack_load(chain: Chain, ttl_s: float, timeout_s: float) -> bytes:
    """Ask for a pin of a run, fetching from peers what is missing."""
    return _LOAD.pack(ttl_s, timeout_s) + chain.encode()


def unpack_load(payload: bytes) -> tuple[Chain, float, float]:
    """Return what `pack_load` packed."""
    ttl_s, timeout_s = _LOAD.unpack_from(payload)
    return decode_chain(payload[_LOAD.size :]), ttl_s, timeout_s


def pack_pin(chain: Chain, kind: PinKind, ttl_s: float) -> bytes:
    """Ask for a hard or soft pin of a run's readable prefix."""
    return _PIN.pack(kind.value, ttl_s) + chain.encode()


def unpack_pin(payload: bytes) -> tuple[Chain, PinKind, float]:
    """Return what `pack_pin` packed.

    Raises:
        ProtocolError: there is no such kind.
    """
    kind, ttl_s = _PIN.unpack_from(payload)
    if kind not in (PinKind.HARD.value, PinKind.SOFT.value):
        raise ProtocolError(f"wanted a hard or soft pin, got kind {kind}")
    return decode_chain(payload[_PIN.size :]), PinKind(kind), ttl_s


def pack_grant(grant: Grant) -> bytes:
    """Answer a lease or a pin."""
    head = _GRANT.pack(grant.lease_id, len(grant.slots), grant.num_refused, grant.epoch)
    return b"".join((head, pack_ints(grant.slots), grant.generations))


def unpack_grant(payload: bytes) -> Grant:
    """Return what `pack_grant` packed."""
    lease_id, count, num_refused, epoch = _GRANT.unpack_from(payload)
    end = _GRANT.size + 4 * count
    return Grant(lease_id, _packed(payload[_GRANT.size : end], count), payload[end:], num_refused, epoch)


def pack_prepare(chain: Chain, num_parts: int = 1, part: int = 0, num_clears: int | None = None) -> bytes:
    """Ask for slots to write one part of each block of a run into, of KV from before a later clearing than that."""
    return _PREPARE.pack(num_parts, part, _ANY_CLEARS if num_clears is None else num_clears) + chain.encode()


def unpack_prepare(payload: bytes) -> tuple[Chain, int, int, int | None]:
    """Return what `pack_prepare` packed."""
    num_parts, part, num_clears = _PREPARE.unpack_from(payload)
    return decode_chain(payload[_PREPARE.size :]), num_parts, part, None if num_clears == _ANY_CLEARS else num_clears


def pack_ticket(ticket: StoreTicket) -> bytes:
    """Answer a prepare."""
    head = _TICKET.pack(
        ticket.write_id, ticket.num_resident, ticket.num_refused, ticket.num_awaited, len(ticket.slots),
        ticket.num_clears, ticket.epoch,
    )  # fmt: skip
    return b"".join((head, pack_ints(ticket.indexes), pack_ints(ticket.slots), ticket.generations))


def unpack_ticket(payload: bytes) -> StoreTicket:
    """Return what `pack_ticket` packed."""
    write_id, num_resident, num_refused, num_awaited, count, num_clears, epoch = _TICKET.unpack_from(payload)
    middle, end = _TICKET.size + 4 * count, _TICKET.size + 8 * count
    return StoreTicket(
        write_id=write_id,
        indexes=_packed(payload[_TICKET.size : middle], count),
        slots=_packed(payload[middle:end], count),
        num_resident=num_resident,
        num_refused=num_refused,
        num_awaited=num_awaited,
        num_clears=num_clears,
        generations=payload[end:],
        epoch=epoch,
    )


def pack_write_end(ticket: StoreTicket) -> bytes:
    """Complete or abort the write of a ticket, naming the lives of its slots and of the store."""
    return _WRITE_END.pack(ticket.write_id, ticket.epoch) + ticket.generations


def unpack_write_end(payload: bytes) -> tuple[int, bytes, bytes]:
    """Return (write id, epoch, generations) that `pack_write_end` packed."""
    write_id, epoch = _WRITE_END.unpack_from(payload)
    return write_id, epoch, bytes(payload[_WRITE_END.size :])


class Progress(NamedTuple):
    """One piece of the answer to a load: `slots` of the blocks that became readable from `first` on.

    The last piece carries a `kvstore.rpc.load_report.LoadReport` as bytes.
    """

    lease_id: int
    first: int
    slots: IndexArray
    report: bytes = b""


def pack_progress(progress: Progress) -> bytes:
    """Pack one piece of the answer to a load."""
    head = _PROGRESS.pack(progress.lease_id, progress.first, len(progress.slots))
    return head + pack_ints(progress.slots) + progress.report


def unpack_progress(payload: bytes) -> Progress:
    """Return what `pack_progress` packed."""
    lease_id, first, count = _PROGRESS.unpack_from(payload)
    end = _PROGRESS.size + 4 * count
    return Progress(lease_id, first, unpack_ints(payload[_PROGRESS.size : end]), payload[end:])

"""Encode what one life of a node store says to the next one, in the order of eviction.

The message crosses versions of raykv, so it begins with a format and a checksum, which are compared before anything is
decoded. Whatever does not fit is refused whole: then the next store begins empty.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.blocks.codec import U16, U64, Digest, Epoch, NodeId, Record, decoder, encode
from kvstore.blocks.indexes import ints_in, pack_ints
from kvstore.errors import ProtocolError
from kvstore.pool.handover.image import BlockColumns, OldReaders, OldWriters, PoolImage

#: Raise it when a field changes, or the order of bytes in a block, or the hash of a block. A field at the end of a
#: record needs no other number if its default is what messages without it mean.
FORMAT = 2
_MAGIC = b"raykv-handover"
_HEAD = struct.Struct(f"<{len(_MAGIC)}sH32s")
_SECONDS, _LONG = np.dtype("<f8"), np.dtype("<i8")
#: The most blocks of which the message has a checksum, to show that the memory is the one it describes.
_MOST_SAMPLES = 32


class Held(Record, frozen=True):
    """Slots that processes may still use. See `OldUse` for the rule by which they are free.

    Args:
        until_s: of kvstore.runtime.clock.
        slots: from `pack_ints`.
        processes: each an index into the pidfds that come with the message. Of slots that are only read: all that may
            read them, or none if one of these cannot be named.
        is_read: whether nobody writes to them. False in messages of versions that did not know it, which name no
            process of a reader.
    """

    until_s: float
    slots: bytes
    processes: tuple[U16, ...] = ()
    is_read: bool = False


class Sample(Record, frozen=True):
    """A block's bytes: the CRC-32 of the first `num_bytes` of a slot."""

    slot: U64
    num_bytes: U64
    checksum: U64


class Message(Record, frozen=True):
    """All that the next life of a node store has to know.

    Args:
        store: its name.
        node: its node.
        epoch: the life that ends.
        capacity_bytes: of the arena.
        slot_bytes: of a slot.
        block_bytes: size of each attached namespace's blocks.
        versions: of the namespaces that this life knew were cleared.
        directory: the life of the directory that it met last, from `Hints.met`.
        clears: the counters of kvstore.memory.clears.
        generations, tenants, owners, namespaces: as in `PoolImage`.
        blocks: the columns of `BlockColumns`, packed, in the order of its fields.
        writers, readers: as in `PoolImage`.
        samples: of some blocks.
    """

    store: str
    node: NodeId
    epoch: Epoch
    capacity_bytes: U64
    slot_bytes: U64
    block_bytes: dict[Digest, U64]
    versions: dict[Digest, U64]
    directory: bytes
    clears: bytes
    generations: bytes
    tenants: tuple[str, ...]
    owners: bytes
    namespaces: tuple[Digest, ...]
    blocks: tuple[bytes, ...]
    writers: tuple[Held, ...]
    readers: tuple[Held, ...]
    samples: tuple[Sample, ...]


_decode = decoder(Message)


def seal(message: Message) -> bytes:
    """Return a message as bytes, with its format and checksum."""
    payload = encode(message)
    return _HEAD.pack(_MAGIC, FORMAT, _checksum(payload)) + payload


def unseal(data: bytes) -> Message:
    """Return the message that `seal` packed.

    Raises:
        ProtocolError: it has another format, was cut or damaged, or is no such message.
    """
    if len(data) < _HEAD.size:
        raise ProtocolError(f"the index of the old store: wanted {_HEAD.size} bytes at least, got {len(data)}")
    magic, number, checksum = _HEAD.unpack_from(data)
    if magic != _MAGIC or number != FORMAT:
        raise ProtocolError(f"the index of the old store: wanted format {FORMAT}, got {number}; this store begins cold")
    payload = data[_HEAD.size :]
    if _checksum(payload) != checksum:
        raise ProtocolError(f"the index of the old store: {len(payload)} bytes of it are cut or damaged")
    return _decode(payload)


def _checksum(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=32).digest()


def pack_blocks(blocks: BlockColumns) -> tuple[bytes, ...]:
    """Return the columns as bytes."""
    return (
        pack_ints(blocks.slot), pack_ints(blocks.space), blocks.hashes, blocks.parents,
        blocks.depth.astype(_LONG).tobytes(), blocks.touch.astype(_LONG).tobytes(), blocks.priority.tobytes(),
        blocks.until_s.astype(_SECONDS).tobytes(), blocks.uses.tobytes(), blocks.used_s.astype(_SECONDS).tobytes(),
        blocks.touched_s.astype(_SECONDS).tobytes(), blocks.roots.astype("<u4").tobytes(),
    )  # fmt: skip


def image_of(message: Message) -> PoolImage:
    """Return the image of the pool, checked.

    Raises:
        ProtocolError: it contradicts itself.
    """
    if len(message.blocks) != len(BlockColumns.__dataclass_fields__):
        raise ProtocolError(f"the index of the old store: got {len(message.blocks)} columns; this store begins cold")
    slot, space, hashes, parents, depth, touch, priority, until_s, uses, used_s, touched_s, roots = message.blocks
    image = PoolImage(
        generations=_numbers(message.generations, np.dtype("<u4")),
        tenants=message.tenants,
        owners=_numbers(message.owners, np.dtype("u1")),
        namespaces=message.namespaces,
        blocks=BlockColumns(
            slot=ints_in(slot), space=ints_in(space), hashes=hashes, parents=parents, depth=_numbers(depth, _LONG),
            touch=_numbers(touch, _LONG), priority=_numbers(priority, np.dtype("u1")),
            until_s=_numbers(until_s, _SECONDS), uses=_numbers(uses, np.dtype("u1")),
            used_s=_numbers(used_s, _SECONDS), touched_s=_numbers(touched_s, _SECONDS),
            roots=_numbers(roots, np.dtype("<u4")),
        ),
        writers=tuple(OldWriters((), held.until_s, ints_in(held.slots)) for held in message.writers),
        readers=tuple(OldReaders((), held.until_s, ints_in(held.slots)) for held in message.readers),
    )  # fmt: skip
    image.check()
    if not message.block_bytes.keys() >= set(message.namespaces):
        raise ProtocolError("the index of the old store: a namespace of its blocks has no block size")
    return image


def _numbers(packed: bytes, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        return np.frombuffer(packed, kind)
    except ValueError as error:
        raise ProtocolError(f"the index of the old store: {len(packed)} bytes are no column of {kind}") from error


def samples_of(blocks: BlockColumns, sizes: list[int], slot_bytes: int, memory: memoryview) -> tuple[Sample, ...]:
    """Return checksums of some of the blocks; `sizes` has the bytes of a block by the index of its namespace."""
    step = max(1, len(blocks) // _MOST_SAMPLES)
    picked = [(int(blocks.slot[at]), sizes[int(blocks.space[at])]) for at in range(0, len(blocks), step)]
    return tuple(
        Sample(slot, size, zlib.crc32(memory[slot * slot_bytes :][:size])) for slot, size in picked[:_MOST_SAMPLES]
    )


def check_samples(message: Message, memory: memoryview) -> None:
    """Check that the memory has the blocks that the message describes.

    Raises:
        ProtocolError: it has others.
    """
    for sample in message.samples:
        found = zlib.crc32(memory[sample.slot * message.slot_bytes :][: sample.num_bytes])
        if found != sample.checksum:
            raise ProtocolError(f"the index of the old store: slot {sample.slot} has other bytes than it says")

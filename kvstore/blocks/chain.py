"""How a run of block hashes looks on the wire and inside the pool: one bytes object per field."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from kvstore.errors import ChainBroken

HASH_BYTES = 32
_HASH = np.dtype(f"V{HASH_BYTES}")
_HEAD = struct.Struct("<32s32sI")


# Not frozen, although nobody changes one: that makes them three times as slow to make, and each call makes two.
@dataclass(slots=True, unsafe_hash=True)
class Chain:
    """A contiguous run of block hashes of one namespace.

    Args:
        namespace: 32-byte digest of the namespace.
        parent: 32-byte hash of the block before the first one; the namespace digest at the root.
        start: index of the first block in its chain; 0 is the root.
        data: the hashes, 32 bytes each, back to back.
    """

    namespace: bytes
    parent: bytes
    start: int
    data: bytes

    def __len__(self) -> int:
        return len(self.data) // HASH_BYTES

    def hash_at(self, index: int) -> bytes:
        """Return the hash of block `index` of this run."""
        return self.data[index * HASH_BYTES : (index + 1) * HASH_BYTES]

    def hashes(self) -> list[bytes]:
        """Return all hashes of the run in order."""
        found: list[bytes] = np.frombuffer(self.data, _HASH).tolist()
        return found

    def tail(self, first: int) -> Chain:
        """Return the run that begins at block `first` of this one."""
        if first == 0:
            return self
        return Chain(self.namespace, self.hash_at(first - 1), self.start + first, self.data[first * HASH_BYTES :])

    def head(self, count: int) -> Chain:
        """Return the first `count` blocks of the run."""
        return Chain(self.namespace, self.parent, self.start, self.data[: count * HASH_BYTES])

    def check_unique(self) -> None:
        """Make sure that no block is there twice.

        Raises:
            ChainBroken: the run names a block twice, or its own parent; nothing changed.
        """
        # Different hashes differ in their first eight bytes, or nearly always: then nothing else is looked at.
        firsts = np.frombuffer(self.data + self.parent, np.uint64)[:: HASH_BYTES // 8]
        ordered = np.sort(firsts)
        if not np.count_nonzero(ordered[1:] == ordered[:-1]):
            return
        unique = set(self.hashes())
        if len(unique) != len(self) or self.parent in unique:
            raise ChainBroken(
                f"wanted {len(self)} different block hashes and a parent that is none of them, got {len(unique)} "
                "different ones; pass one contiguous run of one chain"
            )

    def encode(self) -> bytes:
        """Return the run as bytes; `decode` reads them."""
        return encode_chain(self.namespace, self.parent, self.start, self.data)


def encode_chain(namespace: bytes, parent: bytes, start: int, data: bytes) -> bytes:
    """Return what `Chain.encode` writes, without making a Chain."""
    return _HEAD.pack(namespace, parent, start) + data


def decode_chain(payload: bytes | memoryview) -> Chain:
    """Return the run that `Chain.encode` wrote.

    Raises:
        ChainBroken: the bytes are not a whole number of hashes.
    """
    data = decode_hashes(payload)
    namespace, parent, start = _HEAD.unpack_from(payload)
    return Chain(namespace, parent, start, data)


def namespace_in(payload: bytes | memoryview) -> bytes:
    """Return only the namespace of the run that `Chain.encode` wrote, and `decode_hashes` has found to be one."""
    return bytes(payload[:HASH_BYTES])


def decode_hashes(payload: bytes | memoryview) -> bytes:
    """Return only the hashes of the run that `Chain.encode` wrote.

    Raises:
        ChainBroken: the bytes are not a whole number of hashes.
    """
    num_bytes = len(payload) - _HEAD.size
    if num_bytes < 0 or num_bytes % HASH_BYTES:
        raise ChainBroken(f"wanted {_HEAD.size} bytes and whole hashes of {HASH_BYTES}, got {len(payload)} bytes")
    return bytes(payload[_HEAD.size :])

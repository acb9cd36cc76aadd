"""How a run of block hashes looks on the wire and inside the pool: one bytes object per field."""

from __future__ import annotations

import numpy as np

from kvstore.blocks.codec import U32, Digest, Record, decoder, encode
from kvstore.errors import ChainBroken

HASH_BYTES = 32
_HASH = np.dtype(f"V{HASH_BYTES}")


class Chain(Record, frozen=True):
    """A contiguous run of block hashes of one namespace.

    Args:
        namespace: 32-byte digest of the namespace.
        parent: 32-byte hash of the block before the first one; the namespace digest at the root.
        start: index of the first block in its chain; 0 is the root.
        data: the hashes, 32 bytes each, back to back.

    Raises:
        ChainBroken: the data are not a whole number of hashes.
    """

    namespace: Digest
    parent: Digest
    start: U32
    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) % HASH_BYTES:
            raise ChainBroken(f"wanted whole hashes of {HASH_BYTES} bytes, got {len(self.data)} bytes")

    def __len__(self) -> int:
        return len(self.data) // HASH_BYTES

    def hash_at(self, index: int) -> bytes:
        """Return the hash of block `index` of this run."""
        return self.data[index * HASH_BYTES : (index + 1) * HASH_BYTES]

    def hashes(self) -> list[bytes]:
        """Return all hashes of the run in order."""
        return hashes_in(self.data)

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
        """Return the run as bytes; `decode_chain` reads them."""
        return encode(self)


def hashes_in(data: bytes) -> list[bytes]:
    """Return hashes that stand back to back."""
    found: list[bytes] = np.frombuffer(data, _HASH).tolist()
    return found


#: Returns the run that `Chain.encode` wrote; its hashes may be none, and then it raises ChainBroken.
decode_chain = decoder(Chain)

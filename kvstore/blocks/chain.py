"""Define a run of block hashes, one bytes object per field. Callers hold it, messages carry it, the pool finds it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import overload

import msgspec
import numpy as np

from kvstore.blocks.codec import U32, Digest, Record, decoder, encode
from kvstore.blocks.token_bytes import brief
from kvstore.bounds import DIGEST_BYTES, clip
from kvstore.errors import ChainBroken, InvalidRequest, NamespaceMismatch

HASH_BYTES = DIGEST_BYTES
"""Bytes of one block hash and of a namespace digest."""
_HASH = np.dtype(f"V{HASH_BYTES}")
_WORDS = HASH_BYTES // 8
#: The largest block index that fits in a message.
_LAST_END = (1 << 32) - 1


def event_hash(own: bytes) -> int:
    """Return a block hash as events have it: its low 64 bits, the only form that all routers take."""
    return int.from_bytes(own[-8:], "big")


class BlockHashes(Record, frozen=True):
    """A contiguous run of a chain of block hashes. A `Namespace` makes it; slices are runs, too.

    Args:
        namespace: digest of the namespace that the chain is rooted in, 32 bytes.
        parent: hash of the block before the run, 32 bytes; the namespace digest when start is 0.
        start: index in the chain of the first block of the run.
        data: the hashes back to back, 32 bytes each; may be empty.
        root_key: the first four bytes of the hash of the chain's first block, little-endian; 0 where that is not known.
            At start 0 it is taken from the data. It only chooses a shard of the directory, and does not count when runs
            are compared.

    Raises:
        InvalidRequest: a length or type is wrong, or the end of the run does not fit in a message.
        ChainBroken: the data are not whole hashes, or parent and start disagree about where the root is.
    """

    namespace: Digest
    parent: Digest
    start: U32
    data: bytes
    root_key: U32 = 0

    def __post_init__(self) -> None:
        for value in (self.namespace, self.parent):
            if not isinstance(value, bytes) or len(value) != HASH_BYTES:
                raise InvalidRequest(
                    f"BlockHashes: wanted namespace and parent as {HASH_BYTES} bytes, got {brief(value)}; use "
                    "Namespace.block_hashes"
                )
        if not isinstance(self.data, bytes) or len(self.data) % HASH_BYTES:
            raise ChainBroken(
                f"BlockHashes: wanted whole hashes of {HASH_BYTES} bytes each, got {brief(self.data)}; use "
                "Namespace.wrap for hashes of an engine"
            )
        if type(self.start) is not int or self.start < 0:
            raise InvalidRequest(f"BlockHashes: wanted start as an int >= 0, got {self.start!r}; count blocks from 0")
        # The end must fit too: the next run starts there, and its start is sent to the directory and to peers.
        if self.start + len(self) > _LAST_END:
            raise InvalidRequest(
                f"BlockHashes: wanted the run to end at block {_LAST_END} at most, got {len(self)} blocks from "
                f"{clip(self.start)} on; count blocks from the root of their chain"
            )
        for name, value in (("namespace", self.namespace), ("parent", self.parent), ("data", self.data)):
            if type(value) is not bytes:  # A subclass cannot be sent.
                msgspec.structs.force_setattr(self, name, bytes(value))
        if not self.start:
            msgspec.structs.force_setattr(self, "root_key", root_key_of(self.data))
        elif type(self.root_key) is not int or not 0 <= self.root_key < 1 << 32:
            raise InvalidRequest(f"BlockHashes: wanted root_key from 0 to {(1 << 32) - 1}, got {clip(self.root_key)}")
        if (self.start == 0) != (self.parent == self.namespace):
            raise ChainBroken(
                "BlockHashes: wanted the namespace digest as parent exactly at start 0, "
                f"got start={self.start} and parent {self.parent.hex()[:8]}; "
                "slice an existing run instead of building one"
            )

    @property
    def namespace_digest(self) -> bytes:
        """The digest of the namespace."""
        return self.namespace

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockHashes):
            return NotImplemented
        mine, theirs = (self.namespace, self.parent, self.start), (other.namespace, other.parent, other.start)
        return mine == theirs and self.data == other.data

    def __hash__(self) -> int:
        return hash((self.namespace, self.parent, self.start, self.data))

    def __len__(self) -> int:
        return len(self.data) // HASH_BYTES

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> BlockHashes: ...
    def __getitem__(self, index: int | slice) -> bytes | BlockHashes:
        """Return one hash, or a run with its own start and parent.

        Raises:
            IndexError: no such block.
            TypeError: the index is neither an integer nor a slice of integers.
            ChainBroken: the slice has a step other than 1, so it is not a run.
        """
        count = len(self)
        if isinstance(index, slice):
            first, last, step = index.indices(count)
            if step != 1:
                raise ChainBroken(
                    f"BlockHashes: wanted a slice with step 1, got step {step}; "
                    "only contiguous runs can be looked up, iterate for single hashes"
                )
            if first == 0 and last == count:
                return self
            data = self.data[first * HASH_BYTES : last * HASH_BYTES]
            return BlockHashes(self.namespace, self._before(first), self.start + first, data, self.root_key)
        try:
            at = operator.index(index)
        except TypeError:
            raise TypeError(f"BlockHashes: wanted an integer or a slice, got {clip(index)}") from None
        at += count if at < 0 else 0
        if not 0 <= at < count:
            raise IndexError(f"BlockHashes: wanted an index below {count}, got {index}; check len() first")
        return self.hash_at(at)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.hashes())

    def __repr__(self) -> str:
        tail = f", last={self[-1].hex()[:8]}" if self.data else ""
        return (
            f"BlockHashes(namespace={self.namespace.hex()[:8]}, blocks=[{self.start}, {self.start + len(self)}){tail})"
        )

    def hash_at(self, index: int) -> bytes:
        """Return the hash of block `index` of this run; empty bytes beyond its end."""
        return self.data[index * HASH_BYTES : (index + 1) * HASH_BYTES]

    def hashes(self) -> list[bytes]:
        """Return all hashes of the run in order."""
        return hashes_in(self.data)

    def tail(self, first: int) -> BlockHashes:
        """Return the run that begins at block `first` of this one.

        Raises:
            InvalidRequest: `first` is not an integer.
        """
        return self[_as_int("tail", first) :]

    def head(self, count: int) -> BlockHashes:
        """Return the first `count` blocks of the run.

        Raises:
            InvalidRequest: `count` is not an integer.
        """
        return self[: _as_int("head", count)]

    def common_prefix(self, other: BlockHashes) -> int:
        """Count the leading hashes that both runs share; 0 when they do not start at the same block.

        Raises:
            InvalidRequest: `other` is not a run.
        """
        _check_run("common_prefix", other)
        if (self.namespace, self.start) != (other.namespace, other.start):
            return 0
        count = min(len(self), len(other))
        mine = np.frombuffer(self.data, np.uint64, count * _WORDS)
        theirs = np.frombuffer(other.data, np.uint64, count * _WORDS)
        differing = np.flatnonzero(mine != theirs)
        return int(differing[0]) // _WORDS if differing.size else count

    @staticmethod
    def join(a: BlockHashes, b: BlockHashes) -> BlockHashes:
        """Append run b to run a.

        Raises:
            InvalidRequest: one of them is not a run.
            NamespaceMismatch: the runs are of two namespaces.
            ChainBroken: b does not begin where a ends.
        """
        _check_run("join", a)
        _check_run("join", b)
        start, parent = a.end(b.namespace, "BlockHashes.join")
        if (b.start, b.parent) != (start, parent):
            raise ChainBroken(
                f"BlockHashes.join: wanted a run at block {start} after {parent.hex()[:8]}, "
                f"got one at block {b.start} after {b.parent.hex()[:8]}; "
                "join neighbours of one chain, in order"
            )
        return BlockHashes(a.namespace, a.parent, a.start, a.data + b.data, a.root_key or b.root_key)

    def end(self, namespace: bytes, verb: str) -> tuple[int, bytes]:
        """Return (index, parent) of the block after this run, for a continuation in `namespace`.

        Raises:
            NamespaceMismatch: this run is of another namespace.
        """
        if self.namespace != namespace:
            raise NamespaceMismatch(
                f"{verb}: wanted hashes of namespace {namespace.hex()[:8]}, got {self.namespace.hex()[:8]}; make both "
                "with the same Namespace"
            )
        return self.start + len(self), self._before(len(self))

    def _before(self, at: int) -> bytes:
        """Return the hash before block `at` of this run."""
        return self.hash_at(at - 1) if at else self.parent

    def check_unique(self) -> None:
        """Make sure that each block has a name of its own.

        Raises:
            ChainBroken: the run names a block twice, or a block like its parent or its namespace; nothing changed.
        """
        others = self.parent + self.namespace if self.start else self.namespace
        # Different hashes differ in their first eight bytes, or nearly always: then nothing else is looked at.
        ordered = np.sort(np.frombuffer(self.data + others, np.uint64)[::_WORDS])
        if not np.count_nonzero(ordered[1:] == ordered[:-1]):
            return
        unique = set(self.hashes())
        if len(unique) != len(self) or self.parent in unique or self.namespace in unique:
            raise ChainBroken(
                f"wanted {len(self)} different block hashes, and a parent and a namespace that are none of them, got "
                f"{len(unique)} different ones; pass one contiguous run of one chain"
            )

    def encode(self) -> bytes:
        """Return the run as bytes; `decode_chain` reads them."""
        return encode(self)


def _as_int(verb: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise InvalidRequest(f"BlockHashes.{verb}: wanted a number of blocks as an int, got {clip(value)}") from error


def _check_run(verb: str, value: object) -> None:
    if not isinstance(value, BlockHashes):
        raise InvalidRequest(
            f"BlockHashes.{verb}: wanted BlockHashes of space.block_hashes() or space.wrap(), got {brief(value)}"
        )


def root_key_of(first: bytes) -> int:
    """Return the root key of a chain whose first block's hash begins so; 0 for no bytes."""
    return int.from_bytes(first[:4], "little")


def hashes_in(data: bytes) -> list[bytes]:
    """Return the list of hashes that `data` holds back to back."""
    found: list[bytes] = np.frombuffer(data, _HASH).tolist()
    return found


#: Returns the run that `BlockHashes.encode` wrote; a broken run raises like `BlockHashes`, other bytes ProtocolError.
decode_chain = decoder(BlockHashes)

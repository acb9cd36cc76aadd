"""Block hashes: the content identity of KV blocks.

    h[-1] = namespace digest
    h[i]  = sha256(h[i-1] || tokens of block i, little-endian uint32 [|| "x" || sha256(extra keys)])

A hash therefore stands for the model, the stored shape and every token before it, and two
chains that agree at one index agree at every earlier one. No hash depends on the process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import overload

import numpy as np
import numpy.typing as npt

from kvstore.blocks.shape import KVShape
from kvstore.blocks.token_bytes import ExtraKey, brief, encode_key, encode_keys, keys_by_block, token_bytes
from kvstore.errors import ChainBroken, ConfigError, InvalidRequest, NamespaceMismatch

HASH_BYTES = 32
"""Bytes of one block hash and of a namespace digest."""

_NAMESPACE_TAG = b"raykv/namespace/1"
_WRAP_TAG = b"raykv/wrap/1"


@dataclass(frozen=True, slots=True)
class BlockHashes:
    """A contiguous run of one chain of block hashes, in one bytes object.

    Args:
        namespace_digest: digest of the namespace that the chain is rooted in, 32 bytes.
        start: index in the chain of the first block of the run.
        parent: hash before the first one, 32 bytes; the namespace digest when start is 0.
        data: the hashes back to back, 32 bytes each; may be empty.

    Raises:
        InvalidRequest: a length or type is wrong.
        ChainBroken: parent and start disagree about where the root is.
    """

    namespace_digest: bytes
    start: int
    parent: bytes
    data: bytes

    def __post_init__(self) -> None:
        for name, value in (("namespace_digest", self.namespace_digest), ("parent", self.parent)):
            if not isinstance(value, bytes) or len(value) != HASH_BYTES:
                raise InvalidRequest(
                    f"BlockHashes: wanted {name} as {HASH_BYTES} bytes, got {brief(value)}; use Namespace.block_hashes"
                )
        if not isinstance(self.data, bytes) or len(self.data) % HASH_BYTES:
            raise InvalidRequest(
                f"BlockHashes: wanted data as bytes in a multiple of {HASH_BYTES}, got {brief(self.data)}; "
                "pass whole hashes, or use Namespace.wrap for hashes of an engine"
            )
        if type(self.start) is not int or self.start < 0:
            raise InvalidRequest(f"BlockHashes: wanted start as an int >= 0, got {self.start!r}; count blocks from 0")
        if (self.start == 0) != (self.parent == self.namespace_digest):
            raise ChainBroken(
                f"BlockHashes: wanted the namespace digest as parent exactly at start 0, "
                f"got start={self.start} and parent {self.parent.hex()[:8]}; "
                "slice an existing run instead of building one"
            )

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
            ChainBroken: a slice with a step other than 1, which would not be a run.
        """
        count = len(self)
        if isinstance(index, slice):
            first, last, step = index.indices(count)
            if step != 1:
                raise ChainBroken(
                    f"BlockHashes: wanted a slice with step 1, got step {step}; "
                    "only contiguous runs can be looked up, iterate for single hashes"
                )
            return BlockHashes(
                self.namespace_digest,
                self.start + first,
                self._before(first),
                self.data[first * HASH_BYTES : last * HASH_BYTES],
            )
        at = index + count if index < 0 else index
        if not 0 <= at < count:
            raise IndexError(f"BlockHashes: wanted an index below {count}, got {index}; check len() first")
        return self.data[at * HASH_BYTES : (at + 1) * HASH_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        for at in range(0, len(self.data), HASH_BYTES):
            yield self.data[at : at + HASH_BYTES]

    def __repr__(self) -> str:
        tail = f", last={self[-1].hex()[:8]}" if self.data else ""
        return (
            f"BlockHashes(namespace={self.namespace_digest.hex()[:8]}, "
            f"blocks=[{self.start}, {self.start + len(self)}){tail})"
        )

    def common_prefix(self, other: BlockHashes) -> int:
        """Count the leading hashes that both runs share; 0 when they do not start at the same block."""
        if (self.namespace_digest, self.start) != (other.namespace_digest, other.start):
            return 0
        count = min(len(self), len(other))
        words_of_hash = HASH_BYTES // 8
        mine = np.frombuffer(self.data, np.uint64, count * words_of_hash)
        theirs = np.frombuffer(other.data, np.uint64, count * words_of_hash)
        differing = np.flatnonzero(mine != theirs)
        return int(differing[0]) // words_of_hash if differing.size else count

    @staticmethod
    def join(a: BlockHashes, b: BlockHashes) -> BlockHashes:
        """Append run b to run a.

        Raises:
            NamespaceMismatch: the runs are of two namespaces.
            ChainBroken: b does not begin where a ends.
        """
        _require_namespace(b, a.namespace_digest, "BlockHashes.join")
        end = a.start + len(a)
        if b.start != end or b.parent != a._before(len(a)):
            raise ChainBroken(
                f"BlockHashes.join: wanted a run at block {end} after {a._before(len(a)).hex()[:8]}, "
                f"got one at block {b.start} after {b.parent.hex()[:8]}; "
                "join neighbours of one chain, in order"
            )
        return BlockHashes(a.namespace_digest, a.start, a.parent, a.data + b.data)

    def _before(self, at: int) -> bytes:
        """Return the hash before block `at` of this run."""
        return self.data[(at - 1) * HASH_BYTES : at * HASH_BYTES] if at else self.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything besides the tokens that decides what KV bytes mean.

    Args:
        model: name of the weights; not empty.
        shape: the stored block.
        salt: keeps tenants apart; part of every hash.
        revision: revision of the weights.
        lora: adapter that all requests use; per-request adapters go to `extra` of `block_hashes`.
        quantization: how KV values are scaled, when dtype alone does not say it.

    Raises:
        ConfigError: a value cannot work.
    """

    model: str
    shape: KVShape
    salt: bytes = b""
    revision: str = ""
    lora: str = ""
    quantization: str = ""
    digest: bytes = field(init=False, repr=False, compare=False)
    """32 bytes; the root of every chain of this namespace."""

    def __post_init__(self) -> None:
        for name in ("model", "revision", "lora", "quantization"):
            value = getattr(self, name)
            if not isinstance(value, str) or not _is_utf8(value) or (name == "model" and not value):
                raise ConfigError(
                    f"Namespace: wanted {name} as {'a non-empty ' if name == 'model' else ''}text, "
                    f"got {value!r}; pass a str without lone surrogates"
                )
        if not isinstance(self.salt, bytes):
            raise ConfigError(f"Namespace: wanted salt as bytes, got {brief(self.salt)}; encode it first")
        if not isinstance(self.shape, KVShape):
            raise ConfigError(f"Namespace: wanted shape as a KVShape, got {brief(self.shape)}; build one first")
        fields = {
            "lora": self.lora,
            "model": self.model,
            "quantization": self.quantization,
            "revision": self.revision,
            "salt": self.salt.hex(),
            "shape": self.shape.canonical().hex(),
        }
        encoded = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")
        object.__setattr__(self, "digest", sha256(_NAMESPACE_TAG + encoded).digest())

    def block_hashes(
        self,
        token_ids: Sequence[int] | npt.ArrayLike,
        extra: Sequence[Sequence[ExtraKey] | None] | Mapping[int, Sequence[ExtraKey]] | None = None,
        parent: BlockHashes | None = None,
    ) -> BlockHashes:
        """Hash the full blocks of a token sequence; a last partial block is left out.

        Args:
            token_ids: one-dimensional integers, each in [0, 2**32).
            extra: the keys besides tokens that a block depends on, such as ("lora", name) or
                ("image", digest, offset): one entry per full block, None (or empty) for none, or a mapping from
                the index of a full block to its keys. Name the kind of each key, so that a LoRA called like a
                salt is not taken for it.
            parent: run that these tokens continue; the tokens begin right after its last block.

        Returns:
            The run of the new blocks, without those of parent.

        Raises:
            InvalidRequest: tokens are not such integers, or extra has another length or other key types.
            NamespaceMismatch: parent is of another namespace.
        """
        tokens = token_bytes(token_ids)
        block_bytes = 4 * self.shape.block_size
        end = len(tokens) // block_bytes * block_bytes
        start, root = self._root(parent)
        last, found = root, []
        if extra is None:
            fresh = sha256()  # A copy of one takes less than a new one.
            for at in range(0, end, block_bytes):
                block = fresh.copy()
                block.update(last + tokens[at : at + block_bytes])
                last = block.digest()
                found.append(last)
        else:
            if isinstance(extra, Mapping):
                extra = keys_by_block(extra, end // block_bytes)
            if isinstance(extra, (str, bytes)) or len(extra) != end // block_bytes:
                raise InvalidRequest(
                    f"block_hashes: wanted extra with one entry per full block, {end // block_bytes}, "
                    f"got {len(extra)}; use None for blocks without keys"
                )
            for at, keys in zip(range(0, end, block_bytes), extra, strict=True):
                last = sha256(last + tokens[at : at + block_bytes] + encode_keys(keys)).digest()
                found.append(last)
        return BlockHashes(self.digest, start, root, b"".join(found))

    def wrap(self, engine_hashes: Sequence[bytes | int], parent: BlockHashes | None = None) -> BlockHashes:
        """Take an engine's own chained hashes as opaque names of blocks.

        The store cannot check what they stand for: they must be chained and depend on everything
        that changes KV. They never equal hashes made from tokens, and are shared only between
        engines of one block size and one way of hashing.

        Args:
            engine_hashes: one per full block, in order; bytes, or ints of any size and sign.
            parent: wrapped run that these continue.

        Raises:
            InvalidRequest: an engine hash is neither bytes nor int, or is empty.
            NamespaceMismatch: parent is of another namespace.
        """
        if isinstance(engine_hashes, (str, bytes, bytearray, memoryview)):
            raise InvalidRequest(
                f"wrap: wanted a sequence of hashes, got {brief(engine_hashes)}; pass a list with one item per block"
            )
        start, root = self._root(parent)
        prefix = _WRAP_TAG + self.digest
        found = []
        for engine_hash in engine_hashes:
            if not isinstance(engine_hash, (bytes, int)) or isinstance(engine_hash, bool) or engine_hash == b"":
                raise InvalidRequest(
                    f"wrap: wanted each engine hash as non-empty bytes or an int, got {brief(engine_hash)}; "
                    "pass the engine's block hashes unchanged"
                )
            found.append(sha256(prefix + encode_key(engine_hash)).digest())
        return BlockHashes(self.digest, start, root, b"".join(found))

    def _root(self, parent: BlockHashes | None) -> tuple[int, bytes]:
        """Return index and parent hash of the block after `parent`."""
        if parent is None:
            return 0, self.digest
        _require_namespace(parent, self.digest, "block_hashes")
        return parent.start + len(parent), parent._before(len(parent))


def _require_namespace(hashes: BlockHashes, digest: bytes, verb: str) -> None:
    if hashes.namespace_digest != digest:
        raise NamespaceMismatch(
            f"{verb}: wanted hashes of namespace {digest.hex()[:8]}, "
            f"got {hashes.namespace_digest.hex()[:8]}; make both with the same Namespace"
        )


def _is_utf8(text: str) -> bool:
    # Two lone surrogates and the character they spell would read alike in ASCII JSON.
    return not any("\ud800" <= char <= "\udfff" for char in text)

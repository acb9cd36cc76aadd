"""Block hashes: the content identity of KV blocks.

    h[-1] = namespace digest
    h[i]  = sha256(h[i-1] || tokens of block i, little-endian uint32 [|| "x" || sha256(extra keys)])

A hash therefore names the model, the stored shape, its block's tokens and every token before. Two
chains with equal hashes at one index are equal at every earlier one. No hash depends on the process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from hashlib import sha256

import numpy.typing as npt

from kvstore.blocks.chain import BlockHashes as BlockHashes  # Callers import both from here.
from kvstore.blocks.shape import KVShape
from kvstore.blocks.token_bytes import ExtraKey, brief, encode_key, encode_keys, keys_by_block, token_bytes
from kvstore.errors import ConfigError, InvalidRequest

_NAMESPACE_TAG = b"raykv/namespace/1"
_WRAP_TAG = b"raykv/wrap/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything besides the tokens that decides the meaning of KV bytes.

    Args:
        model: name of the weights; not empty.
        shape: the stored block.
        salt: keeps tenants apart; part of every hash.
        revision: revision of the weights.
        lora: adapter that all requests use; pass per-request adapters as `extra` of `block_hashes`.
        quantization: how KV values are scaled, when dtype alone does not define it.
        tenant: the tenant to whom the blocks are private; a store with private tenants sets it (docs/tenants.md).

    Raises:
        ConfigError: a value cannot work.
    """

    model: str
    shape: KVShape
    salt: bytes = b""
    revision: str = ""
    lora: str = ""
    quantization: str = ""
    tenant: str = ""
    digest: bytes = field(init=False, repr=False, compare=False)
    """32 bytes; the root of every chain of this namespace."""

    def __post_init__(self) -> None:
        for name in ("model", "revision", "lora", "quantization", "tenant"):
            value = getattr(self, name)
            if not isinstance(value, str) or not _is_utf8(value) or (name == "model" and not value):
                raise ConfigError(
                    f"Namespace: wanted {name} as {'a non-empty ' if name == 'model' else ''}text, "
                    f"got {value!r}; pass its name as a str of valid Unicode"
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
        if self.tenant:  # Left out without one, so that hashes are those of stores that knew no tenants.
            fields["tenant"] = self.tenant
        encoded = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")
        object.__setattr__(self, "digest", sha256(_NAMESPACE_TAG + encoded).digest())

    def block_hashes(
        self,
        token_ids: Sequence[int] | npt.ArrayLike,
        extra: Sequence[Sequence[ExtraKey] | None] | Mapping[int, Sequence[ExtraKey]] | None = None,
        parent: BlockHashes | None = None,
    ) -> BlockHashes:
        """Return the hashes of the full blocks of a token sequence; a last partial block is left out.

        Args:
            token_ids: one-dimensional integers, each in [0, 2**32).
            extra: the keys besides tokens that a block depends on, such as ("lora", name) or
                ("image", digest, offset): one entry per full block, None (or empty) for none, or a mapping from
                the index of a full block to its keys. Name the kind of each key, so that a LoRA with the name of
                a salt is not confused with it.
            parent: run that these tokens continue; the tokens begin right after its last block.

        Returns:
            The run of the new blocks, without the blocks of parent.

        Raises:
            InvalidRequest: tokens are not such integers, extra has another length or other key types, or parent is no
                run.
            NamespaceMismatch: parent is of another namespace.
        """
        tokens = token_bytes(token_ids)
        block_bytes = 4 * self.shape.block_size
        end = len(tokens) // block_bytes * block_bytes
        start, root, root_key = self._end("block_hashes", parent)
        last, found = root, []
        if extra is None:
            found = hash_tokens(root, tokens, block_bytes)
        else:
            if isinstance(extra, Mapping):
                extra = keys_by_block(extra, end // block_bytes)
            if isinstance(extra, (str, bytes, Set)) or not (_is_iterable(extra) and hasattr(extra, "__len__")):
                raise InvalidRequest(
                    f"block_hashes: wanted extra as a list with one entry per full block, or a mapping from the index "
                    f"of a block to its keys, got {brief(extra)}"
                )
            entries = list(extra)  # Its own count: a table may say how many rows it has and give its columns.
            if len(entries) != end // block_bytes:
                raise InvalidRequest(
                    f"block_hashes: wanted extra with one entry per full block, {end // block_bytes}, "
                    f"got {len(entries)}; use None for blocks without keys"
                )
            for at, keys in zip(range(0, end, block_bytes), entries, strict=True):
                last = sha256(last + tokens[at : at + block_bytes] + encode_keys(keys)).digest()
                found.append(last)
        return BlockHashes(self.digest, root, start, b"".join(found), root_key)

    def wrap(self, engine_hashes: Sequence[bytes | int], parent: BlockHashes | None = None) -> BlockHashes:
        """Return a run made from an engine's own chained hashes, taken as opaque names of blocks.

        The store cannot check the meaning of these names: each must depend on the one before and on
        everything that changes KV. They never equal hashes made from tokens. Only engines with the
        same block size and the same hashing share them.

        Args:
            engine_hashes: one per full block, in order; bytes, or ints of any size and sign.
            parent: wrapped run that these hashes continue.

        Raises:
            InvalidRequest: an engine hash is neither bytes nor int, or is empty, or parent is no run.
            NamespaceMismatch: parent is of another namespace.
        """
        if isinstance(engine_hashes, (str, bytes, bytearray, memoryview)) or not _is_iterable(engine_hashes):
            raise InvalidRequest(
                f"wrap: wanted a sequence of hashes, got {brief(engine_hashes)}; pass a list with one item per block"
            )
        start, root, root_key = self._end("wrap", parent)
        prefix = _WRAP_TAG + self.digest
        found = []
        for engine_hash in engine_hashes:
            if not isinstance(engine_hash, (bytes, int)) or isinstance(engine_hash, bool) or engine_hash == b"":
                raise InvalidRequest(
                    f"wrap: wanted each engine hash as non-empty bytes or an int, got {brief(engine_hash)}; "
                    "pass the engine's block hashes unchanged"
                )
            found.append(sha256(prefix + encode_key(engine_hash)).digest())
        return BlockHashes(self.digest, root, start, b"".join(found), root_key)

    def _end(self, verb: str, parent: BlockHashes | None) -> tuple[int, bytes, int]:
        """Return (index, parent, root key) of the first block of a run that continues `parent`, or begins a chain."""
        if parent is None:
            return 0, self.digest, 0
        if not isinstance(parent, BlockHashes):
            raise InvalidRequest(
                f"{verb}: wanted parent as the BlockHashes that these continue, or None, got {brief(parent)}"
            )
        return *parent.end(self.digest, verb), parent.root_key


def hash_tokens(parent: bytes, tokens: bytes, block_bytes: int) -> list[bytes]:
    """Return the hashes of the full blocks of tokens without extra keys.

    Args:
        parent: hash of the block before the tokens, or the digest of a namespace.
        tokens: from `token_bytes`.
        block_bytes: of the tokens of one block.
    """
    last, found = parent, []
    fresh = sha256()  # Copying one is faster than making a new one.
    for at in range(0, len(tokens) // block_bytes * block_bytes, block_bytes):
        block = fresh.copy()
        block.update(last + tokens[at : at + block_bytes])
        last = block.digest()
        found.append(last)
    return found


def space_of_tenant(space: Namespace, tenant: str, *, is_private: bool) -> Namespace:
    """Return the namespace in which a tenant saves and finds the blocks of another one.

    Args:
        space: without a tenant, or of this one.
        tenant: its name; "" for the shared one.
        is_private: whether tenants of the store are private. If not, or for the shared one, it is `space` itself.

    Raises:
        ConfigError: `space` is private to another tenant.
    """
    if space.tenant not in ("", tenant):
        raise ConfigError(
            f"space: wanted a namespace of tenant {tenant!r} or of none, got one of tenant {space.tenant!r}; make it "
            "without tenant="
        )
    return replace(space, tenant=tenant) if is_private and tenant else space


def _is_iterable(value: object) -> bool:
    try:
        iter(value)  # type: ignore[call-overload]
    except TypeError:  # Also of an array without dims, which has __iter__.
        return False
    return True


def _is_utf8(text: str) -> bool:
    # In ASCII JSON, two lone surrogates and the character that they form would look the same.
    return not any("\ud800" <= char <= "\udfff" for char in text)

"""Check and encode the tokens and extra keys of block hashes. Different inputs give different bytes."""

from __future__ import annotations

import contextlib
import sys
from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest

ExtraKey: TypeAlias = "str | bytes | int | tuple[ExtraKey, ...]"
"""What a block depends on besides its tokens: a LoRA name, the id of an image."""

_IS_PLAIN_U32 = sys.byteorder == "little" and array("I").itemsize == 4


def token_bytes(token_ids: Sequence[int] | npt.ArrayLike) -> bytes:
    """Return tokens as little-endian uint32; refuse input that this would change.

    Raises:
        InvalidRequest: not one-dimensional integers in [0, 2**32).
    """
    if _IS_PLAIN_U32 and isinstance(token_ids, list) and token_ids and type(token_ids[0]) is int:
        with contextlib.suppress(TypeError, OverflowError):  # The code below raises the full error.
            return array("I", token_ids).tobytes()  # NumPy takes several times as long.
    try:
        tokens = np.asarray(token_ids)
    except (ValueError, TypeError, OverflowError, RuntimeError) as cause:
        raise InvalidRequest(
            f"block_hashes: wanted one-dimensional integers, got {brief(token_ids)} ({cause}); pass a flat list"
        ) from cause
    if tokens.ndim == 1 and tokens.size == 0:
        return b""
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidRequest(
            f"block_hashes: wanted one-dimensional integers in [0, 2**32), "
            f"got {tokens.ndim} dims of {tokens.dtype}; pass token ids as a flat list of ints"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= 1 << 32:
        raise InvalidRequest(
            f"block_hashes: wanted tokens in [0, 2**32), got {low}..{high}; replace placeholders by real "
            "token ids and name media in extra"
        )
    return tokens.astype("<u4").tobytes()


def keys_by_block(extra: Mapping[int, Sequence[ExtraKey]], num_blocks: int) -> list[Sequence[ExtraKey] | None]:
    """Return one entry per full block from keys given by block index.

    Raises:
        InvalidRequest: there are keys for a block that does not exist, or for something else than the index of one.
    """
    others = [index for index in extra if not isinstance(index, int | np.integer)]
    if others:
        raise InvalidRequest(
            f"block_hashes: wanted extra as a mapping from the index of a block to its keys, got one from "
            f"{brief(others[0])}"
        )
    strays = sorted(index for index in extra if not 0 <= index < num_blocks)
    if strays:
        raise InvalidRequest(f"block_hashes: wanted extra keys of blocks [0, {num_blocks}), got blocks {strays[:5]}")
    return [extra.get(index) for index in range(num_blocks)]


def encode_keys(keys: Sequence[ExtraKey] | None) -> bytes:
    """Encode the extra keys of one block; empty when there are none.

    Raises:
        InvalidRequest: `keys` is not a sequence of keys.
    """
    if keys is not None and (isinstance(keys, (str, bytes)) or not isinstance(keys, Sequence)):
        raise InvalidRequest(f"block_hashes: wanted a sequence of extra keys, got {brief(keys)}; put it in a list")
    if not keys:
        return b""
    encoded = b"".join(encode_key(key) for key in keys)
    return b"x" + sha256(len(keys).to_bytes(8, "little") + encoded).digest()


def encode_key(key: ExtraKey) -> bytes:
    """Encode one key as type tag, 8-byte length, bytes; different keys encode differently.

    Raises:
        InvalidRequest: the key is of another type.
    """
    if isinstance(key, tuple):
        tag, encoded = b"t", b"".join(encode_key(part) for part in key)
    elif not isinstance(key, (str, bytes, int)) or isinstance(key, bool):
        raise InvalidRequest(
            f"block_hashes: wanted extra keys as str, bytes, int or tuples of them, got {brief(key)}; convert it"
        )
    elif isinstance(key, str):
        tag, encoded = b"s", key.encode("utf-8", "surrogatepass")
    elif isinstance(key, bytes):
        tag, encoded = b"b", key
    else:
        tag, encoded = b"i", key.to_bytes(key.bit_length() // 8 + 1, "little", signed=True)
    return tag + len(encoded).to_bytes(8, "little") + encoded


def brief(value: object) -> str:
    """Describe a wrong value without printing all of it."""
    size = f" of length {len(value)}" if isinstance(value, (bytes, bytearray, str, list, tuple)) else ""
    return f"{type(value).__name__}{size}"

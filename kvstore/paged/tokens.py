"""Tokens as bytes: encoded once, compared by memory, four bytes each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.blocks.token_bytes import token_bytes
from kvstore.errors import InvalidRequest

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class EncodedTokens:
    """Token ids of a request as little-endian uint32; make it with `encode_tokens`."""

    data: bytes

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens."""
        return len(self.data) // TOKEN_BYTES


TokenIds = EncodedTokens | Sequence[int] | npt.ArrayLike
"""What calls take as tokens. A request that calls several times encodes its tokens once."""


def encode_tokens(token_ids: TokenIds) -> EncodedTokens:
    """Return tokens in the form that the cache compares; encoded ones are returned as they are.

    Args:
        token_ids: one-dimensional integers in [0, 2**32).

    Raises:
        InvalidRequest: not such integers.
    """
    if isinstance(token_ids, EncodedTokens):
        return token_ids
    try:
        return EncodedTokens(token_bytes(token_ids))
    except InvalidRequest as cause:
        raise InvalidRequest(f"encode_tokens: {str(cause).partition(': ')[2]}") from cause


def page_key(data: bytes, at: int, page_bytes: int) -> bytes:
    """Return the tokens of one page, which name a child of a node. Equal keys mean equal tokens."""
    return data[at : at + page_bytes]


def num_common_tokens(edge: bytes | memoryview, data: bytes, at: int, most: int) -> int:
    """Return how many leading tokens `edge` and `data[at:]` share, at most `most`."""
    one = np.frombuffer(edge, np.uint32, count=most)
    other = np.frombuffer(data, np.uint32, count=most, offset=at)
    differs = one != other
    first = int(differs.argmax()) if most else 0
    return first if most and differs[first] else most

"""Chains from letters: one block per letter, and chains with equal beginnings share blocks."""

from __future__ import annotations

from functools import cache
from hashlib import sha256

from kvstore.chain import Chain

NAMESPACES = (b"a" * 32, b"b" * 32)
LATER_S = 1e9


@cache
def chain_of(tokens: str, namespace: bytes = NAMESPACES[0], start: int = 0) -> Chain:
    """Return the chain of `tokens` from block `start` on."""
    hashes, last = [], namespace
    for token in tokens:
        last = sha256(last + token.encode()).digest()
        hashes.append(last)
    return Chain(namespace, namespace, 0, b"".join(hashes)).tail(start)

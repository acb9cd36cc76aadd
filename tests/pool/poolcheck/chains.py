"""Chains from letters: one block per letter, and chains with equal beginnings share blocks; pools that hold them."""

from __future__ import annotations

from functools import cache
from hashlib import sha256

from kvstore.blocks.chain import BlockHashes
from kvstore.pool.pool import Pool

NAMESPACES = (b"a" * 32, b"b" * 32)
LATER_S = 1e9


@cache
def chain_of(tokens: str, namespace: bytes = NAMESPACES[0], start: int = 0) -> BlockHashes:
    """Return the chain of `tokens` from block `start` on."""
    hashes, last = [], namespace
    for token in tokens:
        last = sha256(last + token.encode()).digest()
        hashes.append(last)
    return BlockHashes(namespace, namespace, 0, b"".join(hashes)).tail(start)


def store(pool: Pool, tokens: str, owner: str = "w", start: int = 0) -> tuple[int, ...]:
    """Store what a pool lacks of a chain; returns the slots that were written."""
    ticket = pool.prepare_store(chain_of(tokens, start=start), owner)
    pool.check_integrity()
    if ticket.write_id:
        assert pool.complete_store(ticket.write_id, owner) == len(ticket.slots)
        pool.check_integrity()
    return ticket.slots


def resident(pool: Pool, tokens: str) -> int:
    """Return how many leading blocks can be found."""
    return pool.lookup(chain_of(tokens))

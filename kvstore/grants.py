"""What a pool hands out: grants of pinned blocks, tickets for blocks to write, and its counts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PinKind(Enum):
    """How strongly blocks are held.

    LEASE: read now, until a deadline. HARD: never evicted, counted against a quota of its own. SOFT: a
    preference, evicted last, when nothing else is left.
    """

    LEASE = 0
    HARD = 1
    SOFT = 2


@dataclass(frozen=True, slots=True)
class Grant:
    """Pinned blocks: a prefix of what was asked for.

    Args:
        lease_id: names the pin to `release`; 0 when nothing was pinned.
        slots: slot of each pinned block, in chain order.
        generations: the life of each slot, little-endian uint32.
        num_refused: readable blocks behind them that the budget of pins had no room for.
        epoch: the life of the pool; leases of another one are void.
    """

    lease_id: int
    slots: tuple[int, ...]
    generations: bytes = b""
    num_refused: int = 0
    epoch: bytes = bytes(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTicket:
    """What `prepare_store` claimed.

    Args:
        write_id: names the write to `complete_store` and `abort_store`; 0 when there is nothing to write.
        indexes: positions in the chain that the caller has to write, ascending.
        slots: slot of each of them.
        num_resident: blocks that were there already, or are just being written by somebody else.
        num_refused: blocks at the end of the chain for which no slot could be had.
        num_awaited: how many of the resident ones are still being written by somebody else, who may yet give
            them up; `Pool.watch` tells how that ended.
        num_clears: how often the namespace had been cleared; blocks computed under an earlier count are not
            to be stored under a later one.
        generations: the life of each slot, little-endian uint32; `complete_store` can be given them back.
        epoch: the life of the pool; tickets of another one are void.
    """

    write_id: int
    indexes: tuple[int, ...]
    slots: tuple[int, ...]
    num_resident: int
    num_refused: int
    num_awaited: int = 0
    num_clears: int = 0
    generations: bytes = b""
    epoch: bytes = bytes(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Counts of one snapshot, taken under the lock; the five slot counts add up to `num_slots`."""

    num_slots: int
    num_free: int
    num_writing: int
    num_idle: int
    num_pinned: int
    num_quarantined: int
    num_leases: int
    num_writes: int
    num_evicted: int
    num_published: int
    num_hard_pinned: int = 0
    num_soft_pinned: int = 0

"""What a node store's callers may do with its pool, over whichever door they come.

Times are given as seconds from now, since callers have clocks of their own; the pool is told deadlines.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvstore.blocks.chain import Chain
from kvstore.blocks.grants import Grant, PinKind, StoreTicket
from kvstore.bounds import MAX_TTL_S, check_ttl
from kvstore.config import StoreConfig
from kvstore.errors import InvalidRequest, StoreDraining, StoreUnavailable
from kvstore.memory.clears import ClearCounts
from kvstore.memory.presence import PresenceCounts
from kvstore.pool.pool import Pool
from kvstore.runtime import clock

FOREVER_S = math.inf


class PoolVerbs:
    """The verbs of one node store that concern its pool, which may not be there yet.

    Args:
        node_id: for messages.
        config: of the store.
        changed: called when blocks became findable or stopped being so.
        wake: called when a deadline was set, so that somebody looks at it.
    """

    def __init__(
        self, node_id: str, config: StoreConfig, changed: Callable[[], None], wake: Callable[[], None]
    ) -> None:
        self.node_id, self.config = node_id, config
        self.attached_pool: Pool | None = None
        self._draining = self._ending = False
        self._changed, self._wake = changed, wake

    @property
    def pool(self) -> Pool:
        """The pool of the arena.

        Raises:
            InvalidRequest: no namespace has attached yet, so there are no slots.
        """
        if self.attached_pool is None:
            raise InvalidRequest("no namespace has attached to this store yet; make a client first")
        return self.attached_pool

    def make_pool(self, num_slots: int, epoch: bytes, presence: PresenceCounts, clears: ClearCounts) -> Pool:
        """Return a pool with the budgets of the configuration."""
        max_pinned = max(1, int(num_slots * self.config.max_pinned_fraction))
        max_hard_pinned = min(max_pinned, int(num_slots * self.config.max_hard_pinned_fraction))
        return Pool(
            num_slots, max_pinned, max_hard_pinned=max_hard_pinned, epoch=epoch, presence=presence, clears=clears
        )

    @property
    def is_draining(self) -> bool:
        """Whether nothing is granted to workers."""
        return self._draining

    def check_serving(self) -> None:
        """Refuse when the node is being drained, or its store ends.

        Raises:
            StoreDraining: it is drained.
            StoreUnavailable: it ends. A client has to look for another store then, and not to wait for this one.
        """
        if self._ending:
            raise StoreUnavailable(f"the store of node {self.node_id} is being stopped; make a new client")
        if self._draining:
            raise StoreDraining(f"node {self.node_id} is being drained; use another node or undrain it")

    def lookup(self, chain: Chain) -> int:
        """Return how many leading blocks this node's workers can have; none while it is drained. No side effect."""
        return 0 if self.attached_pool is None or self._draining else self.attached_pool.lookup(chain)

    def lease(self, chain: Chain, owner: str, ttl_s: float) -> Grant:
        """Pin the readable prefix of a run for `ttl_s` seconds.

        Raises:
            StoreDraining: nothing is granted any more.
            InvalidRequest: `ttl_s` is not a time; nothing changed.
        """
        self.check_serving()
        deadline_s = deadline_after(ttl_s)
        if self.attached_pool is None:
            return Grant()
        grant = self.attached_pool.pin_prefix(chain, owner, deadline_s)
        if not grant.packed_slots:
            self.attached_pool.release(grant.lease_id, owner)
            return Grant(num_refused=grant.num_refused, epoch=grant.epoch)
        self._wake()
        return grant

    def pin(self, chain: Chain, owner: str, kind: PinKind, ttl_s: float) -> Grant:
        """Keep the readable prefix of a run here for `ttl_s` seconds, or as long as its owner lives when infinite.

        Raises:
            StoreDraining: nothing is granted any more.
            PoolExhausted: the budget of pins is used up; nothing changed.
            InvalidRequest: `ttl_s` is not a time; nothing changed.
        """
        self.check_serving()
        deadline_s = FOREVER_S if ttl_s == FOREVER_S else deadline_after(ttl_s)
        grant = self.pool.pin(chain, owner, kind, deadline_s)
        self._wake()
        return grant

    def release(self, lease_id: int, owner: str, epoch: bytes | None = None) -> bool:
        """Drop a lease or a pin; whether it was still held by this owner, in this epoch."""
        return self.attached_pool is not None and self.attached_pool.release(lease_id, owner, epoch=epoch)

    def renew(self, lease_id: int, owner: str, ttl_s: float, epoch: bytes | None = None) -> bool:
        """Extend a lease to `ttl_s` from now; whether it was still held. Never shortens.

        Raises:
            InvalidRequest: `ttl_s` is not a time; nothing changed.
        """
        deadline_s = deadline_after(ttl_s)
        return self.attached_pool is not None and self.attached_pool.renew(lease_id, owner, deadline_s, epoch=epoch)

    def prepare_store(
        self,
        chain: Chain,
        owner: str,
        num_parts: int = 1,
        part: int = 0,
        ttl_s: float = FOREVER_S,
        num_clears: int | None = None,
    ) -> StoreTicket:
        """Claim slots for the blocks of a run that are not here, or join those who write other parts of them.

        Args:
            chain: the blocks to store.
            owner: who writes.
            num_parts: in how many parts a block is written, each by a rank of its own.
            part: which of them this owner writes.
            ttl_s: when the slots come back although the owner may live; infinite for owners whose death is seen.
            num_clears: as for `Pool.prepare_store`.

        Raises:
            StoreDraining: nothing is granted any more.
            ChainBroken: the run cannot be attached; nothing changed.
            InvalidRequest: `part`, `num_parts` or `ttl_s` cannot be; nothing changed.
        """
        self.check_serving()
        # What is no number at all the pool refuses.
        in_parts = isinstance(num_parts, int) and num_parts > 1
        ticket = self.pool.prepare_store(
            chain,
            owner,
            num_parts=num_parts,
            part=part,
            deadline_s=FOREVER_S if ttl_s == FOREVER_S else deadline_after(ttl_s),
            parts_deadline_s=deadline_after(self.config.lease_ttl_s) if in_parts else FOREVER_S,
            num_clears=num_clears,
        )
        if in_parts or ttl_s != FOREVER_S:
            self._wake()
        return ticket

    def complete_store(
        self, write_id: int, owner: str, generations: bytes | None = None, epoch: bytes | None = None
    ) -> int:
        """Publish a write whose bytes are in place; returns how many blocks became findable.

        Raises:
            StaleTicket: the generations or the epoch are not those of the ticket; nothing changed.
        """
        num_published = self.pool.complete_store(write_id, owner, generations=generations, epoch=epoch)
        self._changed()
        return num_published

    def abort_store(
        self, write_id: int, owner: str, generations: bytes | None = None, epoch: bytes | None = None
    ) -> int:
        """Give a write up; returns how many slots came back."""
        return self.pool.abort_store(write_id, owner, generations=generations, epoch=epoch)


def deadline_after(ttl_s: float, most_s: float = MAX_TTL_S) -> float:
    """Return the time of kvstore.runtime.clock that lies `ttl_s` seconds ahead.

    Raises:
        InvalidRequest: that is no time, or too far.
    """
    return clock.now_s() + check_ttl("ttl_s", ttl_s, most_s)

"""The verbs of a node store's pool, for callers over a socket or Ray.

Callers give times as seconds from now, since they have their own clocks; the pool gets deadlines.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.grants import Grant, PinKind, StoreTicket
from kvstore.blocks.priority import NORMAL, Retention
from kvstore.bounds import MAX_BLOCK_BYTES, MAX_NAMESPACES, MIN_BLOCK_BYTES, check_count, check_digest
from kvstore.config import StoreConfig
from kvstore.disk.records import PAGE_BYTES
from kvstore.disk.tier import DiskTier
from kvstore.errors import ConfigError, InvalidRequest, StaleVersion, StoreDraining, StoreUnavailable
from kvstore.memory.presence import PresenceTable
from kvstore.memory.slot_layout import SLOT_ALIGNMENT_BYTES, check_fits, check_known, divided
from kvstore.node.traffic import Traffic
from kvstore.pool.eviction.make import make_policy
from kvstore.pool.handover.image import PoolImage
from kvstore.pool.pool import Pool
from kvstore.pool.reclaim import Reclaimer
from kvstore.pool.tenants.limits import SHARED
from kvstore.pool.tenants.make import memory_tenants
from kvstore.remote.versions import NamespaceVersions
from kvstore.runtime.clock import deadline_after
from kvstore.runtime.guard import LogLimit
from kvstore.runtime.life import MOST_LINES, log_life

logger = logging.getLogger(__name__)

FOREVER_S = float("inf")


class PoolService:
    """The pool of one node store, and the verbs that concern it. Any thread may call.

    The pool has no slots until the first namespace attaches. The callbacks are called on any thread and must not block.

    Args:
        node_id: for messages.
        config: of the store.
        epoch: this life of the store.
        presence: the table that the node's workers read.
        versions: of the namespaces that this node knows were cleared.
        changed: blocks became findable or are no longer findable, or a namespace was cleared.
        wake: a deadline was set, or slots are to be swept, so the control thread has to look.
        dividing: the arena is about to be divided into slots of this many bytes, and so many.
        divided: the arena was divided into this pool, with slots of this many bytes.
        disk: the disk tier, or None.
    """

    def __init__(
        self,
        node_id: str,
        config: StoreConfig,
        epoch: bytes,
        presence: PresenceTable,
        versions: NamespaceVersions,
        changed: Callable[[], None],
        wake: Callable[[], None],
        dividing: Callable[[int, int], None],
        divided: Callable[[Pool, int], None],
        disk: DiskTier | None = None,
    ) -> None:
        self._node_id, self._config, self._epoch, self._limit = node_id, config, epoch, LogLimit(at_once=MOST_LINES)
        self._presence, self.versions, self._disk, self.traffic = presence, versions, disk, Traffic()
        self._changed, self._wake, self._attach_lock = changed, wake, threading.Lock()
        self._dividing, self._divided = dividing, divided
        self.current, self.slot_bytes = Pool(0, epoch=epoch, clears=presence.clears), 0
        self.reclaimer: Reclaimer | None = None  # None before the first namespace attaches, and without watermarks.
        self.block_bytes: dict[bytes, int] = {}  # Of each namespace that has attached.
        self.is_draining = self.is_ending = self.is_closed_to_peers = False

    @property
    def is_attached(self) -> bool:
        """Whether the arena is divided into slots."""
        return self.current.num_slots > 0

    @property
    def pool(self) -> Pool:
        """The pool of the arena.

        Raises:
            InvalidRequest: no namespace has attached yet, so there are no slots.
        """
        if not self.is_attached:
            raise InvalidRequest("no namespace has attached to this store yet; make a client first")
        return self.current

    def attach(self, namespace: bytes, block_bytes: int, *, may_divide_again: bool = False) -> dict[str, int]:
        """Make room for blocks of one size; the first call divides the arena into slots.

        With `may_divide_again` larger blocks divide it again, if no slot was ever claimed. The caller then ends all
        clients that know the old slots.

        Raises:
            ConfigError: the blocks do not fit the slots, or there are too many namespaces; nothing changed.
            InvalidRequest: `namespace` or `block_bytes` is not valid; nothing changed.
            LayoutMismatch: the namespace is known with another block size in bytes; nothing changed.
        """
        check_digest("namespace", namespace)
        check_count("block_bytes", block_bytes, MIN_BLOCK_BYTES, MAX_BLOCK_BYTES)
        with self._attach_lock:
            if len(self.block_bytes) >= MAX_NAMESPACES and namespace not in self.block_bytes:
                raise ConfigError(f"wanted at most {MAX_NAMESPACES} namespaces in a store, got one more; restart it")
            check_known(block_bytes, self.block_bytes.get(namespace, block_bytes))
            is_empty = self.current.num_free == self.current.num_slots
            if block_bytes > self.slot_bytes and is_empty and (may_divide_again or not self.is_attached):
                self._divide(max(block_bytes, self._config.block_bytes))
            check_fits(block_bytes, self.slot_bytes, self.block_bytes)
            self.block_bytes[namespace] = block_bytes
        return {"slot_bytes": self.slot_bytes, "num_slots": self.current.num_slots}

    def adopt(self, slot_bytes: int, block_bytes: Mapping[bytes, int], image: PoolImage) -> None:
        """Divide the arena as the store's last life did, and take over its blocks, before any namespace attaches.

        Raises:
            ConfigError, InvalidRequest, ProtocolError: it cannot be; there are no slots then.
        """
        with self._attach_lock:
            self.block_bytes.update(block_bytes)
            self._divide(slot_bytes, image)

    def _divide(self, block_bytes: int, image: PoolImage | None = None) -> None:
        config, alignment = self._config, SLOT_ALIGNMENT_BYTES if self._disk is None else PAGE_BYTES
        slot_bytes, num_slots = divided(config.capacity_bytes, block_bytes, alignment)
        max_pinned = max(1, int(num_slots * config.max_pinned_fraction))
        policy = partial(make_policy, config.eviction, num_slots)
        pool = Pool(
            num_slots, max_pinned, max_hard_pinned=min(max_pinned, int(num_slots * config.max_hard_pinned_fraction)),
            epoch=self._epoch, presence=self._presence.counts, clears=self._presence.clears,
            on_published=self.traffic.hearing(self.block_bytes, None if self._disk is None else self._disk.offer),
            on_used=None if self._disk is None or config.disk_min_uses == 1 else self._disk.used,
            eviction=policy(), has_roots=config.num_directory_shards > 1,
            tenants=memory_tenants(config.tenants, num_slots, slot_bytes, policy),
        )  # fmt: skip
        if image is not None:
            pool.adopt(image)

        def change() -> None:
            self._dividing(slot_bytes, num_slots)
            self.slot_bytes, self.current = slot_bytes, pool

        if not self.current.leave(change):
            return
        if self.reclaimer is not None:
            self.reclaimer.stop()
        if any(config.watermarks):
            self.reclaimer = Reclaimer(pool, *config.watermarks, self._disk if config.disk_write == "back" else None)
        self._divided(pool, slot_bytes)

    def block_bytes_of(self, namespace: bytes) -> int:
        """Return the size of a namespace's blocks.

        Raises:
            InvalidRequest: it has not attached.
        """
        if (known := self.block_bytes.get(namespace)) is None:
            raise InvalidRequest("wanted a namespace that has attached to this store, got another; make a client first")
        return known

    def check_running(self) -> None:
        """Raise an error when the store is being stopped.

        Raises:
            StoreUnavailable: it is. A client then has to use another store, not wait for this one.
        """
        if self.is_ending:
            raise StoreUnavailable(f"the store of node {self._node_id} is being stopped; make a new client")

    def check_serving(self) -> None:
        """Raise an error while the node is drained, or when its store is being stopped.

        Raises:
            StoreDraining: the node is drained.
            StoreUnavailable: as for `check_running`.
        """
        self.check_running()
        if self.is_draining:
            raise StoreDraining(f"node {self._node_id} is being drained; use another node or undrain it")

    def lookup(self, chain: BlockHashes) -> int:
        """Return how many leading blocks this node's workers find in memory; 0 while it is drained. No side effect."""
        return 0 if self.is_draining else self.current.lookup(chain)

    def lookup_disk(self, chain: BlockHashes, num_local: int) -> tuple[int, int]:
        """Return how many blocks after those in memory are on this node's disk, and how many bytes it reads a second.

        Both are 0 while it is off. No side effect.
        """
        if self._disk is None or self.is_draining or num_local == len(chain):
            return 0, 0
        return self._disk.lookup(chain.tail(num_local)), int(self._disk.rate.bytes_per_s)

    def lease(self, chain: BlockHashes, owner: str, ttl_s: float, *, tenant: str = SHARED) -> Grant:
        """Pin the readable prefix of a run for `ttl_s` seconds.

        Raises:
            StoreDraining: the store no longer grants anything.
            InvalidRequest: `ttl_s` is not a time; nothing changed.
        """
        self.check_serving()
        grant = self.current.pin_prefix(chain, owner, deadline_after(ttl_s), tenant=tenant)
        if not grant.packed_slots:
            self.current.release(grant.lease_id, owner)
            return Grant(num_refused=grant.num_refused, epoch=grant.epoch)
        self._wake()
        return grant

    def pin(self, chain: BlockHashes, owner: str, kind: PinKind, ttl_s: float, *, tenant: str = SHARED) -> Grant:
        """Pin the readable prefix of a run for `ttl_s` seconds. If infinite, while its owner lives.

        Raises:
            StoreDraining: the store no longer grants anything.
            PoolExhausted: the budget of pins, or the tenant's quota of them, is used up; nothing changed.
            InvalidRequest: `ttl_s` is not a time; nothing changed.
        """
        self.check_serving()
        deadline_s = FOREVER_S if ttl_s == FOREVER_S else deadline_after(ttl_s)
        grant = self.pool.pin(chain, owner, kind, deadline_s, tenant=tenant)
        self._wake()
        return grant

    def release(self, lease_id: int, owner: str, epoch: bytes | None = None) -> bool:
        """Drop a lease or a pin. Return whether this owner still held it, in this epoch."""
        return self.current.release(lease_id, owner, epoch=epoch)

    def renew(self, lease_id: int, owner: str, ttl_s: float, epoch: bytes | None = None) -> bool:
        """Extend a lease to `ttl_s` from now; return whether it was still held. Never shortens it.

        Raises:
            InvalidRequest: `ttl_s` is not a time; nothing changed.
        """
        return self.current.renew(lease_id, owner, deadline_after(ttl_s), epoch=epoch)

    def prepare_store(
        self,
        chain: BlockHashes,
        owner: str,
        num_parts: int = 1,
        part: int = 0,
        ttl_s: float = FOREVER_S,
        num_clears: int | None = None,
        retention: Retention = NORMAL,
        *,
        tenant: str = SHARED,
    ) -> StoreTicket:
        """Claim slots for missing blocks, or join the writers of their other parts.

        Args:
            chain: the blocks to store.
            owner: the writer.
            num_parts: the number of parts of a block; a different rank writes each of them.
            part: the part that this owner writes.
            ttl_s: the slots come back after this time even if the owner lives; infinite if its death is noticed.
            num_clears: as for `Pool.prepare_store`.
            retention: likewise.
            tenant: likewise.

        Raises:
            StoreDraining: the store no longer grants anything.
            ChainBroken: the run cannot be attached; nothing changed.
            InvalidRequest: `part`, `num_parts` or `ttl_s` is not valid; nothing changed.
        """
        self.check_serving()
        in_parts = isinstance(num_parts, int) and num_parts > 1  # The pool refuses a value that is not a number.
        ticket = self.pool.prepare_store(
            chain, owner, num_parts=num_parts, part=part, num_clears=num_clears, retention=retention, tenant=tenant,
            deadline_s=FOREVER_S if ttl_s == FOREVER_S else deadline_after(ttl_s),
            parts_deadline_s=deadline_after(self._config.lease_ttl_s) if in_parts else FOREVER_S,
        )  # fmt: skip
        if in_parts or ttl_s != FOREVER_S:
            self._wake()
        return ticket

    def complete_store(
        self, write_id: int, owner: str, generations: bytes | None = None, epoch: bytes | None = None
    ) -> int:
        """Publish a write whose bytes are in place; return how many blocks became findable.

        Raises:
            StaleTicket: the generations or the epoch are not those of the ticket; nothing changed.
        """
        num_published = self.pool.complete_store(write_id, owner, generations=generations, epoch=epoch)
        self._changed()
        return num_published

    def abort_store(
        self, write_id: int, owner: str, generations: bytes | None = None, epoch: bytes | None = None
    ) -> int:
        """Give up a write; return how many slots came back."""
        return self.pool.abort_store(write_id, owner, generations=generations, epoch=epoch)

    def clear(self, namespace: bytes, version: int | None = None) -> int:
        """Clear a namespace: all its blocks here become misses; return how many there were.

        A node that was not notified yet cannot bring old blocks back: it has another version, and is granted nothing.

        Args:
            namespace: of the blocks.
            version: of this clearing, later than the last; if None, the last one that this store knows plus one.

        Raises:
            StaleVersion: `version` is not later; nothing changed.
            InvalidRequest: `version` is not a version, or far ahead of the last; nothing changed.
        """
        try:  # Never None: every version that is noted is above 0.
            cleared, stale = self._begin_clear(namespace, lambda: self.versions.advance(namespace, version) > 0), None
        except StaleVersion as error:  # What was heard here has to last, too, when the caller goes on.
            cleared, stale = 0, error
            stale.num_cleared = self.versions.take_heard(namespace, version)
        self.current.sweep_all()
        if self._disk is not None and not self._disk.wait_saved(self._config.disk_timeout_s):
            logger.warning("namespace %s is cleared, but the disk does not keep that yet", namespace.hex()[:12])
        if stale is not None:
            raise stale
        return cleared or 0

    def hear_clearing(self, namespace: bytes, version: int) -> None:
        """Clear, because another process knows a later version; do nothing if `version` is known here.

        Raises:
            InvalidRequest: `version` is far ahead of the one known here; nothing changed.
        """
        with suppress(StoreUnavailable):  # The memory was handed over: the next life hears of it.
            self.versions.count_heard(namespace, version, self._begin_clear)

    def _begin_clear(self, namespace: bytes, is_news: Callable[[], bool]) -> int | None:
        # Memory and disk in one step, so that no block survives on its way from one to the other.
        def is_to_clear(pool: Pool) -> bool:
            return pool is self.current and is_news() and (self._disk is None or self._disk.clear(namespace))

        cleared, pool = None, None
        while cleared is None and pool is not self.current:  # Again if the first namespace attached meanwhile.
            pool = self.current
            cleared = pool.begin_clear(namespace, partial(is_to_clear, pool))
        if cleared is not None:
            # Even when no block was dropped: the directory notifies the stores that do not know the version yet.
            self._changed()
            self._wake()  # The control thread, which may be this one, sweeps slots in steps: all of them take long.
            log_life("namespace_cleared", limit=self._limit, node=self._node_id, namespace=namespace.hex()[:12],
                     version=self.versions.get(namespace), num_blocks=cleared)  # fmt: skip
        return cleared

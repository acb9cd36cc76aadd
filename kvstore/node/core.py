"""The node store: everything that one node keeps, as a plain class. actors/node_store.py wraps it for Ray.

One thread serves local workers, the mover and peers (kvstore.rpc.server); what has to wait for a
peer runs on threads of kvstore.remote.fetch. The pool has its own lock, so any thread may call the verbs here.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from kvstore.blocks.chain import Chain, decode_chain
from kvstore.blocks.shape import BLOCK_ORDER_VERSION
from kvstore.bounds import MAX_BLOCK_BYTES, MAX_NAMESPACES, MAX_SLOTS, MIN_BLOCK_BYTES, check_count, check_digest
from kvstore.config import StoreConfig, socket_dir
from kvstore.errors import (
    ConfigError,
    LayoutMismatch,
    TransferError,
)
from kvstore.memory.arena import Arena, create_arena
from kvstore.memory.presence import PresenceTable
from kvstore.mover.link import MoverLink
from kvstore.node.dispatch import NodeControl
from kvstore.node.pool_verbs import PoolVerbs
from kvstore.remote.directory_link import Hints
from kvstore.remote.fetch import Fetcher
from kvstore.remote.load import Load
from kvstore.remote.peers import PeerAddress, PeerBook, Resolver
from kvstore.remote.versions import NamespaceVersions
from kvstore.rpc.socket_files import remove_stale_sockets
from kvstore.runtime import clock
from kvstore.runtime.store_threads import StoreThreads

logger = logging.getLogger(__name__)

#: Slots begin at multiples of this, so that word-wide copies are always aligned.
SLOT_ALIGNMENT_BYTES = 64
#: How long a new store waits for the directory's first answer.
_FIRST_CONTACT_S = 2.0


class NodeCore(PoolVerbs):
    """State and verbs of one node store.

    Args:
        node_id: unique in the cluster.
        config: the same on every node.
        host: address at which peers reach this node.
        resolve_peer: finds another node's store through the cluster.
        resolve_directory: finds the directory through the cluster.
        on_mover_gone: called, on a thread of its own, when the mover's process is gone and has to be replaced.

    Raises:
        ConfigError: there is not enough memory; nothing is left behind.
    """

    def __init__(
        self,
        node_id: str,
        config: StoreConfig,
        host: str,
        resolve_peer: Resolver,
        resolve_directory: Callable[[], PeerAddress],
        on_mover_gone: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(node_id, config, self._pool_changed, self._deadline_set)
        self.epoch = secrets.token_bytes(8)
        self._host, self.token = host, secrets.token_hex(16)
        self.arena: Arena = create_arena(config.capacity_bytes)
        try:
            #: What this node surely has not, for its workers to read.
            self.presence = PresenceTable(self.epoch, config.capacity_bytes)
        except ConfigError:
            self.arena.close()
            raise
        self._memory_closed, self._pid = False, os.getpid()
        self.slot_bytes = 0
        self._attach_lock = threading.Lock()
        self.versions = NamespaceVersions()
        self.block_bytes: dict[bytes, int] = {}
        self.closed_to_peers = False
        self.mover = MoverLink()
        self.threads = StoreThreads()
        self._peers = PeerBook(node_id, self.epoch, self._resolver(resolve_peer), config.call_timeout_s)
        self.hints = Hints(
            node_id, resolve_directory, config.call_timeout_s, self.versions, self.hear_clearing,
            self.presence.set_alone, self.epoch,
        )  # fmt: skip
        self.fetcher: Fetcher | None = None
        remove_stale_sockets(socket_dir())
        self.control_path = str(socket_dir() / f"{node_id[:16]}-{self.epoch.hex()}.sock")
        self._control = NodeControl(self, on_mover_gone)
        # Before a worker can reach this store: it would keep blocks that the first peer made it drop.
        self.hints.start(_FIRST_CONTACT_S)
        self._control.start(self.control_path, host)
        logger.info("node store %s: arena of %d bytes, epoch %s", node_id, config.capacity_bytes, self.epoch.hex())

    def _resolver(self, others: Resolver) -> Resolver:
        return lambda node_id: self.peer_address() if node_id == self.node_id else others(node_id)

    @property
    def peers(self) -> PeerBook:
        """The stores of other nodes; this one can be its own peer too."""
        return self._peers

    # Verbs that Ray callers use too.

    def peer_address(self) -> PeerAddress:
        """Return where peers reach this store, and the secret they have to name."""
        return PeerAddress(self._host, self._control.port, self.token)

    def attach(self, namespace: bytes, block_bytes: int) -> dict[str, int]:
        """Make room for blocks of one size; the first call divides the arena into slots.

        Raises:
            ConfigError: the blocks do not fit the slots, or there are too many namespaces; nothing changed.
            InvalidRequest: these are no namespace and no size; nothing changed.
            LayoutMismatch: the namespace is known with another block size in bytes; nothing changed.
        """
        check_digest("namespace", namespace)
        check_count("block_bytes", block_bytes, MIN_BLOCK_BYTES, MAX_BLOCK_BYTES)
        with self._attach_lock:
            if len(self.block_bytes) >= MAX_NAMESPACES and namespace not in self.block_bytes:
                raise ConfigError(f"wanted at most {MAX_NAMESPACES} namespaces in a store, got one more; restart it")
            known = self.block_bytes.get(namespace, block_bytes)
            if known != block_bytes:
                raise LayoutMismatch(
                    f"blocks of this namespace have {known} bytes here, got a client with {block_bytes}; "
                    "run one version of raykv everywhere"
                )
            if self.attached_pool is None:
                self._divide(max(block_bytes, self.config.block_bytes))
            if block_bytes > self.slot_bytes:
                raise ConfigError(
                    f"all slots of this store hold {self.slot_bytes} bytes, got a namespace with blocks of "
                    f"{block_bytes}; start another store (name=) for it, or this one again with "
                    f"block_bytes={block_bytes}, which every block then takes"
                )
            self.block_bytes[namespace] = block_bytes
        assert self.attached_pool is not None
        return {"slot_bytes": self.slot_bytes, "num_slots": self.attached_pool.stats().num_slots}

    def _divide(self, block_bytes: int) -> None:
        slot_bytes = -(-block_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        num_slots = self.config.capacity_bytes // slot_bytes
        if num_slots < 2:
            raise ConfigError(
                f"wanted room for at least 2 blocks of {slot_bytes} bytes, got a capacity of "
                f"{self.config.capacity_bytes}; raise capacity="
            )
        if num_slots > MAX_SLOTS:
            raise ConfigError(
                f"wanted at most {MAX_SLOTS} slots, got room for {num_slots} of {slot_bytes} bytes in "
                f"{self.config.capacity_bytes}; give block_bytes= the size of the largest block, or lower capacity="
            )
        self.slot_bytes = slot_bytes
        pool = self.make_pool(num_slots, self.epoch, self.presence.counts, self.presence.clears)
        self.fetcher = Fetcher(
            self.config, self.hints, self._peers, self.mover, self.threads, BLOCK_ORDER_VERSION, self.hear_clearing,
        )  # fmt: skip
        self.mover.set_slots(slot_bytes, num_slots)
        self.hints.follow(pool)
        self.attached_pool = pool

    def lookup_all(self, chain: Chain, until_s: float = math.inf) -> list[tuple[str, int]]:
        """Return (node, prefix length), this node first and as it is, the others as the directory hints.

        A node that is drained brings its workers nothing of others either, and names none. The directory is not asked
        when `until_s` has passed before others were answered.
        """
        found = [(self.node_id, self.lookup(chain))]
        if found[0][1] < len(chain) and not self._draining:
            num_local = found[0][1]
            others = [item for item in self.hints.locate(chain, until_s) if item[0] != self.node_id]
            longer = [(node, count - num_local) for node, count in others if count > num_local]
            if longer:
                self.hints.remember(chain.hash_at(num_local), longer)
            found += others
        return found

    def clear(self, namespace: bytes, version: int | None = None) -> int:
        """Make a namespace a miss here; returns how many blocks that concerned.

        Stores of different versions of a namespace grant each other nothing, so a node that has not heard
        yet cannot bring old blocks back.

        Args:
            namespace: of the blocks.
            version: of this clearing, later than the last; the next one that this store knows of when None.

        Raises:
            StaleVersion: it is not later; nothing changed.
            InvalidRequest: it is no version, or far ahead of the last; nothing changed.
        """
        cleared = self._begin_clear(namespace, lambda: self.versions.advance(namespace, version) > 0)
        if cleared and self.attached_pool is not None:
            self.attached_pool.sweep_all()
        assert cleared is not None, "every version that is noted is above 0"
        return cleared

    def hear_clearing(self, namespace: bytes, version: int) -> None:
        """Clear because another process knows a later version; nothing happens when that is no news.

        Raises:
            InvalidRequest: it is far ahead of what is known here; nothing changed.
        """
        # The slots come back by and by: this may be the control thread, for which that would take long.
        if self._begin_clear(namespace, lambda: self.versions.hear(namespace, version)):
            self._control.wake()

    def num_clears(self, namespace: bytes) -> int:
        """Return how often a namespace was cleared here, for `prepare_store`."""
        return 0 if self.attached_pool is None else self.attached_pool.num_clears(namespace)

    def _begin_clear(self, namespace: bytes, is_news: Callable[[], bool]) -> int | None:
        pool = self.attached_pool
        cleared = pool.begin_clear(namespace, is_news) if pool is not None else 0 if is_news() else None
        if cleared is None:
            return None
        # Also with nothing to drop: the directory tells stores that have not heard.
        self.hints.publish_soon()
        logger.info("cleared namespace %s: %d blocks", namespace.hex()[:12], cleared)
        return cleared

    def begin_drain(self, max_bytes: int) -> list[bytes]:
        """Grant nothing to this node's workers any more, but go on serving peers.

        Returns:
            The most recently used chains, up to `max_bytes` of blocks, encoded, for a peer to `adopt`.
        """
        self._draining = True
        if self.attached_pool is None:
            return []
        return [chain.encode() for chain in self.attached_pool.hot_chains(max_bytes // self.slot_bytes)]

    def adopt(self, chains: list[bytes], timeout_s: float) -> int:
        """Fetch chains from whoever has them; returns how many blocks are here now."""
        if self.fetcher is None:
            return 0
        deadline_s, arrived = clock.now_s() + timeout_s, 0
        for encoded in chains:
            chain, left_s = decode_chain(encoded), deadline_s - clock.now_s()
            if left_s <= 0:
                break
            if chain.namespace not in self.block_bytes:
                continue
            ended, version = threading.Event(), self.versions.get(chain.namespace)
            grant = self.pool.pin_prefix(chain, "adopt", clock.now_s() + self.config.lease_ttl_s)
            load = Load(
                chain=chain, block_bytes=self.block_bytes[chain.namespace], owner="adopt",
                lease_id=grant.lease_id, ttl_s=self.config.lease_ttl_s, deadline_s=deadline_s, pool=self.pool,
                version_now=partial(self.versions.get, chain.namespace), version=version,
                send=lambda _, last, ended=ended: ended.set() if last else None,  # type: ignore[misc]
                num_ready=len(grant.slots),
            )  # fmt: skip
            self.fetcher.begin(load)
            ended.wait(left_s + 1.0)
            arrived += load.num_ready
            self.pool.release(grant.lease_id, "adopt")
        return arrived

    def drain(self, timeout_s: float) -> dict[str, int]:
        """Grant nothing any more, to peers either, and wait for leases and writes; returns what is left.

        The directory forgets this node's blocks, as of a node that has left. Soft pins are not waited for.
        """
        was_closed = self.closed_to_peers
        self._draining = self.closed_to_peers = True
        if not was_closed:
            self.hints.forget()
        deadline_s = clock.now_s() + timeout_s
        while clock.now_s() < deadline_s:
            left = self._left()
            if not any(left.values()):
                break
            time.sleep(0.02)
        return self._left()

    def undrain(self) -> None:
        """Serve again, and announce again what is here."""
        was_closed = self.closed_to_peers
        self._draining = self.closed_to_peers = False
        if was_closed and self.attached_pool is not None:
            self.hints.follow(self.attached_pool)

    def _left(self) -> dict[str, int]:
        if self.attached_pool is None:
            return {"num_leases": 0, "num_writes": 0}
        stats = self.attached_pool.stats()
        return {"num_leases": stats.num_leases - stats.num_soft_pins, "num_writes": stats.num_writes}

    def stats(self) -> dict[str, Any]:
        """Return counts of the pool, the engine and the calls served."""
        result: dict[str, Any] = {
            "node_id": self.node_id,
            "epoch": self.epoch.hex(),
            "pid": os.getpid(),
            "mover_pid": self.mover.pid,
            "host": self._host,
            "capacity_bytes": self.config.capacity_bytes,
            "slot_bytes": self.slot_bytes,
            "draining": self._draining,
            "num_abandoned_reads": self.mover.num_abandoned,
            "num_fenced_movers": self._control.num_fenced,
            "calls": self._control.num_calls,
            "ports": self._control.port_counts,
            "pool": None if self.attached_pool is None else asdict(self.attached_pool.stats()),
            **self._control.handoffs.stats(),
            "nixl": None,
        }
        if self.mover.own is not None:
            try:
                # In time for the caller, which waits for this answer no longer than for any other.
                result["nixl"] = self.mover.stats(self.config.call_timeout_s / 3)
            except TransferError as error:
                logger.debug("no mover statistics: %s", error)
        return result

    def is_serving(self, within_s: float) -> bool:
        """Whether the thread that serves workers and peers answers within so many seconds."""
        return self._control.is_serving(within_s)

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the mover has registered the arena."""
        return self.mover.wait_ready(timeout_s)

    def mover_pid(self) -> int:
        """Return the process id of the present mover, 0 when there is none."""
        return self.mover.pid

    def stop(self) -> None:
        """Close everything; may be called again. Workers that still map the arena keep their mapping.

        In a forked child this does nothing: all that is here is the parent's, and goes with the child.
        """
        if os.getpid() != self._pid:
            return
        self._ending = self._draining = self.closed_to_peers = True
        with contextlib.ExitStack() as steps:
            # From the last to the first; each is done whatever the others raise.
            steps.callback(self._close_memory)
            steps.callback(self._control.stop)
            steps.callback(self._peers.close)
            steps.callback(self.hints.stop)
            steps.callback(self.threads.stop)
            if self.fetcher is not None:
                steps.callback(self.fetcher.stop)

    def _close_memory(self) -> None:
        # Once: the numbers of the descriptors may be somebody else's by the second time.
        if not self._memory_closed:
            self._memory_closed = True
            self.arena.close()
            self.presence.close()

    def _pool_changed(self) -> None:
        self.hints.publish_soon()

    def _deadline_set(self) -> None:
        self._control.wake()

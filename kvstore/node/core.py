"""The node store: everything that one node keeps, as a plain class. actors/node_store.py wraps it for Ray.

One thread serves local workers, the mover and peers (kvstore.rpc.server). Work that waits for a peer runs on threads
of kvstore.remote.fetch or the store's threads. The pool has its own lock, so any thread may call the verbs here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvstore.blocks.chain import decode_chain
from kvstore.bounds import MAX_NODE_ID_CHARS, clip
from kvstore.config import StoreConfig, socket_dir
from kvstore.disk.tier import DiskTier
from kvstore.errors import InvalidRequest, TransferError
from kvstore.memory.arena import Arena, create_arena
from kvstore.memory.presence import PresenceTable
from kvstore.mover.link import MoverLink
from kvstore.node.dispatch import NodeControl
from kvstore.node.events.publisher import DISK, MEMORY, EventPublisher
from kvstore.node.handover.old_life import OldLife
from kvstore.node.pool_service import PoolService
from kvstore.node.residents import Residents
from kvstore.node.state import NodeState
from kvstore.node.stats import counts_of, left_of
from kvstore.pool.pool import Pool
from kvstore.remote.fetch import Fetcher
from kvstore.remote.load import Load
from kvstore.remote.peers import PeerAddress, PeerBook, Resolver
from kvstore.remote.shards.links import link_to_directory
from kvstore.remote.versions import NamespaceVersions
from kvstore.rpc.socket_files import remove_stale_sockets
from kvstore.runtime import clock
from kvstore.runtime.life import ASKED_TO_STOP, log_life
from kvstore.runtime.threads.store_threads import StoreThreads

logger = logging.getLogger(__name__)

#: How long a new store waits for the directory's first answer.
_FIRST_CONTACT_S = 2.0
#: How often a store that is ending is noticed by what waits for the directory.
_LOOK_AGAIN_S = 0.5


class NodeCore:
    """One node store: its parts (`state`), the thread that serves them, the verbs for all.

    `state.pool_service` has the verbs that concern its slots.

    Args:
        node_id: unique in the cluster; tickets, peers and the directory name it.
        config: the same on every node.
        host: address at which peers reach this node.
        resolve_peer: finds another node's store through the cluster.
        resolve_directory: finds the directory through the cluster; called with the number of a shard if it has several.
        on_mover_gone: called, on its own thread, when the mover's process is gone and has to be replaced.
        old: the memory of the store's last life, which has ended; None to begin empty.

    Raises:
        ConfigError: there is not enough memory, or the disk or an address cannot be used; nothing is left behind.
        ProtocolError: the blocks of `old` cannot be taken over; nothing is left behind.
        InvalidRequest: `node_id` is not valid; nothing is left behind.
    """

    def __init__(
        self,
        node_id: str,
        config: StoreConfig,
        host: str,
        resolve_peer: Resolver,
        resolve_directory: Callable[..., PeerAddress],
        on_mover_gone: Callable[[], None] = lambda: None,
        old: OldLife | None = None,
    ) -> None:
        if not 0 < len(node_id) <= MAX_NODE_ID_CHARS or "/" in node_id:
            wanted = f"1 to {MAX_NODE_ID_CHARS} characters without a slash"
            raise InvalidRequest(
                f"node_id: wanted {wanted}, got {clip(node_id)}; pass the id that Ray has for the node"
            )
        self._host, self._pid = host, os.getpid()
        #: Held while the node is drained or put back, so that the directory is told the last of the two.
        self.draining = threading.Lock()
        epoch, versions, mover = secrets.token_bytes(8), NamespaceVersions(), MoverLink()
        threads = StoreThreads(config.num_directory_shards)
        disk = DiskTier(config, node_id, lambda: versions.since(0)[1]) if config.disk_path else None
        with contextlib.ExitStack() as undo:
            if disk is not None:
                undo.callback(disk.stop)
                # Before the directory is met, which hears of them, too.
                versions.hear_all(disk.old_versions)
            arena: Arena = create_arena(config.capacity_bytes) if old is None else old.arena
            undo.callback(arena.close)
            presence = PresenceTable(epoch, config.capacity_bytes)
            undo.callback(presence.close)
            where, replay = config.events_endpoint, config.events_replay_endpoint
            events = EventPublisher(where, replay, node_id, config.name) if where else None
            undo.pop_all()
        self._memory_closed, self.old, self._why_stopped = False, old, ""

        def resolve(peer_id: str, within_s: float) -> PeerAddress:
            return self.peer_address() if peer_id == node_id else resolve_peer(peer_id, within_s)

        peers = PeerBook(node_id, epoch, resolve, config.call_timeout_s)
        service = PoolService(
            node_id, config, epoch, presence, versions, lambda: hints.publish_soon(),
            lambda: self.control.server.wake(), mover.set_slots, self._divided, disk,
        )  # fmt: skip
        hear, timeout_s, alone = service.hear_clearing, config.call_timeout_s, presence.set_alone
        find, num_shards = resolve_directory, config.num_directory_shards
        hints = link_to_directory(num_shards, node_id, find, timeout_s, versions, hear, alone, epoch)
        fetcher = Fetcher(config, hints, peers, mover, threads, hear, disk)
        self.state = NodeState(
            node_id=node_id,
            config=config,
            epoch=epoch,
            token=secrets.token_hex(16),
            arena=arena,
            presence=presence,
            pool_service=service,
            versions=versions,
            mover=mover,
            threads=threads,
            peers=peers,
            hints=hints,
            fetcher=fetcher,
            disk=disk,
            events=events,
        )
        remove_stale_sockets(socket_dir())
        self.control_path = str(socket_dir() / f"{node_id[:16]}-{epoch.hex()}.sock")
        self.control = NodeControl(self.state, lambda: self.stats(), on_mover_gone)
        try:
            # Before a worker can reach this store: else it would store blocks that the first peer then makes it drop.
            hints.start(_FIRST_CONTACT_S) if old is None else old.begin(self.state)
            self.control.start(self.control_path, host)
        except BaseException:
            self.stop("its start failed")  # It lets the disk's folder go.
            raise
        self._say("store_started", capacity_bytes=config.capacity_bytes)

    def _divided(self, pool: Pool, slot_bytes: int) -> None:
        if (disk := self.state.disk) is not None:
            disk.has_begun.clear()
            begin = partial(self._begin_disk, disk, pool, slot_bytes)
            threading.Thread(target=begin, name="raykv-disk-begin", daemon=True).start()
        with self.draining:
            self._announce(pool)

    def _announce(self, pool: Pool) -> None:
        """Tell the directory and subscribers of the blocks of this node: none while it is drained."""
        state = self.state
        if state.pool_service.is_closed_to_peers:
            tiers = []
        elif state.disk is None or not state.disk.pool.num_slots:
            tiers = [(pool, MEMORY)]
        else:
            tiers = [(pool, MEMORY), (state.disk.pool, DISK)]
        pools = [tier for tier, _ in tiers]
        state.hints.follow(Residents(*pools) if len(pools) == 2 else pools[0] if pools else None)
        if state.events is not None:
            state.events.follow(tiers)

    def _begin_disk(self, disk: DiskTier, pool: Pool, slot_bytes: int) -> None:
        state, service = self.state, self.state.pool_service
        presence, changed = state.presence.counts.beside(), state.hints.publish_soon
        memory, version_of = state.arena.memory, state.versions.get
        try:
            disk.attach(pool, memory, slot_bytes, presence, service.block_bytes_of, version_of, changed)
        finally:
            disk.has_begun.set()
        # Of the two that say this, the later one knows both tiers.
        with self.draining:
            self._announce(service.current)
        # A namespace may have been cleared while this node was away: until the directory knows what others have heard,
        # and has said so, its blocks on disk are not found.
        while not self.state.hints.knows_clearings.wait(_LOOK_AGAIN_S):
            if self.state.pool_service.is_ending:
                return
        disk.admit_old()

    @property
    def pool(self) -> Pool:
        """The pool of the arena.

        Raises:
            InvalidRequest: no namespace has attached yet, so there are no slots.
        """
        return self.state.pool_service.pool

    def peer_address(self) -> PeerAddress:
        """Return where peers reach this store, and the secret that they must send."""
        return PeerAddress(self._host, self.control.server.port, self.state.token)

    def begin_drain(self, max_bytes: int) -> list[bytes]:
        """Stop granting to this node's workers, but continue to serve peers.

        Returns:
            The most recently used chains, up to `max_bytes` of blocks, encoded, for a peer to `adopt`.
        """
        service = self.state.pool_service
        with self.draining:
            if not service.is_draining:
                self._say("store_draining")
            service.is_draining = True
        if not service.is_attached:
            return []
        return [chain.encode() for chain in service.current.hot_chains(max_bytes // service.slot_bytes)]

    def tenants_of(self, chains: list[bytes]) -> list[str]:
        """Return the tenant of the last block that is here of each chain."""
        return [self.state.pool_service.current.tenant_of(decode_chain(chain)) for chain in chains]

    def adopt(self, chains: list[bytes], timeout_s: float, tenants: Sequence[str] = ()) -> int:
        """Fetch chains from the nodes that have them, each for its tenant, the shared one if `tenants` is empty.

        Returns:
            How many of their blocks are here now.

        Raises:
            StoreDraining, StoreUnavailable: this node is drained, or its store is being stopped.
        """
        service, ttl_s = self.state.pool_service, self.state.config.lease_ttl_s
        service.check_serving()
        deadline_s, arrived = clock.now_s() + timeout_s, 0
        for encoded, tenant in zip(chains, tenants or [""] * len(chains), strict=True):
            chain, left_s = decode_chain(encoded), deadline_s - clock.now_s()
            if left_s <= 0:
                break
            if chain.namespace not in service.block_bytes:
                continue
            version_now = partial(self.state.versions.get, chain.namespace)
            version = version_now()  # Before the pin.
            pool, ended = service.pool, threading.Event()
            grant = pool.pin_prefix(chain, "adopt", clock.now_s() + ttl_s)
            load = Load(
                chain=chain, block_bytes=service.block_bytes[chain.namespace], owner="adopt",
                lease_id=grant.lease_id, ttl_s=ttl_s, deadline_s=deadline_s, pool=pool, version_now=version_now,
                version=version, send=lambda piece, ended=ended: None if piece.report is None else ended.set(),  # type: ignore[misc]
                num_ready=grant.num_blocks, tenant=tenant, payer="",  # The store's own pins count in no quota.
            )  # fmt: skip
            self.state.fetcher.begin(load)
            ended.wait(left_s + 1.0)
            arrived += load.num_ready
            pool.release(grant.lease_id, "adopt")
        return arrived

    def drain(self, timeout_s: float) -> dict[str, int]:
        """Stop granting, also to peers. Wait for leases, writes and hand-offs, and return what is left.

        The directory forgets this node's blocks, as if the node had left. Published hand-offs are still fetched by
        other nodes. Soft pins are not waited for. The wait ends when `undrain` or `stop` is called meanwhile.

        Returns:
            {"num_leases", "num_writes", "num_handoffs", "is_drained"}: whether nothing is left, and nothing is granted.
        """
        service = self.state.pool_service
        with self.draining:
            was_closed = service.is_closed_to_peers
            if not service.is_draining:
                self._say("store_draining")
            service.is_draining = service.is_closed_to_peers = True
            if not was_closed:
                self._announce(service.current)
        deadline_s = clock.now_s() + timeout_s
        while True:
            left, is_drained = left_of(self.state, self.control.handoffs.table), service.is_draining
            if not (is_drained and any(left.values())) or service.is_ending or clock.now_s() >= deadline_s:
                return {**left, "is_drained": is_drained and not any(left.values())}
            time.sleep(0.02)

    def undrain(self) -> None:
        """Serve again, and announce the blocks that are here again.

        Raises:
            StoreUnavailable: the store is being stopped.
        """
        service = self.state.pool_service
        with self.draining:
            service.check_running()
            if service.is_draining:
                self._say("store_undrained")
            was_closed = service.is_closed_to_peers
            service.is_draining = service.is_closed_to_peers = False
            if was_closed and service.is_attached:
                self._announce(service.current)

    def _say(self, event: str, **facts: Any) -> None:
        log_life(event, store=self.state.config.name, node=self.state.node_id, epoch=self.state.epoch.hex(), **facts)

    def counts(self) -> dict[str, Any]:
        """Return counts of the pool and the calls served, without asking the mover."""
        return counts_of(self.state, self.control, self._host)

    def stats(self) -> dict[str, Any]:
        """Return counts of the pool, the mover and the calls served."""
        state, result = self.state, self.counts()
        if state.mover.own is not None:
            try:
                # A third of the caller's own time limit, so that this answer still reaches it in time.
                result["nixl"] = state.mover.stats(state.config.call_timeout_s / 3)
            except TransferError as error:
                logger.debug("no mover statistics: %s", error)
        return result

    def stop(self, reason: str = ASKED_TO_STOP) -> None:
        """Close everything; may be called again: the first reason counts. Workers keep their mapping of the arena.

        In a forked child this does nothing: all of this belongs to the parent; the child's copies end with the child.
        """
        if os.getpid() != self._pid:
            return
        state, service, self._why_stopped = self.state, self.state.pool_service, self._why_stopped or reason
        with self.draining:
            service.is_ending = service.is_draining = service.is_closed_to_peers = True
        with contextlib.ExitStack() as steps:
            # ExitStack runs them from the last to the first, and each one even if others raise.
            steps.callback(self._close_memory)
            if self.old is not None:
                steps.callback(self.old.processes.stop)
            if state.disk is not None:
                steps.callback(state.disk.stop)
            if service.reclaimer is not None:
                steps.callback(service.reclaimer.stop)
            steps.callback(self.control.stop)
            steps.callback(state.peers.close)
            steps.callback(state.hints.stop)
            steps.callback(state.threads.stop)
            steps.callback(state.fetcher.stop)
            if state.events is not None:
                steps.callback(state.events.stop)

    def _close_memory(self) -> None:
        # Only once: at a second call the file descriptor numbers may belong to other files.
        if not self._memory_closed:
            self._memory_closed = True
            self.state.arena.close()
            self.state.presence.close()
            self._say("store_stopped", reason=self._why_stopped)

"""Fetch the blocks that a load misses from peers. Lease there, READ here, publish, tell the client."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.priority import OF_LOW_READER
from kvstore.blocks.shape import BLOCK_ORDER_VERSION
from kvstore.config import StoreConfig
from kvstore.disk.tier import DiskTier
from kvstore.errors import (
    DiskUnavailable,
    InvalidRequest,
    KVStoreError,
    LeaseError,
    PeerLost,
    PoolExhausted,
    StoreUnavailable,
    TransferError,
    TransferTimeout,
)
from kvstore.mover.link import MoverLink
from kvstore.pool.save_waits import SaveWaits
from kvstore.remote.covered_read import is_quarantine_full
from kvstore.remote.load import Load
from kvstore.remote.messages import PeerLease
from kvstore.remote.peer_read import PeerRead, ReadContext
from kvstore.remote.peers import PeerBook, call_s
from kvstore.remote.shards.links import DirectoryLink
from kvstore.remote.single_flight import Flight, Flights
from kvstore.runtime import clock
from kvstore.runtime.rates import MeasuredRate
from kvstore.runtime.threads.store_threads import StoreThreads
from kvstore.runtime.threads.thread_pool import ThreadPool

logger = logging.getLogger(__name__)

_MAX_PEERS_PER_LOAD = 4
#: A peer is asked before this node's disk if blocks came from peers so many times as fast. Rates vary, and the own disk
#: costs no other node anything.
_PEERS_FASTER = 1.5
#: Most bytes that one load reads from the disk at once. All slots of a read stay taken until its last call has ended: a
#: disk that hangs must not take the whole memory along.
_MOST_DISK_BYTES = 256 << 20
#: Loads that ask or read at once. All of them may hang on a peer that stopped, for one call's timeout.
_NUM_THREADS = 32
#: Loads for other nodes at once, which read this node's disk. Threads of their own: else two nodes, each with loads on
#: all its threads that wait for the other's disk, would have none left to answer.
_NUM_THREADS_FOR_PEERS = 8
#: Most loads that have not ended, and most bytes of their chains (2,097,152 blocks): more are refused at once.
_MOST_LOADS, _MOST_BYTES = 4096, 64 << 20


class Fetcher:
    """Runs the loads that need peers. Each has a thread while it asks or reads.

    Of several loads that miss one block, one fetches it. The others are parked, each with its own deadline. When that
    fetch has ended or failed, they continue: they find the block, or ask another peer themselves.

    Args:
        config: of the store.
        hints: tell which nodes may have which block.
        peers: the stores of other nodes.
        mover: runs the READs.
        threads: for leases that are given back late.
        adopt_version: called when a peer knows of a later clearing of a namespace.
        disk: of this node; asked before peers, unless these were measured to be faster.
    """

    def __init__(
        self,
        config: StoreConfig,
        hints: DirectoryLink,
        peers: PeerBook,
        mover: MoverLink,
        threads: StoreThreads,
        adopt_version: Callable[[bytes, int], object],
        disk: DiskTier | None = None,
    ) -> None:
        self._disk, self.peers_rate = disk, MeasuredRate()
        self._hints, self._peers, self._mover, self._adopt_version = hints, peers, mover, adopt_version
        self._threads = ThreadPool(_NUM_THREADS, "raykv-fetch")
        self._threads_for_peers = ThreadPool(_NUM_THREADS_FOR_PEERS, "raykv-bring")
        self.flights, self.saves = Flights(self._submit), SaveWaits()
        self._context = ReadContext(config, mover, self.flights, hints.publish_soon, peers, threads)
        self._counting = threading.Lock()
        self._num_loads = self._num_bytes = 0  # Of chains of loads that have not ended.

    def begin(self, load: Load) -> None:
        """Fetch the missing blocks of `load` on threads. Its client always gets a last message, perhaps at once."""
        num_bytes = len(load.chain.data)
        load.on_end = partial(self._count, -1, -num_bytes)
        # Counted also when it is refused: its end is subtracted.
        num_all, num_all_bytes = self._count(1, num_bytes)
        if num_all <= _MOST_LOADS and num_all_bytes <= _MOST_BYTES:
            self._submit(load)
        else:
            load.end(f"busy: {num_all - 1} loads of this node wait for peers already; try again soon")

    @property
    def num_loads(self) -> int:
        """Loads that have not ended."""
        return self._num_loads

    def _count(self, num_loads: int, num_bytes: int) -> tuple[int, int]:
        with self._counting:
            self._num_loads, self._num_bytes = self._num_loads + num_loads, self._num_bytes + num_bytes
            return self._num_loads, self._num_bytes

    def _submit(self, load: Load) -> None:
        threads = self._threads if load.may_ask_peers else self._threads_for_peers
        if not threads.run(partial(self._run, load)):
            load.end("busy: the node store ends, or can start no thread")

    def stop(self) -> None:
        """Stop taking loads."""
        self.saves.close()
        self._threads.close(drop=True)
        self._threads_for_peers.close(drop=True)

    def _run(self, load: Load) -> None:
        try:
            reason = self._fill(load)
        except Exception as error:
            if not isinstance(error, KVStoreError):
                logger.exception("a load failed unexpectedly")
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            load.end(reason)

    def _fill(self, load: Load) -> str | None:
        """Fetch until all blocks are pinned. Return "" then, the reason if it ended early, None if parked."""
        while load.num_ready < len(load.chain):
            if clock.now_s() > load.deadline_s:
                return "timeout"
            if not load.is_current():
                return "cleared"
            if not load.is_open():
                return "abandoned: the client closed its connection"
            if why := load.why_unpinned():
                return why  # From any node, what comes cannot be leased.
            rest = load.chain.tail(load.num_ready)
            # Noted before a peer is asked: of several loads that miss one block, one asks and the others wait.
            peers_first = self._are_peers_faster(load, rest)
            flight = self.flights.lead(rest.hash_at(0), load, asks_peer=peers_first)
            if flight is None or self._await_saves(load, rest, flight):
                return None
            try:
                reason = self._ask_sources(load, rest, peers_first=peers_first)
            finally:
                self.flights.leave([rest.hash_at(0)], flight)
            if reason and load.num_ready < len(load.chain):
                return reason
        return ""

    def _await_saves(self, load: Load, rest: BlockHashes, flight: Flight) -> bool:
        """Park a load while a save of this node writes its next block; return whether it is parked.

        The flight ends with the wait. The load then goes on, whether the blocks came or not.
        """
        now_s = clock.now_s()
        until_s = min(now_s + self._context.config.save_wait_s, load.deadline_s)
        if load.has_awaited_saves or until_s <= now_s or not load.pool.is_being_written(rest):
            return False
        load.has_awaited_saves = True

        def go_on(num_ready: int) -> None:
            self.flights.leave([rest.hash_at(0)], flight)
            self._submit(load)

        self.saves.wait(load.pool, rest, until_s, go_on)
        return True

    def _ask_sources(self, load: Load, rest: BlockHashes, *, peers_first: bool) -> str:
        """Fetch from this node's disk or from a peer, the faster one first; return the reason to stop, or ""."""
        before = load.num_ready
        if peers_first:
            self._ask_a_peer(load, rest)
            if load.num_ready > before:
                return ""
        return "" if self._read_disk(load, rest) else self._ask_a_peer(load, rest)

    def _are_peers_faster(self, load: Load, rest: BlockHashes) -> bool:
        # Only where a lookup has just named peers: to ask the directory for a block that is here costs more than it
        # gains. As long as one of the two was not measured, the own disk comes first.
        if self._disk is None or not load.may_ask_peers or not self._disk.rate.bytes_per_s:
            return False
        is_faster = self.peers_rate.bytes_per_s > _PEERS_FASTER * self._disk.rate.bytes_per_s
        return is_faster and self._disk.lookup(rest.head(1)) > 0 and self._hints.has_remembered(rest.hash_at(0))

    def _read_disk(self, load: Load, rest: BlockHashes) -> bool:
        """Read from this node's disk; return whether it was asked, or blocks came."""
        disk, before = self._disk, load.num_ready
        # A second try at the same block would mostly fail for the same reason.
        if disk is None or load.disk_tried_at == before or not disk.lookup(rest.head(1)):
            return False
        load.disk_tried_at, num_disk = before, load.report.num_disk
        flight, entered = Flight(), list[bytes]()

        def claimed(hashes: list[bytes]) -> None:
            entered.extend(self.flights.enter(hashes, flight))

        def ready(reached: int, num_read: int) -> None:
            # Of two pieces that come at once, the second may be told first.
            load.report.num_disk = max(load.report.num_disk, num_disk + num_read)
            self._context.announce()
            with contextlib.suppress(LeaseError):  # The client of the load left before its blocks came.
                load.pin_more(before + reached)

        try:
            began_s = clock.now_s()
            most = max(1, _MOST_DISK_BYTES // load.block_bytes)
            read = disk.read(rest.head(most), ready, claimed, load.block_bytes, tenant=load.tenant)
            if read is None:
                return load.pin_more() > 0
            has_ended = read.wait(load.deadline_s)
            disk.rate.note((load.report.num_disk - num_disk) * load.block_bytes, clock.now_s() - began_s)
            if not has_ended:
                load.fell_short = "timeout: the disk did not answer in time; what it still brings is kept"
            elif read.reason:
                load.fell_short = read.reason
            # That took time: the caller looks again whether the load is still wanted.
            return True
        except DiskUnavailable as error:
            load.fell_short = f"not_found: {error}"
        except PoolExhausted:
            load.fell_short = "pool_full"
        finally:
            self.flights.leave(entered, flight)
        return False

    def _ask_a_peer(self, load: Load, rest: BlockHashes) -> str:
        """Fetch from the best peer not tried yet; return the reason to stop, or ""."""
        # The block may have arrived since the load began. Mostly it has not, and a lookup is cheaper than a pin.
        if load.pool.lookup(rest.head(1)) and load.pin_more():
            return ""
        if not load.may_ask_peers or len(load.tried) >= _MAX_PEERS_PER_LOAD:
            return load.fell_short or "not_found"
        hints = remembered = self._hints.recall(rest.hash_at(0))
        if not remembered:
            load.report.num_locate_calls += 1
            hints = self._hints.locate(rest, load.deadline_s)
        found = [node for node, _ in hints if node not in load.tried]
        usable = [node for node in found if self._peers.is_usable(node)]
        if not usable:
            # The block may have arrived meanwhile. Remembered hints may be old: then the directory is asked next.
            if load.pin_more() or remembered:
                return ""
            return load.fell_short or ("peer_lost" if set(found) - {self._peers.own_node_id} else "not_found")
        if clock.now_s() > load.deadline_s:
            return "timeout"
        load.tried.add(usable[0])
        try:
            reason = self._fetch_from(load, rest, usable[0], dict(hints)[usable[0]])
        except (TransferError, StoreUnavailable) as error:
            logger.warning("fetch from node %s failed: %s", usable[0], error)
            if self._mover.own is not None:
                # Without its own mover this node has learnt nothing about the peer.
                self._peers.failed(usable[0])
            reason = "timeout" if isinstance(error, TransferTimeout) else "peer_lost"
        load.fell_short = reason
        # No other peer helps if the pool here is full. Remembered hints may be old: then the directory is asked.
        return reason if reason == "pool_full" or (len(usable) == 1 and not remembered) else ""

    def _fetch_from(self, load: Load, chain: BlockHashes, node_id: str, num_hinted: int) -> str:
        """Lease a run at one peer and read the granted blocks. Return why blocks are missing, or ""."""
        config = self._context.config
        try:
            peer = self._peers.get(node_id, call_s(config, load.deadline_s))
        except TransferTimeout as error:
            return f"timeout: {error}"
        ttl_s = min(config.lease_ttl_s, load.ttl_s)
        until_s = clock.now_s() + ttl_s - config.lease_margin_s
        wanted = PeerLease(
            chain=chain,
            block_bytes=load.block_bytes,
            slot_format=BLOCK_ORDER_VERSION,
            namespace_version=load.version,
            ttl_s=ttl_s,
            within_s=call_s(config, load.deadline_s),
            is_low=load.retention is OF_LOW_READER,
            tenant=load.tenant if load.payer is None else load.payer,
        )
        with PeerRead(self._context, load, peer, chain, until_s) as read:
            if is_quarantine_full(load.pool, config.max_quarantined_fraction):
                return "timeout: too many slots wait for transfers that were given up; their mover is being replaced"
            load.report.num_lease_calls += 1
            try:
                connection = self._peers.take_spare(peer, wanted.within_s)
                try:
                    grant = peer.lease(connection, wanted, lambda: read.claim_first(num_hinted))
                finally:
                    self._peers.keep_spare(peer, connection)
            except TransferTimeout:
                if peer.is_silent(config.call_timeout_s):
                    raise
                return f"timeout: node {node_id} did not answer in the {wanted.within_s:.1f} s that this load gave it"
            if grant.epoch != peer.epoch:
                self._peers.failed(node_id)
                return "peer_lost"
            if grant.namespace_version > load.version:
                try:
                    self._adopt_version(chain.namespace, grant.namespace_version)
                except InvalidRequest as error:
                    raise PeerLost(f"node {node_id} knows of a clearing that cannot be: {error}") from error
                return "cleared"
            if len(grant.slots) == 0:
                return "not_found"
            began_s, num_bytes = clock.now_s(), load.report.num_bytes
            reason = read.run(grant)
            self.peers_rate.note(load.report.num_bytes - num_bytes, clock.now_s() - began_s)
        if not reason:
            self._peers.succeeded(node_id)
        return reason

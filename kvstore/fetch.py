"""Fetching what a load misses from peers: lease there, READ here, check, publish, tell the waiting client.

A block counts only if the peer's lease covered its whole READ: the clock is taken before the lease is
asked for, and a chunk is published only if it was in place before that + ttl - margin. Any doubt is a miss.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import numpy as np

from kvstore.chain import Chain
from kvstore.config import StoreConfig
from kvstore.errors import ChainBroken, KVStoreError, LeaseError, PeerLost, TransferError, TransferTimeout
from kvstore.hints import Hints
from kvstore.messages import (
    NOTIFICATION,
    MoverDone,
    PeerGrant,
    PeerLease,
    Progress,
    pack_progress,
)
from kvstore.mover_link import MoverLink
from kvstore.peers import Peer, PeerBook
from kvstore.pool import Pool
from kvstore.transport import PeerDescription, ReadRequest

logger = logging.getLogger(__name__)

_MAX_PEERS_PER_LOAD = 4


@dataclass(slots=True)
class LoadReport:
    """What one load cost, as told to the client at its end."""

    num_local: int = 0
    num_peer: int = 0
    reason: str = ""
    peers: list[str] = field(default_factory=list)
    num_bytes: int = 0
    num_descriptors: int = 0
    read_s: float = 0.0
    num_locate_calls: int = 0
    num_lease_calls: int = 0

    def to_json(self) -> bytes:
        """Return the report as JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()


@dataclass(slots=True, eq=False)
class Load:
    """One load in progress: a lease that grows, and the client that waits for it.

    `send(progress, is_last)` tells the client and may be called from any thread.
    """

    chain: Chain
    block_bytes: int
    owner: str
    lease_id: int
    ttl_s: float
    deadline_s: float
    send: Callable[[bytes, bool], None]
    num_ready: int = 0
    report: LoadReport = field(default_factory=LoadReport)


class Fetcher:
    """Runs the loads of one node that need peers, a thread each.

    Args:
        namespace_version: how often a namespace was cleared, as this node knows.
        adopt_version: called when a peer knows of a later clearing.
    """

    def __init__(
        self,
        config: StoreConfig,
        pool: Pool,
        hints: Hints,
        peers: PeerBook,
        mover: MoverLink,
        slot_format: int,
        namespace_version: Callable[[bytes], int],
        adopt_version: Callable[[bytes, int], None],
    ) -> None:
        self._config, self._pool, self._hints, self._peers, self._mover = config, pool, hints, peers, mover
        self._slot_format = slot_format
        self._namespace_version, self._adopt_version = namespace_version, adopt_version
        self._threads = ThreadPoolExecutor(max_workers=16, thread_name_prefix="raykv-fetch")
        self._in_flight: dict[bytes, threading.Event] = {}
        self._in_flight_lock = threading.Lock()
        self._next_owner = 0

    def submit(self, load: Load) -> None:
        """Fetch what `load` misses, on a thread; its client gets a last message in any case."""
        self._threads.submit(self._run, load)

    def stop(self) -> None:
        """Take no more loads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, load: Load) -> None:
        try:
            load.report.reason = self._fill(load)
        except KVStoreError as error:
            load.report.reason = f"{type(error).__name__}: {error}"
        except Exception as error:
            logger.exception("a load failed unexpectedly")
            load.report.reason = f"{type(error).__name__}: {error}"
        finally:
            load.report.num_peer = load.num_ready - load.report.num_local
            load.send(
                pack_progress(Progress(load.lease_id, load.num_ready, np.empty(0, np.int32), load.report.to_json())),
                True,
            )

    def _fill(self, load: Load) -> str:
        """Fetch until everything is pinned; returns why it ended early, or nothing."""
        tried: set[str] = set()
        while load.num_ready < len(load.chain):
            if time.monotonic() > load.deadline_s:
                return "timeout"
            rest = load.chain.tail(load.num_ready)
            with self._in_flight_lock:
                other = self._in_flight.get(rest.hash_at(0))
            if other is not None:
                if not other.wait(max(0.0, load.deadline_s - time.monotonic())):
                    return "timeout"
                if self._pin_more(load):
                    continue
            if len(tried) >= _MAX_PEERS_PER_LOAD:
                return "not_found"
            load.report.num_locate_calls += 1
            found = [node for node, _ in self._hints.locate(rest) if node not in tried]
            usable = [node for node in found if self._peers.is_usable(node)]
            if not usable:
                # It may have arrived here while we were asking.
                if self._pin_more(load):
                    continue
                return "peer_lost" if found and set(found) - {self._own_id()} else "not_found"
            tried.add(usable[0])
            try:
                reason = self._fetch_from(load, rest, usable[0])
            except TransferError as error:
                logger.warning("fetch from node %s failed: %s", usable[0], error)
                self._peers.failed(usable[0])
                reason = "timeout" if isinstance(error, TransferTimeout) else "peer_lost"
            if reason and load.num_ready < len(load.chain) and len(usable) == 1:
                return reason
        return ""

    def _own_id(self) -> str:
        return self._peers.own_node_id

    def _fetch_from(self, load: Load, rest: Chain, node_id: str) -> str:
        """Lease the run at one peer and read what it grants; returns why it fell short, or nothing."""
        peer = self._peers.get(node_id)
        asked_s = time.monotonic()
        version = self._namespace_version(rest.namespace)
        ttl_s = min(self._config.lease_ttl_s, load.ttl_s)
        load.report.num_lease_calls += 1
        grant = peer.lease(
            PeerLease(
                chain=rest,
                block_bytes=load.block_bytes,
                slot_format=self._slot_format,
                namespace_version=version,
                ttl_s=ttl_s,
            ),
            self._config.call_timeout_s,
        )
        if grant.epoch != peer.epoch:
            self._peers.failed(node_id)
            return "peer_lost"
        if grant.namespace_version > version:
            self._adopt_version(rest.namespace, grant.namespace_version)
            return "cleared"
        if len(grant.slots) == 0:
            return "not_found"
        valid_until_s = asked_s + ttl_s - self._config.lease_margin_s
        read = _PeerRead(self, load, peer, grant, rest.head(len(grant.slots)), valid_until_s, version)
        reason = read.run()
        if not reason:
            self._peers.succeeded(node_id)
            load.report.peers.append(node_id)
        return reason

    def _pin_more(self, load: Load, limit: int | None = None) -> int:
        """Pin what became readable since and tell the client; returns how many blocks that were."""
        rest = load.chain.tail(load.num_ready)
        if limit is not None:
            rest = rest.head(limit - load.num_ready)
        deadline_s = time.monotonic() + load.ttl_s
        grant = self._pool.pin_prefix(rest, load.owner, deadline_s, load.lease_id)
        if grant.slots:
            first = load.num_ready
            load.num_ready += len(grant.slots)
            slots = np.asarray(grant.slots, dtype=np.int32)
            load.send(pack_progress(Progress(load.lease_id, first, slots)), False)
        return len(grant.slots)

    def _new_owner(self) -> str:
        with self._in_flight_lock:
            self._next_owner += 1
            return f"fetch-{self._next_owner}"

    def _enter(self, hashes: Iterable[bytes]) -> threading.Event:
        event = threading.Event()
        with self._in_flight_lock:
            for block_hash in hashes:
                self._in_flight.setdefault(block_hash, event)
        return event

    def _leave(self, hashes: Iterable[bytes], event: threading.Event) -> None:
        with self._in_flight_lock:
            for block_hash in hashes:
                if self._in_flight.get(block_hash) is event:
                    del self._in_flight[block_hash]
        event.set()


class _PeerRead:
    """One lease at one peer, and the READ under it."""

    def __init__(
        self, fetcher: Fetcher, load: Load, peer: Peer, grant: PeerGrant, chain: Chain,
        valid_until_s: float, version: int,
    ) -> None:  # fmt: skip
        self._fetcher, self._load, self._peer, self._grant = fetcher, load, peer, grant
        self._chain, self._valid_until_s, self._version = chain, valid_until_s, version
        self._first = load.num_ready
        self._owner = fetcher._new_owner()
        self._finished = threading.Event()
        self._error: KVStoreError | None = None
        self._write_id = 0
        self._num_published = 0
        self._indexes: tuple[int, ...] = ()

    def run(self) -> str:
        fetcher, config = self._fetcher, self._fetcher._config
        try:
            stats = fetcher._pool.stats()
            if stats.num_quarantined >= config.max_quarantined_fraction * stats.num_slots:
                raise TransferTimeout(
                    f"{stats.num_quarantined} of {stats.num_slots} slots are quarantined behind abandoned "
                    "transfers; nothing more is fetched until they are terminal"
                )
            name, description = self._peer.transport(self._grant.mover_generation, config.call_timeout_s)
            ticket = fetcher._pool.prepare_store(self._chain, self._owner, needs_parent=False)
        except (KVStoreError, ChainBroken):
            self._peer.release(self._grant.lease_id)
            raise
        if ticket.num_refused:
            self._load.report.reason = "pool_full"
        if not ticket.indexes:
            self._peer.release(self._grant.lease_id)
            return "" if fetcher._pin_more(self._load) else "pool_full" if ticket.num_refused else "busy"
        self._write_id, self._indexes = ticket.write_id, ticket.indexes
        hashes = [self._chain.hash_at(i) for i in ticket.indexes]
        event = fetcher._enter(hashes)
        try:
            return self._read(name, description, ticket.slots) or ("pool_full" if ticket.num_refused else "")
        finally:
            fetcher._leave(hashes, event)

    def _read(self, name: str, description: PeerDescription, slots: tuple[int, ...]) -> str:
        fetcher, config, load = self._fetcher, self._fetcher._config, self._load
        started_s = time.monotonic()
        timeout_s = min(config.transfer_timeout_s, self._valid_until_s - started_s, load.deadline_s - started_s)
        request = ReadRequest(
            peer=name,
            block_bytes=load.block_bytes,
            local_slots=np.asarray(slots, dtype=np.int32),
            remote_slots=self._grant.slots[list(self._indexes)],
            notification=NOTIFICATION.pack(self._grant.lease_id, self._peer.epoch),
        )
        try:
            read_id = fetcher._mover.read(
                request,
                description,
                self._on_done,
                chunk_blocks=max(1, config.chunk_bytes // load.block_bytes),
                timeout_s=max(timeout_s, 1e-3),
            )
        except PeerLost:
            fetcher._pool.abort_store(self._write_id, self._owner)
            self._peer.release(self._grant.lease_id)
            raise
        # The mover reports by itself when time is up; this wait is for a mover that does not.
        if not self._finished.wait(timeout_s + 1.0):
            fetcher._mover.abandon(read_id)
            self._end_badly(read_id, may_still_write=True)
            raise TransferTimeout(f"the mover did not report on a READ within {timeout_s + 1.0:.1f} s")
        load.report.read_s += time.monotonic() - started_s
        load.report.num_bytes += self._num_published * load.block_bytes
        if self._error is not None:
            raise self._error
        return "" if self._num_published == len(self._indexes) else "lease_expired"

    def _on_done(self, done: MoverDone, error: KVStoreError | None) -> None:
        """Runs on the control thread for every chunk: check, publish, pin for the client, tell it."""
        fetcher, pool = self._fetcher, self._fetcher._pool
        if error is not None:
            self._error = error if isinstance(error, TransferError) else TransferError(str(error))
            self._end_badly(done.read_id, may_still_write=not done.terminal)
            self._finished.set()
            return
        covered = (
            time.monotonic() < self._valid_until_s
            and fetcher._namespace_version(self._chain.namespace) == self._version
        )
        if covered:
            pool.complete_store(self._write_id, self._owner, count=None if done.last else done.num_blocks)
            self._num_published = done.num_blocks
            reached = self._first + self._indexes[done.num_blocks - 1] + 1
            if reached > self._load.num_ready:
                try:
                    fetcher._pin_more(self._load, None if done.last else reached)
                except LeaseError:
                    logger.debug("the client of a load left before its blocks came")
        if done.last:
            self._load.report.num_descriptors += done.num_descriptors
            if not covered:
                pool.abort_store(self._write_id, self._owner)
            fetcher._hints.publish_soon()
            self._finished.set()

    def _end_badly(self, read_id: int, *, may_still_write: bool) -> None:
        """Give up the write; what a transfer may still touch is set aside, and the peer's lease goes back."""
        name = f"read-{read_id}" if may_still_write else ""
        self._fetcher._pool.abort_store(self._write_id, self._owner, quarantine=name)
        try:
            if not may_still_write:
                self._peer.release(self._grant.lease_id)
        except KVStoreError as error:
            logger.debug("could not give a lease back: %s", error)

"""Fetching what a load misses from peers: lease there, READ here, check, publish, tell the waiting client.

A block counts only if the peer's lease covered its whole READ: the clock is taken before the lease is
asked for, and a chunk is published only if it was in place before that + ttl - margin. Any doubt is a miss.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import numpy as np

from kvstore.chain import Chain
from kvstore.config import StoreConfig
from kvstore.errors import (
    KVStoreError,
    StoreUnavailable,
    TransferError,
    TransferTimeout,
)
from kvstore.hints import Hints
from kvstore.messages import (
    PeerLease,
    Progress,
    pack_progress,
)
from kvstore.mover_link import MoverLink
from kvstore.peer_read import PeerRead
from kvstore.peers import PeerBook
from kvstore.pool import Pool

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

    `send(progress, is_last)` tells the client and may be called from any thread. `version` is the namespace's
    clearing that the load began under, taken before its first pin: after a later one it takes nothing more, or
    a chain would be put together from the KV of old and of new weights.
    """

    chain: Chain
    block_bytes: int
    owner: str
    lease_id: int
    ttl_s: float
    deadline_s: float
    version: int
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
        adopt_version: Callable[[bytes, int], object],
    ) -> None:
        self.config, self.pool, self.hints, self._peers, self.mover = config, pool, hints, peers, mover
        self._slot_format = slot_format
        self.namespace_version, self._adopt_version = namespace_version, adopt_version
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
            if self.namespace_version(load.chain.namespace) != load.version:
                return "cleared"
            rest = load.chain.tail(load.num_ready)
            # Noted before anybody is asked: of several loads that miss one block, one asks and the others wait.
            event = threading.Event()
            with self._in_flight_lock:
                other = self._in_flight.setdefault(rest.hash_at(0), event)
            if other is not event:
                if not other.wait(max(0.0, load.deadline_s - time.monotonic())):
                    return "timeout"
                self.pin_more(load)
                continue
            try:
                reason = self._ask_a_peer(load, rest, tried)
            finally:
                self.leave([rest.hash_at(0)], event)
            if reason and load.num_ready < len(load.chain):
                return reason
        return ""

    def _ask_a_peer(self, load: Load, rest: Chain, tried: set[str]) -> str:
        """Fetch from the best peer not tried yet; returns why there is no use in going on, or nothing."""
        # It may have arrived here since the load began.
        if self.pin_more(load):
            return ""
        if len(tried) >= _MAX_PEERS_PER_LOAD:
            return "not_found"
        load.report.num_locate_calls += 1
        found = [node for node, _ in self.hints.locate(rest) if node not in tried]
        usable = [node for node in found if self._peers.is_usable(node)]
        if not usable:
            # Or while we were asking.
            if self.pin_more(load):
                return ""
            return "peer_lost" if found and set(found) - {self._own_id()} else "not_found"
        tried.add(usable[0])
        try:
            reason = self._fetch_from(load, rest, usable[0])
        except (TransferError, StoreUnavailable) as error:
            logger.warning("fetch from node %s failed: %s", usable[0], error)
            if self.mover.own is not None:
                # Without a mover of its own this node has not learnt anything about the peer.
                self._peers.failed(usable[0])
            reason = "timeout" if isinstance(error, TransferTimeout) else "peer_lost"
        return reason if len(usable) == 1 else ""

    def _own_id(self) -> str:
        return self._peers.own_node_id

    def _fetch_from(self, load: Load, rest: Chain, node_id: str) -> str:
        """Lease the run at one peer and read what it grants; returns why it fell short, or nothing."""
        peer = self._peers.get(node_id)
        asked_s = time.monotonic()
        ttl_s = min(self.config.lease_ttl_s, load.ttl_s)
        load.report.num_lease_calls += 1
        grant = peer.lease(
            PeerLease(
                chain=rest,
                block_bytes=load.block_bytes,
                slot_format=self._slot_format,
                namespace_version=load.version,
                ttl_s=ttl_s,
            ),
            self.config.call_timeout_s,
        )
        if grant.epoch != peer.epoch:
            self._peers.failed(node_id)
            return "peer_lost"
        if grant.namespace_version > load.version:
            self._adopt_version(rest.namespace, grant.namespace_version)
            return "cleared"
        if len(grant.slots) == 0:
            return "not_found"
        valid_until_s = asked_s + ttl_s - self.config.lease_margin_s
        chain = rest.head(len(grant.slots))
        read = PeerRead(self, load, peer, grant, chain, valid_until_s, self._new_owner())
        reason = read.run()
        if not reason:
            self._peers.succeeded(node_id)
            load.report.peers.append(node_id)
        return reason

    def pin_more(self, load: Load, limit: int | None = None) -> int:
        """Pin what became readable since and tell the client; returns how many blocks that were."""
        rest = load.chain.tail(load.num_ready)
        if limit is not None:
            rest = rest.head(limit - load.num_ready)
        deadline_s = time.monotonic() + load.ttl_s
        grant = self.pool.pin_prefix(rest, load.owner, deadline_s, load.lease_id)
        # Asked after the pin: a clearing is noted before new blocks can be stored. What it pinned goes with the lease.
        if self.namespace_version(load.chain.namespace) != load.version:
            return 0
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

    def enter(self, hashes: list[bytes], event: threading.Event) -> list[bytes]:
        """Note that blocks are on their way until `event` is set; returns those that nobody else had noted."""
        with self._in_flight_lock:
            new = [block_hash for block_hash in hashes if block_hash not in self._in_flight]
            self._in_flight.update(dict.fromkeys(new, event))
            return new

    def leave(self, hashes: list[bytes], event: threading.Event) -> None:
        """Forget what `enter` noted, and wake who waits for it."""
        with self._in_flight_lock:
            for block_hash in hashes:
                del self._in_flight[block_hash]
        event.set()

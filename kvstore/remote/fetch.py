"""Fetching what a load misses from peers: lease there, READ here, check, publish, tell the waiting client.

A block counts only if the peer's lease covered its whole READ: the clock is taken before the lease is
asked for, and a chunk is published only if it was in place before that + ttl - margin. Any doubt is a miss.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvstore.blocks.chain import Chain
from kvstore.blocks.codec import encode
from kvstore.config import StoreConfig
from kvstore.errors import (
    InvalidRequest,
    KVStoreError,
    PeerLost,
    StoreUnavailable,
    TransferError,
    TransferTimeout,
)
from kvstore.mover.link import MoverLink
from kvstore.pool.pool import Pool
from kvstore.remote.directory_link import Hints
from kvstore.remote.messages import PeerLease
from kvstore.remote.peer_read import PeerRead
from kvstore.remote.peers import Peer, PeerBook
from kvstore.remote.single_flight import Flights
from kvstore.rpc.messages import LoadReport, Progress
from kvstore.runtime import clock
from kvstore.runtime.store_threads import Blocking, StoreThreads
from kvstore.runtime.thread_pool import ThreadPool

logger = logging.getLogger(__name__)

_MAX_PEERS_PER_LOAD = 4
#: Loads that ask or read at once; as many may hang on a peer that stopped, for one call's timeout.
_NUM_THREADS = 32
#: Loads that have not ended, and bytes of their chains (2,097,152 blocks): more are answered at once.
_MOST_LOADS, _MOST_BYTES = 4096, 64 << 20
#: A call for a load that has no time left may still take this long, so that it does not end on a healthy peer.
_LEAST_CALL_S = 1.0


@dataclass(slots=True, eq=False)
class Load:
    """One load in progress: a lease that grows, and the client that waits for it.

    `send(progress, is_last)` tells the client and may be called from any thread; `is_open` says whether it still
    listens: once it does not, nothing more is pinned for it. `tried` are the peers asked so far, `fell_short` why
    the last one was not enough. `version` is the namespace's clearing that the load began under, taken before its
    first pin: after a later one it takes nothing more, or a chain would be put together from the KV of old and of
    new weights.
    """

    chain: Chain
    block_bytes: int
    owner: str
    lease_id: int
    ttl_s: float
    deadline_s: float
    version: int
    send: Callable[[bytes, bool], None]
    is_open: Callable[[], bool] = lambda: True
    num_ready: int = 0
    is_ended: bool = False
    tried: set[str] = field(default_factory=set)
    fell_short: str = ""
    report: LoadReport = field(default_factory=LoadReport)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Fetcher:
    """Runs the loads of one node that need peers, a thread each while they ask or read.

    Of several loads that miss one block, one fetches it. The others are parked, each with its own deadline, and
    go on when that one is through, well or not: then they find the block, or ask another peer themselves.

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
        threads: StoreThreads,
        slot_format: int,
        namespace_version: Callable[[bytes], int],
        adopt_version: Callable[[bytes, int], object],
    ) -> None:
        self.config, self.pool, self.hints, self._peers, self.mover = config, pool, hints, peers, mover
        self._store_threads, self._slot_format = threads, slot_format
        self.namespace_version, self._adopt_version = namespace_version, adopt_version
        self._threads = ThreadPool(_NUM_THREADS, "raykv-fetch")
        self.flights = Flights(self._submit)
        self._owners = itertools.count(1)
        self._counting = threading.Lock()
        self._num_loads = self._num_bytes = 0  # Of chains of loads that have not ended.

    def begin(self, load: Load) -> None:
        """Fetch what `load` misses, on threads; its client gets a last message in any case, perhaps at once."""
        num_bytes = len(load.chain.data)
        with self._counting:
            is_room = self._num_loads < _MOST_LOADS and self._num_bytes + num_bytes <= _MOST_BYTES
            # Counted in any case: its end is subtracted.
            self._num_loads, self._num_bytes = self._num_loads + 1, self._num_bytes + num_bytes
        if is_room:
            self._submit(load)
        else:
            load.report.reason = (
                f"busy: {self._num_loads - 1} loads of this node wait for peers already; try again soon"
            )
            self._end(load)

    def _submit(self, load: Load) -> None:
        if not self._threads.run(partial(self._run, load)):
            load.report.reason = "busy: the node store ends, or can start no thread"
            self._end(load)

    def stop(self) -> None:
        """Take no more loads."""
        self._threads.close(drop=True)

    def _run(self, load: Load) -> None:
        try:
            reason = self._fill(load)
            if reason is None:
                return
            load.report.reason = reason
        except KVStoreError as error:
            load.report.reason = f"{type(error).__name__}: {error}"
        except Exception as error:
            logger.exception("a load failed unexpectedly")
            load.report.reason = f"{type(error).__name__}: {error}"
        self._end(load)

    def _end(self, load: Load) -> None:
        with load.lock:
            # Whoever pinned the last block has said the last word already.
            if not load.is_ended:
                self._tell(load, load.num_ready, b"", is_last=True)

    def _tell(self, load: Load, first: int, packed_slots: bytes, *, is_last: bool) -> None:
        load.is_ended = is_last
        if is_last:
            with self._counting:
                self._num_loads, self._num_bytes = self._num_loads - 1, self._num_bytes - len(load.chain.data)
        load.report.num_peer = load.num_ready - load.report.num_local
        report = load.report if is_last else None
        load.send(encode(Progress(load.lease_id, first, packed_slots, report)), is_last)

    def _fill(self, load: Load) -> str | None:
        """Fetch until everything is pinned; returns why it ended early, "" at the end, None when parked."""
        while load.num_ready < len(load.chain):
            if clock.now_s() > load.deadline_s:
                return "timeout"
            if self.namespace_version(load.chain.namespace) != load.version:
                return "cleared"
            if not load.is_open():
                return "abandoned: the client closed its connection"
            rest = load.chain.tail(load.num_ready)
            # Noted before anybody is asked: of several loads that miss one block, one asks and the others wait.
            flight = self.flights.lead(rest.hash_at(0), load)
            if flight is None:
                return None
            try:
                reason = self._ask_a_peer(load, rest, load.tried)
            finally:
                self.flights.leave([rest.hash_at(0)], flight)
            if reason and load.num_ready < len(load.chain):
                return reason
        return ""

    def _ask_a_peer(self, load: Load, rest: Chain, tried: set[str]) -> str:
        """Fetch from the best peer not tried yet; returns why there is no use in going on, or nothing."""
        # It may have arrived here since the load began; mostly it has not, and one look is cheaper than a pin.
        if self.pool.lookup(rest.head(1)) and self.pin_more(load):
            return ""
        if len(tried) >= _MAX_PEERS_PER_LOAD:
            return "not_found"
        hints = remembered = self.hints.recall(rest.hash_at(0))
        if not remembered:
            load.report.num_locate_calls += 1
            hints = self.hints.locate(rest)
        found = [node for node, _ in hints if node not in tried]
        usable = [node for node in found if self._peers.is_usable(node)]
        if not usable:
            # Or while we were asking.
            if self.pin_more(load):
                return ""
            if remembered:
                return ""
            return load.fell_short or ("peer_lost" if set(found) - {self._own_id()} else "not_found")
        if clock.now_s() > load.deadline_s:
            return "timeout"
        tried.add(usable[0])
        try:
            reason = self._fetch_from(load, rest, usable[0], dict(hints)[usable[0]])
        except (TransferError, StoreUnavailable) as error:
            logger.warning("fetch from node %s failed: %s", usable[0], error)
            if self.mover.own is not None:
                # Without a mover of its own this node has not learnt anything about the peer.
                self._peers.failed(usable[0])
            reason = "timeout" if isinstance(error, TransferTimeout) else "peer_lost"
        load.fell_short = reason
        # No other peer helps against a full pool here. What was remembered may be old: then the directory is asked.
        return reason if reason == "pool_full" or (len(usable) == 1 and not remembered) else ""

    def call_s(self, load: Load) -> float:
        """Return how long a call to a peer may take for this load, seconds."""
        return min(self.config.call_timeout_s, max(load.deadline_s - clock.now_s(), _LEAST_CALL_S))

    def release_at_peer(self, peer: Peer, lease_id: int) -> None:
        """Give a lease back to a peer after all, on a thread: its connection may have to be made anew."""

        def release() -> None:
            with contextlib.suppress(KVStoreError):
                now = self._peers.get(peer.node_id)
                if now.epoch == peer.epoch:
                    now.release(lease_id)

        self._store_threads.submit(Blocking.RELEASE, release, is_admitted=True)

    def _own_id(self) -> str:
        return self._peers.own_node_id

    def _fetch_from(self, load: Load, chain: Chain, node_id: str, num_hinted: int) -> str:
        """Lease a run at one peer and read what it grants; returns why it fell short, or nothing."""
        peer = self._peers.get(node_id)
        asked_s = clock.now_s()
        ttl_s = min(self.config.lease_ttl_s, load.ttl_s)
        valid_until_s = asked_s + ttl_s - self.config.lease_margin_s
        wanted = PeerLease(
            chain=chain,
            block_bytes=load.block_bytes,
            slot_format=self._slot_format,
            namespace_version=load.version,
            ttl_s=ttl_s,
        )
        with PeerRead(self, load, peer, chain, valid_until_s, f"fetch-{next(self._owners)}") as read:
            if read.is_quarantine_full():
                return "timeout: too many slots wait for transfers that were given up; their mover is being replaced"
            load.report.num_lease_calls += 1
            grant = peer.lease(wanted, self.call_s(load), lambda: read.claim_first(num_hinted))
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
            reason = read.run(grant)
        if not reason:
            self._peers.succeeded(node_id)
        return reason

    def pin_more(self, load: Load, limit: int | None = None) -> int:
        """Pin what became readable since and tell the client; returns how many blocks that were.

        The word on the last block carries the report, so that the client waits for nothing more.
        """
        with load.lock:
            return 0 if load.is_ended or not load.is_open() else self._pin_more(load, limit)

    def _pin_more(self, load: Load, limit: int | None) -> int:
        rest = load.chain.tail(load.num_ready)
        if limit is not None:
            rest = rest.head(limit - load.num_ready)
        deadline_s = clock.now_s() + load.ttl_s
        grant = self.pool.pin_prefix(rest, load.owner, deadline_s, load.lease_id)
        # Asked after the pin: a clearing is noted before new blocks can be stored. What it pinned goes with the lease.
        if self.namespace_version(load.chain.namespace) != load.version:
            return 0
        if grant.packed_slots:
            first = load.num_ready
            load.num_ready += len(grant.slots)
            self._tell(load, first, grant.packed_slots, is_last=load.num_ready == len(load.chain))
        return len(grant.slots)

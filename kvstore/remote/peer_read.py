"""Read the blocks that one peer granted. Claim slots, read segment by segment, publish, pin for the client."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.chunking import plan_chunks, plan_segments
from kvstore.blocks.indexes import ints_in
from kvstore.config import StoreConfig
from kvstore.errors import KVStoreError, LeaseError, TransferError, TransferTimeout
from kvstore.mover.link import MoverLink
from kvstore.mover.messages import MoverDone
from kvstore.mover.transport import PeerDescription, ReadRequest
from kvstore.remote.covered_read import Arrivals, Cover, CoveredRead
from kvstore.remote.load import Load
from kvstore.remote.messages import PeerGrant
from kvstore.remote.peers import Peer, PeerBook, call_s
from kvstore.remote.single_flight import Flight, Flights
from kvstore.rpc.messages import NOTIFICATION
from kvstore.runtime import clock
from kvstore.runtime.threads.store_threads import Blocking, StoreThreads

logger = logging.getLogger(__name__)

_NO_GRANT = PeerGrant(lease_id=0, epoch=b"", namespace_version=0, mover_generation=0, slots=np.empty(0, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class ReadContext:
    """The parts that the READs of a node's loads share.

    Args:
        config: of the store.
        mover: runs the READs.
        flights: the blocks that are on their way here.
        announce: called when blocks became readable here.
        peers: the stores of other nodes.
        threads: for leases that are given back late.
        numbers: make the owners of the writes.
    """

    config: StoreConfig
    mover: MoverLink
    flights: Flights
    announce: Callable[[], None]
    peers: PeerBook
    threads: StoreThreads
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))


@dataclass(slots=True, eq=False)
class _Segment:
    """Blocks [first, first + len(chain)) of a peer's grant, claimed and read as one."""

    first: int
    chain: BlockHashes
    write_id: int
    indexes: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]
    read: CoveredRead = field(init=False)
    has_ended: bool = False


class PeerRead(contextlib.AbstractContextManager["PeerRead"]):
    """One lease at one peer, and the READs under it.

    The slots of the first segment (kvstore.blocks.chunking) are claimed while the peer is asked; the slots of each
    later segment while the mover reads the one before. A context manager: its exit gives up slots that were claimed
    but not read, and gives the lease back.

    Args:
        context: of this node.
        load: the load that wants the blocks.
        peer: the peer that is asked for them.
        chain: the blocks that it is asked for.
        until_s: the lease covers blocks in place before this time; computed before the peer is asked.
    """

    def __init__(self, context: ReadContext, load: Load, peer: Peer, chain: BlockHashes, until_s: float) -> None:
        self._context, self._load, self._peer, self._chain = context, load, peer, chain
        self._pool, self._owner = load.pool, f"fetch-{next(context.numbers)}"
        self._cover = Cover(until_s, load.deadline_s, load.is_current)
        self._arrivals = Arrivals(load.report, peer.node_id, load.block_bytes, 0.0)
        self._grant = _NO_GRANT
        self._first = load.num_ready
        self._flight, self._entered = Flight(asks_peer=True), list[bytes]()
        self._claimed: _Segment | None = None
        self._is_full = False
        self._lock = threading.Lock()
        self._all_ended = threading.Event()
        self._segments: list[_Segment] = []
        self._posted_all = self._notified = False
        self._error: KVStoreError | None = None
        self._num_wanted = self._num_published = 0

    def __exit__(self, *error: object) -> None:
        self._drop_claim()
        self._context.flights.leave(self._entered, self._flight)
        if self._grant.lease_id and not (self._notified and self._num_published == self._num_wanted):
            self._give_back()

    def claim_first(self, num_hinted: int) -> None:
        """Claim the slots of the first segment of the hinted blocks; `run` raises any error."""
        try:
            if plan := self._plan(min(num_hinted, len(self._chain))):
                self._claimed = self._claim(0, plan[0][-1])
        except KVStoreError as error:
            self._error = error

    def run(self, grant: PeerGrant) -> str:
        """Read all blocks that the peer granted; return why blocks are missing, or "".

        Raises:
            TransferError: the peer or the mover failed; slots that may still be written are in quarantine.
        """
        self._grant, self._arrivals.since_s = grant, clock.now_s()
        self._chain = self._chain.head(len(grant.slots))
        if self._error is not None:
            raise self._error
        config = self._context.config
        try:
            source = self._peer.transport(grant.mover_generation, call_s(config, self._load.deadline_s))
        except TransferTimeout:
            if self._peer.is_silent(config.call_timeout_s):
                raise
            return f"timeout: node {self._peer.node_id} did not answer in the short time of this load"
        first = 0
        for ends in self._plan(len(self._chain)):
            segment = self._claimed
            if segment is None or (segment.first, len(segment.chain)) != (first, ends[-1] - first):
                self._drop_claim()
                segment = self._claim(first, ends[-1])
            self._claimed = None
            if segment is not None:
                self._notified = ends[-1] == len(self._chain)
                found = np.searchsorted(segment.indexes, np.asarray(ends) - first)
                chunk_ends = np.unique(found[found > 0]).astype(np.int32)  # Blocks of the other chunks are here.
                self._post(segment, *source, chunk_ends)
            if self._is_full or self._error is not None:
                break
            first = ends[-1]
        return self._wait() or ("pool_full" if self._is_full else "")

    def _claim(self, first: int, end: int) -> _Segment | None:
        """Claim slots for blocks [first, end) of the chain. Return None if there is none to read."""
        piece = self._chain.tail(first).head(end - first)
        ticket = self._pool.prepare_store(piece, self._owner, needs_parent=False, tenant=self._load.tenant)
        self._is_full = ticket.num_refused > 0
        if not ticket.packed_indexes:
            return None
        indexes, hashes = ints_in(ticket.packed_indexes), piece.hashes()
        if len(indexes) < len(hashes):
            hashes = [hashes[i] for i in indexes.tolist()]
        self._entered += self._context.flights.enter(hashes, self._flight)
        return _Segment(first, piece, ticket.write_id, indexes, ints_in(ticket.packed_slots))

    def _drop_claim(self) -> None:
        """Give up slots that were claimed and not read into."""
        if self._claimed is not None:
            self._pool.abort_store(self._claimed.write_id, self._owner)
            self._claimed = None

    def _give_back(self) -> None:
        """Release the peer's pins, but only after abandoned READs can no longer read them."""
        given_up = {segment.read.given_up_id for segment in self._segments} - {0}
        if not given_up:
            with contextlib.suppress(KVStoreError):
                self._peer.release(self._grant.lease_id)
            return
        context, peer, lease_id = self._context, self._peer, self._grant.lease_id

        def release() -> None:
            with contextlib.suppress(KVStoreError):
                now = context.peers.get(peer.node_id)  # It may have to connect again.
                if now.epoch == peer.epoch:
                    now.release(lease_id)

        context.mover.when_terminal(
            given_up, lambda: context.threads.submit(Blocking.RELEASE, release, is_admitted=True)
        )

    def _plan(self, num_blocks: int) -> list[list[int]]:
        """Return the chunk ends of each segment."""
        chunk_blocks = max(1, self._context.config.chunk_bytes // self._load.block_bytes)
        return plan_segments(plan_chunks(num_blocks, chunk_blocks))

    def _post(
        self, segment: _Segment, name: str, description: PeerDescription, chunk_ends: npt.NDArray[np.int32]
    ) -> None:
        note = NOTIFICATION.pack(self._grant.lease_id, self._peer.epoch, self._peer.owner_key)
        request = ReadRequest(
            peer=name,
            block_bytes=self._load.block_bytes,
            local_slots=segment.slots,
            remote_slots=self._grant.slots[segment.first + segment.indexes],
            notification=note if self._notified else b"",
        )
        segment.read = CoveredRead(
            self._context.mover, lambda done: self._on_blocks(segment, done), lambda: self._on_end(segment)
        )
        with self._lock:
            self._segments.append(segment)
            self._num_wanted += len(segment.indexes)
        try:
            segment.read.post(
                request, description, self._cover, chunk_ends, timeout_s=self._context.config.transfer_timeout_s
            )
        except KVStoreError as error:
            self._error = error
            self._on_end(segment)

    def _wait(self) -> str:
        load = self._load
        with self._lock:
            self._posted_all = True
            if all(segment.has_ended for segment in self._segments):
                self._all_ended.set()
        if not self._segments:
            # All blocks arrived through other loads meanwhile, or no slot was free.
            return "" if load.pin_more() else "busy"
        late_s = max(segment.read.late_s for segment in self._segments)
        if not self._all_ended.wait(max(late_s - clock.now_s(), 0.0)):
            for segment in self._segments:
                segment.read.give_up()
        if self._error is not None:
            failed = [segment.read for segment in self._segments if segment.read.error is not None]
            if failed and not any(read.is_peers_fault() for read in failed):
                return f"timeout: {self._error}"  # Not raised: that would back the peer off for the whole node.
            raise self._error
        return "" if self._num_published == self._num_wanted else "lease_expired"

    def _on_blocks(self, segment: _Segment, done: MoverDone) -> None:
        """Publish a chunk that counts, pin it for the client and tell it. On the control thread."""
        count = done.num_blocks  # With the last chunk it is all blocks: the link to the mover has checked that.
        num_published = self._pool.complete_store(segment.write_id, self._owner, count=count)
        self._num_published += num_published
        self._arrivals.add(done, num_published)
        reached = self._first + segment.first
        reached += len(segment.chain) if done.last else int(segment.indexes[done.num_blocks - 1]) + 1
        if reached > self._load.num_ready:
            try:
                self._load.pin_more(reached)
            except LeaseError:
                logger.debug("the client of a load left before its blocks came")

    def _on_end(self, segment: _Segment) -> None:
        """Give up the slots that a segment has not published."""
        read = segment.read
        if (error := read.error) is not None:
            self._error = error if isinstance(error, TransferError) else TransferError(str(error))
        read.settle(self._pool, segment.write_id, self._owner)
        self._context.announce()
        with self._lock:
            segment.has_ended = True
            if self._posted_all and all(s.has_ended for s in self._segments):
                self._all_ended.set()

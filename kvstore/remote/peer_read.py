"""Reading what one peer granted: claim slots, READ, check that the lease covered it, publish, pin, tell."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.blocks.chain import Chain
from kvstore.blocks.chunking import plan_chunks, plan_segments
from kvstore.errors import KVStoreError, LeaseError, PeerLost, TransferError, TransferTimeout
from kvstore.mover.messages import MoverDone
from kvstore.mover.transport import PeerDescription, ReadRequest
from kvstore.remote.answers import check_slots
from kvstore.remote.messages import PeerGrant
from kvstore.remote.peers import Peer
from kvstore.remote.single_flight import Flight
from kvstore.rpc.messages import NOTIFICATION
from kvstore.runtime import clock

if TYPE_CHECKING:
    from kvstore.remote.fetch import Fetcher, Load

logger = logging.getLogger(__name__)

_MOVER_GRACE_S = 1.0
_NO_SLOTS = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class _Segment:
    """Part of a peer's grant that is prepared and read as one: blocks [first, first + len(chain)) of it."""

    first: int
    chain: Chain
    write_id: int
    indexes: npt.NDArray[np.int64]
    slots: Sequence[int]
    read_id: int = 0
    ended: bool = False


class PeerRead:
    """One lease at one peer, and the READs under it.

    The slots of the first segment (kvstore.blocks.chunking) are claimed while the peer is asked, those of each later
    one while the mover reads the one before. A context manager: what was claimed and not read is given up at its end.

    Args:
        fetcher: of this node.
        load: who wants the blocks.
        peer: who is asked for them.
        chain: the blocks that it is asked for.
        valid_until_s: what is in place before counts: by the clock taken before the peer is asked.
        owner: of the writes.
    """

    def __init__(
        self, fetcher: Fetcher, load: Load, peer: Peer, chain: Chain, valid_until_s: float, owner: str
    ) -> None:
        self._fetcher, self._load, self._peer = fetcher, load, peer
        self._pool, self._config, self._owner = fetcher.pool, fetcher.config, owner
        self._chain, self._valid_until_s = chain, valid_until_s
        self._grant = PeerGrant(lease_id=0, epoch=b"", namespace_version=0, mover_generation=0, slots=_NO_SLOTS)
        self._first = load.num_ready
        self._flight, self._entered = Flight(), list[bytes]()
        self._claimed: _Segment | None = None
        self._is_full = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._segments: list[_Segment] = []
        self._posted_all = self._notified = False
        self._error: KVStoreError | None = None
        self._given_up: set[int] = set()
        self._num_wanted = self._num_published = 0
        self._told_s = 0.0

    def __enter__(self) -> PeerRead:
        return self

    def __exit__(self, *error: object) -> None:
        self._drop_claim()
        self._fetcher.flights.leave(self._entered, self._flight)
        if self._grant.lease_id and not (self._notified and self._num_published == self._num_wanted):
            self._give_back()

    def is_quarantine_full(self) -> bool:
        """Whether so many slots wait for transfers that were given up that nothing more is to be read."""
        stats = self._pool.stats()
        return stats.num_quarantined >= self._config.max_quarantined_fraction * stats.num_slots

    def claim_first(self, num_hinted: int) -> None:
        """Claim the slots of the first segment of what the peer is said to have; what goes wrong is told by `run`."""
        try:
            if plan := self._plan(min(num_hinted, len(self._chain))):
                self._claimed = self._claim(0, plan[0][-1])
        except KVStoreError as error:
            self._error = error

    def run(self, grant: PeerGrant) -> str:
        """Read everything that the peer granted; returns why it fell short, or nothing.

        Raises:
            TransferError: the peer or the mover failed; what may still be written is quarantined.
        """
        self._grant, self._told_s = grant, clock.now_s()
        self._chain = self._chain.head(len(grant.slots))
        if self._error is not None:
            raise self._error
        name, description = self._peer.transport(grant.mover_generation, self._fetcher.call_s(self._load))
        check_slots(grant.slots, description, self._load.block_bytes)
        first = 0
        for ends in self._plan(len(self._chain)):
            segment = self._claimed
            if segment is None or (segment.first, len(segment.chain)) != (first, ends[-1] - first):
                self._drop_claim()
                segment = self._claim(first, ends[-1])
            self._claimed = None
            if segment is not None:
                self._notified = ends[-1] == len(self._chain)
                chunk_ends = _distinct(np.searchsorted(segment.indexes, np.asarray(ends) - first))
                self._post(segment, name, description, chunk_ends, with_notification=self._notified)
            if self._is_full or self._error is not None:
                break
            first = ends[-1]
        return self._wait() or ("pool_full" if self._is_full else "")

    def _claim(self, first: int, end: int) -> _Segment | None:
        """Claim slots for blocks [first, end) of the chain; None when there is none to be read."""
        piece = self._chain.tail(first).head(end - first)
        ticket = self._pool.prepare_store(piece, self._owner, needs_parent=False)
        self._is_full = ticket.num_refused > 0
        if not ticket.indexes:
            return None
        indexes, hashes = np.asarray(ticket.indexes), piece.hashes()
        if len(indexes) < len(hashes):
            hashes = [hashes[i] for i in ticket.indexes]
        self._entered += self._fetcher.flights.enter(hashes, self._flight)
        return _Segment(first, piece, ticket.write_id, indexes, ticket.slots)

    def _drop_claim(self) -> None:
        """Give up slots that were claimed and not read into."""
        if self._claimed is not None:
            self._pool.abort_store(self._claimed.write_id, self._owner)
            self._claimed = None

    def _give_back(self) -> None:
        """Release the peer's pins, but not while a READ that was given up may still be reading them."""
        if not self._given_up:
            with contextlib.suppress(KVStoreError):
                self._peer.release(self._grant.lease_id)
            return
        fetcher, peer, lease_id = self._fetcher, self._peer, self._grant.lease_id
        fetcher.mover.when_terminal(self._given_up, lambda: fetcher.release_at_peer(peer, lease_id))

    def _plan(self, num_blocks: int) -> list[list[int]]:
        """Return the chunk ends of each segment."""
        chunk_blocks = max(1, self._config.chunk_bytes // self._load.block_bytes)
        return plan_segments(plan_chunks(num_blocks, chunk_blocks))

    def _post(
        self,
        segment: _Segment,
        name: str,
        description: PeerDescription,
        chunk_ends: npt.NDArray[np.int32],
        *,
        with_notification: bool,
    ) -> None:
        load, now_s = self._load, clock.now_s()
        left_s = min(self._valid_until_s, load.deadline_s, now_s + self._config.transfer_timeout_s) - now_s
        note = b""
        if with_notification:
            note = NOTIFICATION.pack(self._grant.lease_id, self._peer.epoch, self._peer.owner_key)
        request = ReadRequest(
            peer=name,
            block_bytes=load.block_bytes,
            local_slots=np.asarray(segment.slots, dtype=np.int32),
            remote_slots=self._grant.slots[segment.first + segment.indexes],
            notification=note,
        )
        with self._lock:
            self._segments.append(segment)
            self._num_wanted += len(segment.indexes)
        try:
            segment.read_id = self._fetcher.mover.read(
                request,
                description,
                lambda done, error: self._on_done(segment, done, error),
                chunk_ends=chunk_ends,
                timeout_s=max(left_s, 1e-3),
            )
        except PeerLost as error:
            self._error = error
            self._end(segment, 0)

    def _wait(self) -> str:
        load = self._load
        with self._lock:
            self._posted_all = True
            if all(segment.ended for segment in self._segments):
                self._ended.set()
        if not self._segments:
            # Everything arrived by other ways meanwhile, or no slot could be had.
            return "" if self._fetcher.pin_more(load) else "busy"
        # The mover reports by itself when time is up; this wait is for a mover that does not.
        left_s = min(self._valid_until_s, load.deadline_s) - clock.now_s()
        if not self._ended.wait(max(left_s, 0.0) + _MOVER_GRACE_S):
            for segment in [s for s in self._segments if not s.ended]:
                # Quarantined first: the READ may turn terminal between these two lines.
                self._end(segment, segment.read_id)
                if not self._fetcher.mover.abandon(segment.read_id):
                    self._pool.end_quarantine(f"read-{segment.read_id}")
            raise TransferTimeout("the mover did not report on a READ in time")
        if self._error is not None:
            raise self._error
        return "" if self._num_published == self._num_wanted else "lease_expired"

    def _on_done(self, segment: _Segment, done: MoverDone, error: KVStoreError | None) -> None:
        """Runs on the control thread for every chunk: check, publish, pin for the client, tell it."""
        if error is not None:
            self._error = error if isinstance(error, TransferError) else TransferError(str(error))
            self._end(segment, 0 if done.terminal else done.read_id)
            return
        fetcher = self._fetcher
        covered = (
            clock.now_s() < self._valid_until_s
            and fetcher.namespace_version(self._chain.namespace) == self._load.version
        )
        if covered:
            count = None if done.last else done.num_blocks
            published = self._pool.complete_store(segment.write_id, self._owner, count=count)
            self._note(done, published)
            reached = self._first + segment.first + int(segment.indexes[done.num_blocks - 1]) + 1
            if done.last:
                reached = self._first + segment.first + len(segment.chain)
            if reached > self._load.num_ready:
                try:
                    fetcher.pin_more(self._load, reached)
                except LeaseError:
                    logger.debug("the client of a load left before its blocks came")
        if done.last:
            fetcher.hints.publish_soon()
            self._end(segment, 0)

    def _note(self, done: MoverDone, num_published: int) -> None:
        """Account for a chunk before the client hears of it: the last word to the client carries the report."""
        report, now_s = self._load.report, clock.now_s()
        self._num_published += num_published
        report.num_bytes += num_published * self._load.block_bytes
        report.read_s += now_s - self._told_s
        self._told_s = now_s
        if done.last:
            report.num_descriptors += done.num_descriptors
        if self._peer.node_id not in report.peers:
            report.peers.append(self._peer.node_id)

    def _end(self, segment: _Segment, read_id: int) -> None:
        """Give up what a segment has not published; what READ `read_id` may still touch is set aside."""
        self._pool.abort_store(segment.write_id, self._owner, quarantine=f"read-{read_id}" if read_id else "")
        with self._lock:
            segment.ended = True
            if read_id:
                self._given_up.add(read_id)
            if self._posted_all and all(s.ended for s in self._segments):
                self._ended.set()


def _distinct(ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return chunk ends without those of chunks that became empty because all their blocks were here."""
    kept: npt.NDArray[np.int32] = ends[np.diff(ends, prepend=0) > 0].astype(np.int32)
    return kept

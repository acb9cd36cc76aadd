"""One READ of a peer's blocks, which count only as far as the lease or claim on them covered it.

The clock is taken before the peer is asked, and blocks count only if they were in place before that time plus the
lease, less a margin, while the namespace was not cleared. Any doubt is a miss. A READ that was given up may still
write: until it cannot, its slots are in quarantine, and what the peer granted is not given back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.errors import KVStoreError, TransferTimeout
from kvstore.mover.link import MoverLink
from kvstore.mover.messages import MoverDone
from kvstore.mover.transport import PeerDescription, ReadRequest
from kvstore.pool.pool import Pool
from kvstore.remote.answers import check_slots
from kvstore.rpc.messages import LoadReport
from kvstore.runtime import clock

#: The mover reports by itself when time is up; after this a mover that does not is waited for no longer.
_MOVER_GRACE_S = 1.0
#: A READ that ended with its time says nothing of the peer, unless nothing of it came for so long.
_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Cover:
    """Until when blocks of a peer count.

    Args:
        until_s: the end of the lease or claim by this node's clock, less the margin.
        deadline_s: of the caller that waits for the blocks.
        is_current: whether the namespace has not been cleared since they were asked for.
    """

    until_s: float
    deadline_s: float
    is_current: Callable[[], bool]

    def holds(self) -> bool:
        """Whether what is in place now counts."""
        return clock.now_s() < self.until_s and self.is_current()


@dataclass(slots=True)
class Arrivals:
    """Accounts in the report of a load or fetch for what one peer's READs brought.

    Args:
        report: is written to.
        node_id: of the peer.
        block_bytes: of each block.
        since_s: when the first READ began, or the chunk before was in place.
    """

    report: LoadReport
    node_id: str
    block_bytes: int
    since_s: float

    def add(self, done: MoverDone, num_blocks: int) -> None:
        """Account for a chunk, before the client hears of it: its last message carries the report."""
        report, now_s = self.report, clock.now_s()
        report.num_bytes += num_blocks * self.block_bytes
        report.read_s += now_s - self.since_s
        self.since_s = now_s
        if done.last:
            report.num_descriptors += done.num_descriptors
        if self.node_id not in report.peers:
            report.peers.append(self.node_id)


class CoveredRead:
    """One READ, from the moment when it is posted until nothing of it can write any more.

    Args:
        mover: that reads.
        on_blocks: called on the control thread with each chunk that counts.
        on_end: called once, after the last chunk or the failure: on the control thread, or where `give_up` is called.
    """

    def __init__(self, mover: MoverLink, on_blocks: Callable[[MoverDone], None], on_end: Callable[[], None]) -> None:
        self._mover, self._on_blocks, self._on_end = mover, on_blocks, on_end
        # A chunk is taken under it, so that none counts once `give_up` has returned.
        self._lock = threading.Lock()
        self._cover: Cover | None = None
        self._read_id = 0
        #: After this the mover is taken for one that does not report.
        self.late_s = 0.0
        self._heard_s = self._ended_s = 0.0
        self.has_ended = False
        #: Why it failed.
        self.error: KVStoreError | None = None
        #: The id of the READ when it was given up, so that it may still write; else 0.
        self.given_up_id = 0

    def post(
        self,
        request: ReadRequest,
        peer: PeerDescription,
        cover: Cover,
        chunk_ends: npt.NDArray[np.int32],
        *,
        timeout_s: float,
        may_wait: bool = True,
        generation: int = 0,
    ) -> None:
        """Have the mover read, for as long as the cover, the caller and `timeout_s` allow.

        Raises:
            PeerLost: the slots are none of the peer's, or this node has no such mover; nothing was started.
            TransferTimeout: as for `MoverLink.read`; nothing was started.
        """
        check_slots(request.remote_slots, peer, request.block_bytes)
        now_s = clock.now_s()
        left_s = max(min(cover.until_s, cover.deadline_s, now_s + timeout_s) - now_s, 0.0)
        self._cover, self._heard_s, self.late_s = cover, now_s, now_s + left_s + _MOVER_GRACE_S
        self._read_id = self._mover.read(
            request, peer, self._on_done, chunk_ends=chunk_ends, timeout_s=max(left_s, 1e-3), may_wait=may_wait,
            generation=generation,
        )  # fmt: skip

    def is_peers_fault(self) -> bool:
        """Whether the failure is to be held against the peer: not if the READ was only given too little time."""
        return not isinstance(self.error, TransferTimeout) or self._ended_s - self._heard_s >= _PATIENCE_S

    def is_late(self, now_s: float) -> bool:
        """Whether the mover has not reported in time."""
        return bool(self._read_id) and not self.has_ended and now_s > self.late_s

    def give_up(self) -> None:
        """Stop waiting for the mover's report, unless it has come: nothing that comes later counts."""
        with self._lock:
            if self.has_ended:
                return
            self.has_ended, self._ended_s = True, clock.now_s()
            self.error = TransferTimeout("the mover did not report on a READ in time")
            if self._mover.abandon(self._read_id):
                self.given_up_id = self._read_id
        self._on_end()

    def _on_done(self, done: MoverDone, error: KVStoreError | None) -> None:
        """Take one report of the mover, on the control thread."""
        with self._lock:
            if self.has_ended:
                return
            assert self._cover is not None, "posted"
            self._ended_s = clock.now_s()
            if error is not None:
                self.error = error
                self.given_up_id = 0 if done.terminal else done.read_id
            else:
                self._heard_s = self._ended_s
                if self._cover.holds():
                    self._on_blocks(done)
            self.has_ended = has_ended = done.last or error is not None
        if has_ended:
            self._on_end()

    def settle(self, pool: Pool, write_id: int, owner: str) -> None:
        """Give up what of a write was not published; while the READ may still write to its slots, to quarantine."""
        read_id = self.given_up_id
        name = f"read-{read_id}" if read_id else ""
        pool.abort_store(write_id, owner, quarantine=name)
        if read_id:
            # It may have turned terminal before there was anything to set free.
            self._mover.when_terminal({read_id}, partial(pool.end_quarantine, name))


def is_quarantine_full(pool: Pool, most_fraction: float) -> bool:
    """Whether so many slots wait for READs that were given up that nothing more is to be read."""
    return 0 < pool.num_quarantined >= most_fraction * pool.num_slots

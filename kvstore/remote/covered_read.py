"""One READ of a peer's blocks. Blocks count only if the lease or claim on them covered the READ.

The clock is read before the peer is asked. Blocks count only if they were in place before that time plus the lease,
less a margin, and the namespace was not cleared. Any doubt is a miss. An abandoned READ may still write: until it has
ended, its slots are in quarantine, and the peer's lease or claim is not given back.
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

#: The mover reports by itself when a READ's time ends. If it does not, it is waited for this much longer.
_MOVER_GRACE_S = 1.0
#: A READ that timed out is the peer's fault only if no chunk of it arrived for this long.
_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Cover:
    """The conditions under which a peer's blocks count.

    Args:
        until_s: the end of the lease or claim by this node's clock, less the margin.
        deadline_s: of the caller that waits for the blocks.
        is_current: returns True if the namespace was not cleared since the peer was asked.
    """

    until_s: float
    deadline_s: float
    is_current: Callable[[], bool]


@dataclass(slots=True)
class Arrivals:
    """Adds the chunks of one peer's READs to the report of a load or fetch.

    Args:
        report: is written to.
        node_id: of the peer.
        block_bytes: of each block.
        since_s: the time when the first READ began, or when the previous chunk was in place.
    """

    report: LoadReport
    node_id: str
    block_bytes: int
    since_s: float

    def add(self, done: MoverDone, num_blocks: int) -> None:
        """Add a chunk before the client is told of it. The client's last message carries the report."""
        report, now_s = self.report, clock.now_s()
        report.num_peer += num_blocks
        report.num_bytes += num_blocks * self.block_bytes
        report.read_s += now_s - self.since_s
        self.since_s = now_s
        if done.last:
            report.num_descriptors += done.num_descriptors
        if self.node_id not in report.peers:
            report.peers.append(self.node_id)


class CoveredRead:
    """One READ, from its post until it can no longer write.

    Args:
        mover: runs the READ.
        on_blocks: called on the control thread with each chunk that counts.
        on_end: called once, after the last chunk or the failure: on the control thread, or where `give_up` is called.
    """

    def __init__(self, mover: MoverLink, on_blocks: Callable[[MoverDone], None], on_end: Callable[[], None]) -> None:
        self._mover, self._on_blocks, self._on_end = mover, on_blocks, on_end
        # Held while a chunk is taken, so that no chunk counts after `give_up` has returned.
        self._lock = threading.Lock()
        self._cover: Cover | None = None
        self._read_id = 0
        #: After this time the mover's report is late.
        self.late_s = 0.0
        self._heard_s = self._ended_s = 0.0
        self.has_ended = False
        #: Why the READ failed.
        self.error: KVStoreError | None = None
        #: The id of an abandoned READ, which may still write; 0 if it was not abandoned.
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
        """Let the mover read for as long as the cover, the caller and `timeout_s` allow.

        Raises:
            PeerLost: the slots do not fit the peer's slab, or this node has no such mover; nothing was started.
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
        """Return whether the peer caused the failure. False if the READ only had too little time."""
        return not isinstance(self.error, TransferTimeout) or self._ended_s - self._heard_s >= _PATIENCE_S

    def is_late(self, now_s: float) -> bool:
        """Return whether the mover's report is late."""
        return bool(self._read_id) and not self.has_ended and now_s > self.late_s

    def give_up(self) -> None:
        """Stop waiting for the mover's report, unless it has come; later chunks do not count."""
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
            cover = self._cover
            assert cover is not None, "posted"
            self._ended_s = clock.now_s()
            if error is not None:
                self.error = error
                self.given_up_id = 0 if done.terminal else done.read_id
            else:
                self._heard_s = self._ended_s
                if clock.now_s() < cover.until_s and cover.is_current():
                    self._on_blocks(done)
            self.has_ended = has_ended = done.last or error is not None
        if has_ended:
            self._on_end()

    def settle(self, pool: Pool, write_id: int, owner: str) -> None:
        """Give up the unpublished slots of a write. Quarantine them while the READ may still write."""
        read_id = self.given_up_id
        name = f"read-{read_id}" if read_id else ""
        pool.abort_store(write_id, owner, quarantine=name)
        if read_id:
            # The READ may have become terminal before the slots were in quarantine.
            self._mover.when_terminal({read_id}, partial(pool.end_quarantine, name))


def is_quarantine_full(pool: Pool, most_fraction: float) -> bool:
    """Return whether too many slots wait for abandoned READs. Then no new READ may begin."""
    return 0 < pool.num_quarantined >= most_fraction * pool.num_slots

"""One load that needs peers: a lease that grows as blocks arrive, and the client that waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.codec import encode
from kvstore.pool.pool import Pool
from kvstore.rpc.messages import LoadReport, Progress
from kvstore.runtime import clock


@dataclass(slots=True, eq=False)
class Load:
    """One load in progress.

    Args:
        chain: the blocks that the client wants.
        block_bytes: of each block.
        owner: of the lease.
        lease_id: of the lease, which `pin_more` extends.
        ttl_s: how long each block is leased from the moment when it is pinned.
        deadline_s: when the client stops waiting.
        pool: of this node.
        version_now: returns the version of the namespace's last clearing that this node knows.
        version: of the clearing that the load began under, taken before its first pin. After a later one it takes
            nothing more, or a chain would be put together from the KV of old and of new weights.
        send: tells the client (progress, whether it is the last); any thread.
        is_open: whether the client still listens; once it does not, nothing more is pinned for it.
        num_ready: blocks that are leased already.
    """

    chain: BlockHashes
    block_bytes: int
    owner: str
    lease_id: int
    ttl_s: float
    deadline_s: float
    pool: Pool
    version_now: Callable[[], int]
    version: int
    send: Callable[[bytes, bool], None]
    is_open: Callable[[], bool] = lambda: True
    num_ready: int = 0
    is_ended: bool = False
    #: Called once, when the client was told the last.
    on_end: Callable[[], None] = lambda: None
    #: Peers that were asked, and why the last one was not enough.
    tried: set[str] = field(default_factory=set)
    fell_short: str = ""
    report: LoadReport = field(default_factory=LoadReport)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_current(self) -> bool:
        """Whether the namespace was not cleared since the load began."""
        return self.version_now() == self.version

    def pin_more(self, limit: int | None = None) -> int:
        """Pin what became readable since and tell the client; returns how many blocks that were.

        The message on the last block carries the report, so that the client waits for nothing more.
        """
        with self._lock:
            return 0 if self.is_ended or not self.is_open() else self._pin_more(limit)

    def _pin_more(self, limit: int | None) -> int:
        rest = self.chain.tail(self.num_ready)
        if limit is not None:
            rest = rest.head(limit - self.num_ready)
        grant = self.pool.pin_prefix(rest, self.owner, clock.now_s() + self.ttl_s, self.lease_id)
        # Asked after the pin: a clearing is noted before new blocks can be stored. What it pinned goes with the lease.
        if not self.is_current():
            return 0
        if grant.packed_slots:
            first = self.num_ready
            self.num_ready += len(grant.slots)
            self._tell(first, grant.packed_slots, is_last=self.num_ready == len(self.chain))
        return len(grant.slots)

    def end(self, reason: str) -> None:
        """Tell the client that nothing more comes, and why, unless it has been told everything."""
        with self._lock:
            if not self.is_ended:
                self.report.reason = reason
                self._tell(self.num_ready, b"", is_last=True)

    def _tell(self, first: int, packed_slots: bytes, *, is_last: bool) -> None:
        self.is_ended = is_last
        if is_last:
            self.on_end()
        self.report.num_peer = self.num_ready - self.report.num_local
        self.send(encode(Progress(self.lease_id, first, packed_slots, self.report if is_last else None)), is_last)

"""One load that needs peers. Its lease grows as blocks arrive, and its client waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.priority import NORMAL, Retention
from kvstore.pool.pool import Pool
from kvstore.pool.tenants.limits import SHARED
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
        deadline_s: the time at which the client stops waiting.
        pool: of this node.
        version_now: returns the version of the namespace's last clearing that this node knows.
        version: of the last clearing before the load, read before its first pin. After a later clearing the load
            takes no more blocks: its chain would mix the KV of old and of new weights.
        send: sends a piece of the answer to the client; the piece with the report is the last. Any thread.
        is_open: returns whether the client's connection is open; if not, nothing more is pinned for it.
        retention: of the load, as for `Pool.pin_prefix`.
        tenant: for which blocks are brought; they are its own.
        payer: the tenant whose pins the leases are, here and at peers; `tenant` when None.
        num_ready: number of blocks that are leased already.
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
    send: Callable[[Progress], object]
    is_open: Callable[[], bool] = lambda: True
    retention: Retention = NORMAL
    tenant: str = SHARED
    payer: str | None = None
    num_ready: int = 0
    #: Whether other nodes may be asked; if not, only the disk of this node is.
    may_ask_peers: bool = True
    #: Whether it has waited for saves of this node, which it does once.
    has_awaited_saves: bool = False
    #: Blocks that are here and found no room in the budget of pins, or in the tenant's quota of them.
    num_unpinned: int = 0
    #: Where in the chain the disk was asked last.
    disk_tried_at: int = -1
    is_ended: bool = False
    #: Called once, just before the client gets its last message.
    on_end: Callable[[], object] = lambda: None
    #: Peers that were asked, and why the last one was not enough.
    tried: set[str] = field(default_factory=set)
    fell_short: str = ""
    report: LoadReport = field(default_factory=LoadReport)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_current(self) -> bool:
        """Return True if the namespace was not cleared since the load began."""
        return self.version_now() == self.version

    def pin_more(self, limit: int | None = None) -> int:
        """Pin the blocks that became readable and tell the client; return their number.

        The message about the last block carries the report, so that the client needs no further message.
        """
        with self._lock:
            if self.is_ended or not self.is_open():
                return 0
            rest = self.chain.tail(self.num_ready)
            if limit is not None:
                rest = rest.head(limit - self.num_ready)
            until_s = clock.now_s() + self.ttl_s
            grant = self.pool.pin_prefix(rest, self.owner, until_s, self.lease_id, retention=self.retention)
            # Check after the pin: a clearing is noted before new blocks can be stored. The lease's end drops the pins.
            if not self.is_current():
                return 0
            self.num_unpinned = grant.num_refused
            if grant.packed_slots:
                first = self.num_ready
                self.num_ready += grant.num_blocks
                self._tell(first, grant.packed_slots, is_last=self.num_ready == len(self.chain))
            return grant.num_blocks

    def why_unpinned(self) -> str:
        """Return why blocks that are here cannot be leased now; "" if none is left out."""
        if not self.num_unpinned:
            return ""
        if self.pool.is_quota_of_pins_used(self.tenant):
            full, remedy = f"the quota of tenant {self.tenant!r}", "its max_pinned_bytes"
        else:
            full, remedy = "the budget of pins of all clients", "max_pinned_fraction"
        num_left = self.num_unpinned
        return f"pool_full: {full} has no room for {num_left} more blocks; release leases or pins, or raise {remedy}"

    def end(self, reason: str) -> None:
        """Send the client its last message with the reason, unless it has got it already."""
        with self._lock:
            if not self.is_ended:
                self.report.reason = reason
                self._tell(self.num_ready, b"", is_last=True)

    def _tell(self, first: int, packed_slots: bytes, *, is_last: bool) -> None:
        self.is_ended = is_last
        if is_last:
            self.on_end()
            report = self.report
            num_came = max(self.num_ready - report.num_local, 0)
            # The disk and peers may have brought more than the budget of pins has room for. Before the last piece they
            # may have brought blocks that are told next.
            report.num_disk = min(report.num_disk, num_came)
            report.num_peer = min(report.num_peer, num_came - report.num_disk)
            # The others were brought by saves, or for other loads, or were here behind a block that was not.
            report.num_local += num_came - report.num_disk - report.num_peer
        self.send(Progress(self.lease_id, first, packed_slots, self.report if is_last else None))

"""Count the blocks and bytes that come into this node's memory and leave it, as plain numbers.

Nothing here knows a metrics system: a count that talked to one would slow down what it counts. `Traffic.counts` is
read once in a while.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvstore.rpc.messages import LoadReport

#: Ways of blocks into memory. Owners of writes begin with the second word; all other owners are workers that save.
_WRITERS = (("peer", "fetch-"), ("disk", "disk-read-"))
_IN, _OUT = ("save", "peer", "disk", "handoff"), ("load", "peer")
_TIERS = ("memory", "disk", "peer")
#: Reasons that a store gives for blocks that did not come; names of `kvstore.MissReason`. All others count as "other".
REASONS = frozenset(
    (
        "not_found", "peer_lost", "timeout", "lease_expired", "pool_full", "cleared", "busy", "abandoned", "draining",
        "stale", "used", "expired", "withdrawn", "owner_gone", "disk", "other",
    )
)  # fmt: skip

_OnPublished = Callable[[bytes, list[int], str], object]


class Traffic:
    """The counts of one life of a node store. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hits, self._stored = dict.fromkeys(_TIERS, 0), dict.fromkeys(_IN[:3], 0)
        self._in_bytes, self._out_bytes = dict.fromkeys(_IN, 0), dict.fromkeys(_OUT, 0)
        self._misses: dict[str, Counter[str]] = {"load": Counter(), "handoff": Counter()}

    def hearing(
        self, block_bytes: dict[bytes, int], then: _OnPublished | None
    ) -> Callable[[bytes, list[int], str], None]:
        """Return what a pool calls when blocks became readable, under its own lock.

        Args:
            block_bytes: of each namespace; read at each call.
            then: called after the count, with the same arguments.
        """

        def published(namespace: bytes, slots: list[int], owner: str) -> None:
            path = next((path for path, start in _WRITERS if owner.startswith(start)), "save")
            self._stored[path] += len(slots)
            with self._lock:  # Fetches of hand-offs count their bytes without the pool's lock.
                self._in_bytes[path] += len(slots) * block_bytes.get(namespace, 0)
            if then is not None:
                then(namespace, slots, owner)

        return published

    def load_ended(self, report: LoadReport, num_blocks: int, block_bytes: int) -> None:
        """Count a load of a worker that got its last message.

        Args:
            report: what the worker was told.
            num_blocks: blocks that it asked for.
            block_bytes: of each.
        """
        num_hits = report.num_local + report.num_disk + report.num_peer
        with self._lock:
            self._hits["memory"] += report.num_local
            self._hits["disk"] += report.num_disk
            self._hits["peer"] += report.num_peer
            self._out_bytes["load"] += num_hits * block_bytes
            self._miss("load", num_blocks - num_hits, report.reason)

    def load_refused(self, num_blocks: int, reason: str) -> None:
        """Count a load that was refused at once."""
        with self._lock:
            self._miss("load", num_blocks, reason)

    def fetch_ended(self, report: LoadReport, num_blocks: int, block_bytes: int) -> None:
        """Count a fetch of a ticket that got its last message. The arguments are those of `load_ended`.

        Blocks of this node's own tickets came into its memory before.
        """
        with self._lock:
            self._in_bytes["handoff"] += report.num_peer * block_bytes
            self._miss("handoff", num_blocks - report.num_local - report.num_peer, report.reason)

    def granted_to_peer(self, num_bytes: int) -> None:
        """Count bytes that a peer may read from now on."""
        with self._lock:
            self._out_bytes["peer"] += num_bytes

    def _miss(self, path: str, num_blocks: int, reason: str) -> None:
        if num_blocks > 0:
            # A reason may have a text after it, with ids in it: that is for logs.
            name = reason.partition(":")[0] or "not_found"
            self._misses[path][name if name in REASONS else "other"] += num_blocks

    def counts(self) -> dict[str, Any]:
        """Return all counts since the store began."""
        with self._lock:
            return {
                "hit_blocks": dict(self._hits),
                "miss_blocks": {path: dict(misses) for path, misses in self._misses.items()},
                "stored_blocks": dict(self._stored),
                "in_bytes": dict(self._in_bytes),
                "out_bytes": dict(self._out_bytes),
            }

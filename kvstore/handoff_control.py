"""Hand-offs as clients and peers ask for them. Runs on the control thread, so nothing here may block."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvstore.control_server import Connection
from kvstore.errors import ConfigError, InvalidRequest, LayoutMismatch
from kvstore.fetch import LoadReport
from kvstore.handoff_fetch import HandoffFetcher
from kvstore.handoff_messages import (
    END,
    FetchRequest,
    PeerClaimed,
    pack_peer_claimed,
    unpack_complete_handoff,
    unpack_fetch,
    unpack_peer_claim,
    unpack_prepare_handoff,
)
from kvstore.handoff_table import CLAIM_BIT, HandoffTable
from kvstore.messages import NOTIFICATION, U64, Progress, pack_ints, pack_progress
from kvstore.peer_control import owner_of
from kvstore.pool_verbs import deadline_after
from kvstore.shape import BLOCK_ORDER_VERSION
from kvstore.wire import Flag, Message, Op

if TYPE_CHECKING:
    from kvstore.node import NodeCore


class HandoffControl:
    """Serves the operations of `OPS` to clients, and those of `PEER_OPS` to peers.

    Args:
        core: the node store.
        claim_began: called with the id and the deadline of a peer's claim.
        claim_ended: called with its id.
    """

    OPS = frozenset(
        {Op.HANDOFF_PREPARE, Op.HANDOFF_COMPLETE, Op.HANDOFF_WITHDRAW, Op.HANDOFF_FETCH, Op.HANDOFF_END}
    )  # fmt: skip
    PEER_OPS = frozenset({Op.PEER_CLAIM, Op.PEER_CLAIM_END})

    def __init__(
        self, core: NodeCore, claim_began: Callable[[int, float], None], claim_ended: Callable[[int], None]
    ) -> None:
        self._core, self._claim_began, self._claim_ended = core, claim_began, claim_ended
        share = core.config.max_handoff_fraction
        self.table = HandoffTable(lambda: core.pool, lambda: int(core.pool.stats().num_slots * share))
        self.fetcher = HandoffFetcher(
            core.config, lambda: core.pool, core.peers, core.mover, self._version, core.clear
        )  # fmt: skip

    def _version(self, namespace: bytes) -> int:
        return self._core.versions.get(namespace, 0)

    def serve(self, connection: Connection, message: Message) -> bytes | None:
        """Serve one message of a client; None when the answer comes later, or never.

        Raises:
            KVStoreError: refused; nothing changed.
        """
        core, payload, owner = self._core, message.payload, connection.owner
        match message.op:
            case Op.HANDOFF_PREPARE:
                if connection.pidfd < 0:
                    raise ConfigError(
                        "this kernel does not tell the store when this process ends, so it may fetch but not publish; "
                        "run both in one PID namespace (Linux 5.3 and newer) or on Linux 6.5 and newer"
                    )
                core.check_serving()
                key, namespace, num_blocks = unpack_prepare_handoff(payload)
                self._block_bytes(namespace)
                return pack_ints(self.table.prepare(key, owner, namespace, self._version(namespace), num_blocks))
            case Op.HANDOFF_COMPLETE:
                key, ttl_s = unpack_complete_handoff(payload)
                return U64.pack(self.table.complete(key, owner, deadline_after(ttl_s)))
            case Op.HANDOFF_WITHDRAW:
                return U64.pack(self.table.withdraw(payload))
            case Op.HANDOFF_FETCH:
                self._fetch(connection, message, unpack_fetch(payload))
                return None
            case _:
                number, used = END.unpack(payload)
                if number & CLAIM_BIT:
                    self.table.end_claim(number, owner, used=bool(used))
                else:
                    self.fetcher.end(number, owner)
                return None

    def _block_bytes(self, namespace: bytes) -> int:
        known = self._core.block_bytes.get(namespace)
        if known is None:
            raise InvalidRequest("wanted a namespace that has attached to this store, got another; make a client first")
        return known

    def _fetch(self, connection: Connection, message: Message, request: FetchRequest) -> None:
        core = self._core
        core.check_serving()
        block_bytes = self._block_bytes(request.namespace)

        def send(payload: bytes, last: bool) -> None:
            connection.send(Op.HANDOFF_FETCH, Flag.REPLY if last else Flag.PROGRESS, message.request, payload)

        if request.node_id != core.node_id:
            self.fetcher.begin(request, connection.owner, block_bytes, send)
            return
        # Straight out of the slots in which they were published.
        report = LoadReport()
        if request.epoch != core.epoch:
            report.reason = "stale: the store that had the blocks was restarted, and they are gone"
            send(pack_progress(Progress(0, 0, np.empty(0, np.int32), report.to_json())), True)
            return
        version = self._version(request.namespace)
        deadline_s = deadline_after(request.ttl_s)
        claim = self.table.claim(request.key, connection.owner, request.namespace, version, deadline_s)
        if isinstance(claim, str):
            report.reason = claim
            send(pack_progress(Progress(0, 0, np.empty(0, np.int32), report.to_json())), True)
            return
        report.num_local = len(claim.slots)
        slots = np.asarray(claim.slots, dtype=np.int32)
        send(pack_progress(Progress(claim.claim_id, 0, slots, report.to_json())), True)

    def serve_peer(self, connection: Connection, message: Message) -> bytes | None:
        """Serve one message of a peer.

        Raises:
            KVStoreError: refused; nothing changed.
        """
        if message.op is Op.PEER_CLAIM_END:
            claim_id, used = END.unpack(message.payload)
            self._end_remote(claim_id, connection.owner, used=bool(used))
            return None
        core, wanted = self._core, unpack_peer_claim(message.payload)
        if core.closed_to_peers:
            core.check_serving()
        known = core.block_bytes.get(wanted.namespace, wanted.block_bytes)
        if (wanted.slot_format, wanted.block_bytes) != (BLOCK_ORDER_VERSION, known):
            raise LayoutMismatch(
                f"blocks of this namespace have {known} bytes here, in order {BLOCK_ORDER_VERSION}, the peer wants "
                f"{wanted.block_bytes} in order {wanted.slot_format}; run one version of raykv everywhere"
            )
        if wanted.namespace_version > self._version(wanted.namespace):
            core.clear(wanted.namespace, wanted.namespace_version)
        version, own = self._version(wanted.namespace), core.mover.own
        reason, claim_id, slots = "", 0, np.empty(0, np.int32)
        if own is None:
            reason = "peer_lost: the mover of the node that has the blocks is being replaced; try again soon"
        elif version != wanted.namespace_version:
            reason = "cleared: the namespace was cleared, as the node that has the blocks knows"
        else:
            deadline_s = deadline_after(wanted.ttl_s)
            claim = self.table.claim(wanted.key, connection.owner, wanted.namespace, version, deadline_s)
            if isinstance(claim, str):
                reason = claim
            else:
                claim_id, slots = claim.claim_id, np.asarray(claim.slots, dtype=np.int32)
                self._claim_began(claim_id, deadline_s)
        return pack_peer_claimed(
            PeerClaimed(
                claim_id=claim_id,
                epoch=core.epoch,
                namespace_version=version,
                mover_generation=own.generation if own is not None else 0,
                slots=slots,
                reason=reason,
            )
        )

    def notified(self, payload: bytes) -> None:
        """Peers' READs are through; those under claims free what was claimed."""
        for claim_id, epoch, reader_epoch in NOTIFICATION.iter_unpack(payload):
            if claim_id & CLAIM_BIT and epoch == self._core.epoch:
                self._end_remote(claim_id, owner_of(reader_epoch), used=True)

    def _end_remote(self, claim_id: int, owner: str, *, used: bool) -> None:
        if self.table.end_claim(claim_id, owner, used=used):
            self._claim_ended(claim_id)

    def release_owner(self, owner: str) -> int:
        """Take back what a client held that is gone; returns how many hand-offs and fetches."""
        return self.table.release_owner(owner) + self.fetcher.release_owner(owner)

    def holds(self, owner: str) -> bool:
        """Whether an owner has hand-offs or fetches."""
        return self.table.holds(owner) or self.fetcher.holds(owner)

    def wants_ticks(self) -> bool:
        """Whether something here ends with time."""
        return len(self.table) > 0

    def tick(self, now_s: float) -> None:
        """End what is over."""
        for claim_id in self.table.expire(now_s):
            self._claim_ended(claim_id)

    def stats(self) -> dict[str, int]:
        """Return counts."""
        return {
            "num_handoffs": len(self.table),
            "num_handoff_slots": self.table.num_slots,
            "num_handoff_fetches": len(self.fetcher),
        }

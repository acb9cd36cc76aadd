"""Claims of other nodes' stores on blocks published here. On the control thread, so nothing here may block."""

from __future__ import annotations

import functools

import numpy as np

from kvstore.blocks.codec import encode
from kvstore.blocks.shape import BLOCK_ORDER_VERSION
from kvstore.bounds import check_seconds
from kvstore.errors import KVStoreError, LayoutMismatch, PoolExhausted, TransferTimeout
from kvstore.handoff.messages import PeerClaim, PeerClaimed, decode_peer_claim
from kvstore.handoff.records import CLAIM_BIT, NOT_READY, Claim, Place
from kvstore.handoff.stages import StageBook
from kvstore.handoff.table import HandoffTable
from kvstore.handoff.waiting import WaitingClaims
from kvstore.mover.messages import Spill
from kvstore.node.peer_service import PeerControl, most_for_peers_s
from kvstore.node.state import NodeState
from kvstore.rpc.connection import Connection, Handler
from kvstore.rpc.framing import Flag, Message, Op, pack_error
from kvstore.rpc.handoff_messages import decode_end
from kvstore.runtime.clock import deadline_after
from kvstore.runtime.threads.store_threads import Blocking

_NO_CLAIM = Claim(0, np.empty(0, np.int32))


class HandoffPeers:
    """Serves `routes` to peers. A route that raises KVStoreError changed nothing.

    Args:
        state: of the node store.
        leases: of peers; claims count among them.
        table: the hand-offs that were published here.
        waiting: the claims that wait for blocks.
        stages: of this node.
    """

    def __init__(
        self,
        state: NodeState,
        leases: PeerControl,
        table: HandoffTable,
        waiting: WaitingClaims,
        stages: StageBook,
    ) -> None:
        self._state, self._leases, self._table, self._waiting, self._stages = state, leases, table, waiting, stages
        self.routes: dict[Op, Handler] = {
            Op.PEER_CLAIM: self._serve_claim,
            Op.PEER_CLAIM_END: self._serve_claim_end,
            Op.PEER_STAGES: self._serve_stages,
        }

    def arena(self) -> Place:
        """Return the place for blocks that are not in a stage. Peers can read it without a GPU."""
        pool = self._state.pool_service.pool
        return Place(pool, int(pool.num_slots * self._state.config.max_handoff_fraction))

    def _serve_claim_end(self, connection: Connection, message: Message) -> bytes:
        end = decode_end(message.payload)
        if end.number & CLAIM_BIT:
            self.end(end.number, connection.owner, used=end.used)
            return b""
        # The reader gave up this question, and will not read the answer. It asks one question at a time.
        self._waiting.forget(connection)
        gave, connection.gave = connection.gave, None
        if gave is not None and gave[0] == end.number:
            gave[1]()
        return b""

    def _serve_stages(self, connection: Connection, message: Message) -> bytes:
        return encode([stage.found() for stage in self._stages.all()])

    def _serve_claim(self, connection: Connection, message: Message) -> None:
        wanted = decode_peer_claim(message.payload)
        check_seconds("wait_s", wanted.wait_s)
        serve = functools.partial(self._claim_there, connection, message, wanted)
        soon = functools.partial(connection.send, message.op, Flag.PROGRESS, message.request, b"")
        self._waiting.serve(wanted.key, connection, wanted.wait_s, serve, soon)

    def _claim_there(self, connection: Connection, message: Message, wanted: PeerClaim, is_last: bool) -> bool:
        """Answer a peer with the slots of a ticket or a reason. Return False while the slots are being written."""
        try:
            claim = self._claim(connection.owner, wanted)
        except KVStoreError as error:
            connection.send(message.op, Flag.ERROR, message.request, pack_error(error))
            return True
        if claim == NOT_READY and not is_last:
            return False
        if isinstance(claim, Claim):
            undo = functools.partial(self.end, claim.claim_id, connection.owner, used=False)
            connection.gave = message.request, undo
        if isinstance(claim, Claim) and claim.slab and wanted.to_host:
            spill = functools.partial(self._spill, connection, message, wanted, claim)
            if self._state.threads.submit(Blocking.SPILL, spill):
                return True
            self.end(claim.claim_id, connection.owner, used=False)
            claim = "busy: too many blocks of stages are being copied to memory on their node; try again soon"
        connection.send(message.op, Flag.REPLY, message.request, self._claimed(wanted, claim))
        return True

    def _claim(self, owner: str, wanted: PeerClaim) -> Claim | str:
        state, service = self._state, self._state.pool_service
        service.check_running()  # Also while it is drained: what was published before is fetched, or would be lost.
        known = service.block_bytes.get(wanted.namespace, wanted.block_bytes)
        if (wanted.slot_format, wanted.block_bytes) != (BLOCK_ORDER_VERSION, known):
            raise LayoutMismatch(
                f"blocks of this namespace have {known} bytes here, in order {BLOCK_ORDER_VERSION}, the peer wants "
                f"{wanted.block_bytes} in order {wanted.slot_format}; run one version of raykv everywhere"
            )
        if wanted.namespace_version > state.versions.get(wanted.namespace):
            service.hear_clearing(wanted.namespace, wanted.namespace_version)
        version = state.versions.get(wanted.namespace)
        if state.mover.own is None:
            return "peer_lost: the mover of the node that has the blocks is being replaced; try again soon"
        if version != wanted.namespace_version:
            return "cleared: the namespace was cleared, as the node that has the blocks knows"
        deadline_s = deadline_after(wanted.ttl_s, most_for_peers_s(state.config))
        claim = self._table.claim(
            wanted.key, owner, wanted.namespace, version, deadline_s, is_early=wanted.is_early,
            is_draining=service.is_draining,
        )  # fmt: skip
        # A READ between stages has no notification: its reader reports the end.
        if isinstance(claim, Claim) and (not claim.slab or wanted.to_host):
            self._leases.began(claim.claim_id, deadline_s)
        return claim

    def _claimed(self, wanted: PeerClaim, found: Claim | str) -> bytes:
        own, claim = self._state.mover.own, found if isinstance(found, Claim) else _NO_CLAIM
        return encode(
            PeerClaimed(
                claim_id=claim.claim_id,
                epoch=self._state.epoch,
                namespace_version=self._state.versions.get(wanted.namespace),
                mover_generation=own.generation if own is not None else 0,
                slots=claim.slots,
                slab=claim.slab,
                reason=found if isinstance(found, str) else "",
            )
        )

    def _spill(self, connection: Connection, message: Message, wanted: PeerClaim, claim: Claim) -> None:
        """Copy claimed blocks from a stage to the arena, on a thread. The reader cannot reach the stage."""
        state = self._state
        try:
            slots = self._table.move(claim.claim_id, self.arena())
            question = Spill(claim.slab, claim.slots, slots, wanted.block_bytes)
            moved = functools.partial(self._table.moved, claim.claim_id)
            try:
                state.mover.ask(Op.MOVER_SPILL, question, state.config.transfer_timeout_s, moved, claim.generation)
            except TransferTimeout:
                raise  # The mover may still write to the slots.
            except BaseException:
                moved()
                raise
            moved()
            answer = self._claimed(wanted, Claim(claim.claim_id, slots))
        except KVStoreError as error:
            self.end(claim.claim_id, connection.owner, used=False)
            reason = "pool_full" if isinstance(error, PoolExhausted) else "peer_lost"
            answer = self._claimed(wanted, f"{reason}: {error}")
        connection.send(message.op, Flag.REPLY, message.request, answer)

    def end(self, claim_id: int, owner: str, *, used: bool) -> None:
        """End a peer's claim, as `HandoffTable.end_claim` does."""
        if self._table.end_claim(claim_id, owner, used=used):
            self._leases.ended(claim_id)

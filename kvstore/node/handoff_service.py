"""Hand-offs as clients and peers ask for them. Runs on the control thread, so nothing here may block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.blocks.codec import encode
from kvstore.blocks.grants import PackedInts
from kvstore.blocks.shape import BLOCK_ORDER_VERSION
from kvstore.bounds import check_seconds
from kvstore.errors import (
    ConfigError,
    InvalidRequest,
    KVStoreError,
    LayoutMismatch,
    PoolExhausted,
    StaleVersion,
    TransferTimeout,
)
from kvstore.handoff.fetcher import HandoffFetcher
from kvstore.handoff.messages import PeerClaim, PeerClaimed, decode_peer_claim
from kvstore.handoff.records import CLAIM_BIT, NOT_READY, NOT_READY_IN_TIME, Claim, Place
from kvstore.handoff.stages import StageBook
from kvstore.handoff.table import HandoffTable
from kvstore.handoff.waiting import WaitingClaims
from kvstore.mover.messages import Spill
from kvstore.node.later import answer_later
from kvstore.node.peer_service import most_for_peers_s, owner_of
from kvstore.node.pool_verbs import deadline_after
from kvstore.rpc.connection import Connection
from kvstore.rpc.framing import Flag, Message, Op, pack_error
from kvstore.rpc.handoff_messages import (
    FetchRequest,
    decode_abort_handoff,
    decode_ask_stage,
    decode_complete_handoff,
    decode_end,
    decode_fetch,
    decode_key,
    decode_prepare_handoff,
    decode_warm_up,
)
from kvstore.rpc.messages import NOTIFICATION, STAGE_BIT, LoadReport, Progress
from kvstore.rpc.server import ControlServer
from kvstore.runtime import clock
from kvstore.runtime.store_threads import Blocking

if TYPE_CHECKING:
    from kvstore.node.core import NodeCore

#: For what follows when blocks are to be packed into a stage: word that they are, and their reader's claim. And for a
#: fetch that was announced.
_AWAKE_S = 2e-3


class HandoffControl:
    """Serves the operations of `OPS` to clients, and those of `PEER_OPS` to peers.

    Args:
        core: the node store.
        claim_began: called with the id and the deadline of a peer's claim.
        claim_ended: called with its id.
        server: whose thread this runs on.
    """

    OPS = frozenset(
        {
            Op.HANDOFF_PREPARE, Op.HANDOFF_COMPLETE, Op.HANDOFF_WITHDRAW, Op.HANDOFF_FETCH, Op.HANDOFF_END,
            Op.HANDOFF_STAGE, Op.HANDOFF_WARM, Op.HANDOFF_SOON, Op.HANDOFF_PACKING,
            Op.HANDOFF_ABORT,
        }
    )  # fmt: skip
    PEER_OPS = frozenset({Op.PEER_CLAIM, Op.PEER_CLAIM_END, Op.PEER_STAGES})

    def __init__(
        self,
        core: NodeCore,
        claim_began: Callable[[int, float], None],
        claim_ended: Callable[[int], None],
        server: ControlServer,
    ) -> None:
        self._core, self._server = core, server
        self._claim_began, self._claim_ended = claim_began, claim_ended
        self.table = HandoffTable()
        self._waiting = WaitingClaims()
        self.stages = StageBook(core.config, core.mover)
        self.fetcher = HandoffFetcher(
            core.config, lambda: core.pool, core.peers, core.mover, self.stages, self._version,
            core.hear_clearing, server, core.threads,
        )  # fmt: skip

    def _version(self, namespace: bytes) -> int:
        return self._core.versions.get(namespace)

    def _place(self, slab: int, generation: int) -> Place:
        if slab:
            pool = self.stages.get(slab, generation).pool
            return Place(pool, pool.num_slots, slab, generation)
        pool = self._core.pool
        return Place(pool, int(pool.num_slots * self._core.config.max_handoff_fraction))

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
                wanted = decode_prepare_handoff(payload)
                self._block_bytes(wanted.namespace)
                # First the version: a clearing between is seen in the count.
                place, version = self._place(wanted.slab, wanted.generation), self._version(wanted.namespace)
                if core.num_clears(wanted.namespace) != wanted.num_clears:
                    raise StaleVersion(
                        "wanted blocks of the present weights, but their namespace was cleared since they were to be "
                        "published; publish what is computed anew"
                    )
                slots = self.table.prepare(
                    wanted.key, wanted.writer, owner, wanted.namespace, version, wanted.num_blocks, place
                )
                if wanted.slab:
                    self._server.stay_awake(_AWAKE_S)
                if not connection.send(message.op, Flag.REPLY, message.request, encode(np.asarray(slots, np.int32))):
                    # It gave up waiting. Not all packets of the answer went out, and of a part no slot is taken out:
                    # so nothing writes to these, and the publisher may live for long.
                    self._never_written(wanted.key, wanted.writer)
                connection.gave = message.request, functools.partial(self._never_written, wanted.key, wanted.writer)
                return None
            case Op.HANDOFF_PACKING:
                self._waiting.are_soon(decode_key(payload))
                self._server.stay_awake(_AWAKE_S)
            case Op.HANDOFF_COMPLETE:
                done = decode_complete_handoff(payload)
                completed = self.table.complete(done.key, done.writer, owner, deadline_after(done.ttl_s))
                self._waiting.look_again(done.key)  # First: nobody is in a hurry for this answer.
                return encode(completed)
            case Op.HANDOFF_ABORT:
                failed = decode_abort_handoff(payload)
                aborted = self.table.abort(failed.key, failed.writer)
                self._waiting.look_again(failed.key)
                return encode(aborted)
            case Op.HANDOFF_WITHDRAW:
                key = decode_key(payload)
                withdrawn = self.table.withdraw(key)
                self._waiting.look_again(key)
                return encode(withdrawn)
            case Op.HANDOFF_FETCH:
                self._fetch(connection, message, decode_fetch(payload))
            case Op.HANDOFF_SOON:
                self._server.stay_awake(_AWAKE_S)
                if payload:  # Of a fetch: for a publication there is nothing for the mover to do.
                    self._core.mover.expect_read(payload)
            case Op.HANDOFF_STAGE:
                asked = decode_ask_stage(payload)
                if not 0 < asked.block_bytes <= asked.num_bytes:
                    raise InvalidRequest(
                        f"wanted a stage of at least one block, got {asked.num_bytes} bytes of {asked.block_bytes}"
                    )
                make = functools.partial(self.stages.make, asked.uuid, asked.num_bytes, asked.block_bytes)
                self._answer_later(connection, message, lambda: make().found())
            case Op.HANDOFF_WARM:
                warm = decode_warm_up(payload)
                stage = self.stages.get(warm.slab, warm.generation)
                self._answer_later(connection, message, lambda: self.fetcher.warm_up(warm.node_id, stage))
            case _:
                end = decode_end(payload)
                if end.number & CLAIM_BIT:
                    self.table.end_claim(end.number & ~STAGE_BIT, owner, used=end.used)
                else:
                    self.fetcher.end(end.number & ~STAGE_BIT, owner)
        return None

    def _never_written(self, key: bytes, writer: int) -> None:
        self.table.abort(key, writer)
        self._waiting.look_again(key)

    def _answer_later(self, connection: Connection, message: Message, work: Callable[[], object]) -> None:
        answer_later(self._core.threads, Blocking.STAGE, connection, message, work)

    def _block_bytes(self, namespace: bytes) -> int:
        known = self._core.block_bytes.get(namespace)
        if known is None:
            raise InvalidRequest("wanted a namespace that has attached to this store, got another; make a client first")
        return known

    def _fetch(self, connection: Connection, message: Message, request: FetchRequest) -> None:
        core = self._core
        core.check_serving()
        block_bytes = self._block_bytes(request.namespace)
        check_seconds("timeout_s", request.timeout_s)
        deadline_after(request.ttl_s)

        def send(payload: bytes, last: bool) -> None:
            connection.send(Op.HANDOFF_FETCH, Flag.REPLY if last else Flag.PROGRESS, message.request, payload)

        here = request.node_id == core.node_id
        if not here or request.from_slab not in (0, request.slab):
            fetch_id = self.fetcher.begin(request, connection.owner, block_bytes, send)
            connection.gave = message.request, functools.partial(self.fetcher.end, fetch_id, connection.owner)
            return
        # Straight out of the slots in which they were published.
        serve = functools.partial(self._claim_here, connection, message.request, clock.now_s(), request, send)
        self._waiting.serve(request.key, connection, request.timeout_s, serve)

    def _claim_here(
        self,
        connection: Connection,
        question: int,
        asked_s: float,
        request: FetchRequest,
        send: Callable[[bytes, bool], None],
        is_last: bool,
    ) -> bool:
        """Answer with the slots of a ticket of this node, or why not; False when they are still being written."""
        core, report, slots, number = self._core, LoadReport(), b"", 0
        if request.epoch != core.epoch:
            report.reason = "stale: the store that had the blocks was restarted, and they are gone"
        else:
            report.waited_s = clock.now_s() - asked_s  # First: the client counts the claim's time from then on.
            version, deadline_s = self._version(request.namespace), deadline_after(request.ttl_s)
            claim = self.table.claim(
                request.key, connection.owner, request.namespace, version, deadline_s, is_early=request.is_early
            )
            if claim == NOT_READY and not is_last:
                return False
            if isinstance(claim, str):
                report.reason = NOT_READY_IN_TIME if claim == NOT_READY else claim
            else:
                report.num_local, slots = len(claim.slots), PackedInts.of(claim.slots).packed
                number = claim.claim_id | (STAGE_BIT if claim.slab else 0)
                undo = functools.partial(self.table.end_claim, claim.claim_id, connection.owner, used=False)
                connection.gave = question, undo
        send(encode(Progress(number, 0, slots, report)), True)
        return True

    def serve_peer(self, connection: Connection, message: Message) -> bytes | None:
        """Serve one message of a peer; None when the answer comes later, or never.

        Raises:
            KVStoreError: refused; nothing changed.
        """
        if message.op is Op.PEER_CLAIM_END:
            end = decode_end(message.payload)
            self._end_remote(end.number, connection.owner, used=end.used)
            return b""
        if message.op is Op.PEER_STAGES:
            return encode([stage.found() for stage in self.stages.all()])
        wanted = decode_peer_claim(message.payload)
        check_seconds("wait_s", wanted.wait_s)
        serve = functools.partial(self._claim_there, connection, message, wanted)
        soon = functools.partial(connection.send, message.op, Flag.PROGRESS, message.request, b"")
        self._waiting.serve(wanted.key, connection, wanted.wait_s, serve, soon)
        return None

    def _claim_there(self, connection: Connection, message: Message, wanted: PeerClaim, is_last: bool) -> bool:
        """Answer a peer with the slots of a ticket, or why not; False when they are still being written."""
        try:
            reason, claim = self._claim(connection.owner, wanted)
        except KVStoreError as error:
            connection.send(message.op, Flag.ERROR, message.request, pack_error(error))
            return True
        if reason == NOT_READY and not is_last:
            return False
        if claim is not None and claim.slab and wanted.to_host:
            spill = functools.partial(self._spill, connection, message, wanted, claim)
            if not self._core.threads.submit(Blocking.SPILL, spill):
                self._end_remote(claim.claim_id, connection.owner, used=False)
                reason = "busy: too many blocks of stages are being copied to memory on their node; try again soon"
                connection.send(message.op, Flag.REPLY, message.request, self._claimed(wanted, reason, None))
        else:
            connection.send(message.op, Flag.REPLY, message.request, self._claimed(wanted, reason, claim))
        return True

    def _claim(self, owner: str, wanted: PeerClaim) -> tuple[str, Claim | None]:
        core = self._core
        if core.closed_to_peers:
            core.check_serving()
        known = core.block_bytes.get(wanted.namespace, wanted.block_bytes)
        if (wanted.slot_format, wanted.block_bytes) != (BLOCK_ORDER_VERSION, known):
            raise LayoutMismatch(
                f"blocks of this namespace have {known} bytes here, in order {BLOCK_ORDER_VERSION}, the peer wants "
                f"{wanted.block_bytes} in order {wanted.slot_format}; run one version of raykv everywhere"
            )
        if wanted.namespace_version > self._version(wanted.namespace):
            core.hear_clearing(wanted.namespace, wanted.namespace_version)
        version = self._version(wanted.namespace)
        if core.mover.own is None:
            return "peer_lost: the mover of the node that has the blocks is being replaced; try again soon", None
        if version != wanted.namespace_version:
            return "cleared: the namespace was cleared, as the node that has the blocks knows", None
        deadline_s = deadline_after(wanted.ttl_s, most_for_peers_s(core.config))
        claim = self.table.claim(wanted.key, owner, wanted.namespace, version, deadline_s, is_early=wanted.is_early)
        if isinstance(claim, str):
            return claim, None
        if not claim.slab or wanted.to_host:  # Of a READ between stages its reader tells the end.
            self._claim_began(claim.claim_id, deadline_s)
        return "", claim

    def _claimed(self, wanted: PeerClaim, reason: str, claim: Claim | None) -> bytes:
        own = self._core.mover.own
        return encode(
            PeerClaimed(
                claim_id=claim.claim_id if claim else 0,
                epoch=self._core.epoch,
                namespace_version=self._version(wanted.namespace),
                mover_generation=own.generation if own is not None else 0,
                slots=np.asarray(claim.slots if claim else (), np.int32),
                slab=claim.slab if claim else 0,
                reason=reason,
            )
        )

    def _spill(self, connection: Connection, message: Message, wanted: PeerClaim, claim: Claim) -> None:
        """Copy claimed blocks from a stage to the arena for a reader that cannot reach the stage; on a thread."""
        core, answer = self._core, b""
        try:
            slots = self.table.move(claim.claim_id, self._place(0, 0))
            source, target = np.asarray(claim.slots, np.int32), np.asarray(slots, np.int32)
            question = Spill(claim.slab, source, target, wanted.block_bytes)

            def moved() -> None:
                self.table.moved(claim.claim_id)

            try:
                core.mover.ask(Op.MOVER_SPILL, question, core.config.transfer_timeout_s, moved, claim.generation)
            except TransferTimeout:
                raise  # It may still write to the slots.
            except BaseException:
                moved()
                raise
            moved()
            answer = self._claimed(wanted, "", Claim(claim.claim_id, slots))
        except KVStoreError as error:
            self._end_remote(claim.claim_id, connection.owner, used=False)
            word = "pool_full" if isinstance(error, PoolExhausted) else "peer_lost"
            answer = self._claimed(wanted, f"{word}: {error}", None)
        connection.send(message.op, Flag.REPLY, message.request, answer)

    def notified(self, payload: bytes) -> None:
        """Peers' READs are through; those under claims free what was claimed."""
        for claim_id, epoch, reader in NOTIFICATION.iter_unpack(payload):
            if claim_id & CLAIM_BIT and epoch == self._core.epoch:
                self._end_remote(claim_id, owner_of(reader), used=True)

    def _end_remote(self, claim_id: int, owner: str, *, used: bool) -> None:
        if self.table.end_claim(claim_id, owner, used=used):
            self._claim_ended(claim_id)

    def mover_gone(self) -> None:
        """What was in the mover's memory is gone with it."""
        self.table.lose_stages()

    def release_owner(self, owner: str) -> int:
        """Take back what a client held that is gone; returns how many hand-offs and fetches."""
        return self.table.release_owner(owner) + self.fetcher.release_owner(owner)

    def holds(self, owner: str) -> bool:
        """Whether an owner has hand-offs or fetches."""
        return self.table.holds(owner) or self.fetcher.holds(owner)

    def wants_ticks(self) -> bool:
        """Whether something here ends with time."""
        return len(self.table) > 0 or len(self._waiting) > 0 or len(self.fetcher) > 0

    def tick(self, now_s: float) -> None:
        """End what is over."""
        for claim_id in self.table.expire(now_s):
            self._claim_ended(claim_id)
        self._waiting.tick(now_s)
        self.fetcher.tick(now_s)

    def stats(self) -> dict[str, Any]:
        """Return counts."""
        return {
            "num_handoffs": len(self.table),
            "num_handoff_slots": self.table.num_slots,
            "num_handoff_fetches": len(self.fetcher),
            "num_lane_warm_up_bytes": self.fetcher.lanes.num_warm_bytes,
            "stages": [
                {"uuid": stage.uuid, "num_bytes": stage.num_slots * stage.description.slot_bytes}
                for stage in self.stages.all()
            ],
        }

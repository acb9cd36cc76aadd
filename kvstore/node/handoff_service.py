"""The hand-off requests of clients. Runs on the control thread, so nothing here may block."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvstore.blocks.codec import encode
from kvstore.blocks.indexes import pack_ints
from kvstore.bounds import check_seconds
from kvstore.errors import ConfigError, InvalidRequest, PoolExhausted, StaleVersion
from kvstore.handoff.fetch_context import FetchContext
from kvstore.handoff.fetcher import HandoffFetcher
from kvstore.handoff.lanes import StageLanes
from kvstore.handoff.records import CLAIM_BIT, NOT_READY, NOT_READY_IN_TIME, Place
from kvstore.handoff.stages import StageBook
from kvstore.handoff.table import HandoffTable
from kvstore.handoff.waiting import WaitingClaims
from kvstore.node.handoff_peers import HandoffPeers
from kvstore.node.later import answer_later, send_piece
from kvstore.node.peer_service import PeerControl
from kvstore.node.state import NodeState
from kvstore.quotas import quota_of
from kvstore.rpc.connection import Connection, Handler
from kvstore.rpc.framing import Flag, Message, Op
from kvstore.rpc.handoff_messages import (
    FetchRequest,
    LaneFound,
    decode_abort_handoff,
    decode_ask_stage,
    decode_complete_handoff,
    decode_end,
    decode_fetch,
    decode_key,
    decode_prepare_handoff,
    decode_warm_up,
)
from kvstore.rpc.messages import STAGE_BIT, LoadReport, Progress
from kvstore.rpc.server import ControlServer
from kvstore.runtime import clock
from kvstore.runtime.clock import deadline_after
from kvstore.runtime.threads.store_threads import Blocking

#: How long the control thread stays awake for the messages that follow the packing of blocks into a stage (that they
#: are packed, and their reader's claim), and for a fetch that was announced.
_AWAKE_S = 2e-3


class HandoffControl:
    """Serves `routes` to clients. Each returns the answer, or None if it comes later or never.

    A route that raises KVStoreError changed nothing.

    Args:
        state: of the node store.
        leases: of peers; claims count among them.
        server: its thread is the control thread, on which this runs.
    """

    def __init__(self, state: NodeState, leases: PeerControl, server: ControlServer) -> None:
        self._state, self._service, self._leases, self._server = state, state.pool_service, leases, server
        self._version = state.versions.get
        self.table = HandoffTable()
        self.waiting = WaitingClaims()
        #: Hand-offs that a tenant's quota refused.
        self.num_refused = Counter[str]()
        self.stages = StageBook(state.config, state.mover)
        self.lanes = StageLanes(state.config, state.mover)
        self.fetcher = HandoffFetcher(
            FetchContext(
                config=state.config,
                pool=lambda: state.pool_service.pool,
                peers=state.peers,
                mover=state.mover,
                stages=self.stages,
                lanes=self.lanes,
                version_of=self._version,
                adopt_version=state.pool_service.hear_clearing,
                server=server,
                threads=state.threads,
            )
        )
        self.peers = HandoffPeers(state, leases, self.table, self.waiting, self.stages)
        self.routes: dict[Op, Handler] = {
            Op.HANDOFF_PREPARE: self._prepare,
            Op.HANDOFF_PACKING: self._packing,
            Op.HANDOFF_COMPLETE: self._complete,
            Op.HANDOFF_ABORT: self._abort,
            Op.HANDOFF_WITHDRAW: self._withdraw,
            Op.HANDOFF_FETCH: self._fetch,
            Op.HANDOFF_SOON: self._soon,
            Op.HANDOFF_STAGE: self._make_stage,
            Op.HANDOFF_WARM: self._warm_up,
            Op.HANDOFF_END: self._end,
        }

    def _place(self, slab: int, generation: int) -> Place:
        if not slab:
            return self.peers.arena()
        pool = self.stages.get(slab, generation).pool
        return Place(pool, pool.num_slots, slab, generation)

    def _prepare(self, connection: Connection, message: Message) -> None:
        if connection.pidfd < 0:
            raise ConfigError(
                "this kernel does not tell the store when this process ends, so it may fetch but not publish; "
                "run both in one PID namespace (Linux 5.3 and newer) or on Linux 6.5 and newer"
            )
        self._service.check_serving()
        wanted = decode_prepare_handoff(message.payload)
        self._service.block_bytes_of(wanted.namespace)
        # Read the version before the count: the count then shows a clearing that happens between the two reads.
        place, version = self._place(wanted.slab, wanted.generation), self._version(wanted.namespace)
        self._check_quota(connection.tenant)
        if self._service.current.num_clears(wanted.namespace) != wanted.num_clears:
            raise StaleVersion(
                "wanted blocks of the present weights, but their namespace was cleared since they were to be "
                "published; publish what is computed anew"
            )
        slots = self.table.prepare(
            wanted.key, wanted.writer, connection.owner, wanted.namespace, version, wanted.num_blocks,
            replace(place, tenant=connection.tenant),
        )  # fmt: skip
        if wanted.slab:
            self._server.stay_awake(_AWAKE_S)
        if not connection.send(message.op, Flag.REPLY, message.request, encode(np.asarray(slots, np.int32))):
            # The publisher gave up waiting. It did not receive the whole answer, and takes no slot from a part of it.
            # So nothing writes to these slots. Free them now: the publisher may live for long.
            self._void(wanted.key, wanted.writer)
        connection.gave = message.request, functools.partial(self._void, wanted.key, wanted.writer)

    def _check_quota(self, tenant: str) -> None:
        """Refuse one more hand-off of a tenant that has as many as it may. Only this thread makes more."""
        most = quota_of(self._state.config.tenants, tenant).max_handoffs
        if most is not None and (held := self.num_of(tenant)) >= most:
            self.num_refused[tenant] += 1
            raise PoolExhausted(
                f"wanted one more hand-off, but tenant {tenant!r} has {held} of the {most} that it may have at once; "
                "fetch or withdraw some, or raise its max_handoffs"
            )

    def num_of(self, tenant: str) -> int:
        """Return how many hand-offs a tenant has published, or is publishing."""
        # A copy: hand-offs may end on another thread.
        return sum(handoff.place.tenant == tenant for handoff in list(self.table.handoffs.values()))

    def _packing(self, connection: Connection, message: Message) -> None:
        self.waiting.are_soon(decode_key(message.payload))
        self._server.stay_awake(_AWAKE_S)

    def _complete(self, connection: Connection, message: Message) -> bytes:
        done = decode_complete_handoff(message.payload)
        completed = self.table.complete(done.key, done.writer, connection.owner, deadline_after(done.ttl_s))
        self.waiting.look_again(done.key)  # Before the answer, which is not urgent.
        return encode(completed)

    def _abort(self, connection: Connection, message: Message) -> bytes:
        failed = decode_abort_handoff(message.payload)
        return encode(self._void(failed.key, failed.writer))

    def _void(self, key: bytes, writer: int) -> bool:
        aborted = self.table.abort(key, writer)
        self.waiting.look_again(key)
        return aborted

    def _withdraw(self, connection: Connection, message: Message) -> bytes:
        key = decode_key(message.payload)
        withdrawn = self.table.withdraw(key)
        self.waiting.look_again(key)
        return encode(withdrawn)

    def _soon(self, connection: Connection, message: Message) -> None:
        self._server.stay_awake(_AWAKE_S)
        if message.payload:  # Only a fetch has one: for a publication the mover has nothing to do.
            self._state.mover.expect_read(message.payload)

    def _make_stage(self, connection: Connection, message: Message) -> None:
        asked = decode_ask_stage(message.payload)
        if not 0 < asked.block_bytes <= asked.num_bytes:
            raise InvalidRequest(
                f"wanted a stage of at least one block, got {asked.num_bytes} bytes of {asked.block_bytes}"
            )
        answer_later(
            self._state.threads, Blocking.STAGE, connection, message,
            lambda: self.stages.make(asked.uuid, asked.num_bytes, asked.block_bytes).found(),
        )  # fmt: skip

    def _warm_up(self, connection: Connection, message: Message) -> None:
        warm, state = decode_warm_up(message.payload), self._state
        stage = self.stages.get(warm.slab, warm.generation)

        def warm_up() -> list[LaneFound]:
            lanes = self.lanes.find_all(state.peers.get(warm.node_id), stage, state.config.call_timeout_s)
            return [LaneFound(lane.gb_per_s, lane.why_not) for lane in lanes]

        answer_later(state.threads, Blocking.STAGE, connection, message, warm_up)

    def _end(self, connection: Connection, message: Message) -> None:
        end = decode_end(message.payload)
        if end.number & CLAIM_BIT:
            self.table.end_claim(end.number & ~STAGE_BIT, connection.owner, used=end.used)
        else:
            self.fetcher.end(end.number & ~STAGE_BIT, connection.owner)

    def _fetch(self, connection: Connection, message: Message) -> None:
        request, question = decode_fetch(message.payload), message.request
        self._service.check_serving()
        block_bytes = self._service.block_bytes_of(request.namespace)
        check_seconds("timeout_s", request.timeout_s)
        deadline_after(request.ttl_s)
        here = request.node_id == self._state.node_id
        if not here or request.from_slab not in (0, request.slab):
            counted = self._counting(request)
            send = functools.partial(send_piece, connection, message.op, question, counted=counted)
            fetch_id = self.fetcher.begin(request, connection.owner, block_bytes, send, connection.tenant)
            connection.gave = question, functools.partial(self.fetcher.end, fetch_id, connection.owner)
            return
        # The client copies directly out of the slots in which the blocks were published.
        serve = functools.partial(self._claim_here, connection, question, clock.now_s(), request)
        self.waiting.serve(request.key, connection, request.timeout_s, serve)

    def _claim_here(
        self, connection: Connection, question: int, asked_s: float, request: FetchRequest, is_last: bool
    ) -> bool:
        """Answer with the slots of this node's ticket, or a reason. Return False while they are being written."""
        report, slots, number = LoadReport(), b"", 0
        if request.epoch != self._state.epoch:
            report.reason = "stale: the store that had the blocks was restarted, and they are gone"
        else:
            report.waited_s = clock.now_s() - asked_s  # Before the claim: the client counts its time from here.
            version, deadline_s = self._version(request.namespace), deadline_after(request.ttl_s)
            claim = self.table.claim(
                request.key, connection.owner, request.namespace, version, deadline_s, is_early=request.is_early,
                is_draining=self._service.is_draining,
            )  # fmt: skip
            if claim == NOT_READY and not is_last:
                return False
            if isinstance(claim, str):
                report.reason = NOT_READY_IN_TIME if claim == NOT_READY else claim
            else:
                report.num_local, slots = len(claim.slots), pack_ints(claim.slots)
                number = claim.claim_id | (STAGE_BIT if claim.slab else 0)
                undo = functools.partial(self.table.end_claim, claim.claim_id, connection.owner, used=False)
                connection.gave = question, undo
        piece = Progress(number, 0, slots, report)
        send_piece(connection, Op.HANDOFF_FETCH, question, piece, counted=self._counting(request))
        return True

    def _counting(self, request: FetchRequest) -> Callable[[LoadReport], None]:
        traffic, block_bytes = self._service.traffic, self._service.block_bytes_of(request.namespace)
        return functools.partial(traffic.fetch_ended, num_blocks=request.num_blocks, block_bytes=block_bytes)

    def release_owner(self, owner: str) -> int:
        """Take back everything that a dead client held; return the number of hand-offs and fetches."""
        return self.table.release_owner(owner) + self.fetcher.release_owner(owner)

    def holds(self, owner: str) -> bool:
        """Return whether an owner has hand-offs or fetches."""
        return self.table.holds(owner) or self.fetcher.holds(owner)

    def wants_ticks(self) -> bool:
        """Return whether anything here has a deadline."""
        return len(self.table) > 0 or len(self.waiting) > 0 or len(self.fetcher) > 0

    def tick(self, now_s: float) -> None:
        """End the claims, hand-offs and waits whose time has expired."""
        self.table.end_cleared(self._version)
        for claim_id in self.table.expire(now_s):
            self._leases.ended(claim_id)
        self.waiting.tick(now_s)
        self.fetcher.tick(now_s)

    def stats(self) -> dict[str, Any]:
        """Return counts."""
        return {
            "num_handoffs": len(self.table),
            "num_handoff_slots": self.table.num_slots,
            "num_handoff_fetches": len(self.fetcher),
            "num_lane_warm_up_bytes": self.lanes.num_warm_bytes,
            "stages": [
                {"uuid": stage.uuid, "num_bytes": stage.pool.num_slots * stage.description.slot_bytes}
                for stage in self.stages.all()
            ],
        }

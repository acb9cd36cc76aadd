"""One fetch of a ticket's blocks from the node that has them: claim there, READ here, tell the client.

As with a load, a block counts only if the claim covered its whole READ, by this node's clock alone. Unlike a load's
blocks they are never published here: their slots are a write that is given up when the client has copied them out.
The slots are in the client's stage where the lane between the GPUs is a real one, else in the arena.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import KVStoreError, PeerLost, PoolExhausted, StoreUnavailable, TransferError, TransferTimeout
from kvstore.handoff_claim import SourceClaim
from kvstore.handoff_messages import END, FetchRequest, PeerClaimed
from kvstore.latch import Latch
from kvstore.load_report import LoadReport
from kvstore.messages import NOTIFICATION, STAGE_BIT, MoverDone, Progress, pack_progress
from kvstore.peer_words import check_slots
from kvstore.peers import Peer
from kvstore.pool import Pool
from kvstore.segments import plan_chunks, plan_stage_chunks
from kvstore.stage_lanes import StageLane
from kvstore.transport import IndexArray, PeerDescription, ReadRequest
from kvstore.wire import Op

if TYPE_CHECKING:
    from kvstore.handoff_fetch import HandoffFetcher

logger = logging.getLogger(__name__)

#: Between stages the store is not to be woken for each chunk, which takes a tenth of what the chunk does.
_AWAKE_S = 1e-3
_MOVER_GRACE_S = 1.0
#: A fetch that failed waits so long for the source to hear of it: one that is tried at once is not to meet its claim.
_TELL_WITHIN_S = 0.5
Send = Callable[[bytes, bool], None]
"""Tells the client one piece of the answer, and whether it is the last."""


class RemoteFetch:
    """One fetch: the slots that it fills, the claim at the source, the READ, and the client that copies out.

    The slots go when both the READ and the client are through with them; while a READ may still write, to quarantine.
    """

    def __init__(
        self, fetcher: HandoffFetcher, fetch_id: int, request: FetchRequest, owner: str, block_bytes: int, send: Send
    ) -> None:
        self.owner = owner
        self._fetcher, self._id, self._request, self._send = fetcher, fetch_id, request, send
        self._block_bytes, self._write_owner = block_bytes, f"handoff-fetch-{fetch_id}"
        self._version = fetcher.namespace_version(request.namespace)
        self._deadline_s = time.monotonic() + request.timeout_s
        self._claim = SourceClaim(fetcher, request, block_bytes, self._version, self._deadline_s)
        self._report = LoadReport()
        self._lock = threading.Lock()
        self._read_ended = Latch()
        self._is_over = self._is_told = self._client_left = self._is_free = False
        self._write_id = self._read_id = self._given_up = 0
        self._slots: IndexArray = np.empty(0, np.int32)
        self._pool: Pool | None = None
        self._begun: Peer | None = None
        self._lane: StageLane | None = None
        self._why_host = self._no_room = ""
        self._num_ready = 0
        self._told_s = 0.0
        self._error: KVStoreError | None = None

    def begin(self) -> None:
        """Do on the control thread what waits for nobody, so that no thread is to be woken for it; `run` does the rest.

        Where the lane between the stages is known the source is asked, and the READ posted as soon as it answers.
        """
        fetcher, request = self._fetcher, self._request
        peer = fetcher.peers.known(self._node_id)
        if peer is None or peer.epoch != request.epoch:
            return
        try:
            stage = fetcher.stages.get(request.slab, request.generation)
        except PeerLost:
            return
        lane = fetcher.lanes.known(peer, request.from_slab, stage)
        if lane is None or lane.why_not or self._waits_for_transfers(stage.pool):
            return
        if self._claim.begin(peer, self._claimed_early):
            self._begun, self._lane, self._pool = peer, lane, stage.pool
            self._reserve(stage.pool)
            self._claim.look()  # Slots take as long to choose as the source to answer.

    def _claimed_early(self, claimed: PeerClaimed) -> None:
        """Post the READ; on the control thread. What is not simple, or does not work, `run` comes to."""
        peer, lane = self._begun, self._lane
        assert peer is not None
        assert lane is not None, "only what goes over a lane begins early"
        if claimed.reason or self._no_room or self._client_left or claimed.namespace_version > self._version:
            return
        if (claimed.slab, claimed.mover_generation) == (self._request.from_slab, lane.generation):
            with contextlib.suppress(KVStoreError):
                self._post(peer, lane.name, lane.description, claimed, may_wait=False)

    def run(self) -> None:
        """Fetch everything, or say why not."""
        try:
            reason = self._fetch()
        except TransferTimeout as error:
            reason = f"timeout: {error}"
        except (TransferError, StoreUnavailable) as error:
            reason = f"peer_lost: {error}"
        except KVStoreError as error:
            reason = f"{type(error).__name__}: {error}"
        except Exception as error:
            logger.exception("a fetch failed unexpectedly")
            reason = f"{type(error).__name__}: {error}"
        if reason:
            logger.warning("fetch of %d blocks from node %s: %s", self._request.num_blocks, self._node_id, reason)
        with self._lock:
            self._is_over = True
        if not self._is_told:
            self._tell_last(reason, self._num_ready)
        self._free_if_through()

    def _tell_last(self, reason: str, first: int) -> None:
        self._is_told = True
        self._report.reason, self._report.num_peer = reason, self._num_ready
        self._report.num_lease_calls = self._claim.num_calls
        self._report.note = self._why_host
        slots = self._slots[first : self._num_ready]
        self._send(pack_progress(Progress(self._number, first, slots, self._report.to_bytes())), True)

    @property
    def _number(self) -> int:
        return self._id | (STAGE_BIT if self._lane is not None else 0)

    def client_left(self) -> None:
        """The client copies nothing more out of the slots."""
        with self._lock:
            self._client_left = True
        self._free_if_through()

    def _free_if_through(self) -> None:
        with self._lock:
            if self._is_free or not (self._is_over and self._client_left):
                return
            self._is_free = True
        self._fetcher.forget(self._id)
        pool, read_id = self._pool, self._given_up
        if pool is None or not self._write_id:
            return
        name = f"read-{read_id}" if read_id else ""
        pool.abort_store(self._write_id, self._write_owner, quarantine=name)

        def end_quarantine() -> None:
            pool.end_quarantine(name)

        if name:
            # It may have turned terminal before there was anything to set free.
            self._fetcher.mover.when_terminal({read_id}, end_quarantine)

    @property
    def _node_id(self) -> str:
        return self._request.node_id

    def _fetch(self) -> str:
        fetcher, request, peer, pool = self._fetcher, self._request, self._begun, self._pool
        if peer is None or pool is None:
            if self._node_id != fetcher.node_id and not fetcher.peers.is_usable(self._node_id):
                return "peer_lost: the node failed a moment ago and is left alone; try again soon"
            peer = fetcher.peers.of_life(self._node_id, request.epoch)
            if peer.epoch != request.epoch:
                return "stale: the store that had the blocks was restarted, and they are gone"
            pool = self._pool = self._choose(peer)
            if self._waits_for_transfers(pool):
                return "timeout: too many slots wait for transfers that were given up; their mover is being replaced"
        try:
            reason = self._claim_and_read(peer, pool)
        except TransferError:
            if fetcher.mover.own is not None:
                # Without a mover of its own this node has not learnt anything about the peer.
                fetcher.peers.failed(self._node_id)
            raise
        if not reason:
            fetcher.peers.succeeded(self._node_id)
        return reason

    def _waits_for_transfers(self, pool: Pool) -> bool:
        return pool.num_quarantined >= self._fetcher.config.max_quarantined_fraction * pool.num_slots

    def _choose(self, peer: Peer) -> Pool:
        """Choose between the client's stage and the arena, and return the pool of the choice."""
        fetcher, request = self._fetcher, self._request
        if request.from_slab and request.slab:
            try:
                stage = fetcher.stages.get(request.slab, request.generation)
            except PeerLost as error:
                self._why_host = f"stage_lost: {error}"
                return fetcher.pool()
            lane = fetcher.lanes.known(peer, request.from_slab, stage)
            lane = lane or fetcher.lanes.find(peer, request.from_slab, stage, self._claim.call_s())
            if not lane.why_not:
                self._lane = lane
                return stage.pool
            self._why_host = lane.why_not
        elif request.from_slab:
            self._why_host = "this client has no stage on its GPU; attach the hand-off"
        return fetcher.pool()

    def _reserve(self, pool: Pool) -> None:
        if self._write_id or self._no_room:
            return
        try:
            ticket = pool.reserve(self._request.num_blocks, self._write_owner)
        except KVStoreError as error:  # The answer to the claim is still on its way.
            word = "pool_full" if isinstance(error, PoolExhausted) else type(error).__name__
            self._no_room = f"{word}: {error}"
        else:
            self._write_id, self._slots = ticket.write_id, np.asarray(ticket.slots, dtype=np.int32)

    def _claim_and_read(self, peer: Peer, pool: Pool) -> str:
        fetcher, request = self._fetcher, self._request
        claimed = self._claim.take(
            peer,
            to_host=self._lane is None,
            meanwhile=lambda: self._reserve(pool),
            is_wanted=lambda: not self._client_left,
        )
        if claimed.namespace_version > self._version:
            fetcher.adopt_version(request.namespace, claimed.namespace_version)
        if claimed.reason:
            return claimed.reason
        if self._lane is not None and not claimed.slab:
            self._leave_stage(pool)
        if self._no_room:
            self._give_back(peer, claimed.claim_id)
            return self._no_room
        arrived = False
        try:
            self._read(peer, claimed)
            arrived = self._num_ready == request.num_blocks
        finally:
            # Of a READ between stages nobody else tells the source that it is over.
            if self._lane is not None or not arrived:
                self._give_back(peer, claimed.claim_id, used=arrived)
        if self._error is not None:
            raise self._error
        return (
            "" if arrived else "lease_expired: the blocks came after the claim on them was over, so they do not count"
        )

    def _leave_stage(self, stage: Pool) -> None:
        """Go through host memory after all: under a ticket that names its stage the publisher has filled its arena."""
        if self._write_id:
            stage.abort_store(self._write_id, self._write_owner)
        self._lane, self._write_id, self._no_room = None, 0, ""
        self._why_host = "the stage of the publisher had no room"
        self._pool = self._fetcher.pool()
        self._reserve(self._pool)

    def _read(self, peer: Peer, claimed: PeerClaimed) -> None:
        if not self._read_id:
            self._post(peer, *self._source(peer, claimed), claimed)
        # The mover reports by itself when time is up; this wait is for a mover that does not.
        left_s = min(self._claim.valid_until_s, self._deadline_s) - time.monotonic()
        if not self._read_ended.wait(max(left_s, 0.0) + _MOVER_GRACE_S):
            if self._fetcher.mover.abandon(self._read_id):
                self._given_up = self._read_id
            raise TransferTimeout("the mover did not report on a READ in time")

    def _post(
        self, peer: Peer, name: str, description: PeerDescription, claimed: PeerClaimed, *, may_wait: bool = True
    ) -> None:
        """Have the mover read, as far as the claim and the client's patience go."""
        fetcher, config, now_s = self._fetcher, self._fetcher.config, time.monotonic()
        left_s = min(self._claim.valid_until_s, self._deadline_s, now_s + config.transfer_timeout_s) - now_s
        notification = b""
        if self._lane is None:
            # Between stages it would have to wait for all chunks before its own, and the lane stand still meanwhile.
            notification = NOTIFICATION.pack(claimed.claim_id, claimed.epoch, peer.owner_key)
        else:
            fetcher.server.stay_awake(_AWAKE_S)
        check_slots(claimed.slots, description, self._block_bytes)
        request = ReadRequest(
            peer=name,
            block_bytes=self._block_bytes,
            local_slots=self._slots,
            remote_slots=np.asarray(claimed.slots, dtype=np.int32),
            notification=notification,
        )
        ends = np.asarray(self._chunk_ends(), dtype=np.int32)
        self._read_id = fetcher.mover.read(
            request, description, self._on_done, chunk_ends=ends, timeout_s=max(left_s, 1e-3), may_wait=may_wait,
            generation=0 if self._lane is None else self._request.generation,
        )  # fmt: skip

    def _chunk_ends(self) -> list[int]:
        config, count = self._fetcher.config, len(self._slots)
        if self._lane is None:
            return plan_chunks(count, max(1, config.chunk_bytes // self._block_bytes))
        return plan_stage_chunks(count, max(1, config.stage_chunk_bytes // self._block_bytes))

    def _source(self, peer: Peer, claimed: PeerClaimed) -> tuple[str, PeerDescription]:
        lane, request = self._lane, self._request
        if lane is None:
            return peer.transport(claimed.mover_generation, self._claim.call_s())
        if lane.generation != claimed.mover_generation:
            # Remembered from an earlier life of the peer's mover.
            stage = self._fetcher.stages.get(request.slab, request.generation)
            lane = self._fetcher.lanes.find(peer, request.from_slab, stage, self._claim.call_s())
        if (claimed.slab, claimed.mover_generation) != (request.from_slab, lane.generation) or lane.why_not:
            raise PeerLost(f"the mover of node {peer.node_id} was replaced meanwhile; the blocks went with it")
        return lane.name, lane.description

    def _on_done(self, done: MoverDone, error: KVStoreError | None) -> None:
        """Runs on the control thread for every chunk: check, count, tell the client."""
        if error is not None:
            self._error = error
            if not done.terminal:
                self._given_up = done.read_id
            self._read_ended.set()
            return
        now_s, first = time.monotonic(), self._num_ready
        same_weights = self._fetcher.namespace_version(self._request.namespace) == self._version
        if now_s < self._claim.valid_until_s and same_weights and done.num_blocks > first:
            self._num_ready = done.num_blocks
            self._note(done, now_s, done.num_blocks - first)
            if self._num_ready == self._request.num_blocks:
                self._tell_last("", first)
            else:
                self._send(pack_progress(Progress(self._number, first, self._slots[first : self._num_ready])), False)
        if self._lane is not None:
            self._fetcher.server.stay_awake(0.0 if done.last else _AWAKE_S)
        if done.last:
            self._read_ended.set()

    def _note(self, done: MoverDone, now_s: float, num_blocks: int) -> None:
        report = self._report
        report.num_bytes += num_blocks * self._block_bytes
        report.read_s += now_s - (self._told_s or self._claim.asked_s)
        self._told_s, report.peers = now_s, [self._node_id]
        report.num_descriptors = done.num_descriptors

    def _give_back(self, peer: Peer, claim_id: int, *, used: bool = False) -> None:
        """Tell the source that the blocks are here, or let another fetch have them.

        Not while a READ that was given up may still be reading them.
        """

        def tell() -> None:
            with contextlib.suppress(KVStoreError):
                now = self._fetcher.peers.get(peer.node_id)
                if now.epoch != peer.epoch:
                    return
                if used:
                    now.client.send(Op.PEER_CLAIM_END, END.pack(claim_id, used))
                else:
                    now.client.call(Op.PEER_CLAIM_END, END.pack(claim_id, used), timeout_s=self._claim.call_s())

        teller = threading.Thread(target=tell, name="raykv-release", daemon=True)
        if self._given_up:
            self._fetcher.mover.when_terminal({self._given_up}, teller.start)
            return
        teller.start()
        if not used:
            teller.join(_TELL_WITHIN_S)

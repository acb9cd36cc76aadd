"""One fetch of a ticket's blocks from the node that has them: claim there, READ here, tell the client.

As with a load, a block counts only if the claim covered its whole READ, by this node's clock alone. Unlike a load's
blocks they are never published here: their slots are a write that is given up when the client has copied them out.
The slots are in the client's stage where the lane between the GPUs is a real one, else in the arena.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvstore.blocks.chunking import plan_chunks, plan_stage_chunks
from kvstore.blocks.codec import IndexArray, encode
from kvstore.errors import KVStoreError, PeerLost, PoolExhausted, StoreUnavailable, TransferError, TransferTimeout
from kvstore.handoff.lanes import StageLane
from kvstore.handoff.messages import PeerClaimed
from kvstore.handoff.source_claim import SourceClaim
from kvstore.mover.messages import MoverDone
from kvstore.mover.transport import PeerDescription, ReadRequest
from kvstore.pool.pool import Pool
from kvstore.remote.answers import check_slots
from kvstore.remote.peers import Peer
from kvstore.rpc.handoff_messages import FetchRequest
from kvstore.rpc.messages import NOTIFICATION, STAGE_BIT, LoadReport, Progress
from kvstore.runtime import clock

if TYPE_CHECKING:
    from kvstore.handoff.fetcher import HandoffFetcher

logger = logging.getLogger(__name__)

#: Between stages the store is not to be woken for each chunk, which takes a tenth of what the chunk does.
_AWAKE_S = 1e-3
_MOVER_GRACE_S = 1.0
_NO_STAGE = "this client has no stage on its GPU; attach the hand-off"
Send = Callable[[bytes, bool], None]
"""Tells the client one piece of the answer, and whether it is the last."""


class RemoteFetch:
    """One fetch: the slots that it fills, the claim at the source, the READ, and the client that copies out.

    It holds no thread while it waits: the control thread hears the source and the mover, and has a thread do what may
    block, one step after the other.
    The slots go when both the READ and the client are through with them; while a READ may still write, to quarantine.
    """

    def __init__(
        self, fetcher: HandoffFetcher, fetch_id: int, request: FetchRequest, owner: str, block_bytes: int, send: Send
    ) -> None:
        self.owner = owner
        self._fetcher, self._id, self._request, self._send = fetcher, fetch_id, request, send
        self._block_bytes, self._write_owner = block_bytes, f"handoff-fetch-{fetch_id}"
        self._version = fetcher.namespace_version(request.namespace)
        self._deadline_s = clock.now_s() + request.timeout_s
        self._claim = SourceClaim(
            fetcher, request, block_bytes, self._version, self._deadline_s, self._heard, lambda: not self._client_left
        )
        self._report = LoadReport()
        self._lock = threading.Lock()
        self._is_over = self._is_told = self._client_left = self._is_free = self._has_read_ended = False
        self._write_id = self._read_id = self._given_up = 0
        self._read_until_s = math.inf
        self._slots: IndexArray = np.empty(0, np.int32)
        self._pool: Pool | None = None
        self._peer: Peer | None = None
        self._found: PeerClaimed | KVStoreError | None = None
        self._lane: StageLane | None = None
        self._why_host = self._no_room = ""
        self._num_ready = 0
        self._told_s = 0.0
        self._error: KVStoreError | None = None

    def begin(self) -> bool:
        """Ask the source on the control thread, if nobody has to be waited for; else `start` does, on a thread.

        The READ is posted as soon as it answers, where the way to it is known.
        """
        fetcher, request = self._fetcher, self._request
        peer = fetcher.peers.known(self._node_id)
        if peer is None or peer.epoch != request.epoch or not peer.spare:
            return False
        lane: StageLane | None = None
        try:
            pool = fetcher.pool()
            if request.from_slab and request.slab:
                stage = fetcher.stages.get(request.slab, request.generation)
                lane, pool = fetcher.lanes.known(peer, request.from_slab, stage), stage.pool
                if lane is None or lane.why_not:
                    return False
            elif request.from_slab:
                self._why_host = _NO_STAGE
        except KVStoreError:
            return False
        if self._waits_for_transfers(pool):
            return False
        connection = peer.spare.pop()
        try:
            self._lane, self._pool = lane, pool
            self._claim.ask(peer, connection, to_host=lane is None)
        except KVStoreError:
            self._lane = self._pool = None
            return False
        self._peer = peer
        self._reserve(pool)
        self._claim.look()  # Slots take as long to choose as the source to answer.
        return True

    def start(self) -> None:
        """Ask the source, on a thread."""
        self._step(self._start)

    def tick(self, now_s: float) -> None:
        """See whether the source or the mover is late; on the control thread."""
        self._claim.tick(now_s)
        if self._read_id and now_s > self._read_until_s and self._end_read():
            if self._fetcher.mover.abandon(self._read_id):
                self._given_up = self._read_id
            self._error = TransferTimeout("the mover did not report on a READ in time")
            self._fetcher.submit(self._after_read_step)

    def close(self) -> None:
        """Let go of what only this fetch has: the store ends."""
        self._claim.close()

    def _heard(self, found: PeerClaimed | KVStoreError) -> None:
        """Post the READ; on the control thread. What is not simple, or does not work, a thread comes to."""
        self._found = found
        if not self._post_at_once(found):
            self._fetcher.submit(self._claimed_step)

    def _post_at_once(self, found: PeerClaimed | KVStoreError) -> bool:
        peer, lane = self._peer, self._lane
        if isinstance(found, KVStoreError) or peer is None:
            return False
        if found.reason or self._no_room or self._client_left or found.namespace_version > self._version:
            return False
        if lane is not None:
            if (found.slab, found.mover_generation) != (self._request.from_slab, lane.generation):
                return False
            source = lane.name, lane.description
        elif (known := peer.known_transport(found.mover_generation)) is not None:
            source = known
        else:
            return False
        try:
            self._post(peer, *source, found, may_wait=False)
        except KVStoreError:
            return False
        return True

    def _claimed_step(self) -> None:
        self._step(self._claimed)

    def _after_read_step(self) -> None:
        self._step(self._after_read)

    def _step(self, step: Callable[[], str | None]) -> None:
        """Do what waits for somebody, on a thread, and end the fetch unless it goes on by itself."""
        try:
            reason = step()
        except TransferTimeout as error:
            reason = f"timeout: {error}"
        except (TransferError, StoreUnavailable) as error:
            reason = f"peer_lost: {error}"
        except KVStoreError as error:
            reason = f"{type(error).__name__}: {error}"
        except Exception as error:
            logger.exception("a fetch failed unexpectedly")
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            self._end(reason)

    def refuse(self, reason: str) -> None:
        """End before anything began."""
        self._end(reason)

    def _end(self, reason: str) -> None:
        if reason:
            logger.warning("fetch of %d blocks from node %s: %s", self._request.num_blocks, self._node_id, reason)
        with self._lock:
            self._is_over = True
        if not self._is_told:
            self._tell_last(reason, self._num_ready)
        self._claim.leave()
        self._free_if_through()

    def _tell_last(self, reason: str, first: int) -> None:
        self._is_told = True
        self._report.reason, self._report.num_peer = reason, self._num_ready
        self._report.num_lease_calls = self._claim.num_calls
        self._report.note = self._why_host
        slots = self._slots[first : self._num_ready].tobytes()
        self._send(encode(Progress(self._number, first, slots, self._report)), True)

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

    def _start(self) -> str | None:
        fetcher, request = self._fetcher, self._request
        if clock.now_s() > self._deadline_s:
            return "timeout: its time ended before a thread of the store was free for it"
        if self._node_id != fetcher.node_id and not fetcher.peers.is_usable(self._node_id):
            return "peer_lost: the node failed a moment ago and is left alone; try again soon"
        peer = fetcher.peers.of_life(self._node_id, request.epoch)
        if peer.epoch != request.epoch:
            return "stale: the store that had the blocks was restarted, and they are gone"
        pool = self._pool = self._choose(peer)
        if self._waits_for_transfers(pool):
            return "timeout: too many slots wait for transfers that were given up; their mover is being replaced"
        connection = fetcher.peers.take_spare(peer)
        self._peer = peer
        self._reserve(pool)  # First: from then on the control thread goes on.
        self._claim.ask(peer, connection, to_host=self._lane is None)
        return None

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
            self._why_host = _NO_STAGE
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

    def _claimed(self) -> str | None:
        """Go on after the answer of the source, where the control thread could not."""
        fetcher, peer, pool, found = self._fetcher, self._peer, self._pool, self._found
        assert peer is not None
        assert pool is not None
        if isinstance(found, KVStoreError):
            self._note_failure(found)
            raise found
        assert found is not None, "heard"
        if found.namespace_version > self._version:
            fetcher.adopt_version(self._request.namespace, found.namespace_version)
        if found.reason:
            return found.reason
        if self._lane is not None and not found.slab:
            self._leave_stage(pool)
        if self._no_room:
            self._claim.give_back(found.claim_id, used=False)
            return self._no_room
        try:
            self._post(peer, *self._source(peer, found), found)
        except BaseException as error:
            self._note_failure(error)
            self._claim.give_back(found.claim_id, used=False)
            raise
        return None

    def _after_read(self) -> str:
        arrived = self._num_ready == self._request.num_blocks
        found = self._found
        assert isinstance(found, PeerClaimed), "nothing else is read"
        # Of a READ between stages nobody else tells the source that it is over.
        if self._lane is not None or not arrived:
            self._give_back(found.claim_id, used=arrived)
        if self._error is not None:
            self._note_failure(self._error)
            raise self._error
        if not arrived:
            return "lease_expired: the blocks came after the claim on them was over, so they do not count"
        self._fetcher.peers.succeeded(self._node_id)
        return ""

    def _note_failure(self, error: BaseException) -> None:
        # Without a mover of its own this node has not learnt anything about the peer.
        if isinstance(error, TransferError) and self._fetcher.mover.own is not None:
            self._fetcher.peers.failed(self._node_id)

    def _leave_stage(self, stage: Pool) -> None:
        """Go through host memory after all: under a ticket that names its stage the publisher has filled its arena."""
        if self._write_id:
            stage.abort_store(self._write_id, self._write_owner)
        self._lane, self._write_id, self._no_room = None, 0, ""
        self._why_host = "the stage of the publisher had no room"
        self._pool = self._fetcher.pool()
        self._reserve(self._pool)

    def _post(
        self, peer: Peer, name: str, description: PeerDescription, claimed: PeerClaimed, *, may_wait: bool = True
    ) -> None:
        """Have the mover read, as far as the claim and the client's patience go."""
        fetcher, config, now_s = self._fetcher, self._fetcher.config, clock.now_s()
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
        # The mover reports by itself when time is up; that is for a mover that does not.
        self._read_until_s = now_s + max(left_s, 0.0) + _MOVER_GRACE_S
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
            self._read_is_over()
            return
        now_s, first = clock.now_s(), self._num_ready
        same_weights = self._fetcher.namespace_version(self._request.namespace) == self._version
        if now_s < self._claim.valid_until_s and same_weights and done.num_blocks > first:
            self._num_ready = done.num_blocks
            self._note(done, now_s, done.num_blocks - first)
            if self._num_ready == self._request.num_blocks:
                self._tell_last("", first)
            else:
                slots = self._slots[first : self._num_ready].tobytes()
                self._send(encode(Progress(self._number, first, slots)), False)
        if self._lane is not None:
            self._fetcher.server.stay_awake(0.0 if done.last else _AWAKE_S)
        if done.last:
            self._read_is_over()

    def _read_is_over(self) -> None:
        if self._end_read():
            self._fetcher.submit(self._after_read_step)

    def _end_read(self) -> bool:
        """Whether this is the first that ends the READ, which is over by itself or taken for it."""
        with self._lock:
            had_ended, self._has_read_ended = self._has_read_ended, True
        return not had_ended

    def _note(self, done: MoverDone, now_s: float, num_blocks: int) -> None:
        report = self._report
        report.num_bytes += num_blocks * self._block_bytes
        report.read_s += now_s - (self._told_s or self._claim.asked_s)
        self._told_s, report.peers = now_s, [self._node_id]
        report.num_descriptors = done.num_descriptors

    def _give_back(self, claim_id: int, *, used: bool) -> None:
        """Tell the source that the blocks are here, or let another fetch have them.

        Not while a READ that was given up may still be reading them.
        """
        if not self._given_up:
            self._claim.give_back(claim_id, used=used)
            return

        def late() -> None:
            self._claim.give_back(claim_id, used=used)
            self._claim.leave()

        self._fetcher.mover.when_terminal({self._given_up}, lambda: self._fetcher.submit(late))

"""One fetch of a ticket's blocks from their node. Claim there, READ here, tell the client.

These blocks are never published in this store: their slots are given up when the client has copied the blocks out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np

from kvstore.errors import KVStoreError, StoreUnavailable, TransferError, TransferTimeout
from kvstore.handoff.fetch_context import FetchContext
from kvstore.handoff.landing import Landing
from kvstore.handoff.messages import PeerClaimed
from kvstore.handoff.records import FetchSeen
from kvstore.handoff.source_claim import SourceClaim
from kvstore.mover.messages import MoverDone
from kvstore.mover.transport import PeerDescription, ReadRequest
from kvstore.remote.covered_read import Arrivals, Cover, CoveredRead
from kvstore.remote.peers import Peer, call_s
from kvstore.rpc.handoff_messages import FetchRequest
from kvstore.rpc.messages import NOTIFICATION, STAGE_BIT, LoadReport, Progress
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

#: During a READ between stages the control thread stays awake: waking it for each chunk costs a tenth of the chunk.
_AWAKE_S = 1e-3
_ABANDONED = "abandoned: the client left before the blocks were read"


class RemoteFetch:
    """One fetch. It has slots here, a claim at the source, a READ, and a client that copies out.

    It holds no thread while it waits: the control thread receives the messages of the source and the mover. Steps that
    may block run on a thread, one after the other. The slots are freed when both READ and client are done with them.

    Args:
        context: of this node.
        fetch_id: the client ends the fetch by this id.
        request: of the client.
        owner: the client.
        block_bytes: of each block.
        send: sends a piece of the answer to the client; the piece with the report is the last.
        on_free: called once, when the fetch no longer holds anything.
        tenant: of the client.
    """

    def __init__(
        self,
        context: FetchContext,
        fetch_id: int,
        request: FetchRequest,
        owner: str,
        block_bytes: int,
        send: Callable[[Progress], object],
        on_free: Callable[[], None],
        tenant: str = "",
    ) -> None:
        self.owner, self.slot_owner = owner, f"handoff-fetch-{fetch_id}"
        self._context, self._id, self._request, self._send, self._on_free = context, fetch_id, request, send, on_free
        self._node_id, self._block_bytes = request.node_id, block_bytes
        self._version = context.version_of(request.namespace)
        self._deadline_s = clock.now_s() + request.timeout_s
        self._landing = Landing(context, request, self.slot_owner, self._deadline_s, tenant)
        self._claim = SourceClaim(
            context, request, block_bytes, self._version, self._deadline_s, self._heard, lambda: not self._client_left
        )
        self._read = CoveredRead(context.mover, self._on_blocks, self._on_read_end)
        self._report = LoadReport()
        self._arrivals = Arrivals(self._report, request.node_id, block_bytes, 0.0)
        self._lock = threading.Lock()
        self._is_over = self._is_told = self._client_left = self._is_free = False
        self._peer: Peer | None = None
        self._found: PeerClaimed | KVStoreError | None = None
        self._num_ready = 0

    def begin(self) -> bool:
        """Ask the source, on the control thread. Return False if that would block: then call `start`.

        If the lane to the source is known, the READ is posted as soon as the source answers.
        """
        peer = self._context.peers.known(self._node_id)
        if peer is None or peer.epoch != self._request.epoch or not peer.spare:
            return False
        try:
            if self._landing.choose(peer) and not self._landing.waits_for_transfers():
                self._claim.ask(peer, peer.spare.pop(), to_host=self._landing.lane is None)
                self._peer = peer
        except (KVStoreError, IndexError) as error:  # Another thread may have taken the last connection.
            logger.debug("a fetch begins on a thread: %r", error)
        if self._peer is None:
            self._landing.lane = None
            return False
        self._landing.reserve(is_claimed=False)
        self._claim.look()  # Choosing slots takes about as long as the answer of the source.
        return True

    def start(self) -> None:
        """Ask the source, on a thread."""
        self._step(self._start)

    def tick(self, now_s: float) -> None:
        """Check whether the source or the mover is late; on the control thread."""
        self._claim.tick(now_s)
        if self._read.is_late(now_s):
            self._read.give_up()

    def seen(self) -> FetchSeen:
        """Return what can be seen of this fetch; any thread may call."""
        request, now_s = self._request, clock.now_s()
        if self._is_over:
            waits_for = "its client's copies"
        elif self._read.late_s:
            waits_for = "its READ"
        else:
            waits_for = "the node of its ticket" if self._claim.asked_s else "a thread of this store"
        return FetchSeen(
            key=request.key, owner=self.owner, node_id=self._node_id, num_blocks=request.num_blocks,
            num_bytes=request.num_blocks * self._block_bytes, age_s=now_s - self._deadline_s + request.timeout_s,
            left_s=max(0.0, self._deadline_s - now_s), waits_for=waits_for,
        )  # fmt: skip

    def close(self) -> None:
        """Close the connection of this fetch, because the store is being stopped."""
        self._claim.close()

    @property
    def has_left(self) -> bool:
        """Whether the client copies nothing more."""
        return self._client_left

    def client_left(self) -> None:
        """Note that the client copies nothing more. Free the slots if the fetch has ended."""
        self._client_left = True
        self._free_if_through()

    def _heard(self, found: PeerClaimed | KVStoreError) -> None:
        """Post the READ, on the control thread. If that fails or may block, continue on a thread."""
        self._found = found
        if not self._post_at_once(found):
            self._context.submit(lambda: self._step(self._claimed))

    def _post_at_once(self, found: PeerClaimed | KVStoreError) -> bool:
        peer = self._peer
        if isinstance(found, KVStoreError) or peer is None:
            return False
        if found.reason or self._client_left or found.namespace_version > self._version:
            return False
        self._landing.reserve(is_claimed=True)
        if self._landing.no_room or (source := self._landing.known_source(peer, found)) is None:
            return False
        try:
            self._post(peer, *source, found, may_wait=False)
        except KVStoreError:
            return False
        return True

    def _step(self, step: Callable[[], str | None]) -> None:
        """Run a step that may block, on a thread. End the fetch if the step returns a reason or fails."""
        try:
            reason = step()
        except TransferTimeout as error:
            reason = f"timeout: {error}"
        except (TransferError, StoreUnavailable) as error:
            reason = f"peer_lost: {error}"
        except Exception as error:
            if not isinstance(error, KVStoreError):
                logger.exception("a fetch failed unexpectedly")
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            self.end(reason)

    def _start(self) -> str | None:
        peers = self._context.peers
        if clock.now_s() > self._deadline_s:
            return "timeout: its time ended before a thread of the store was free for it"
        if self._node_id != peers.own_node_id and not peers.is_usable(self._node_id):
            return "peer_lost: the node failed a moment ago and is left alone; try again soon"
        peer = peers.of_life(self._node_id, self._request.epoch, self._call_s())
        if peer.epoch != self._request.epoch:
            return "stale: the store that had the blocks was restarted, and they are gone"
        self._landing.choose(peer, self._call_s())
        if self._landing.waits_for_transfers():
            return "timeout: too many slots wait for transfers that were given up; their mover is being replaced"
        connection = peers.take_spare(peer, self._call_s())
        self._peer = peer
        self._landing.reserve(is_claimed=False)  # Before `ask`: after it the control thread uses the landing.
        self._claim.ask(peer, connection, to_host=self._landing.lane is None)
        return None

    def _claimed(self) -> str | None:
        """Continue after the answer of the source, where the control thread could not."""
        peer, landing, found = self._peer, self._landing, self._found
        assert peer is not None
        assert found is not None, "heard"
        if isinstance(found, KVStoreError):
            self._note_no_answer(peer, found)
            raise found
        if found.namespace_version > self._version:
            self._context.adopt_version(self._request.namespace, found.namespace_version)
        if found.reason:
            return found.reason
        if self._client_left:
            self._claim.give_back(found.claim_id, used=False)  # A READ would use the ticket.
            return _ABANDONED
        if landing.lane is not None and not found.slab:
            landing.leave_stage()
        landing.reserve(is_claimed=True)
        if landing.no_room:
            self._claim.give_back(found.claim_id, used=False)
            return landing.no_room
        try:
            self._post(peer, *landing.source(peer, found, self._call_s()), found)
        except BaseException as error:
            self._note_no_answer(peer, error)
            self._claim.give_back(found.claim_id, used=False)
            raise
        return None

    def _post(
        self, peer: Peer, name: str, description: PeerDescription, claimed: PeerClaimed, *, may_wait: bool = True
    ) -> None:
        """Let the mover read until the claim or the client's time ends."""
        context, landing, request = self._context, self._landing, self._request
        in_stage, notification = landing.lane is not None, b""
        if in_stage:
            context.server.stay_awake(_AWAKE_S)
        else:
            # Between stages none is sent: it would wait for all earlier chunks, and the lane would be idle meanwhile.
            notification = NOTIFICATION.pack(claimed.claim_id, claimed.epoch, peer.owner_key)
        self._arrivals.since_s = self._claim.asked_s
        self._read.post(
            ReadRequest(
                peer=name,
                block_bytes=self._block_bytes,
                local_slots=landing.slots,
                remote_slots=np.asarray(claimed.slots, dtype=np.int32),
                notification=notification,
            ),
            description,
            Cover(
                self._claim.valid_until_s,
                self._deadline_s,
                lambda: context.version_of(request.namespace) == self._version,
            ),
            landing.chunk_ends(self._block_bytes),
            timeout_s=context.config.transfer_timeout_s,
            may_wait=may_wait,
            generation=request.generation if in_stage else 0,
        )

    def _on_blocks(self, done: MoverDone) -> None:
        """Count a chunk and tell the client; on the control thread."""
        first = self._num_ready
        if done.num_blocks > first:
            self._num_ready = done.num_blocks
            self._arrivals.add(done, done.num_blocks - first)
            if self._num_ready == self._request.num_blocks:
                self._tell_last("", first)
            else:
                self._tell(first)
        if self._landing.lane is not None:
            self._context.server.stay_awake(_AWAKE_S)

    def _on_read_end(self) -> None:
        if self._landing.lane is not None:
            self._context.server.stay_awake(0.0)
        self._context.submit(lambda: self._step(self._after_read))

    def _after_read(self) -> str:
        arrived = self._num_ready == self._request.num_blocks
        found, error = self._found, self._read.error
        assert isinstance(found, PeerClaimed), "nothing else is read"
        # A READ between stages sends no notification, so the source must be told here that it has ended.
        if self._landing.lane is not None or not arrived:
            self._give_back(found.claim_id, used=arrived)
        if error is not None:
            if self._read.is_peers_fault():
                self._note_failure(error)
            raise error
        if not arrived:
            return "lease_expired: the blocks came after the claim on them was over, so they do not count"
        self._context.peers.succeeded(self._node_id)
        return ""

    def _give_back(self, claim_id: int, *, used: bool) -> None:
        """Tell the source that the blocks are here, or give the claim back.

        While an abandoned READ may still read the blocks, this is delayed until that READ has ended.
        """
        if not self._read.given_up_id:
            self._claim.give_back(claim_id, used=used)
            return

        def late() -> None:
            self._claim.give_back(claim_id, used=used)
            self._claim.leave()

        self._context.mover.when_terminal({self._read.given_up_id}, lambda: self._context.submit(late))

    def _call_s(self) -> float:
        """Return how many seconds the next question to the source may take."""
        return call_s(self._context.config, self._deadline_s)

    def _note_no_answer(self, peer: Peer, error: BaseException) -> None:
        # This fetch may have had little time: then the timeout of one question is no failure yet.
        if not isinstance(error, TransferTimeout) or peer.is_silent(self._context.config.call_timeout_s):
            self._note_failure(error)

    def _note_failure(self, error: BaseException) -> None:
        # Without its own mover this node has learnt nothing about the peer.
        if isinstance(error, TransferError) and self._context.mover.own is not None:
            self._context.peers.failed(self._node_id)

    def end(self, reason: str) -> None:
        """End the fetch, for this reason or because all blocks are here. Its slots stay until the client left."""
        if reason:
            logger.warning("fetch of %d blocks from node %s: %s", self._request.num_blocks, self._node_id, reason)
        self._is_over = True
        if not self._is_told:
            self._tell_last(reason, self._num_ready)
        self._claim.leave()
        self._free_if_through()

    def _tell_last(self, reason: str, first: int) -> None:
        self._is_told = True
        self._report.reason, self._report.num_peer = reason, self._num_ready
        self._report.num_lease_calls = self._claim.num_calls
        self._report.note = self._landing.why_host
        self._tell(first, self._report)

    def _tell(self, first: int, report: LoadReport | None = None) -> None:
        number = self._id | (STAGE_BIT if self._landing.lane is not None else 0)
        slots = self._landing.slots[first : self._num_ready].tobytes()
        self._send(Progress(number, first, slots, report))

    def _free_if_through(self) -> None:
        with self._lock:
            if self._is_free or not (self._is_over and self._client_left):
                return
            self._is_free = True
        self._on_free()
        self._landing.free(self._read)

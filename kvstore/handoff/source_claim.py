"""The claim of one fetch at the blocks' node, from question to return."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import msgspec

from kvstore.blocks.codec import encode
from kvstore.blocks.shape import BLOCK_ORDER_VERSION
from kvstore.errors import KVStoreError, TransferTimeout
from kvstore.handoff.fetch_context import FetchContext
from kvstore.handoff.messages import PeerClaim, PeerClaimed, claimed_of
from kvstore.handoff.records import NOT_READY, NOT_READY_IN_TIME
from kvstore.remote.peers import Peer, call_s
from kvstore.rpc.client import ControlClient
from kvstore.rpc.exchange import Question
from kvstore.rpc.framing import Op
from kvstore.rpc.handoff_messages import End, FetchRequest, Soon
from kvstore.runtime import clock

#: The longest that a source may hold a claim's question until all blocks are written, also as a share of a lease.
_MOST_WAIT_S, _WAIT_SHARE = 1.0, 0.25
#: The control thread stays awake this long for the answer to a claim: as long as the mover does for the READ after it.
_AWAKE_S = 3e-3
#: If the source answers sooner than this that the blocks are not ready, the next tick asks it again.
_PAUSE_S = 1e-3
#: A failed fetch waits this long until the source has ended its claim: an immediate retry must not meet that claim.
_TELL_WITHIN_S = 0.5


class SourceClaim:
    """The right to read the blocks of a ticket, alone. No thread waits: the control thread receives the answers.

    Args:
        context: of this node.
        request: of the client.
        block_bytes: of each block.
        version: the namespace's last clearing, as this node knows it.
        deadline_s: of the fetch.
        then: called once on the control thread with the answer or the error, so it must not block.
        is_wanted: returns whether the client still waits; called while the blocks are being written.
    """

    def __init__(
        self,
        context: FetchContext,
        request: FetchRequest,
        block_bytes: int,
        version: int,
        deadline_s: float,
        then: Callable[[PeerClaimed | KVStoreError], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        self._context, self._request, self._block_bytes = context, request, block_bytes
        self._version, self._deadline_s, self._then, self._is_wanted = version, deadline_s, then, is_wanted
        #: When the source was asked, and until when the claim is good by this node's clock alone.
        self.asked_s = self.valid_until_s = 0.0
        self.num_calls = 0
        self._peer: Peer | None = None
        self._connection: ControlClient | None = None
        self._to_host = False
        self._question: Question | None = None
        #: When the answer is late, or the source is asked once more.
        self._until_s, self._again_s = math.inf, math.inf

    def ask(self, peer: Peer, connection: ControlClient, *, to_host: bool) -> None:
        """Ask for the blocks once they are all written; on any thread, once.

        Args:
            peer: has the blocks.
            connection: to the peer; used by this claim alone until `leave`.
            to_host: whether the blocks are wanted in the peer's arena.

        Raises:
            PeerLost: the connection broke; `then` is not called.
        """
        self._peer, self._connection, self._to_host = peer, connection, to_host
        self._ask()
        if not to_host:
            self._context.server.stay_awake(_AWAKE_S)

    def _ask(self) -> None:
        config, connection = self._context.config, self._connection
        assert connection is not None, "taken by `ask`"
        self.num_calls += 1
        self.asked_s = clock.now_s()
        self.valid_until_s = self.asked_s + config.lease_ttl_s - config.lease_margin_s
        left_s, within_s = max(0.0, self._deadline_s - self.asked_s), call_s(config, self._deadline_s)
        claim = PeerClaim(
            key=self._request.key,
            namespace=self._request.namespace,
            num_blocks=self._request.num_blocks,
            block_bytes=self._block_bytes,
            slot_format=BLOCK_ORDER_VERSION,
            namespace_version=self._version,
            ttl_s=config.lease_ttl_s,
            wait_s=min(left_s, within_s / 2, _MOST_WAIT_S, _WAIT_SHARE * config.lease_ttl_s),
            to_host=self._to_host,
            is_early=self._request.is_early,
        )
        self._until_s, self._again_s = self.asked_s + within_s, math.inf
        question = self._question = connection.ask(Op.PEER_CLAIM, encode(claim), self._wake)
        self._context.server.watch(question.fileno(), self.look)

    def _wake(self) -> None:
        """Keep the mover and its lane awake, because the blocks come in a moment."""
        request = self._request
        lane = encode(Soon(request.node_id, request.from_slab, request.slab, request.generation))
        self._context.mover.expect_read(lane)
        if not self._to_host:
            self._context.server.stay_awake(_AWAKE_S)

    def look(self) -> None:
        """Take the answer if it is there; on the control thread."""
        found: PeerClaimed | KVStoreError
        if (question := self._question) is None:
            return
        try:
            payload = question.take()
            if payload is None:
                return
            found = claimed_of(payload, self._request.num_blocks)
        except KVStoreError as error:
            found = error
        else:
            assert self._peer is not None, "asked"
            self._peer.silence.end(Op.HELLO.name, Op.PEER_CLAIM.name)
        self._hear(question, found)

    def tick(self, now_s: float) -> None:
        """Give up an answer that is late, or ask once more; on the control thread."""
        question = self._question
        if question is not None and now_s > self._until_s:
            assert self._peer is not None, "asked"
            self._peer.silence.add(Op.PEER_CLAIM.name, self.asked_s)
            # A source that was stopped reads the question when it goes on: it must not keep a claim that nobody has.
            question.say(Op.PEER_CLAIM_END, encode(End(question.number, used=False)))
            self._hear(question, TransferTimeout(f"node {self._request.node_id} did not answer a claim in time"))
        elif question is None and now_s > self._again_s:
            self._ask_again()

    def _hear(self, question: Question, found: PeerClaimed | KVStoreError) -> None:
        self._question = None
        if isinstance(found, PeerClaimed) and found.reason == NOT_READY:
            self._end(question)
            if clock.now_s() > self._deadline_s or not self._is_wanted():
                self._then(msgspec.structs.replace(found, reason=NOT_READY_IN_TIME))
            elif clock.now_s() < self.asked_s + _PAUSE_S:
                self._again_s = self.asked_s + _PAUSE_S
            else:
                self._ask_again()
            return
        if isinstance(found, KVStoreError):
            self._end(question)  # First: it may close the connection, which must not be kept as a spare one before.
            self._then(found)
            return
        try:
            self._then(found)  # First: the client waits for the READ that follows, and no caller for the connection.
        finally:
            self._end(question)

    def _end(self, question: Question) -> None:
        self._context.server.unwatch(question.fileno())
        question.close()

    def _ask_again(self) -> None:
        self._again_s = math.inf
        try:
            self._ask()
        except KVStoreError as error:
            self._question = None
            self._then(error)

    def give_back(self, claim_id: int, *, used: bool) -> None:
        """Tell the source that the blocks are here, or are free for another fetch. On a thread that may wait."""
        peers, peer, connection = self._context.peers, self._peer, self._connection
        assert peer is not None, "claimed there"
        with contextlib.suppress(KVStoreError):
            if connection is None or connection.closed:
                # A fetch that failed tells its client after this.
                connection = self._connection = peers.take_spare(peer, None if used else _TELL_WITHIN_S)
            if used:
                connection.send(Op.PEER_CLAIM_END, encode(End(claim_id, used)))
            else:
                connection.call(Op.PEER_CLAIM_END, encode(End(claim_id, used)), timeout_s=_TELL_WITHIN_S)

    def leave(self) -> None:
        """Give the connection back for other uses; at the end."""
        connection, self._connection = self._connection, None
        if self._peer is not None and connection is not None:
            self._context.peers.keep_spare(self._peer, connection)

    def close(self) -> None:
        """Close the connection. The store is being stopped, and no thread receives answers any more."""
        if self._question is not None:
            self._question.close()
        if self._connection is not None:
            self._connection.close()

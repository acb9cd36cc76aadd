"""The claim of one fetch at the node that has the blocks: asked for, waited for while they are written, given back."""

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
from kvstore.remote.peers import Peer
from kvstore.rpc.client import ControlClient
from kvstore.rpc.exchange import Question
from kvstore.rpc.framing import Op
from kvstore.rpc.handoff_messages import End, FetchRequest, Soon
from kvstore.runtime import clock

_LEAST_CALL_S = 1.0
#: The most that a source may keep a question while it has not all blocks, so long as that is little of a claim.
_MOST_WAIT_S, _WAIT_SHARE = 1.0, 0.25
#: For the answer to a claim: as long as the mover stays awake for the READ after it.
_AWAKE_S = 3e-3
#: A source that could not keep the question for so long is asked once more with the next tick.
_PAUSE_S = 1e-3
#: A fetch that failed waits so long for the source to hear of it: one that is tried at once is not to meet its claim.
_TELL_WITHIN_S = 0.5


class SourceClaim:
    """The right to read the blocks of a ticket, alone. No thread waits for it: the control thread hears the answers.

    Args:
        context: of this node.
        request: of the client.
        block_bytes: of each block.
        version: the namespace's last clearing, as this node knows it.
        deadline_s: of the fetch.
        then: called once on the control thread with what came of it, so it must not block.
        is_wanted: asked while the blocks are still being written.
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

    def call_s(self) -> float:
        """Return how long a call may take."""
        left_s = self._deadline_s - clock.now_s()
        return min(self._context.config.call_timeout_s, max(left_s, _LEAST_CALL_S))

    def ask(self, peer: Peer, connection: ControlClient, *, to_host: bool) -> None:
        """Ask for the blocks once they are all written; on any thread, once.

        Args:
            peer: that has them.
            connection: to it, of nobody else until `leave`.
            to_host: they are wanted in its arena.

        Raises:
            PeerLost: the connection broke, and `then` hears nothing.
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
        left_s, call_s = max(0.0, self._deadline_s - self.asked_s), self.call_s()
        wait_s = min(left_s, call_s / 2, _MOST_WAIT_S, _WAIT_SHARE * config.lease_ttl_s)
        self._until_s, self._again_s = self.asked_s + call_s, math.inf
        question = self._question = connection.ask(Op.PEER_CLAIM, self._claim(wait_s), self._wake)
        self._context.server.watch(question.fileno(), self.look)

    def _wake(self) -> None:
        """Blocks that were waited for are there in a moment: keep the mover awake for them, and its lane."""
        request = self._request
        word = encode(Soon(request.node_id, request.from_slab, request.slab, request.generation))
        self._context.mover.expect_read(word)
        if not self._to_host:
            self._context.server.stay_awake(_AWAKE_S)

    def look(self) -> None:
        """Hear the answer if it is there; on the control thread."""
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
        self._hear(question, found)

    def tick(self, now_s: float) -> None:
        """Give up an answer that is late, or ask once more; on the control thread."""
        question = self._question
        if question is not None and now_s > self._until_s:
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
        try:
            self._then(found)  # First: somebody waits for what it leads to, and nobody for the connection.
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

    def _claim(self, wait_s: float) -> bytes:
        return encode(
            PeerClaim(
                key=self._request.key,
                namespace=self._request.namespace,
                num_blocks=self._request.num_blocks,
                block_bytes=self._block_bytes,
                slot_format=BLOCK_ORDER_VERSION,
                namespace_version=self._version,
                ttl_s=self._context.config.lease_ttl_s,
                wait_s=wait_s,
                to_host=self._to_host,
                is_early=self._request.is_early,
            )
        )

    def give_back(self, claim_id: int, *, used: bool) -> None:
        """Tell the source that the blocks are here, or let another fetch have them; on a thread that may wait."""
        peers, peer, connection = self._context.peers, self._peer, self._connection
        assert peer is not None, "claimed there"
        with contextlib.suppress(KVStoreError):
            if connection is None or connection.closed:
                connection = self._connection = peers.take_spare(peer)
            if used:
                connection.send(Op.PEER_CLAIM_END, encode(End(claim_id, used)))
            else:
                connection.call(Op.PEER_CLAIM_END, encode(End(claim_id, used)), timeout_s=_TELL_WITHIN_S)

    def leave(self) -> None:
        """Let the connection be others'; at the end."""
        connection, self._connection = self._connection, None
        if self._peer is not None and connection is not None:
            self._context.peers.keep_spare(self._peer, connection)

    def close(self) -> None:
        """Close the connection: the store ends, and nobody hears answers any more."""
        if self._question is not None:
            self._question.close()
        if self._connection is not None:
            self._connection.close()

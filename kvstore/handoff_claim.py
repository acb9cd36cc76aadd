"""The claim of one fetch at the node that has the blocks: asked for, waited for while they are written, given back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore.control_client import ControlClient, Question
from kvstore.errors import KVStoreError, TransferTimeout
from kvstore.handoff_messages import (
    FetchRequest,
    PeerClaim,
    PeerClaimed,
    pack_peer_claim,
    pack_soon,
)
from kvstore.handoff_table import NOT_READY
from kvstore.latch import Latch
from kvstore.peer_words import claimed_of
from kvstore.peers import Peer
from kvstore.shape import BLOCK_ORDER_VERSION
from kvstore.wire import Op

if TYPE_CHECKING:
    from kvstore.handoff_fetch import HandoffFetcher

_LEAST_CALL_S = 1.0
#: The most that a source may keep a question while it has not all blocks, so long as that is little of a claim.
_MOST_WAIT_S, _WAIT_SHARE = 1.0, 0.25
#: For the answer to a claim: as long as the mover stays awake for the READ after it.
_AWAKE_S = 3e-3
#: Before a source is asked once more that could not keep the question.
_PAUSE_S = 1e-3


class SourceClaim:
    """The right to read the blocks of a ticket, alone.

    Args:
        fetcher: of this node.
        request: of the client.
        block_bytes: of each block.
        version: the namespace's last clearing, as this node knows it.
        deadline_s: of the fetch.
    """

    def __init__(
        self, fetcher: HandoffFetcher, request: FetchRequest, block_bytes: int, version: int, deadline_s: float
    ) -> None:
        self._fetcher, self._request, self._block_bytes = fetcher, request, block_bytes
        self._version, self._deadline_s = version, deadline_s
        #: When the source was asked, and until when the claim is good by this node's clock alone.
        self.asked_s = self.valid_until_s = 0.0
        self.num_calls = 0
        self._early: _EarlyClaim | None = None

    def call_s(self) -> float:
        """Return how long a call may take."""
        left_s = self._deadline_s - time.monotonic()
        return min(self._fetcher.config.call_timeout_s, max(left_s, _LEAST_CALL_S))

    def begin(self, peer: Peer, then: Callable[[PeerClaimed], None]) -> bool:
        """Ask on the control thread, if a connection is idle; `take` has the answer, whenever it is called.

        Args:
            peer: that has the blocks.
            then: called with the answer before `take` returns it, on the control thread, so it must not block.
        """
        try:
            connection = peer.spare.pop()
        except IndexError:
            return False
        num_blocks = self._request.num_blocks
        self._early = _EarlyClaim(self._fetcher, peer, connection, num_blocks, then, self._wake)
        try:
            wait_s = self._begin_call()
            self._early.ask(self._question(wait_s, to_host=False))
        except KVStoreError:
            self._early = None
            return False
        self._fetcher.server.stay_awake(_AWAKE_S)
        return True

    def _wake(self) -> None:
        """Keep awake whoever comes after an answer on the control thread: that itself, and the mover with the lane."""
        self._wake_lane()
        self._fetcher.server.stay_awake(_AWAKE_S)

    def _wake_lane(self) -> None:
        """Keep the mover and the lane awake; of another thread the control thread would only keep the interpreter."""
        request = self._request
        word = pack_soon(request.node_id, request.from_slab, request.slab, request.generation)
        self._fetcher.mover.expect_read(word)

    def look(self) -> None:
        """Hear the answer to what `begin` asked, on the control thread, if it is there."""
        if self._early is not None:
            self._early.look()

    def take(
        self, peer: Peer, *, to_host: bool, meanwhile: Callable[[], None], is_wanted: Callable[[], bool]
    ) -> PeerClaimed:
        """Claim the blocks once they are all written.

        Args:
            peer: that has them.
            to_host: they are wanted in its arena.
            meanwhile: called while an answer is on its way, each time; must not raise.
            is_wanted: asked while the blocks are still being written.

        Raises:
            KVStoreError: the peer refused, or does not answer.
        """
        while True:
            if self._early is None:
                claimed = self._ask(peer, to_host, meanwhile)
            else:
                claimed, self._early = self._early.wait(self.asked_s + self.call_s()), None
            if claimed.reason != NOT_READY:
                return claimed
            if time.monotonic() > self._deadline_s or not is_wanted():
                return claimed._replace(reason=f"timeout: {NOT_READY}")
            time.sleep(_PAUSE_S)

    def _ask(self, peer: Peer, to_host: bool, meanwhile: Callable[[], None]) -> PeerClaimed:
        peers = self._fetcher.peers
        connection = peers.take_spare(peer)
        wait_s = self._begin_call()
        try:
            question = self._question(wait_s, to_host=to_host)
            answer = connection.call(
                Op.PEER_CLAIM, question, timeout_s=self.call_s(), meanwhile=meanwhile, progress=self._wake_lane
            )
            return claimed_of(answer, self._request.num_blocks)
        finally:
            peers.keep_spare(peer, connection)

    def _begin_call(self) -> float:
        """Take the time before the source is asked; returns how long it may keep the question."""
        config = self._fetcher.config
        self.num_calls += 1
        self.asked_s = time.monotonic()
        self.valid_until_s = self.asked_s + config.lease_ttl_s - config.lease_margin_s
        left_s = max(0.0, self._deadline_s - self.asked_s)
        return min(left_s, self.call_s() / 2, _MOST_WAIT_S, _WAIT_SHARE * config.lease_ttl_s)

    def _question(self, wait_s: float, *, to_host: bool) -> bytes:
        return pack_peer_claim(
            PeerClaim(
                key=self._request.key,
                namespace=self._request.namespace,
                num_blocks=self._request.num_blocks,
                block_bytes=self._block_bytes,
                slot_format=BLOCK_ORDER_VERSION,
                namespace_version=self._version,
                ttl_s=self._fetcher.config.lease_ttl_s,
                wait_s=wait_s,
                to_host=to_host,
                is_early=self._request.is_early,
            )
        )


class _EarlyClaim:
    """One question to a source that is asked and answered on the control thread, which is awake in any case.

    Args:
        fetcher: of this node.
        peer: the source.
        connection: to it, of nobody else; its peer's again when it was answered.
        num_blocks: that are claimed.
        then: hears the answer on the control thread, unless `wait` has given it up.
        soon: hears on the control thread that the answer will be there soon, where the source waits for blocks.
    """

    def __init__(
        self,
        fetcher: HandoffFetcher,
        peer: Peer,
        connection: ControlClient,
        num_blocks: int,
        then: Callable[[PeerClaimed], None],
        soon: Callable[[], None],
    ) -> None:
        self._fetcher, self._peer, self._connection, self._then, self._soon = fetcher, peer, connection, then, soon
        self._num_blocks = num_blocks
        self._lock = threading.Lock()
        self._ended = Latch()
        self._answer: PeerClaimed | KVStoreError | None = None
        self._asked: Question

    def ask(self, question: bytes) -> None:
        """Ask, on the control thread.

        Raises:
            PeerLost: the connection broke; it is closed.
        """
        self._asked = self._connection.ask(Op.PEER_CLAIM, question, self._soon)
        self._fetcher.server.watch(self._asked.fileno(), self.look)

    def wait(self, until_s: float) -> PeerClaimed:
        """Return the answer; on another thread.

        Raises:
            KVStoreError: the source refused, or is lost.
            TransferTimeout: there is none in time, and `then` will hear of none.
        """
        self._ended.wait(max(0.0, until_s - time.monotonic()))
        with self._lock:
            if self._answer is None:
                self._answer = TransferTimeout(f"node {self._peer.node_id} did not answer a claim in time")
                self._connection.close()  # The control thread sees its end.
        if isinstance(self._answer, KVStoreError):
            raise self._answer
        return self._answer

    def look(self) -> None:
        """Hear the answer if it is there, on the control thread."""
        found: PeerClaimed | KVStoreError
        if self._ended.is_set():
            return
        try:
            payload = self._asked.take()
            if payload is None:
                return
            found = claimed_of(payload, self._num_blocks)
        except KVStoreError as error:
            found = error
        try:
            # First of all: somebody waits for what it leads to, and nobody for the connection.
            with self._lock:
                if self._answer is None:
                    self._answer = found
                    if isinstance(found, PeerClaimed):
                        self._then(found)
        finally:
            self._fetcher.server.unwatch(self._asked.fileno())
            self._asked.close()
            self._fetcher.peers.keep_spare(self._peer, self._connection)
            self._ended.set()

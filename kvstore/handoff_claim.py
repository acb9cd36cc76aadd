"""The claim of one fetch at the node that has the blocks: asked for, waited for while they are written, given back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.handoff_messages import FetchRequest, PeerClaim, PeerClaimed, pack_peer_claim, unpack_peer_claimed
from kvstore.handoff_table import NOT_READY
from kvstore.peers import Peer
from kvstore.shape import BLOCK_ORDER_VERSION
from kvstore.wire import Op

if TYPE_CHECKING:
    from kvstore.handoff_fetch import HandoffFetcher

_LEAST_CALL_S = 1.0
#: The most that a source may keep a question while it has not all blocks, so long as that is little of a claim.
_MOST_WAIT_S, _WAIT_SHARE = 1.0, 0.25
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

    def call_s(self) -> float:
        """Return how long a call may take."""
        left_s = self._deadline_s - time.monotonic()
        return min(self._fetcher.config.call_timeout_s, max(left_s, _LEAST_CALL_S))

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
            claimed, config = self._ask(peer, to_host, meanwhile), self._fetcher.config
            self.valid_until_s = self.asked_s + config.lease_ttl_s - config.lease_margin_s
            if claimed.reason != NOT_READY:
                return claimed
            if time.monotonic() > self._deadline_s or not is_wanted():
                return replace(claimed, reason=f"timeout: {NOT_READY}")
            time.sleep(_PAUSE_S)

    def _ask(self, peer: Peer, to_host: bool, meanwhile: Callable[[], None]) -> PeerClaimed:
        peers, config = self._fetcher.peers, self._fetcher.config
        connection = peers.take_spare(peer)
        self.asked_s, call_s = time.monotonic(), self.call_s()
        left_s = max(0.0, self._deadline_s - self.asked_s)
        wait_s = min(left_s, call_s / 2, _MOST_WAIT_S, _WAIT_SHARE * config.lease_ttl_s)
        self.num_calls += 1
        try:
            question = self._question(wait_s, to_host=to_host)
            return unpack_peer_claimed(connection.call(Op.PEER_CLAIM, question, timeout_s=call_s, meanwhile=meanwhile))
        finally:
            peers.keep_spare(peer, connection)

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
            )
        )

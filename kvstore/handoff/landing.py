"""Where the blocks of one fetch arrive: in the client's stage, or in the arena."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.blocks.chunking import plan_chunks, plan_stage_chunks
from kvstore.blocks.indexes import IndexArray, ints_in
from kvstore.errors import KVStoreError, PeerLost, PoolExhausted
from kvstore.handoff.fetch_context import FetchContext
from kvstore.handoff.lanes import StageLane
from kvstore.handoff.messages import PeerClaimed
from kvstore.handoff.stages import Stage
from kvstore.mover.transport import PeerDescription
from kvstore.pool.pool import Pool
from kvstore.remote.covered_read import CoveredRead, is_quarantine_full
from kvstore.remote.peers import Peer
from kvstore.rpc.handoff_messages import FetchRequest

_NO_STAGE = "this client has no stage on its GPU; attach the hand-off"


class Landing:
    """The slots that one fetch fills, and the lane to those in a stage.

    The slots are in the client's stage if the lane between the GPUs is not emulated, else in the arena. To the pool
    they are a write that is never published; `free` gives it back.

    Args:
        context: of this node.
        request: of the client.
        owner: of the slots.
        deadline_s: of the fetch.
        tenant: of the client.
    """

    def __init__(
        self, context: FetchContext, request: FetchRequest, owner: str, deadline_s: float, tenant: str = ""
    ) -> None:
        self._context, self._request, self._owner, self._deadline_s = context, request, owner, deadline_s
        self._tenant = tenant
        self.lane: StageLane | None = None
        #: Why the blocks go through host memory although their publisher has them in a stage.
        self.why_host = ""
        #: Why no slots could be reserved.
        self.no_room = ""
        self.slots: IndexArray = np.empty(0, np.int32)
        self._pool: Pool | None = None
        self._write_id = 0

    def choose(self, peer: Peer, timeout_s: float | None = None) -> bool:
        """Choose the place, and find its lane; return False if the lane is not known.

        Args:
            peer: has the blocks.
            timeout_s: how long the peer may take to answer, on a thread that may wait for it and for the mover; if
                None, no process is asked.

        Raises:
            KVStoreError: the peer does not answer; or there is no arena.
        """
        request, lanes = self._request, self._context.lanes
        self.lane, self._pool = None, self._context.pool()
        if not request.from_slab:
            return True
        if not request.slab:
            self.why_host = _NO_STAGE
            return True
        try:
            stage = self._stage()
        except PeerLost as error:
            self.why_host = f"stage_lost: {error}"
            return True
        lane = lanes.known(peer, request.from_slab, stage)
        if lane is None and timeout_s is not None:
            lane = lanes.find(peer, request.from_slab, stage, timeout_s, self._deadline_s)
        if lane is None:
            return False
        self.why_host = lane.why_not
        if not lane.why_not:
            self.lane, self._pool = lane, stage.pool
        return True

    def _stage(self) -> Stage:
        return self._context.stages.get(self._request.slab, self._request.generation)

    def waits_for_transfers(self) -> bool:
        """Return whether too many slots of the chosen pool wait for abandoned READs."""
        return is_quarantine_full(self._chosen(), self._context.config.max_quarantined_fraction)

    def _chosen(self) -> Pool:
        assert self._pool is not None, "chosen"
        return self._pool

    def reserve(self, *, is_claimed: bool) -> None:
        """Reserve the slots, once; on failure `no_room` says why.

        Args:
            is_claimed: whether the source has confirmed that it has the blocks. Before that only free slots are
                taken: blocks are evicted only for a valid ticket.
        """
        if self._write_id or self.no_room:
            return
        try:
            ticket = self._chosen().reserve(
                self._request.num_blocks, self._owner, may_evict=is_claimed, tenant=self._tenant
            )
        except KVStoreError as error:
            if not is_claimed:
                return
            reason = "pool_full" if isinstance(error, PoolExhausted) else type(error).__name__
            self.no_room = f"{reason}: {error}"
        else:
            self._write_id, self.slots = ticket.write_id, ints_in(ticket.packed_slots)

    def leave_stage(self) -> None:
        """Go through host memory. The ticket names a stage, but the publisher has filled its arena.

        Raises:
            KVStoreError: there is no arena.
        """
        if self._write_id:
            self._chosen().abort_store(self._write_id, self._owner)
        self.lane, self._write_id, self.no_room = None, 0, ""
        self.why_host = "the stage of the publisher had no room"
        self._pool = self._context.pool()
        self.reserve(is_claimed=True)

    def known_source(self, peer: Peer, claimed: PeerClaimed) -> tuple[str, PeerDescription] | None:
        """Return (name, description) of the claimed blocks' memory if it is known without asking."""
        lane = self.lane
        if lane is None:
            return peer.known_transport(claimed.mover_generation)
        if (claimed.slab, claimed.mover_generation) != (self._request.from_slab, lane.generation):
            return None
        return lane.name, lane.description

    def source(self, peer: Peer, claimed: PeerClaimed, timeout_s: float) -> tuple[str, PeerDescription]:
        """Return (name, description) of the claimed blocks' memory. On a thread that may wait for the peer.

        Raises:
            PeerLost: the peer's mover was replaced, or it does not answer.
        """
        lane, request = self.lane, self._request
        if lane is None:
            return peer.transport(claimed.mover_generation, timeout_s)
        if lane.generation != claimed.mover_generation:
            # The lane was remembered from an earlier life of the peer's mover.
            lanes, stage = self._context.lanes, self._stage()
            lane = lanes.find(peer, request.from_slab, stage, timeout_s, self._deadline_s)
        if (claimed.slab, claimed.mover_generation) != (request.from_slab, lane.generation) or lane.why_not:
            raise PeerLost(f"the mover of node {peer.node_id} was replaced meanwhile; the blocks went with it")
        return lane.name, lane.description

    def chunk_ends(self, block_bytes: int) -> npt.NDArray[np.int32]:
        """Return the ends of the chunks in which the blocks are read."""
        config, count = self._context.config, len(self.slots)
        if self.lane is None:
            ends = plan_chunks(count, max(1, config.chunk_bytes // block_bytes))
        else:
            ends = plan_stage_chunks(count, max(1, config.stage_chunk_bytes // block_bytes))
        return np.asarray(ends, dtype=np.int32)

    def free(self, read: CoveredRead) -> None:
        """Give the slots back; while `read` may still write to them, to quarantine."""
        if self._write_id:
            read.settle(self._chosen(), self._write_id, self._owner)

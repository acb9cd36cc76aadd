"""Lanes between stages. They are warmed up, measured, and not used when they are emulated.

The first READ of a connection is ten times slower than the next ones. Where GPUs reach each other neither over NVLink
or the bus nor through an RDMA card, NIXL carries device memory over TCP piece by piece, slower than the way through
host memory. No table of hardware shows that reliably, but short READs do.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvstore.blocks.codec import encode
from kvstore.config import StoreConfig
from kvstore.errors import KVStoreError, TransferError, TransferTimeout
from kvstore.handoff.stages import WARM_BYTES, Stage
from kvstore.mover.link import MoverLink
from kvstore.mover.transport import PeerDescription, ReadRequest
from kvstore.remote.answers import stages_of
from kvstore.remote.covered_read import Cover, CoveredRead
from kvstore.remote.peers import Peer
from kvstore.rpc.framing import Op
from kvstore.rpc.handoff_messages import Soon
from kvstore.runtime import clock
from kvstore.runtime.silence import Silence

logger = logging.getLogger(__name__)

#: Below this a lane is emulated. Measured: 0.6 to 1 over TCP, 16 and more over NVLink when cold.
_LEAST_GB_PER_S = 3.0
#: A lane that failed is tried again after this long.
_RETRY_S = 10.0
#: Time limit of one short READ; the first one has to connect.
_READ_WITHIN_S = 10.0
#: The READs of a fetch with little time have at least this long together.
_LEAST_S = 1.0
#: A lane has failed when READs timed out for this share of one READ's limit. Less may be the short time of one fetch.
_SILENT_SHARE = 0.75

_Key = tuple[str, bytes, int, int, int]


@dataclass(frozen=True, slots=True)
class StageLane:
    """The way from a peer's stage into one here.

    Args:
        name: the mover knows the lane by it.
        description: of the peer's stage.
        generation: the life of the peer's mover.
        gb_per_s: of a READ, warm; 0 when it failed.
        why_not: why it is not used; empty if it is.
        until_s: the time at which a lane that failed is tried again.
    """

    name: str
    description: PeerDescription
    generation: int
    gb_per_s: float
    why_not: str
    until_s: float


def _key(peer: Peer, slab: int, stage: Stage) -> _Key:
    return peer.node_id, peer.epoch, slab, stage.slab, stage.generation


def _is_beside(known: _Key, key: _Key) -> bool:
    """Return whether a known lane stays useful beside a new one. Those of earlier lives do not."""
    return known[-1] == key[-1] and (known[0] != key[0] or known[1] == key[1])


@contextmanager
def _held(measuring: threading.Lock, until_s: float) -> Iterator[None]:
    left_s = until_s - clock.now_s()
    if not measuring.acquire(timeout=-1 if left_s == math.inf else max(left_s, 0.0)):
        raise TransferTimeout("wanted a lane that another fetch measures just now, which did not end in time")
    try:
        yield
    finally:
        measuring.release()


def _read_of_nothing(name: str, description: PeerDescription, stage: Stage, count: int) -> ReadRequest:
    """Return a READ of the last slots of the peer's stage, which hold no blocks."""
    end = description.num_slots
    return ReadRequest(
        peer=name,
        block_bytes=min(description.slot_bytes, stage.description.slot_bytes),
        local_slots=np.asarray(stage.warm_slots[:count], dtype=np.int32),
        remote_slots=np.arange(end - count, end, dtype=np.int32),
    )


class StageLanes:
    """The lanes into the stages of one node.

    Args:
        config: of the store.
        mover: that reads.
    """

    def __init__(self, config: StoreConfig, mover: MoverLink) -> None:
        self._config, self._mover = config, mover
        self._lock = threading.Lock()
        self._lanes: dict[_Key, StageLane] = {}
        # One lock for each lane: a peer that does not answer must not delay the other lanes.
        self._measuring: defaultdict[_Key, threading.Lock] = defaultdict(threading.Lock)
        # Of lanes that are neither measured nor given up yet.
        self._silences: defaultdict[_Key, Silence] = defaultdict(Silence)
        #: Bytes of the READs that measured, and so warmed up, a lane. NIXL's own counts include them.
        self.num_warm_bytes = 0

    def known(self, peer: Peer, slab: int, stage: Stage) -> StageLane | None:
        """Return the lane of the last fetch from a peer's stage, without asking anybody."""
        lane = self._lanes.get(_key(peer, slab, stage))
        return lane if lane is not None and time.monotonic() < lane.until_s else None

    def find(self, peer: Peer, slab: int, stage: Stage, timeout_s: float, until_s: float) -> StageLane:
        """Return the lane from a peer's stage. Warm it up and measure it if needed.

        Args:
            peer: has the stage.
            slab: of the stage.
            stage: of this node.
            timeout_s: how long the peer may take to answer.
            until_s: how long the READs may take.

        Raises:
            TransferTimeout: the READs did not end in that time, which is no failure of the lane yet.
            KVStoreError: the peer does not answer, or has no such stage.
        """
        for lane in self.find_all(peer, stage, timeout_s, slab, until_s):
            return lane
        raise TransferError(f"node {peer.node_id} has no stage {slab} any more; its mover was replaced")

    def find_all(
        self, peer: Peer, stage: Stage, timeout_s: float, only: int = 0, until_s: float = math.inf
    ) -> list[StageLane]:
        """Return the lanes from all stages of a peer, or from one of them; the rest is as for `find`."""
        lanes = []
        answer = peer.client.call(Op.PEER_STAGES, timeout_s=timeout_s)
        until_s = max(until_s, clock.now_s() + _LEAST_S)
        for slab, generation, num_warm, description in stages_of(answer, stage.slab):
            if only not in (0, slab):
                continue
            key = _key(peer, slab, stage)
            with self._lock:
                measuring, silence = self._measuring[key], self._silences[key]
            with _held(measuring, until_s):
                lane = self.known(peer, slab, stage)
                if lane is None or lane.generation != generation:
                    name = f"{peer.node_id}/{peer.epoch.hex()}/{generation}/{slab}>{stage.slab}"
                    lane = self._measure(name, description, generation, num_warm, stage, until_s, silence)
                    self._remember(key, lane)
                    if not lane.why_not:
                        message = encode(Soon(peer.node_id, slab, stage.slab, stage.generation))
                        self._mover.wake_by(message, _read_of_nothing(name, description, stage, 1), stage.generation)
            lanes.append(lane)
        return lanes

    def _remember(self, key: _Key, lane: StageLane) -> None:
        with self._lock:
            # Drop lanes into the stages of an earlier mover of this node, or from an earlier life of this peer.
            self._lanes = {known: old for known, old in self._lanes.items() if _is_beside(known, key)} | {key: lane}
            for old in [known for known in self._measuring if not _is_beside(known, key)]:
                del self._measuring[old]
            self._silences.pop(key, None)
            for old in [known for known in self._silences if not _is_beside(known, key)]:
                del self._silences[old]

    def _measure(
        self,
        name: str,
        description: PeerDescription,
        generation: int,
        num_warm: int,
        stage: Stage,
        until_s: float,
        silence: Silence,
    ) -> StageLane:
        size = min(description.slot_bytes, stage.description.slot_bytes)
        count = min(num_warm, len(stage.warm_slots), max(1, WARM_BYTES // size))
        request = _read_of_nothing(name, description, stage, count)
        rate, why, good_until_s, asked_s = 0.0, "", math.inf, clock.now_s()
        try:
            seconds = [self._read(request, description, stage.generation, until_s) for _ in range(3)]
        except KVStoreError as error:
            if isinstance(error, TransferTimeout):
                silence.add(name, asked_s)
                if silence.total_s() < _SILENT_SHARE * self._most_s:
                    raise
            why, good_until_s = f"the lane between the GPUs failed: {error}", time.monotonic() + _RETRY_S
        else:
            rate, first_ms = count * size / min(seconds[1:]) / 1e9, 1e3 * seconds[0]
            logger.info("lane %s: first READ of %d bytes %.1f ms, then %.1f GB/s", name, count * size, first_ms, rate)
            if rate < _LEAST_GB_PER_S:
                why = (
                    f"the lane between the GPUs is emulated ({rate:.2f} GB/s): they reach each other neither over "
                    "NVLink or the bus nor through an RDMA card"
                )
        if why:
            logger.warning("hand-offs over %s go through host memory: %s", name, why)
        return StageLane(name, description, generation, rate, why, good_until_s)

    @property
    def _most_s(self) -> float:
        return min(_READ_WITHIN_S, self._config.transfer_timeout_s)

    def _read(self, request: ReadRequest, description: PeerDescription, generation: int, until_s: float) -> float:
        ended, seconds = threading.Event(), list[float]()
        read = CoveredRead(self._mover, lambda done: seconds.append(done.seconds), ended.set)
        read.post(
            request,
            description,
            Cover(math.inf, math.inf, lambda: True),  # There are no blocks in these slots.
            np.asarray([len(request.local_slots)], dtype=np.int32),
            timeout_s=min(self._most_s, max(until_s - clock.now_s(), 0.0)),
            generation=generation,
        )
        if not ended.wait(max(read.late_s - clock.now_s(), 0.0)):
            read.give_up()
        if read.error is not None:
            raise read.error
        with self._lock:
            self.num_warm_bytes += request.block_bytes * len(request.local_slots)
        return seconds[-1]

"""READs from one stage of a mover into another: plain copies between two GPUs of the machine.

If both ends are in one process, NIXL would carry them through host memory (2 GB/s instead of 385).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvstore.blocks.indexes import IndexArray
from kvstore.errors import PeerLost, TransferError
from kvstore.kernels.merging import merge_runs
from kvstore.mover.transport import PeerDescription, ReadRequest, ReadState, ReadTotals


class StageMemory(Protocol):
    """Memory of a stage, with a queue of copies into it."""

    @property
    def address(self) -> int:
        """Its first byte, in this process."""

    @property
    def gpu(self) -> int:
        """Ordinal of the GPU that it is on."""

    def begin_copies(self, runs: list[tuple[int, int, int]], source: int) -> int:
        """Queue copies; see `CopyQueue.copy`."""

    def copies_done(self, mark: int) -> bool:
        """Return whether all copies before a mark are in place; see `CopyQueue.reached`."""


class Neighbours:
    """Reads into one stage, from other stages of the same mover; see `ReadTransport`.

    The distance between slots of `stage` is `slot_bytes`.
    """

    def __init__(self, stage: StageMemory, slot_bytes: int, num_slots: int) -> None:
        self._stage, self._slot_bytes, self._num_slots = stage, slot_bytes, num_slots
        self.totals = ReadTotals()
        self._peers: dict[str, PeerDescription] = {}
        #: Mark, notification and counts of each READ.
        self._copies: dict[int, tuple[int, bytes, ReadTotals]] = {}
        self._inbox: list[bytes] = []
        self._next = 0

    def add_peer(self, peer: str, description: PeerDescription) -> None:
        """Make another stage readable."""
        self._peers[peer] = description

    def forget_peer(self, peer: str) -> None:
        """Forget a stage."""
        self._peers.pop(peer, None)

    def post(self, request: ReadRequest) -> int:
        """Queue the copies of a READ; see `ReadTransport`.

        Slots are checked here, before any copy: a wrong slot gives an address in other memory.
        """
        peer = self._peers.get(request.peer)
        if peer is None:
            raise PeerLost(f"wanted a stage that was added, got {request.peer!r}")
        _check_slots("local", request.local_slots, self._num_slots)
        _check_slots("remote", request.remote_slots, peer.num_slots)
        runs = _runs(request, self._stage.address, self._slot_bytes, peer.address, peer.slot_bytes)
        try:
            mark = self._stage.begin_copies(runs, peer.gpu)
        except RuntimeError as error:
            raise TransferError(f"copies between two GPUs: {error}") from error
        self._next += 1
        counts = ReadTotals(1, len(runs), request.block_bytes * len(request.local_slots))
        self._copies[self._next] = mark, request.notification, counts
        return self._next

    def poll(self, handle: int) -> ReadState:
        """Ask the driver; its errors are terminal failures."""
        try:
            done = self._stage.copies_done(self._copies[handle][0])
        except RuntimeError as error:
            raise TransferError(f"copies between two GPUs: {error}") from error
        return ReadState.DONE if done else ReadState.RUNNING

    def release(self, handle: int) -> None:
        """Count a READ, and deliver its notification."""
        _, notification, counts = self._copies.pop(handle)
        self.totals += counts
        if notification:
            self._inbox.append(notification)

    def notifications(self) -> list[bytes]:
        """Return the notifications of READs that ended; this mover itself posted them."""
        taken, self._inbox = self._inbox, []
        return taken


def _check_slots(whose: str, slots: IndexArray, num_slots: int) -> None:
    if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < num_slots:
        raise TransferError(f"wanted {whose} slots in [0, {num_slots}), got {int(slots.min())} to {int(slots.max())}")


def _runs(
    request: ReadRequest, target: int, target_stride: int, source: int, source_stride: int
) -> list[tuple[int, int, int]]:
    """Return (address here, address there, bytes); neighbours are merged if slots have no gaps."""
    local, remote, size = request.local_slots, request.remote_slots, request.block_bytes
    counts = np.ones(len(local), np.int64)
    if target_stride == source_stride == size:
        local, remote, counts = merge_runs(local, remote, 1)
    here = target + local.astype(np.int64) * target_stride
    there = source + remote.astype(np.int64) * source_stride
    return list(zip(here.tolist(), there.tolist(), (counts * size).tolist(), strict=True))

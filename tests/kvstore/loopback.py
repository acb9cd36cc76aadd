"""A transport inside one process that copies memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.errors import PeerLost, TransferError
from kvstore.mover.transport import PeerDescription, ReadRequest, ReadState, ReadTotals, count_runs


@dataclass(slots=True)
class LoopbackNetwork:
    """The slabs and inboxes that loopback transports of one process share."""

    slabs: dict[bytes, npt.NDArray[np.uint8]] = field(default_factory=dict)
    inboxes: dict[bytes, list[bytes]] = field(default_factory=dict)


class LoopbackTransport:
    """Reads by memcpy inside one process: the same contract without NIXL."""

    def __init__(self, name: str, slab: npt.NDArray[np.uint8], network: LoopbackNetwork) -> None:
        self.totals = ReadTotals()
        self._name, self.slab, self._network = name.encode(), slab, network
        self._slot_bytes = 0
        self.peers: dict[str, PeerDescription] = {}
        self.handles: dict[int, ReadRequest] = {}
        self._next = 0
        network.slabs[self._name] = slab
        network.inboxes[self._name] = []

    def describe(self) -> bytes:
        """Return the name under which the network knows this slab."""
        return self._name

    def set_slots(self, slot_bytes: int, num_slots: int) -> None:
        """Remember the distance between slots."""
        self._slot_bytes = slot_bytes

    def add_peer(self, peer: str, description: PeerDescription) -> None:
        """Remember a peer."""
        self.peers[peer] = description

    def forget_peer(self, peer: str) -> None:
        """Forget a peer."""
        self.peers.pop(peer, None)

    def post(self, request: ReadRequest) -> int:
        """Copy at once; the handle is done from the start."""
        peer = self.peers.get(request.peer)
        if peer is None or peer.agent not in self._network.slabs:
            raise PeerLost(f"wanted a peer that was added, got {request.peer!r}")
        source, size = self._network.slabs[peer.agent], request.block_bytes
        for here, there in zip(request.local_slots.tolist(), request.remote_slots.tolist(), strict=True):
            if not 0 <= there < peer.num_slots:
                raise TransferError(f"wanted a remote slot in [0, {peer.num_slots}), got {there}")
            a, b = here * self._slot_bytes, there * peer.slot_bytes
            self.slab[a : a + size] = source[b : b + size]
        if request.notification:
            self._network.inboxes[peer.agent].append(request.notification)
        self._next += 1
        self.handles[self._next] = request
        return self._next

    def poll(self, handle: int) -> ReadState:
        """Return DONE."""
        return ReadState.DONE

    def release(self, handle: int) -> None:
        """Count the finished READ."""
        request = self.handles.pop(handle)
        num_runs = count_runs(request.local_slots, request.remote_slots)
        self.totals += ReadTotals(1, num_runs, request.block_bytes * len(request.local_slots))

    def notifications(self) -> list[bytes]:
        """Return and empty the inbox."""
        inbox = self._network.inboxes[self._name]
        taken, inbox[:] = list(inbox), []
        return taken

    def close(self) -> None:
        """Leave the network."""
        self._network.slabs.pop(self._name, None)

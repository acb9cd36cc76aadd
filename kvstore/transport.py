"""What a mover needs of a transfer engine, and an in-process engine for tests of logic.

A transport owns one registered slab and reads runs of peers' slots into it. It is driven by one thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.errors import PeerLost, TransferError
from kvstore.grants import IndexArray


class ReadState(Enum):
    """Where a posted READ is; DONE alone, and an error of `poll`, are terminal: nothing writes any more."""

    RUNNING = "running"
    DONE = "done"
    LOST = "lost"
    """It failed, but a part of it may still write for as long as this process lives. It is never released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDescription:
    """What a peer publishes so that others can read its slab; travels over the control connection.

    Args:
        agent: the peer's agent metadata, opaque.
        address: first byte of the slab in the peer's mover.
        slot_bytes: distance between its slots.
        num_slots: number of its slots.
        same_host: whether the peer is known to run on this machine.
        gpu: ordinal of the GPU in the peer's mover, when the slab is on one.
        into: the slab here that READs from it fill; 0 is the arena.
    """

    agent: bytes
    address: int
    slot_bytes: int
    num_slots: int
    same_host: bool = False
    gpu: int = 0
    into: int = 0


class ReadRequest(NamedTuple):
    """Blocks to read: `remote_slots[i]` of the peer into `local_slots[i]`, each `block_bytes` long.

    `notification` reaches the peer after the last byte was read; empty sends none.
    """

    peer: str
    block_bytes: int
    local_slots: IndexArray
    remote_slots: IndexArray
    notification: bytes = b""


@dataclass(slots=True)
class ReadTotals:
    """What the engine itself counted over all finished READs of this transport."""

    num_reads: int = 0
    num_descriptors: int = 0
    num_bytes: int = 0


class Transport(Protocol):
    """One agent with one registered slab."""

    @property
    def totals(self) -> ReadTotals:
        """What the engine itself counted over all finished READs."""

    def describe(self) -> bytes:
        """Return this side's agent metadata for peers."""

    def set_slots(self, slot_bytes: int, num_slots: int) -> None:
        """Say how the local slab is divided; called once, before the first READ."""

    def add_peer(self, peer: str, description: PeerDescription) -> None:
        """Make a peer readable under the name `peer`; an older one of that name is forgotten."""

    def forget_peer(self, peer: str) -> None:
        """Drop what is held for a peer; unknown names are ignored."""

    def post(self, request: ReadRequest) -> int:
        """Start a READ and return its handle, which must be polled until terminal and then released.

        A READ of which a part may have been started when it failed has a handle too, and is LOST.

        Raises:
            PeerLost: the peer is unknown or gone; nothing was started.
            TransferError: the engine refused; nothing was started.
        """

    def poll(self, handle: int) -> ReadState:
        """Return how a READ is doing.

        Raises:
            TransferError: it failed; that is terminal.
        """

    def release(self, handle: int) -> None:
        """Drop the handle of a terminal READ and add it to `totals`."""

    def notifications(self) -> list[bytes]:
        """Return notifications of peers' finished READs since the last call."""

    def close(self) -> None:
        """Drop handles, lists and the agent, in this order."""


@dataclass(slots=True)
class LoopbackNetwork:
    """The slabs and inboxes that loopback transports of one process share."""

    slabs: dict[bytes, npt.NDArray[np.uint8]] = field(default_factory=dict)
    inboxes: dict[bytes, list[bytes]] = field(default_factory=dict)


class LoopbackTransport:
    """Reads by memcpy inside one process: the same contract with no engine, for tests of logic."""

    def __init__(self, name: str, slab: npt.NDArray[np.uint8], network: LoopbackNetwork) -> None:
        self.totals = ReadTotals()
        self._name, self._slab, self._network = name.encode(), slab, network
        self._slot_bytes = 0
        self._peers: dict[str, PeerDescription] = {}
        self._handles: dict[int, ReadRequest] = {}
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
        self._peers[peer] = description

    def forget_peer(self, peer: str) -> None:
        """Forget a peer."""
        self._peers.pop(peer, None)

    def post(self, request: ReadRequest) -> int:
        """Copy at once; the handle is done from the start."""
        peer = self._peers.get(request.peer)
        if peer is None or peer.agent not in self._network.slabs:
            raise PeerLost(f"wanted a peer that was added, got {request.peer!r}")
        source, size = self._network.slabs[peer.agent], request.block_bytes
        for here, there in zip(request.local_slots.tolist(), request.remote_slots.tolist(), strict=True):
            if not 0 <= there < peer.num_slots:
                raise TransferError(f"wanted a remote slot in [0, {peer.num_slots}), got {there}")
            a, b = here * self._slot_bytes, there * peer.slot_bytes
            self._slab[a : a + size] = source[b : b + size]
        if request.notification:
            self._network.inboxes[peer.agent].append(request.notification)
        self._next += 1
        self._handles[self._next] = request
        return self._next

    def poll(self, handle: int) -> ReadState:
        """Return DONE."""
        return ReadState.DONE

    def release(self, handle: int) -> None:
        """Count the finished READ."""
        request = self._handles.pop(handle)
        self.totals.num_reads += 1
        self.totals.num_bytes += request.block_bytes * len(request.local_slots)
        self.totals.num_descriptors += count_runs(request.local_slots, request.remote_slots)

    def notifications(self) -> list[bytes]:
        """Return and empty the inbox."""
        inbox = self._network.inboxes[self._name]
        taken, inbox[:] = list(inbox), []
        return taken

    def close(self) -> None:
        """Leave the network."""
        self._network.slabs.pop(self._name, None)


def count_runs(local_slots: IndexArray, remote_slots: IndexArray) -> int:
    """Return how many runs of blocks are neighbours, in order, on both sides."""
    if len(local_slots) == 0:
        return 0
    breaks = (np.diff(local_slots) != 1) | (np.diff(remote_slots) != 1)
    return int(breaks.sum()) + 1

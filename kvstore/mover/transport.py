"""The interface between a mover and its transfer backend.

A transport owns one registered slab and reads runs of peers' slots into it. It is driven by one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from kvstore.blocks.codec import U32, U64, Record
from kvstore.blocks.indexes import IndexArray
from kvstore.kernels.merging import begins_of_runs


class ReadState(Enum):
    """The state of a posted READ. Only DONE, or an error of `poll`, is terminal: nothing writes any more."""

    RUNNING = "running"
    DONE = "done"
    LOST = "lost"
    """It failed, but a part of it may still write while this process lives. It is never released."""


class PeerDescription(Record, frozen=True, kw_only=True):
    """The data with which others can read a peer's slab; travels over the control connection.

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
    address: U64
    slot_bytes: U64
    num_slots: U64
    same_host: bool = False
    gpu: U32 = 0
    into: U32 = 0


class ReadRequest(Record, frozen=True):
    """Blocks to read: `remote_slots[i]` of the peer into `local_slots[i]`, each `block_bytes` long.

    `notification` reaches the peer after the last byte was read; empty sends none.
    """

    peer: str
    block_bytes: U32
    local_slots: IndexArray
    remote_slots: IndexArray
    notification: bytes = b""

    def __post_init__(self) -> None:
        if len(self.local_slots) != len(self.remote_slots):
            raise ValueError(f"{len(self.local_slots)} slots here, {len(self.remote_slots)} at the peer")


@dataclass(frozen=True, slots=True)
class ReadTotals:
    """The transfer backend's own counts over all finished READs of this transport."""

    num_reads: int = 0
    num_descriptors: int = 0
    num_bytes: int = 0

    def __add__(self, other: ReadTotals) -> ReadTotals:
        descriptors, num_bytes = self.num_descriptors + other.num_descriptors, self.num_bytes + other.num_bytes
        return ReadTotals(self.num_reads + other.num_reads, descriptors, num_bytes)

    def __sub__(self, other: ReadTotals) -> ReadTotals:
        return self + ReadTotals(-other.num_reads, -other.num_descriptors, -other.num_bytes)


class ReadTransport(Protocol):
    """Reads into one slab."""

    @property
    def totals(self) -> ReadTotals:
        """The transfer backend's own counts over all finished READs."""

    def add_peer(self, peer: str, description: PeerDescription) -> None:
        """Make a peer readable under the name `peer`; an older one of that name is forgotten."""

    def forget_peer(self, peer: str) -> None:
        """Drop the data that is held for a peer; unknown names are ignored."""

    def post(self, request: ReadRequest) -> int:
        """Start a READ and return its handle, which must be polled until terminal and then released.

        A READ that failed after a part of it may have been started has a handle too, and is LOST.

        Raises:
            PeerLost: the peer is unknown or gone; nothing was started.
            TransferError: the transfer backend refused; nothing was started.
        """

    def poll(self, handle: int) -> ReadState:
        """Return the state of a READ.

        Raises:
            TransferError: it failed; that is terminal.
        """

    def release(self, handle: int) -> None:
        """Drop the handle of a terminal READ and add it to `totals`."""

    def notifications(self) -> list[bytes]:
        """Return notifications of peers' finished READs since the last call."""


class Transport(ReadTransport, Protocol):
    """One agent with one registered slab, which it owns and which peers can read."""

    def describe(self) -> bytes:
        """Return this side's agent metadata for peers."""

    def set_slots(self, slot_bytes: int, num_slots: int) -> None:
        """Set the division of the local slab into slots; called once, before the first READ."""

    def close(self) -> None:
        """Drop handles, lists and the agent, in this order."""


def count_runs(local_slots: IndexArray, remote_slots: IndexArray) -> int:
    """Return how many runs of blocks are neighbours, in order, on both sides."""
    return int(np.count_nonzero(begins_of_runs(local_slots, remote_slots, 1)))

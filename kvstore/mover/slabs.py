"""All slabs of one mover behind one transport: the arena, and a stage on each GPU that hands blocks off.

The mover allocates the stages: NIXL can offer to other processes only memory that its own process has allocated.
Workers map them. Each slab has its own agents, so that slabs do not affect each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvstore.errors import PeerLost, RegistrationFailed
from kvstore.mover.gpu_copies import Neighbours, StageMemory
from kvstore.mover.messages import NewStage, Spill, StageMade
from kvstore.mover.transport import PeerDescription, ReadRequest, ReadState, ReadTotals, ReadTransport, Transport

logger = logging.getLogger(__name__)


class Stage(StageMemory, Protocol):
    """Memory on one GPU, registered with a transfer backend."""

    @property
    def transport(self) -> Transport:
        """The transport that reads into it."""

    @property
    def handle(self) -> bytes:
        """The handle by which a worker maps it."""

    def copy_out(self, target: int, offset: int, num_bytes: int) -> None:
        """Copy bytes from `offset` of the stage to an address in host memory."""

    def close(self) -> None:
        """Close the transport, then free the memory."""


#: Makes a stage of a size on the GPU with a UUID; the first argument names its agents.
MakeStage = Callable[[str, str, int], Stage]


@dataclass(frozen=True, slots=True)
class _Made:
    """A stage, what it was made for, and the copies into it from other stages."""

    stage: Stage
    wanted: NewStage
    answer: StageMade
    neighbours: Neighbours


class Slabs:
    """A `Transport` over several slabs; a peer's slab is read into the slab that its description names.

    Args:
        name: of the arena's agent; stages derive theirs from it.
        arena: slab 0.
        arena_address: its first byte.
        make_stage: makes the other slabs.
    """

    def __init__(self, name: str, arena: Transport, arena_address: int, make_stage: MakeStage) -> None:
        self._name, self._arena, self._arena_address, self._make_stage = name, arena, arena_address, make_stage
        self._stages: dict[int, _Made] = {}
        self.into: dict[str, ReadTransport] = {}
        self._handles: dict[int, tuple[ReadTransport, int]] = {}
        self._next = self._num_made = self._slot_bytes = 0

    def _all(self) -> list[ReadTransport]:
        made = self._stages.values()
        return [self._arena, *(each.stage.transport for each in made), *(each.neighbours for each in made)]

    @property
    def totals(self) -> ReadTotals:
        """The transfer backend's counts on all slabs."""
        return sum((transport.totals for transport in self._all()), ReadTotals())

    def describe(self) -> bytes:
        """Return the arena's agent metadata."""
        return self._arena.describe()

    def set_slots(self, slot_bytes: int, num_slots: int) -> None:
        """Set the division of the arena into slots."""
        self._slot_bytes = slot_bytes
        self._arena.set_slots(slot_bytes, num_slots)

    def stage(self, wanted: NewStage) -> StageMade:
        """Make a stage for a GPU; return how to reach it.

        If the answer came too late for the store, it asks again for that GPU. No other process knows of that stage, so
        the store gets it now if the request is the same; a stage of another size replaces it.

        Raises:
            RegistrationFailed: there is no such GPU, or it does not have that much memory; nothing is held.
        """
        uuid, slot_bytes, num_slots = wanted.uuid, wanted.slot_bytes, wanted.num_slots
        for known in list(self._stages.values()):
            if known.wanted == wanted:
                return known.answer
            if known.wanted.uuid == uuid:
                del self._stages[known.answer.slab]
                known.stage.close()
        self._num_made += 1
        number = self._num_made
        try:
            stage = self._make_stage(f"{self._name}-stage{number}", uuid, slot_bytes * num_slots)
        except RuntimeError as error:
            raise RegistrationFailed(f"could not stage {num_slots} blocks on GPU {uuid}: {error}") from error
        stage.transport.set_slots(slot_bytes, num_slots)
        logger.info("mover: stage %d of %d bytes on GPU %s", number, slot_bytes * num_slots, uuid)
        answer = StageMade(number, stage.transport.describe(), stage.address, stage.gpu, stage.handle)
        self._stages[number] = _Made(stage, wanted, answer, Neighbours(stage, slot_bytes, num_slots))
        return answer

    def spill(self, wanted: Spill) -> None:
        """Copy slots of a stage into slots of the arena, for readers that cannot reach the stage."""
        made = self._stages.get(wanted.slab)
        if made is None:
            raise PeerLost(f"wanted a stage of this mover, got slab {wanted.slab}")
        for source, target in zip(wanted.slots.tolist(), wanted.into.tolist(), strict=True):
            address = self._arena_address + target * self._slot_bytes
            made.stage.copy_out(address, source * made.wanted.slot_bytes, wanted.block_bytes)

    def add_peer(self, peer: str, description: PeerDescription) -> None:
        """Make a peer's slab readable; see `Transport`."""
        made = self._stages.get(description.into)
        if description.into and made is None:
            raise PeerLost(f"wanted a stage of this mover, got slab {description.into}")
        if made is None:
            self.into[peer] = self._arena
        elif any(description.agent == each.answer.agent for each in self._stages.values()):
            self.into[peer] = made.neighbours
        else:
            self.into[peer] = made.stage.transport
        self.into[peer].add_peer(peer, description)

    def forget_peer(self, peer: str) -> None:
        """Drop the data that is held for a peer."""
        if (transport := self.into.pop(peer, None)) is not None:
            transport.forget_peer(peer)

    def post(self, request: ReadRequest) -> int:
        """Start a READ; see `Transport`."""
        transport = self.into.get(request.peer)
        if transport is None:
            raise PeerLost(f"wanted a peer that was added, got {request.peer!r}")
        handle = transport.post(request)
        self._next += 1
        self._handles[self._next] = (transport, handle)
        return self._next

    def poll(self, handle: int) -> ReadState:
        """Return the state of a READ; see `Transport`."""
        transport, inner = self._handles[handle]
        return transport.poll(inner)

    def release(self, handle: int) -> None:
        """Drop the handle of a terminal READ."""
        transport, inner = self._handles.pop(handle)
        transport.release(inner)

    def notifications(self) -> list[bytes]:
        """Return notifications of all slabs."""
        return [note for transport in self._all() for note in transport.notifications()]

    def close(self) -> None:
        """Close every slab."""
        self._arena.close()
        for made in self._stages.values():
            made.stage.close()
        self._stages.clear()

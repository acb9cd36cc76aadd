"""The stages of one node, as its store sees them: GPU memory for hand-offs.

A stage belongs to the mover, and ends with it. It has its own pool, so its slots are claimed, quarantined and given
back by the same rules as those of the arena.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvstore.config import StoreConfig
from kvstore.errors import ConfigError, PeerLost
from kvstore.mover.link import MoverLink
from kvstore.mover.messages import NewStage, decode_stage_made
from kvstore.mover.transport import PeerDescription
from kvstore.pool.pool import Pool
from kvstore.rpc.framing import Op
from kvstore.rpc.handoff_messages import StageFound

#: Slots behind those of the pool are at least this long in all. Warming a lane up reads into them.
WARM_BYTES = 8 << 20
_MAKE_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stage:
    """One stage, for one life of the mover.

    Args:
        slab: its number in that mover.
        generation: which life.
        uuid: of the GPU.
        handle: a worker maps the stage by it.
        description: tells peers how to read it.
        pool: of its slots.
    """

    slab: int
    generation: int
    uuid: str
    handle: bytes
    description: PeerDescription
    pool: Pool

    @property
    def warm_slots(self) -> range:
        """Slots behind those of the pool, which never hold blocks, for warming up."""
        return range(self.pool.num_slots, self.description.num_slots)

    def found(self) -> StageFound:
        """Return the description of this stage for clients and peers."""
        told = self.description
        return StageFound(
            slab=self.slab, generation=self.generation, uuid=self.uuid, handle=self.handle, agent=told.agent,
            address=told.address, gpu=told.gpu, slot_bytes=told.slot_bytes, num_slots=told.num_slots,
            num_warm=len(self.warm_slots),
        )  # fmt: skip


class StageBook:
    """The stages of this node's GPUs.

    Args:
        config: of the store.
        mover: makes the stages.
    """

    def __init__(self, config: StoreConfig, mover: MoverLink) -> None:
        self._config, self._mover = config, mover
        self._making = threading.Lock()
        self._stages: dict[int, Stage] = {}

    def get(self, slab: int, generation: int) -> Stage:
        """Return a stage that was made.

        Raises:
            PeerLost: the mover that had it is gone.
        """
        for stage in self.all():
            if (stage.slab, stage.generation) == (slab, generation):
                return stage
        raise PeerLost("the mover that had this stage is gone, and its blocks with it; attach the hand-off again")

    def all(self) -> list[Stage]:
        """Return the stages of the present mover."""
        own = self._mover.own
        return [stage for stage in self._stages.values() if own is not None and stage.generation == own.generation]

    def make(self, uuid: str, num_bytes: int, block_bytes: int) -> Stage:
        """Return the stage of a GPU. If there is none, make it, and block until it is made.

        Raises:
            ConfigError: the slots of the stage are smaller than these blocks, or the store has lane="tcp".
            RegistrationFailed: the mover could not make it; nothing is held.
            PeerLost, TransferTimeout: the mover is gone, or does not answer.
        """
        if self._config.lane == "tcp":
            raise ConfigError(
                "a store with lane='tcp' reads from GPU to GPU over TCP alone, slower than through memory"
            )
        with self._making:
            own = self._mover.own
            if own is None:
                raise PeerLost("the mover of this node is being replaced; try again")
            for stage in self.all():
                if stage.uuid == uuid:
                    if stage.description.slot_bytes < block_bytes:
                        raise ConfigError(
                            f"the stage of this GPU has slots of {stage.description.slot_bytes} bytes, got blocks of "
                            f"{block_bytes}; attach the client with the largest blocks first"
                        )
                    return stage
            slot_bytes = -(-block_bytes // 512) * 512
            num_slots, num_warm = num_bytes // slot_bytes, -(-WARM_BYTES // slot_bytes)
            if num_slots < 2:
                raise ConfigError(f"wanted room for at least 2 blocks of {slot_bytes} bytes, got {num_bytes} bytes")
            question = NewStage(uuid, slot_bytes, num_slots + num_warm)
            answer = decode_stage_made(self._mover.ask(Op.MOVER_STAGE, question, _MAKE_WITHIN_S))
            if self._mover.own is not own:
                raise PeerLost("the mover of this node was replaced meanwhile; try again")
            made = Stage(
                slab=answer.slab,
                generation=own.generation,
                uuid=uuid,
                handle=answer.handle,
                description=PeerDescription(
                    agent=answer.agent,
                    address=answer.address,
                    slot_bytes=slot_bytes,
                    num_slots=num_slots + num_warm,
                    gpu=answer.gpu,
                ),
                pool=Pool(num_slots),
            )
            self._stages = {s.slab: s for s in self.all()} | {made.slab: made}
            return made

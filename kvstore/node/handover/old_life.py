"""Begin a node store with the memory of the store's last life."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

from kvstore.config import StoreConfig
from kvstore.errors import KVStoreError
from kvstore.memory.arena import Arena
from kvstore.memory.slot_layout import SLOT_ALIGNMENT_BYTES
from kvstore.node.handover.message import Held, Message
from kvstore.node.handover.processes import OldProcesses, OldUse
from kvstore.node.state import NodeState
from kvstore.pool.handover.adoption import OLD_READER, OLD_WRITER
from kvstore.pool.handover.image import PoolImage
from kvstore.remote.versions import NamespaceVersions
from kvstore.runtime import clock
from kvstore.runtime.life import log_life

logger = logging.getLogger(__name__)

#: How long a store with old blocks waits for the directory, which says what was cleared between the two lives.
MEETS_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a node store began.

    Args:
        is_warm: whether it has the memory of the last life.
        num_blocks: of that life, readable when it began.
        num_held_slots: slots that old processes may still use.
        why_cold: why it began empty; "" if it is warm, or if there was nothing to take over.
    """

    is_warm: bool = False
    num_blocks: int = 0
    num_held_slots: int = 0
    why_cold: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return this as plain values."""
        return asdict(self)


class OldLife:
    """The arena of a store's last life, which has ended, and what it said. Used by one `NodeCore`.

    Args:
        arena: mapped; the node core closes it.
        message: of the last life.
        image: of its pool, checked.
        pidfds: of the processes that the message refers to; owned by this object.
    """

    def __init__(self, arena: Arena, message: Message, image: PoolImage, pidfds: tuple[int, ...]) -> None:
        self.arena, self._message, self._image = arena, message, image
        self._state: NodeState | None = None
        self.processes = OldProcesses(pidfds, uses_of(message, pidfds), self._release)
        self.beginning = Beginning()

    def begin(self, state: NodeState) -> None:
        """Take over the blocks, before anyone can reach the store, and then meet the directory.

        What was cleared between the two lives is a miss. The directory knows it. If it does not answer, or is not the
        one that the last life knew, nothing is kept.

        Raises:
            KVStoreError: the blocks cannot be taken over; this store must not go on with this arena.
        """
        self._adopt(state)
        until_s = clock.now_s() + MEETS_WITHIN_S
        state.hints.start(MEETS_WITHIN_S)
        has_met = state.hints.has_met.wait(max(0.0, until_s - clock.now_s()))  # The first try may fail at once.
        why, pool = "", state.pool_service.current
        if not has_met:
            why = "the directory did not answer, so a clearing in between may be unknown"
        elif state.hints.met != self._message.directory:
            why = "the directory was restarted meanwhile, so a clearing in between may be unknown"
        if why:
            for namespace in self._message.block_bytes:
                pool.clear(namespace)
        else:
            self._offer_to_disk(state)
        stats = pool.stats()
        num_held = sum(len(held.slots) for held in self._image.writers)
        self.beginning = Beginning(not why, stats.num_idle + stats.num_pinned, num_held, why)
        log_life(
            "cold_start" if why else "warm_restart",
            store=state.config.name,
            node=state.node_id,
            num_held_slots=num_held,
            num_blocks=self.beginning.num_blocks,
            reason=why or None,
        )
        self.processes.start()

    def _adopt(self, state: NodeState) -> None:
        message, image, versions, service = self._message, self._image, state.versions, state.pool_service
        self._state, theirs = state, NamespaceVersions()
        theirs.hear_all(message.versions)
        versions.hear_all(message.versions)
        state.presence.clears.continue_from(message.clears)
        service.adopt(message.slot_bytes, message.block_bytes, image)
        if state.disk is not None:
            state.disk.wait_begun({})
        for namespace in message.namespaces:
            if versions.get(namespace) != theirs.get(namespace):  # The disk knows a later clearing.
                service.current.clear(namespace)

    def _offer_to_disk(self, state: NodeState) -> None:
        """Have written what the last life has not written yet, now that it is known what was cleared meanwhile."""
        if (disk := state.disk) is None:
            return
        blocks = self._image.blocks
        for number, namespace in enumerate(self._message.namespaces):
            disk.offer(namespace, blocks.slot[blocks.space == number].tolist(), "old-life")

    def _release(self, owner: str) -> None:
        assert self._state is not None, "released only after `settle`"
        num_freed = self._state.pool_service.current.release_owner(owner)
        if num_freed:  # A lease whose time has passed has ended by itself.
            logger.info("%s: the workers of the old store that had these slots are gone, so the slots are free", owner)


def uses_of(message: Message, pidfds: tuple[int, ...]) -> list[OldUse]:
    """Return what has to be over before slots may be used again, by the owners that `adopt` gives them.

    Leases that only their time ends are left out: they end in the pool.
    """

    def of(owner: str, held: Held, *, is_read: bool) -> OldUse:
        return OldUse(owner, held.until_s, tuple(pidfds[at] for at in held.processes), is_read)

    writers = [of(f"{OLD_WRITER}{at}", held, is_read=held.is_read) for at, held in enumerate(message.writers)]
    readers = [of(f"{OLD_READER}{at}", held, is_read=True) for at, held in enumerate(message.readers) if held.processes]
    return writers + readers


def check_is_of(message: Message, config: StoreConfig, node_id: str) -> None:
    """Check that a message is of an earlier life of this node's store, and describes one arena.

    Raises:
        KVStoreError: it is not.
    """
    why = ""
    if (message.store, message.node) != (config.name, node_id):
        why = f"it is the memory of store {message.store!r} on node {message.node}"
    elif len(message.generations) // 4 != message.capacity_bytes // max(message.slot_bytes, 1):
        why = f"it has {len(message.generations) // 4} slots of {message.slot_bytes} bytes"
    elif not message.slot_bytes or message.slot_bytes % SLOT_ALIGNMENT_BYTES:
        why = f"it has slots of {message.slot_bytes} bytes, not a multiple of {SLOT_ALIGNMENT_BYTES}"
    elif min(message.block_bytes.values(), default=0) < 1:
        why = "it has no sizes of blocks, or a size of 0"
    elif max(message.block_bytes.values()) > message.slot_bytes:
        why = f"it has blocks of {max(message.block_bytes.values())} bytes in slots of {message.slot_bytes}"
    if why:
        raise KVStoreError(why)

"""Publishing: claim slots, copy blocks into them, have the store keep them."""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
from collections.abc import Callable, Sized
from typing import cast

import numpy as np

from kvstore.blocks.codec import decode_count, decode_indexes, encode
from kvstore.blocks.indexes import IndexArray, checked_slots
from kvstore.blocks.ticket import HandoffTicket
from kvstore.client.connections import StoreConnections
from kvstore.client.handoff.stage_link import AttachedStage
from kvstore.client.work import CopyGuard
from kvstore.engine.copier import EngineCopier, EnginePages, job_pages
from kvstore.errors import (
    CopyStuck,
    InvalidRequest,
    KernelError,
    KVStoreError,
    ProtocolError,
    StoreUnavailable,
    TransferTimeout,
)
from kvstore.rpc.framing import Op
from kvstore.rpc.handoff_messages import AbortHandoff, CompleteHandoff, PrepareHandoff

logger = logging.getLogger(__name__)

#: Time within which a store that was woken before answers a claim of stage slots.
_AWAKE_S = 5e-4


def num_published(block_ids: object, engine_block_size: int, stored_block_size: int) -> int:
    """Return how many stored blocks fit in engine blocks that are published whole.

    Raises:
        InvalidRequest: there are no engine blocks, or they are not a whole number of stored blocks.
    """
    try:
        count = len(cast(Sized, block_ids))
    except TypeError:  # An array of no dimension has a len() that raises.
        raise InvalidRequest(
            f"block_ids: wanted a list of engine blocks, got {type(block_ids).__name__}; pass the ids of a "
            "request's blocks, in order"
        ) from None
    num_blocks, left = divmod(count * engine_block_size, stored_block_size)
    if not num_blocks or left:
        # The smallest number of engine blocks that makes whole stored blocks; multiples of it do too.
        step = math.lcm(engine_block_size, stored_block_size) // engine_block_size
        raise InvalidRequest(
            f"block_ids: wanted at least {step} engine block{'s, and a multiple of that' if step > 1 else ''}, got "
            f"{count}; engine blocks of {engine_block_size} tokens are published as whole blocks of "
            f"{stored_block_size}, so publish more or fewer of them"
        )
    return num_blocks


class Publishing:
    """Blocks that are being copied into slots.

    Once slots are claimed, a fetch of the ticket waits until `complete` has told the store that the bytes are in place,
    or will not be. Until then this object owns the slots, even if the ticket ends: the store is told of a failure only
    when no copy runs any more.

    Args:
        ticket: the ticket under which they are published.
        name: of the ticket, with what its blocks are.
        block_ids: the engine's blocks; not read before `order`.
        copier: copies between the engine's cache and the memory of the slots.
        stage: that memory; None for the arena.
        store: connections to the store that keeps the blocks.
        ttl_s: how long they are kept once they are in place.
        num_clears: the namespace's count of clearings when `publish` was called.
    """

    pages: EnginePages
    guard: CopyGuard

    def __init__(
        self,
        ticket: HandoffTicket,
        name: bytes,
        block_ids: object,
        copier: EngineCopier,
        stage: AttachedStage | None,
        store: StoreConnections,
        ttl_s: float,
        num_clears: int,
    ) -> None:
        self.ticket, self.name, self._writer = ticket, name, secrets.randbits(64)
        self._block_ids, self._copier, self.stage, self._store = block_ids, copier, stage, store
        self._ttl_s, self._num_clears = ttl_s, num_clears
        self._slots: IndexArray = np.empty(0, np.int32)

    def __str__(self) -> str:
        return f"publication of {self.ticket.num_blocks} blocks"

    def order(self) -> None:
        """Fix the blocks to copy, and order the copies after the calling thread's stream.

        Raises:
            InvalidRequest: the blocks are not the engine's, or copies cannot be ordered after that stream.
            LayoutMismatch, KernelError: the cache is not as it was registered, or the device failed.
        """
        self.pages = job_pages(self._block_ids, self._copier, 0, self.ticket.num_blocks)
        self.guard = CopyGuard(self.pages.order)
        self._copier.check_unchanged()

    def claim(self, ask: Callable[[Op, bytes], bytes]) -> None:
        """Claim slots of the stage, or else of the arena. For the arena, call `order` first.

        `ask` uses the connection that owns the slots while they are written.

        Raises:
            PoolExhausted: the store has no room for all of them; nothing is kept.
            StaleVersion: the namespace was cleared since `publish` was called; nothing is kept.
            KVStoreError: the store failed; nothing is kept.
        """
        ticket, stage = self.ticket, self.stage
        slab, generation = (stage.slab, stage.generation) if stage is not None else (0, 0)
        question = PrepareHandoff(
            self.name, self._writer, ticket.namespace, ticket.num_blocks, slab, generation, self._num_clears
        )
        try:
            slots = decode_indexes(ask(Op.HANDOFF_PREPARE, encode(question)))
            self._slots = checked_slots(slots, ticket.num_blocks, self._copier.num_slots, is_whole=True)
        except (TransferTimeout, ProtocolError):
            self._void()  # Slots may be granted all the same; only this publisher knows that it writes nothing.
            raise

    def begin(self) -> None:
        """Claim slots of the stage, call `order` meanwhile, and queue the copies into them.

        Raises:
            KVStoreError: as for `order` and `claim`, or the copies could not be queued; nothing is kept.
            CopyStuck: not all copies could be queued, and some of the queued ones did not end; see `drop`.
        """
        stage, failed = self.stage, list[Exception]()
        assert stage is not None, "the arena is copied to by `complete`"

        def prepare() -> None:
            try:
                self.order()
                stage.copier.expect(self.pages, [self.ticket.num_blocks], to_slots=True)
            except Exception as error:  # noqa: BLE001 - Raised once the answer was read.
                failed.append(error)

        self.claim(lambda op, payload: self._store.call(op, payload, prepare, _AWAKE_S))
        try:
            if failed:
                raise failed[0]
        except BaseException:
            self._void()
            raise
        try:
            with self.guard.copying:
                self.guard.check()
                stage.copier.begin_into_slots(self.pages, np.arange(len(self._slots)), self._slots.astype(np.int64))
        except BaseException:
            self.drop()
            raise

    def hold_engine(self) -> None:
        """Make work that the engine queues from now on wait for the copies. On a CPU they are done."""
        if self.pages.order is not None:
            self.pages.order.hold_engine()

    def complete(self) -> HandoffTicket:
        """Return the ticket when the bytes are in place and kept. Any thread may call it once slots are claimed.

        Raises:
            CopyStuck: the copies did not end; the slots stay taken until this process ends.
            KVStoreError: the copies or the store failed; the ticket is void.
        """
        try:
            if self.stage is not None:
                if self.stage.copier.await_begun(self.pages):
                    # The blocks were still being computed. Wake a waiting reader while they are packed.
                    with contextlib.suppress(KVStoreError):
                        self._store.say(Op.HANDOFF_PACKING, encode(self.name))
                self.stage.copier.finish(self.pages)
            else:
                with self.guard.copying:
                    self.guard.check()
                    self._copier.into_slots(self.pages, np.arange(len(self._slots)), self._slots.astype(np.int64))
            self._copier.check_unchanged()
            payload = encode(CompleteHandoff(self.name, self._writer, self._ttl_s))
            kept = decode_count(self._store.call(Op.HANDOFF_COMPLETE, payload))
        except CopyStuck:
            raise
        except BaseException:
            self.drop()
            raise
        if not kept:
            raise StoreUnavailable("these blocks were withdrawn or cleared while they were copied; publish them again")
        return self.ticket

    def drop(self) -> None:
        """Void the ticket instead of `complete`, once all queued copies have ended.

        Raises:
            CopyStuck: they have not ended in time; the slots stay taken until this process ends.
        """
        try:
            self._copier.finish(self.pages)
        except CopyStuck:
            raise
        except KernelError as error:
            logger.debug("%s: %s", self, error)  # Nothing is copied any more.
        self._void()

    def _void(self) -> None:
        """Tell the store, again if needed, that no copy of this runs any more: only this publisher knows."""
        self._store.retelling.tell(Op.HANDOFF_ABORT, encode(AbortHandoff(self.name, self._writer)))

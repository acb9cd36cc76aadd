"""What publishing and fetching do on a thread of the client."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sized
from dataclasses import dataclass

import numpy as np

from kvstore.config import StoreConfig
from kvstore.control_client import Answers, ControlClient
from kvstore.engine_copy import EngineCopier, EnginePages, engine_pages
from kvstore.errors import (
    CopyStuck,
    InvalidRequest,
    JobAbandoned,
    KVStoreError,
    LayoutMismatch,
    NamespaceMismatch,
    RegistrationFailed,
    StoreUnavailable,
    TransferError,
)
from kvstore.handoff import FetchResult, HandoffTicket
from kvstore.handoff_messages import (
    END,
    FetchRequest,
    pack_complete_handoff,
    pack_fetch,
    pack_prepare_handoff,
)
from kvstore.hashing import Namespace
from kvstore.jobs import Answer, CopyGuard, failed_load
from kvstore.messages import STAGE_BIT, U64, unpack_ints
from kvstore.shape import BLOCK_ORDER_VERSION
from kvstore.stage_client import AttachedStage
from kvstore.transport import IndexArray
from kvstore.wire import Op

#: Asks the store: (what, payload, what to do meanwhile).
Ask = Callable[[Op, bytes, Callable[[], None] | None], bytes]


def published_pages(block_ids: object, copier: EngineCopier, stored_block_size: int) -> tuple[EnginePages, int]:
    """Return (where their tokens lie, number of stored blocks) of engine blocks that are published whole.

    Raises:
        InvalidRequest: no blocks, no integers, a block out of range or named twice, or no whole stored blocks.
    """
    engine = copier.layout.block_size
    num_tokens = engine * (len(block_ids) if isinstance(block_ids, Sized) else 0)
    num_blocks = num_tokens // stored_block_size
    pages = engine_pages(block_ids, copier.layout, stored_block_size, 0, max(1, num_blocks))
    if num_tokens % stored_block_size:
        raise InvalidRequest(
            f"block_ids: wanted whole blocks of {stored_block_size} tokens, got {len(pages.ids)} engine blocks of "
            f"{engine} tokens; publish more or fewer of them"
        )
    return pages, num_blocks


def check_ticket(ticket: HandoffTicket, space: Namespace, part: tuple[int, int, int, int]) -> None:
    """Refuse a ticket that this client cannot fetch, whatever its store says.

    Raises:
        InvalidRequest: no ticket.
        NamespaceMismatch: of another namespace.
        LayoutMismatch: of another part of the blocks, or of blocks in another order of bytes.
    """
    if not isinstance(ticket, HandoffTicket):
        raise InvalidRequest(f"ticket: wanted a HandoffTicket of Client.publish, got {type(ticket).__name__}")
    if ticket.namespace != space.digest:
        raise NamespaceMismatch(
            f"wanted a ticket of namespace {space.digest.hex()[:12]} ({space.model!r}), got one of "
            f"{ticket.namespace.hex()[:12]}; publish and fetch with one space"
        )
    wanted = (part, space.shape.block_bytes, BLOCK_ORDER_VERSION)
    got = (ticket.part, ticket.block_bytes, ticket.block_order)
    if got != wanted:
        raise LayoutMismatch(
            f"ticket: wanted (part, block bytes, byte order) {wanted}, got {got}; publish and fetch with clients "
            "of the same part, and run one version of raykv everywhere"
        )


def check_named(
    ticket: HandoffTicket, space: Namespace, part: tuple[int, int, int, int], node_id: str, epoch: str
) -> None:
    """Refuse a ticket under which this client cannot publish.

    Raises:
        InvalidRequest, NamespaceMismatch, LayoutMismatch: as for `check_ticket`, and for a ticket of another store.
    """
    check_ticket(ticket, space, part)
    if (ticket.node_id, ticket.epoch.hex()) != (node_id, epoch):
        raise InvalidRequest(
            f"ticket: wanted one of this client's store (node {node_id}, epoch {epoch}), got one of node "
            f"{ticket.node_id}, epoch {ticket.epoch.hex()}; make it with this client's node_id and epoch"
        )


def prepare_publish(
    ask: Ask, keep: Ask, ticket: HandoffTicket, generation: int, ahead: Callable[[], None] | None = None
) -> IndexArray:
    """Claim slots for the blocks of a ticket; from now on a fetch of it waits until the bytes are there.

    Args:
        ask: asks over the connection that owns the slots while they are written.
        keep: asks over the one that keeps them afterwards.
        ticket: what they are published as.
        generation: the life of the mover that has the stage which the ticket names; 0 takes the arena.
        ahead: prepares the copy while the store looks for slots.

    Returns:
        A slot for each block.

    Raises:
        PoolExhausted: the store has no room for all of them; nothing is kept.
        KVStoreError: the store or `ahead` failed; nothing is kept.
    """
    slab = ticket.slab if generation else 0
    question = pack_prepare_handoff(ticket.key, ticket.namespace, ticket.num_blocks, slab, generation)
    preparing = _Ahead(ahead)
    slots = unpack_ints(ask(Op.HANDOFF_PREPARE, question, preparing.run))
    if preparing.error is not None:
        with contextlib.suppress(KVStoreError):
            keep(Op.HANDOFF_WITHDRAW, ticket.key, None)
        raise preparing.error
    return slots


def complete_publish(
    keep: Ask,
    copier: EngineCopier,
    pages: EnginePages,
    slots: IndexArray,
    ticket: HandoffTicket,
    ttl_s: float,
    guard: CopyGuard,
) -> HandoffTicket:
    """Copy blocks into the slots of `prepare_publish` and have them kept.

    Args:
        keep: asks over the connection that keeps them.
        copier: the engine's cache.
        pages: where the blocks' tokens lie in the engine.
        slots: one for each block.
        ticket: what they are published as.
        ttl_s: how long they are kept.
        guard: stands before the copy.

    Raises:
        KVStoreError: the copy or the store failed; nothing is kept for longer than `ttl_s`.
    """
    try:
        with guard.copying():
            copier.into_slots(pages, np.arange(len(slots)), slots.astype(np.int64))
        kept = U64.unpack(keep(Op.HANDOFF_COMPLETE, pack_complete_handoff(ticket.key, ttl_s), None))[0]
    except CopyStuck:
        raise  # The slots may still be written: they stay taken until this process ends.
    except BaseException:
        with contextlib.suppress(KVStoreError):
            keep(Op.HANDOFF_WITHDRAW, ticket.key, None)
        raise
    if not kept:
        raise StoreUnavailable("the node store gave up these blocks while they were copied; publish them again")
    return ticket


class _Ahead:
    """Does something while an answer is on its way, and remembers what it raised until the answer was read."""

    def __init__(self, work: Callable[[], None] | None) -> None:
        self._work = work
        self.error: KVStoreError | None = None

    def run(self) -> None:
        try:
            if self._work is not None:
                self._work()
        except KVStoreError as error:
            self.error = error


@dataclass(slots=True, eq=False)
class Asked:
    """A fetch that the store was asked for: over which connection, what it answers, and when that was.

    `end` is what it has still to be told.
    """

    connection: ControlClient
    pieces: Answers
    at_s: float
    end: bytes = b""

    def give_back(self) -> None:
        """Tell the store that nothing more is copied; nobody waits for that.

        Raises:
            PeerLost: the connection broke, which tells the store as well.
        """
        if self.end:
            self.connection.send(Op.HANDOFF_END, self.end)


def ask_fetch(
    connection: ControlClient, stage: AttachedStage | None, ticket: HandoffTicket, config: StoreConfig, timeout_s: float
) -> Asked:
    """Ask the store for the blocks of a ticket.

    Args:
        connection: taken until the answer's pieces are closed.
        stage: the stage of the engine's GPU, if there is one; the store chooses between it and the arena.
        ticket: what to fetch.
        config: of the store.
        timeout_s: give up after this long.

    Raises:
        PeerLost: the connection broke; it is closed.
    """
    ttl_s, asked_s = config.lease_ttl_s, time.monotonic()
    request = FetchRequest(
        key=ticket.key,
        namespace=ticket.namespace,
        epoch=ticket.epoch,
        node_id=ticket.node_id,
        num_blocks=ticket.num_blocks,
        ttl_s=ttl_s,
        timeout_s=timeout_s,
        from_slab=ticket.slab,
        slab=stage.slab if stage else 0,
        generation=stage.generation if stage else 0,
    )
    pieces = connection.call_stream(Op.HANDOFF_FETCH, pack_fetch(request), timeout_s=timeout_s + config.call_timeout_s)
    return Asked(connection, pieces, asked_s)


def run_fetch(
    asked: Asked,
    copier: EngineCopier,
    stage: AttachedStage | None,
    pages: EnginePages,
    ticket: HandoffTicket,
    skip_tokens: int,
    guard: CopyGuard,
    config: StoreConfig,
) -> FetchResult:
    """Copy out what is here while the rest is still on its way; then the slots are to be given back, see `Asked`.

    Args:
        asked: of `ask_fetch`.
        copier: the engine's cache and the arena.
        stage: the stage of the engine's GPU, if there is one.
        pages: where the blocks' tokens lie in the engine.
        ticket: what was asked for.
        skip_tokens: tokens at the front that must not be written; their blocks are read all the same.
        guard: stands before each copy.
        config: of the store.
    """
    num_skipped = min(skip_tokens // pages.stored_block_size, ticket.num_blocks)
    answer, connection = Answer(reason="store_lost: the node store ended the fetch early"), asked.connection
    try:
        with contextlib.closing(asked.pieces):
            if stage is not None and ticket.slab and not skip_tokens:
                with contextlib.suppress(KVStoreError):  # Then each piece is listed for itself.
                    stage.copier.expect(pages, ticket.num_blocks, to_slots=False)
            stage_copier = stage.copier if stage else None
            answer.copy_out(asked.pieces, guard, copier, pages, 0, skip_tokens, stage_copier)
        late = time.monotonic() > asked.at_s + config.lease_ttl_s - config.lease_margin_s
        asked.end = END.pack(answer.number, not late and answer.num_ready == ticket.num_blocks)
    except RegistrationFailed as error:
        # Nothing is wrong with the store, but nothing of it can be copied now.
        with contextlib.suppress(KVStoreError):
            connection.send(Op.HANDOFF_END, END.pack(answer.number, 0))
        return failed_fetch(pages, ticket, num_skipped, f"not_pinned: {error}")
    except CopyStuck:
        raise  # No result says that blocks are the engine's again.
    except (StoreUnavailable, TransferError) as error:
        # Fail closed: what was copied so far may be incomplete, so none of it counts.
        return failed_fetch(pages, ticket, num_skipped, f"store_lost: {error}")
    except JobAbandoned as error:
        # The rest of the answer is not waited for: the connection goes, and with it what it held.
        connection.close()
        return failed_fetch(pages, ticket, num_skipped, f"abandoned: {error}")
    except BaseException:
        with contextlib.suppress(KVStoreError):
            connection.send(Op.HANDOFF_END, END.pack(answer.number, 0))
        raise
    if late and answer.report.get("num_local"):
        # Copied straight out of the publisher's slots, which may have been reused meanwhile: nothing of it counts.
        answer.num_ready, answer.report["reason"] = (
            0,
            "lease_expired: the copy took longer than the claim on the blocks",
        )
    usable = max(num_skipped, answer.num_ready)
    return FetchResult(
        num_blocks=usable,
        failed=failed_load(usable, pages, ticket.num_blocks, answer.reason).failed,
        route="gpu" if answer.number & STAGE_BIT else "host",
        note=str(answer.report.get("note", "")),
        **answer.counts(),
    )


def failed_fetch(pages: EnginePages, ticket: HandoffTicket, usable: int, reason: str) -> FetchResult:
    """Return the result of a fetch that delivered nothing; the engine had its first blocks before."""
    return FetchResult(num_blocks=usable, failed=failed_load(usable, pages, ticket.num_blocks, reason).failed)

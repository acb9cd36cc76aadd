"""What publishing and fetching do on a thread of the client."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sized
from typing import Any

import numpy as np

from kvstore.config import StoreConfig
from kvstore.control_client import ControlClient
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
    STAGE_BIT,
    FetchRequest,
    pack_complete_handoff,
    pack_fetch,
    pack_prepare_handoff,
)
from kvstore.hashing import Namespace
from kvstore.jobs import CopyGuard, failed_load, finishing
from kvstore.messages import U64, unpack_ints, unpack_progress
from kvstore.shape import BLOCK_ORDER_VERSION
from kvstore.stage_client import AttachedStage
from kvstore.wire import Op


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


def run_publish(
    connection: ControlClient,
    keep: Callable[[Op, bytes], bytes],
    copier: EngineCopier,
    pages: EnginePages,
    ticket: HandoffTicket,
    generation: int,
    ttl_s: float,
    guard: CopyGuard,
    call_timeout_s: float,
) -> HandoffTicket:
    """Claim slots, copy, have them kept.

    Args:
        connection: owns the slots while they are written.
        keep: asks over the connection that keeps them afterwards.
        copier: the engine's cache, and the slots that the ticket is for.
        pages: where the blocks' tokens lie in the engine.
        ticket: what they are published as.
        generation: the life of the mover that has the ticket's stage; 0 without one.
        ttl_s: how long they are kept.
        guard: stands before the copy.
        call_timeout_s: for each call.

    Raises:
        PoolExhausted: the store has no room for all of them; nothing is kept.
        KVStoreError: the store failed; nothing is kept for longer than `ttl_s`.
    """
    question = pack_prepare_handoff(ticket.key, ticket.namespace, ticket.num_blocks, ticket.slab, generation)
    slots = unpack_ints(connection.call(Op.HANDOFF_PREPARE, question, timeout_s=call_timeout_s))
    try:
        with guard.copying():
            copier.into_slots(pages, np.arange(len(slots)), slots.astype(np.int64))
        kept = U64.unpack(keep(Op.HANDOFF_COMPLETE, pack_complete_handoff(ticket.key, ttl_s)))[0]
    except CopyStuck:
        raise  # The slots may still be written: they stay taken until this process ends.
    except BaseException:
        with contextlib.suppress(KVStoreError):
            connection.call(Op.HANDOFF_WITHDRAW, ticket.key, timeout_s=call_timeout_s)
        raise
    if not kept:
        raise StoreUnavailable("the node store gave up these blocks while they were copied; publish them again")
    return ticket


def run_fetch(
    connection: ControlClient,
    copier: EngineCopier,
    stage: AttachedStage | None,
    pages: EnginePages,
    ticket: HandoffTicket,
    guard: CopyGuard,
    config: StoreConfig,
    timeout_s: float,
) -> FetchResult:
    """Ask once, copy out what is here while the rest is still on its way, give the slots back.

    Args:
        connection: taken for as long as the fetch lasts.
        copier: the engine's cache and the arena.
        stage: the stage of the engine's GPU, if there is one; the store chooses between the two.
        pages: where the blocks' tokens lie in the engine.
        ticket: what to fetch.
        guard: stands before each copy.
        config: of the store.
        timeout_s: give up after this long.
    """
    ttl_s = config.lease_ttl_s
    asked_s, ready, number = time.monotonic(), 0, 0
    report: dict[str, Any] = {"reason": "store_lost: the node store ended the fetch early"}
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
    chosen = copier
    try:
        pieces = connection.call_stream(
            Op.HANDOFF_FETCH, pack_fetch(request), timeout_s=timeout_s + config.call_timeout_s
        )
        with contextlib.closing(pieces), contextlib.ExitStack() as copies:
            for _, payload in pieces:
                progress = unpack_progress(payload)
                number = progress.lease_id
                if count := len(progress.slots):
                    if not ready:
                        chosen = stage.copier if stage and number & STAGE_BIT else copier
                        copies.enter_context(finishing(chosen, pages))
                    with guard.copying():
                        indexes = np.arange(progress.first, progress.first + count)
                        chosen.out_of_slots(pages, indexes, progress.slots.astype(np.int64))
                    ready = progress.first + count
                if progress.report:
                    report = json.loads(progress.report)
        late = time.monotonic() > asked_s + ttl_s - config.lease_margin_s
        connection.send(Op.HANDOFF_END, END.pack(number, not late and ready == ticket.num_blocks))
    except RegistrationFailed as error:
        # Nothing is wrong with the store, but nothing of it can be copied now.
        with contextlib.suppress(KVStoreError):
            connection.send(Op.HANDOFF_END, END.pack(number, 0))
        return failed_fetch(pages, ticket, f"not_pinned: {error}")
    except CopyStuck:
        raise  # No result says that blocks are the engine's again.
    except (StoreUnavailable, TransferError) as error:
        # Fail closed: what was copied so far may be incomplete, so none of it counts.
        return failed_fetch(pages, ticket, f"store_lost: {error}")
    except JobAbandoned as error:
        # The rest of the answer is not waited for: the connection goes, and with it what it held.
        connection.close()
        return failed_fetch(pages, ticket, f"abandoned: {error}")
    except BaseException:
        with contextlib.suppress(KVStoreError):
            connection.send(Op.HANDOFF_END, END.pack(number, 0))
        raise
    if late and report.get("num_local"):
        # Copied straight out of the publisher's slots, which may have been reused meanwhile: nothing of it counts.
        ready, report = 0, {**report, "reason": "lease_expired: the copy took longer than the claim on the blocks"}
    return FetchResult(
        num_blocks=ready,
        failed=failed_load(ready, pages, ticket.num_blocks, str(report.get("reason") or "")).failed,
        num_local=int(report.get("num_local", 0)),
        num_peer=int(report.get("num_peer", 0)),
        peers=tuple(report.get("peers", ())),
        num_bytes=int(report.get("num_bytes", 0)),
        num_descriptors=int(report.get("num_descriptors", 0)),
        read_s=float(report.get("read_s", 0.0)),
        num_lease_calls=int(report.get("num_lease_calls", 0)),
        route="gpu" if number & STAGE_BIT else "host",
        note=str(report.get("note", "")),
    )


def failed_fetch(pages: EnginePages, ticket: HandoffTicket, reason: str) -> FetchResult:
    """Return the result of a fetch that delivered nothing."""
    return FetchResult(num_blocks=0, failed=failed_load(0, pages, ticket.num_blocks, reason).failed)

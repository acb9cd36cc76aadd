"""What fetching does, step by step, and which tickets it takes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from kvstore.blocks.chunking import plan_stage_chunks
from kvstore.blocks.codec import encode
from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import BLOCK_ORDER_VERSION
from kvstore.blocks.ticket import HandoffTicket
from kvstore.client.results import FetchResult
from kvstore.client.save_load import Answer, CopyGuard, failures
from kvstore.client.stage_link import AttachedStage
from kvstore.client.work import Awaited, Steps
from kvstore.config import StoreConfig
from kvstore.engine.copier import EngineCopier, EnginePages
from kvstore.errors import (
    CopyStuck,
    InvalidRequest,
    JobAbandoned,
    KVStoreError,
    LayoutMismatch,
    NamespaceMismatch,
    RegistrationFailed,
    StoreDraining,
    StoreUnavailable,
    TransferError,
)
from kvstore.rpc.client import ControlClient
from kvstore.rpc.exchange import Exchange
from kvstore.rpc.framing import Op
from kvstore.rpc.handoff_messages import End, FetchRequest
from kvstore.rpc.messages import STAGE_BIT
from kvstore.runtime import clock


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


@dataclass(slots=True, eq=False)
class Asked:
    """A fetch that the store was asked for: over which connection, what it answers, and when that was.

    `end` is what it has still to be told.
    """

    connection: ControlClient
    pieces: Exchange
    at_s: float
    end: bytes = b""

    def awaited(self) -> Awaited:
        """Return what there is to wait for before the first piece is taken."""
        return Awaited(self.pieces.fileno(), self.pieces.until_s)

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
    ttl_s, asked_s = config.lease_ttl_s, clock.now_s()
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
        is_early=ticket.is_early,
    )
    pieces = connection.call_stream(Op.HANDOFF_FETCH, encode(request), timeout_s=timeout_s + config.call_timeout_s)
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
) -> Steps[FetchResult]:
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
    told: list[FetchResult] = []

    def queued() -> None:
        told.append(_result(answer, pages, ticket, num_skipped))  # While the device is still at the last copy.

    try:
        with contextlib.closing(asked.pieces):
            if stage is not None and ticket.slab and not skip_tokens:
                ends = plan_stage_chunks(ticket.num_blocks, max(1, config.stage_chunk_bytes // ticket.block_bytes))
                with contextlib.suppress(KVStoreError):  # Then each piece is listed for itself.
                    stage.copier.expect(pages, ends, to_slots=False)
            stage_copier = stage.copier if stage else None
            yield from answer.copy_out(asked.pieces, guard, copier, pages, 0, skip_tokens, stage_copier, queued)
        # The claim was made when the question had waited so long in the store, which got it after it was asked here.
        claimed_s = asked.at_s + answer.report.waited_s
        late = clock.now_s() > claimed_s + config.lease_ttl_s - config.lease_margin_s
        asked.end = encode(End(answer.number, not late and answer.num_ready == ticket.num_blocks))
    except RegistrationFailed as error:
        # Nothing is wrong with the store, but nothing of it can be copied now.
        with contextlib.suppress(KVStoreError):
            connection.send(Op.HANDOFF_END, encode(End(answer.number, False)))
        return failed_fetch(pages, ticket, num_skipped, f"not_pinned: {error}")
    except CopyStuck:
        raise  # No result says that blocks are the engine's again.
    except StoreDraining as error:
        return failed_fetch(pages, ticket, num_skipped, f"draining: {error}")
    except (StoreUnavailable, TransferError) as error:
        # Fail closed: what was copied so far may be incomplete, so none of it counts.
        return failed_fetch(pages, ticket, num_skipped, f"store_lost: {error}")
    except JobAbandoned as error:
        # The rest of the answer is not waited for: the connection goes, and with it what it held.
        connection.close()
        return failed_fetch(pages, ticket, num_skipped, f"abandoned: {error}")
    except KVStoreError:
        with contextlib.suppress(KVStoreError):
            connection.send(Op.HANDOFF_END, encode(End(answer.number, False)))
        raise
    except BaseException:
        connection.close()  # An interrupt: the answer may still hold it.
        raise
    if late and answer.report.num_local:
        # Copied straight out of the publisher's slots, which may have been reused meanwhile: nothing of it counts.
        answer.num_ready = 0
        answer.report.reason = "lease_expired: the copy took longer than the claim on the blocks"
        return _result(answer, pages, ticket, num_skipped)
    return told[0]


def _result(answer: Answer, pages: EnginePages, ticket: HandoffTicket, num_skipped: int) -> FetchResult:
    usable = max(num_skipped, answer.num_ready)
    return FetchResult(
        num_blocks=usable,
        failed=failures(usable, pages, ticket.num_blocks, answer.reason),
        route="gpu" if answer.number & STAGE_BIT else "host",
        note=answer.report.note,
        **answer.counts(),
    )


def failed_fetch(pages: EnginePages, ticket: HandoffTicket, usable: int, reason: str) -> FetchResult:
    """Return the result of a fetch that delivered nothing; the engine had its first blocks before."""
    return FetchResult(num_blocks=usable, failed=failures(usable, pages, ticket.num_blocks, reason))

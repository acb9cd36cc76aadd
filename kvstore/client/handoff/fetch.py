"""The steps of a fetch, and the check of its ticket."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

from kvstore.blocks.chunking import plan_stage_chunks
from kvstore.blocks.codec import encode
from kvstore.blocks.hashing import BlockHashes
from kvstore.blocks.shape import BLOCK_ORDER_VERSION
from kvstore.blocks.ticket import HandoffTicket
from kvstore.bounds import MAX_COPY_THREADS, check_count
from kvstore.client.attachment import Attachment
from kvstore.client.handoff.stage_link import AttachedStage
from kvstore.client.job import Job
from kvstore.client.load import TIMED_OUT_IN_QUEUE, Answer, failing_closed, failures
from kvstore.client.results import FetchResult
from kvstore.client.submit import call_off, submit
from kvstore.client.work import Awaited, CopyGuard, Steps, Work
from kvstore.config import StoreConfig
from kvstore.engine.copier import EngineCopier, EnginePages, engine_pages, ordered
from kvstore.engine.side_tensors import check_skip
from kvstore.errors import (
    CopyStuck,
    InvalidRequest,
    KVStoreError,
    LayoutMismatch,
    NamespaceMismatch,
    PeerLost,
    StoreUnavailable,
    TransferError,
)
from kvstore.rpc.client import ControlClient
from kvstore.rpc.exchange import Exchange
from kvstore.rpc.framing import Op
from kvstore.rpc.handoff_messages import End, FetchRequest
from kvstore.rpc.messages import STAGE_BIT
from kvstore.runtime import clock


def check_ticket(attached: Attachment, ticket: HandoffTicket) -> None:
    """Refuse a ticket that this client cannot fetch, without asking its store.

    Raises:
        InvalidRequest: it is not a ticket.
        NamespaceMismatch: it is of another namespace.
        LayoutMismatch: it is of another part of the blocks, or of another byte order.
    """
    space, part = attached.space, attached.part.ranks
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


def name_of(attached: Attachment, ticket: HandoffTicket, hashes: BlockHashes | None) -> bytes:
    """Return the name of a ticket's blocks; only what this client knows by itself says what they are.

    Raises:
        InvalidRequest, NamespaceMismatch: these are no hashes, or of another namespace.
    """
    space = attached.space
    last_hash = b"" if hashes is None else attached.chain(hashes).end(space.digest, "hashes")[1]
    return ticket.name(space.digest, last_hash)


def begin_fetch(
    attached: Attachment,
    ticket: HandoffTicket,
    block_ids: object,
    skip_tokens: int,
    hashes: BlockHashes | None,
    timeout_s: float | None,
    num_copy_threads: int,
) -> Job[FetchResult]:
    """Begin `Client.fetch`; see there for the arguments."""
    copier, link = attached.registered(), attached.stage
    store, shape, config = attached.store, attached.space.shape, attached.store.config
    held, guard = contextlib.ExitStack(), CopyGuard()
    asked: list[Asked] = []
    work: Work[FetchResult] | None = None
    try:
        connection = None
        if len(store.for_fetches):
            connection = held.enter_context(store.for_fetches.taken())
            if link.is_wanted and isinstance(ticket, HandoffTicket) and ticket.slab:
                # First of all, so that the store wakes meanwhile.
                with contextlib.suppress(PeerLost):
                    connection.send(Op.HANDOFF_SOON, link.soon(ticket.node_id, ticket.slab))
        check_ticket(attached, ticket)
        name = name_of(attached, ticket, hashes)
        limit_s = attached.transfer_s(timeout_s)
        num_copy_threads = check_count("num_copy_threads", num_copy_threads, 0, MAX_COPY_THREADS)
        deadline_s = clock.now_s() + limit_s
        stage = held.enter_context(link.using(limit_s))
        pages = engine_pages(block_ids, copier.layout, shape.block_size, 0, ticket.num_blocks)
        check_skip(shape, skip_tokens, ticket.num_blocks)
        num_skipped = min(skip_tokens // shape.block_size, ticket.num_blocks)
        if connection is not None:
            # Ask early: the rest of this call takes as long as the store and its peer need to answer.
            with contextlib.suppress(PeerLost):
                left_s = max(0.0, deadline_s - clock.now_s())
                asked.append(_ask(held, connection, stage, ticket, name, config, left_s))
        pages = ordered(pages, copier, num_copy_threads)
        copier.check_unchanged()
        guard = CopyGuard(pages.order)

        def run() -> Steps[FetchResult]:
            try:
                if not asked:
                    if (left_s := deadline_s - clock.now_s()) <= 0:
                        return _failed(pages, ticket, num_skipped, TIMED_OUT_IN_QUEUE)
                    connection = held.enter_context(store.for_fetches.taken())
                    asked.append(_ask(held, connection, stage, ticket, name, config, left_s))
                    yield asked[0].awaited()
            except (StoreUnavailable, TransferError) as error:
                return _failed(pages, ticket, num_skipped, f"store_lost: {error}")
            with attached.noting_stuck():
                result = yield from run_fetch(asked[0], copier, stage, pages, ticket, skip_tokens, guard, config)
            if stage is not None and result.note.startswith("stage_lost"):
                link.lose(stage)
            return result

        def give_back() -> None:
            assert work is not None, "it calls this at its end"
            error = None if work.future.cancelled() else work.future.exception()
            # The stage of stuck copies stays mapped. An interrupt, a callback's error or a bug may have come anywhere,
            # so the connection is closed.
            is_plain = isinstance(error, KVStoreError) and not isinstance(error, CopyStuck)
            cause = work.interrupt or (None if is_plain else error)
            try:
                with contextlib.suppress(KVStoreError), held:
                    if cause is not None:
                        raise cause
                    for each in asked:
                        if each.end:
                            each.connection.send(Op.HANDOFF_END, each.end)
            except BaseException as raised:
                if raised is not cause:
                    raise

        # A waiting thread must not run a fetch that has yet to connect, which has no time limit.
        work = Work(run, limit_s if asked else None, give_back)
        start = attached.threads.start
        if asked:
            start = functools.partial(attached.threads.start_asked, awaited=asked[0].awaited())
        return submit(attached, work, f"fetch of {ticket.num_blocks} blocks", guard, start)
    except BaseException:
        if work is None:
            with held:
                raise
        call_off(attached.threads, work, guard)  # The work gives back what is held, because it may be using it.
        raise


@dataclass(slots=True, eq=False)
class Asked:
    """A fetch that was sent to the store at `at_s`. `end` is the message that the store still has to get."""

    connection: ControlClient
    pieces: Exchange
    at_s: float
    end: bytes = b""

    def awaited(self) -> Awaited:
        """Return the wait before the first piece."""
        return Awaited(self.pieces.fileno(), self.pieces.until_s)


def _ask(
    held: contextlib.ExitStack,
    connection: ControlClient,
    stage: AttachedStage | None,
    ticket: HandoffTicket,
    name: bytes,
    config: StoreConfig,
    timeout_s: float,
) -> Asked:
    """Ask the store for a ticket's blocks. The store chooses between the stage and the arena.

    `held` closes the answer; the connection is taken until then.

    Raises:
        PeerLost: the connection broke; it is closed.
    """
    ttl_s, asked_s = config.lease_ttl_s, clock.now_s()
    request = FetchRequest(
        key=name,
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
    held.enter_context(contextlib.closing(pieces))
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
    """Copy out blocks that came while the rest is on its way. The caller then sends `asked.end`.

    Skipped tokens are not written, but their blocks are read all the same.
    """
    num_skipped = min(skip_tokens // pages.stored_block_size, ticket.num_blocks)
    answer = Answer(ticket.num_blocks, reason="store_lost: the node store ended the fetch early")
    told: list[FetchResult] = []

    def queued() -> None:
        told.append(_result(answer, pages, ticket, num_skipped))  # Made while the device still does the last copy.

    def steps() -> Steps[None]:
        with contextlib.closing(asked.pieces):
            if stage is not None and ticket.slab and not skip_tokens:
                ends = plan_stage_chunks(ticket.num_blocks, max(1, config.stage_chunk_bytes // ticket.block_bytes))
                with contextlib.suppress(KVStoreError):  # If it fails, each piece is listed separately.
                    stage.copier.expect(pages, ends, to_slots=False)
            stage_copier = stage.copier if stage else None
            yield from answer.copy_out(asked.pieces, guard, copier, pages, 0, skip_tokens, stage_copier, queued)

    def end(used: bool) -> bytes:
        return encode(End(answer.number, used))

    failure = yield from failing_closed(asked.connection, steps(), lambda: (Op.HANDOFF_END, end(used=False)))
    if failure:
        return _failed(pages, ticket, num_skipped, failure)
    # The store claimed the blocks `waited_s` after it got the question, which was after `at_s`.
    claimed_s = asked.at_s + answer.report.waited_s
    late = clock.now_s() > claimed_s + config.lease_ttl_s - config.lease_margin_s
    asked.end = end(used=not late and answer.num_ready == ticket.num_blocks)
    if late and answer.report.num_local:
        # Copied directly out of the publisher's slots, which may have been reused meanwhile: no block counts.
        answer.num_ready = 0
        answer.report.reason = "lease_expired: the copy took longer than the claim on the blocks"
        return _result(answer, pages, ticket, num_skipped)
    return told[0]


def _result(answer: Answer, pages: EnginePages, ticket: HandoffTicket, num_skipped: int) -> FetchResult:
    usable = max(num_skipped, answer.num_ready)
    return FetchResult(
        num_blocks=usable,
        failed=failures(usable, pages, ticket.num_blocks, answer.report.reason),
        route="gpu" if answer.number & STAGE_BIT else "host",
        note=answer.report.note,
        **answer.counts(),
    )


def _failed(pages: EnginePages, ticket: HandoffTicket, usable: int, reason: str) -> FetchResult:
    """Return the result of a fetch that delivered nothing. The first `usable` blocks were in the engine before."""
    return FetchResult(num_blocks=usable, failed=failures(usable, pages, ticket.num_blocks, reason))

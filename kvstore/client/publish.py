"""What `Client.publish` and its like do: into a stage or into the arena, at once or later, and taken back."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from dataclasses import replace

from kvstore.blocks.codec import decode_count, encode
from kvstore.blocks.ticket import HandoffTicket, expiry_after
from kvstore.bounds import check_count, check_ttl
from kvstore.client.attachment import Attachment
from kvstore.client.fetch import check_ticket
from kvstore.client.publication import Publishing, num_published
from kvstore.client.results import Job, Publication
from kvstore.client.stage_link import AttachedStage, StageLink
from kvstore.client.work import Work, in_one_step
from kvstore.errors import (
    CopyStuck,
    InvalidRequest,
    JobAbandoned,
    KVStoreError,
    PeerLost,
    PoolExhausted,
    StoreUnavailable,
)
from kvstore.rpc.framing import Op

logger = logging.getLogger(__name__)


def prepare_ticket(attached: Attachment, num_blocks: int, ttl_s: float | None) -> HandoffTicket:
    """Return what `Client.prepare_ticket` returns."""
    attached.store.check_open()
    num_blocks = check_count("num_blocks", num_blocks, 1, (1 << 32) - 1)
    if attached.stage.is_wanted:
        _wake_store(attached)
    return _ticket(attached, num_blocks, _keep_s(attached, ttl_s), attached.stage.slab, is_early=True)


def publish(
    attached: Attachment, block_ids: object, ttl_s: float | None, ticket: HandoffTicket | None
) -> HandoffTicket:
    """Do what `Client.publish` says."""
    keep_s = _keep_s(attached, ttl_s)
    _check_named(attached, ticket)
    begun = _begin_in_stage(attached, block_ids, keep_s, ticket)
    if begun is not None:
        publishing, completing = begun
        try:
            try:
                publishing.hold_engine()
            except KVStoreError:
                _complete_later(attached, publishing, completing).job.add_done_callback(_log_failure)
                raise
            # Only now: a thread that is woken wants the interpreter, and the ticket is waited for.
            _complete_later(attached, publishing, completing).job.add_done_callback(_log_failure)
        except KVStoreError:
            raise
        except BaseException:
            _call_off(attached, publishing, completing)
            raise
        return publishing.ticket
    publishing, store = _publishing(attached, block_ids, keep_s, ticket), attached.store
    publishing.order()

    def run() -> HandoffTicket:
        with store.for_jobs.taken() as connection:
            publishing.claim(functools.partial(connection.call, timeout_s=store.call_timeout_s))
            return _complete(attached, publishing)

    # The calls in it have their own timeouts.
    work, start = Work(lambda: in_one_step(run)), attached.threads.publish
    try:
        job: Job[HandoffTicket] = attached.submit(work, str(publishing), publishing.guard, start)
        return job.result(None)
    except BaseException as error:
        # An interrupt, say: the caller may reuse the blocks at once, and nothing of them may be delivered then.
        if not work.future.done() or work.future.cancelled() or work.future.exception() is not error:
            _call_off(attached, publishing, work)
        raise  # Its own error has seen to the rest.


def begin_publish(
    attached: Attachment, block_ids: object, ttl_s: float | None, ticket: HandoffTicket | None
) -> Publication:
    """Do what `Client.begin_publish` says."""
    keep_s = _keep_s(attached, ttl_s)
    _check_named(attached, ticket)
    begun = _begin_in_stage(attached, block_ids, keep_s, ticket)
    if begun is None:
        publishing = _publishing(attached, block_ids, keep_s, ticket)
        publishing.order()
        completing = _completing(attached, publishing)
    else:
        publishing, completing = begun
    try:
        if begun is None:
            publishing.claim(attached.store.call)
        return _complete_later(attached, publishing, completing)
    except KVStoreError:
        raise  # Nothing is kept.
    except BaseException:  # An interrupt: perhaps the slots are claimed.
        _call_off(attached, publishing, completing)
        raise


def _begin_in_stage(
    attached: Attachment, block_ids: object, keep_s: float, named: HandoffTicket | None
) -> tuple[Publishing, Work[HandoffTicket]] | None:
    """Queue the copies into the stage, which stays mapped for them; None where the arena has to serve.

    Returns:
        What `_complete_later` takes.
    """
    link = attached.stage
    # Not for longer than for a call: the arena serves as well.
    if (stage := link.take(attached.store.call_timeout_s)) is None:
        return None
    completing: Work[HandoffTicket] | None = None
    try:
        if named is None or named.slab == stage.slab:
            _wake_store(attached)  # The question after it is made meanwhile.
            publishing = _publishing(attached, block_ids, keep_s, named, stage)
            completing = _completing(attached, publishing, link)
            # Before copies are queued, or a client that is closed meanwhile gives their slots back under them.
            attached.threads.expect(completing)
            with attached.noting_stuck():
                publishing.begin()
            return publishing, completing
    except CopyStuck:
        _forget(completing)
        raise  # Something may still copy to it: the stage stays mapped until this process ends.
    except PoolExhausted:
        _forget(completing)
        logger.debug("hand-off: the stage is full, the arena is taken")
    except (PeerLost, StoreUnavailable):
        # Its mover died: the arena serves, or says what else is wrong.
        _forget(completing)
        link.lose(stage)
    except BaseException as error:
        if completing is None or isinstance(error, KVStoreError) or not hasattr(publishing, "guard"):
            _forget(completing)
            link.leave(stage)
        else:
            # An interrupt: perhaps the slots are claimed, and copies queued. The stage is left behind them.
            _call_off(attached, publishing, completing)
        raise
    link.leave(stage)
    return None


def _completing(attached: Attachment, publishing: Publishing, link: StageLink | None = None) -> Work[HandoffTicket]:
    """Return what waits for the copies and tells the store; the link's stage is left behind that.

    It is made before slots are claimed. From then on it alone gives them back, when its copies have ended.
    """

    def give_back() -> None:
        is_stuck = isinstance(work.future.exception(), CopyStuck)
        if link is not None and publishing.stage is not None and not is_stuck:  # Else the stage stays mapped.
            link.leave(publishing.stage)

    def run() -> HandoffTicket:
        if work.is_called_off:
            with attached.noting_stuck():
                publishing.drop()
            raise JobAbandoned(f"{publishing}: interrupted before it had begun; nothing of it is kept")
        return _complete(attached, publishing)

    work = Work(lambda: in_one_step(run), math.inf, give_back)
    work.begin()  # Cancelled it would leave slots that nobody gives back.
    return work


def _complete_later(attached: Attachment, publishing: Publishing, completing: Work[HandoffTicket]) -> Publication:
    try:
        job = attached.submit(completing, str(publishing), publishing.guard, attached.threads.publish)
        return Publication(publishing.ticket, job)
    except KVStoreError:
        # The client was closed meanwhile. What was claimed is given back behind the copies that are queued.
        _call_off(attached, publishing, completing)
        raise


def _complete(attached: Attachment, publishing: Publishing) -> HandoffTicket:
    with attached.noting_stuck():
        return publishing.complete()


def _call_off(attached: Attachment, publishing: Publishing, work: Work[HandoffTicket]) -> None:
    """Let nothing of a publication be delivered whose caller hears of an interrupt alone."""
    attached.call_off(work, publishing.guard)
    with contextlib.suppress(KVStoreError):
        withdraw(attached, publishing.ticket)


def _keep_s(attached: Attachment, ttl_s: float | None) -> float:
    return attached.store.config.lease_ttl_s if ttl_s is None else check_ttl("ttl_s", ttl_s)


def _wake_store(attached: Attachment) -> None:
    with contextlib.suppress(KVStoreError):
        attached.store.say(Op.HANDOFF_SOON, b"")


def _check_named(attached: Attachment, ticket: HandoffTicket | None) -> None:
    """Refuse a ticket under which this client cannot publish; see `check_ticket` for what is raised."""
    if ticket is None:
        return
    store = attached.store
    check_ticket(ticket, attached.space, attached.part.ranks)
    if (ticket.node_id, ticket.epoch.hex()) != (store.node_id, store.epoch):
        raise InvalidRequest(
            f"ticket: wanted one of this client's store (node {store.node_id}, epoch {store.epoch}), got one of node "
            f"{ticket.node_id}, epoch {ticket.epoch.hex()}; make it with this client's node_id and epoch"
        )


def _ticket(
    attached: Attachment, num_blocks: int, keep_s: float, slab: int, *, is_early: bool = False
) -> HandoffTicket:
    return HandoffTicket(
        node_id=attached.store.node_id,
        epoch=bytes.fromhex(attached.store.epoch),
        namespace=attached.space.digest,
        num_blocks=num_blocks,
        block_bytes=attached.space.shape.block_bytes,
        expires_s=expiry_after(keep_s),
        part=attached.part.ranks,
        slab=slab,
        is_early=is_early,
    )


def _publishing(
    attached: Attachment,
    block_ids: object,
    keep_s: float,
    named: HandoffTicket | None,
    stage: AttachedStage | None = None,
) -> Publishing:
    copier, space = attached.registered().copier, attached.space
    if named is not None:
        ticket = replace(named, expires_s=expiry_after(keep_s))
    else:
        num_blocks = num_published(block_ids, copier.layout.block_size, space.shape.block_size)
        ticket = _ticket(attached, num_blocks, keep_s, stage.slab if stage else 0)
    chosen, num_clears = copier if stage is None else stage.copier, attached.clears.get(space.digest)
    return Publishing(ticket, block_ids, space.shape.block_size, chosen, stage, attached.store, keep_s, num_clears)


def withdraw(attached: Attachment, ticket: HandoffTicket) -> bool:
    """Do what `Client.withdraw` says."""
    if not isinstance(ticket, HandoffTicket):
        raise InvalidRequest(f"ticket: wanted a HandoffTicket of Client.publish, got {type(ticket).__name__}")
    if (ticket.node_id, ticket.epoch.hex()) != (attached.store.node_id, attached.store.epoch):
        return False
    return bool(decode_count(attached.store.call(Op.HANDOFF_WITHDRAW, encode(ticket.key))))


def _forget(expected: Work[HandoffTicket] | None) -> None:
    """Nothing is queued for it, or never ends."""
    if expected is not None:
        expected.forget()


def _log_failure(job: Job[HandoffTicket]) -> None:
    try:
        job.result(0.0)
    except Exception:
        logger.exception("%r failed after its ticket was given out; a fetch of it is told so", job)

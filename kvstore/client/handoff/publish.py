"""The calls of a publisher: `Client.prepare_ticket`, `publish`, `begin_publish` and `withdraw`."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from dataclasses import replace

from kvstore.blocks.codec import decode_count, encode
from kvstore.blocks.hashing import BlockHashes
from kvstore.blocks.ticket import HandoffTicket, expiry_after
from kvstore.bounds import check_count, check_ttl
from kvstore.client.attachment import Attachment
from kvstore.client.handoff.fetch import check_ticket, name_of
from kvstore.client.handoff.publication import Publishing, num_published
from kvstore.client.handoff.stage_link import AttachedStage, StageLink
from kvstore.client.job import Job
from kvstore.client.results import Publication
from kvstore.client.submit import call_off, submit
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
    attached: Attachment,
    block_ids: object,
    hashes: BlockHashes | None,
    ttl_s: float | None,
    ticket: HandoffTicket | None,
) -> HandoffTicket:
    """Do what `Client.publish` says."""
    keep_s = _keep_s(attached, ttl_s)
    _check_named(attached, ticket)
    begun = _begin_in_stage(attached, block_ids, hashes, keep_s, ticket)
    if begun is not None:
        publishing, completing = begun
        try:
            try:
                publishing.hold_engine()
            except KVStoreError:
                _complete_later(attached, publishing, completing).job.add_done_callback(_log_failure)
                raise
            # Only now: a woken thread competes for the interpreter, and the caller waits for the ticket.
            _complete_later(attached, publishing, completing).job.add_done_callback(_log_failure)
        except KVStoreError:
            raise
        except BaseException:
            _call_off(attached, publishing, completing)
            raise
        return publishing.ticket
    publishing, store = _publishing(attached, block_ids, hashes, keep_s, ticket), attached.store
    publishing.order()

    def run() -> HandoffTicket:
        with store.for_jobs.taken() as connection:
            publishing.claim(functools.partial(connection.call, timeout_s=store.call_timeout_s))
            return _complete(attached, publishing)

    # The calls in `run` have their own timeouts.
    work, start = Work(lambda: in_one_step(run)), attached.threads.publish
    try:
        job: Job[HandoffTicket] = submit(attached, work, str(publishing), publishing.guard, start)
        return job.result(None)
    except BaseException as error:
        # For example an interrupt: the caller may reuse the blocks at once, so none may be delivered.
        if not work.future.done() or work.future.cancelled() or work.future.exception() is not error:
            _call_off(attached, publishing, work)
        raise  # The job's own error has already cleaned up.


def begin_publish(
    attached: Attachment,
    block_ids: object,
    hashes: BlockHashes | None,
    ttl_s: float | None,
    ticket: HandoffTicket | None,
) -> Publication:
    """Do what `Client.begin_publish` says."""
    keep_s = _keep_s(attached, ttl_s)
    _check_named(attached, ticket)
    begun = _begin_in_stage(attached, block_ids, hashes, keep_s, ticket)
    if begun is None:
        publishing = _publishing(attached, block_ids, hashes, keep_s, ticket)
        publishing.order()
        completing = _completing(attached, publishing)
    else:
        publishing, completing = begun
    try:
        if begun is None:
            publishing.claim(attached.store.call)
        return _complete_later(attached, publishing, completing)
    except KVStoreError:
        raise  # The store keeps nothing.
    except BaseException:  # An interrupt: perhaps the slots are claimed.
        _call_off(attached, publishing, completing)
        raise


def _begin_in_stage(
    attached: Attachment, block_ids: object, hashes: BlockHashes | None, keep_s: float, named: HandoffTicket | None
) -> tuple[Publishing, Work[HandoffTicket]] | None:
    """Queue the copies into the stage, which stays mapped for them. Return None if the arena has to be used."""
    link = attached.stage
    # Waits no longer than for a call: the arena can be used instead.
    if (stage := link.take(attached.store.call_timeout_s)) is None:
        return None
    completing: Work[HandoffTicket] | None = None
    try:
        if named is None or named.slab == stage.slab:
            _wake_store(attached)  # The store wakes while the question is made.
            publishing = _publishing(attached, block_ids, hashes, keep_s, named, stage)
            completing = _completing(attached, publishing, link)
            # Before copies are queued: else `close` could give their slots back while they run.
            attached.threads.expect(completing)
            with attached.noting_stuck():
                publishing.begin()
            return publishing, completing
    except CopyStuck:
        _forget(completing)
        raise  # Copies to the stage may still run: it stays mapped until this process ends.
    except PoolExhausted:
        _forget(completing)
        logger.debug("hand-off: the stage is full, the arena is taken")
    except (PeerLost, StoreUnavailable):
        # Its mover died: use the arena, whose calls report any other problem.
        _forget(completing)
        link.lose(stage)
    except BaseException as error:
        if completing is None or isinstance(error, KVStoreError) or not hasattr(publishing, "guard"):
            _forget(completing)
            link.leave(stage)
        else:
            # An interrupt: perhaps slots are claimed and copies queued. `completing` leaves the stage after them.
            _call_off(attached, publishing, completing)
        raise
    link.leave(stage)
    return None


def _completing(attached: Attachment, publishing: Publishing, link: StageLink | None = None) -> Work[HandoffTicket]:
    """Return work that waits for the copies, tells the store, and then leaves the link's stage.

    It is made before slots are claimed. From then on only this work gives them back, when its copies have ended.
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
    work.begin()  # So that it cannot be cancelled, which would leave its slots claimed.
    return work


def _complete_later(attached: Attachment, publishing: Publishing, completing: Work[HandoffTicket]) -> Publication:
    try:
        job = submit(attached, completing, str(publishing), publishing.guard, attached.threads.publish)
        return Publication(publishing.ticket, job)
    except KVStoreError:
        # The client was closed meanwhile. The claimed slots are given back after the queued copies.
        _call_off(attached, publishing, completing)
        raise


def _complete(attached: Attachment, publishing: Publishing) -> HandoffTicket:
    with attached.noting_stuck():
        return publishing.complete()


def _call_off(attached: Attachment, publishing: Publishing, work: Work[HandoffTicket]) -> None:
    """Call a publication off after an interrupt of its caller, so that nothing of it is delivered."""
    call_off(attached.threads, work, publishing.guard)
    with contextlib.suppress(KVStoreError):
        _withdraw(attached, publishing.name)


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
    check_ticket(attached, ticket)
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
    hashes: BlockHashes | None,
    keep_s: float,
    named: HandoffTicket | None,
    stage: AttachedStage | None = None,
) -> Publishing:
    copier, space = attached.registered(), attached.space
    if named is not None:
        ticket = replace(named, expires_s=expiry_after(keep_s))
    else:
        num_blocks = num_published(block_ids, copier.layout.block_size, space.shape.block_size)
        ticket = _ticket(attached, num_blocks, keep_s, stage.slab if stage else 0)
    chosen, num_clears = copier if stage is None else stage.copier, attached.clears.get(space.digest)
    name = name_of(attached, ticket, hashes)
    return Publishing(ticket, name, block_ids, chosen, stage, attached.store, keep_s, num_clears)


def withdraw(attached: Attachment, ticket: HandoffTicket, hashes: BlockHashes | None) -> bool:
    """Do what `Client.withdraw` says."""
    check_ticket(attached, ticket)
    if (ticket.node_id, ticket.epoch.hex()) != (attached.store.node_id, attached.store.epoch):
        return False
    return _withdraw(attached, name_of(attached, ticket, hashes))


def _withdraw(attached: Attachment, name: bytes) -> bool:
    return bool(decode_count(attached.store.call(Op.HANDOFF_WITHDRAW, encode(name))))


def _forget(expected: Work[HandoffTicket] | None) -> None:
    """Stop counting expected work: nothing is queued for it, or its copies never end."""
    if expected is not None:
        expected.forget()


def _log_failure(job: Job[HandoffTicket]) -> None:
    try:
        job.result(0.0)
    except Exception:
        logger.exception("%r failed after its ticket was given out; a fetch of it is told so", job)

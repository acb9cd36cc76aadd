"""What a client does to hand blocks off: the publishing half."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from dataclasses import replace

from kvstore.blocks.codec import decode_count, encode
from kvstore.blocks.ticket import HandoffTicket, expiry_after
from kvstore.bounds import check_ttl
from kvstore.client.fetch_job import check_named
from kvstore.client.publication import Publishing, num_published
from kvstore.client.results import Job, Publication
from kvstore.client.stage_link import AttachedStage, StageLink
from kvstore.client.stage_verbs import StageVerbs
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


class PublishVerbs(StageVerbs):
    """Publishing, and taking back."""

    def prepare_ticket(self, num_blocks: int, *, ttl_s: float | None = None) -> HandoffTicket:
        """Return a ticket for blocks that this client will publish, to be sent ahead of them.

        A fetch waits until they are published under it, and there. So the reader's way to them, and all that comes
        before the READ, is over when they are.

        Args:
            num_blocks: stored blocks that will be published.
            ttl_s: within which the blocks will be published; the configured lease time when None. Only the ticket's
                `expires_s` is made of it, which tells routers and readers how long the ticket is worth anything. How
                long the blocks are kept is for `publish` to say.

        Returns:
            The ticket, for the next `publish` or `begin_publish` of these blocks. Whoever will not publish after all
            says so with `withdraw`, or a fetch waits for its time.

        Raises:
            InvalidRequest: an argument is wrong.
            StoreUnavailable: this client was closed.
        """
        self._store.check_open()
        if not isinstance(num_blocks, int) or not 1 <= num_blocks < 1 << 32:
            raise InvalidRequest(f"num_blocks: wanted a number of stored blocks in [1, 2**32), got {num_blocks!r}")
        if self._stage_link is not None:
            self._wake_store()
        return self._ticket(num_blocks, self._keep_s(ttl_s), self.handoff_slab, is_early=True)

    def publish(
        self, block_ids: object, *, ttl_s: float | None = None, ticket: HandoffTicket | None = None
    ) -> HandoffTicket:
        """Hold a copy of engine blocks ready for one fetch by another client, on this node or on another.

        They are no cache: no lookup finds them. When this returns the engine's blocks are its own again: on the CPU
        because they are copied, on a GPU for all that is queued on the calling thread's current stream from now on. A
        fetch waits for copies that are still queued then.

        Args:
            block_ids: the engine's blocks of a request, in order, from its first token on.
            ttl_s: how long they are kept unless fetched before; the configured lease time when None. They are
                kept no longer than this client is open.
            ticket: publish under this one; see `begin_publish`.

        Returns:
            What the other client needs, to be sent there by any means; with `ticket`, that one with the `expires_s`
            that counts now. If the device fails after all, the ticket is void: the log says so, and the fetch.

        Raises:
            InvalidRequest: an argument is wrong; nothing changed.
            InvalidRequest, NamespaceMismatch, LayoutMismatch: the ticket is not one of this client, or was used
                before; nothing changed.
            PoolExhausted: the store has no room for all of the blocks; nothing changed.
            StaleVersion: the namespace was cleared meanwhile; nothing is kept.
            LayoutMismatch, KernelError: the cache is not as it was registered, or the device failed; nothing is kept.
            StoreUnavailable, PeerLost, TransferTimeout: the store is gone, drained, or does not answer.
        """
        keep_s, link = self._keep_s(ttl_s), self._stage_link
        self._check_named(ticket)
        begun = self._begin_in_stage(link, block_ids, keep_s, ticket)
        if begun is not None:
            publishing, completing = begun
            try:
                try:
                    publishing.hold_engine()
                except KVStoreError:
                    self._complete_later(publishing, completing).job.add_done_callback(_log_failure)
                    raise
                # Only now: a thread that is woken wants the interpreter, and the ticket is waited for.
                self._complete_later(publishing, completing).job.add_done_callback(_log_failure)
            except KVStoreError:
                raise
            except BaseException:
                self._call_off_publishing(publishing, completing)
                raise
            return publishing.ticket
        publishing = self._publishing(block_ids, keep_s, ticket)
        publishing.order()

        def run() -> HandoffTicket:
            with self._store.for_jobs.taken() as connection:
                publishing.claim(functools.partial(connection.call, timeout_s=self._store.call_timeout_s))
                return self._complete(publishing)

        # The calls in it have their own timeouts.
        work = Work(lambda: in_one_step(run))
        order, start = publishing.pages.order, self._jobs.publish
        try:
            job: Job[HandoffTicket] = self._submit(work, str(publishing), publishing.guard, order, start)
            return job.result(None)
        except BaseException as error:
            # An interrupt, say: the caller may reuse the blocks at once, and nothing of them may be delivered then.
            if not work.future.done() or work.future.cancelled() or work.future.exception() is not error:
                self._call_off_publishing(publishing, work)
            raise  # Its own error has seen to the rest.

    def begin_publish(
        self, block_ids: object, *, ttl_s: float | None = None, ticket: HandoffTicket | None = None
    ) -> Publication:
        """Publish blocks, but return before they are copied: their ticket can be on its way to the reader meanwhile.

        A fetch waits until the blocks are there. They have to stay as they are until the publication's job is done.

        Args:
            block_ids: as for `publish`.
            ttl_s: as for `publish`, from the end of the job on.
            ticket: publish under this one, of `prepare_ticket` or made elsewhere, which may be on its way to the
                reader; it names this client's store and part, and how many stored blocks to publish, where the last
                engine block has room for more. Where its `slab` is this client's stage and that is full, or gone, the
                arena takes the blocks. A fetch that comes before this call waits if the ticket `is_early`, and is else
                told that there is no such ticket.

        Returns:
            The ticket, and the job; what goes wrong with that is raised by its result, and voids the ticket.

        Raises:
            InvalidRequest, PoolExhausted, StoreUnavailable, PeerLost, TransferTimeout: as for `publish`.
            InvalidRequest, NamespaceMismatch, LayoutMismatch: the ticket is not one of this client, or was used
                before; nothing changed.
        """
        keep_s, link = self._keep_s(ttl_s), self._stage_link
        self._check_named(ticket)
        begun = self._begin_in_stage(link, block_ids, keep_s, ticket)
        if begun is not None:
            try:
                return self._complete_later(*begun)
            except KVStoreError:
                raise
            except BaseException:
                self._call_off_publishing(*begun)
                raise
        publishing = self._publishing(block_ids, keep_s, ticket)
        publishing.order()
        completing = self._completing(publishing)
        try:
            publishing.claim(self._store.call)
            return self._complete_later(publishing, completing)
        except KVStoreError:
            raise  # Nothing is kept.
        except BaseException:  # An interrupt: perhaps the slots are claimed.
            self._call_off_publishing(publishing, completing)
            raise

    def _begin_in_stage(
        self, link: StageLink | None, block_ids: object, keep_s: float, named: HandoffTicket | None = None
    ) -> tuple[Publishing, Work[HandoffTicket]] | None:
        """Queue the copies into the stage, which stays mapped for them; None where the arena has to serve.

        Returns:
            What `_complete_later` takes.
        """
        stage = link.take() if link is not None else None
        if link is None or stage is None:
            return None
        completing: Work[HandoffTicket] | None = None
        try:
            if named is None or named.slab == stage.slab:
                self._wake_store()  # The question after it is made meanwhile.
                publishing = self._publishing(block_ids, keep_s, named, stage)
                completing = self._completing(publishing, link)
                # Before copies are queued, or a client that is closed meanwhile gives their slots back under them.
                self._jobs.expect(completing)
                with self._noting_stuck():
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
                self._call_off_publishing(publishing, completing)
            raise
        link.leave(stage)
        return None

    def _completing(self, publishing: Publishing, link: StageLink | None = None) -> Work[HandoffTicket]:
        """Return what waits for the copies and tells the store; the link's stage is left behind that.

        It is made before slots are claimed. From then on it alone gives them back, when its copies have ended.
        """
        stage = publishing.stage

        def give_back() -> None:
            is_stuck = isinstance(work.future.exception(), CopyStuck)
            if link is not None and stage is not None and not is_stuck:  # Else the stage stays mapped.
                link.leave(stage)

        def run() -> HandoffTicket:
            if work.is_called_off:
                with self._noting_stuck():
                    publishing.drop()
                raise JobAbandoned(f"{publishing}: interrupted before it had begun; nothing of it is kept")
            return self._complete(publishing)

        work = Work(lambda: in_one_step(run), math.inf, give_back)
        work.begin()  # Cancelled it would leave slots that nobody gives back.
        return work

    def _complete_later(self, publishing: Publishing, completing: Work[HandoffTicket]) -> Publication:
        order, start = publishing.pages.order, self._jobs.publish
        try:
            return Publication(
                publishing.ticket, self._submit(completing, str(publishing), publishing.guard, order, start)
            )
        except KVStoreError:
            # The client was closed meanwhile. What was claimed is given back behind the copies that are queued.
            self._call_off_publishing(publishing, completing)
            raise

    def _call_off_publishing(self, publishing: Publishing, work: Work[HandoffTicket]) -> None:
        """Let nothing of a publication be delivered whose caller hears of an interrupt alone."""
        self._call_off(work, publishing.guard)
        with contextlib.suppress(KVStoreError):
            self.withdraw(publishing.ticket)

    def _keep_s(self, ttl_s: float | None) -> float:
        return self.config.lease_ttl_s if ttl_s is None else check_ttl("ttl_s", ttl_s)

    def _wake_store(self) -> None:
        with contextlib.suppress(KVStoreError):
            self._store.say(Op.HANDOFF_SOON, b"")

    def _check_named(self, ticket: HandoffTicket | None) -> None:
        if ticket is not None:
            check_named(ticket, self.space, self.part.ranks, self.node_id, self.epoch)

    def _ticket(self, num_blocks: int, keep_s: float, slab: int, *, is_early: bool = False) -> HandoffTicket:
        return HandoffTicket(
            node_id=self.node_id,
            epoch=bytes.fromhex(self.epoch),
            namespace=self.space.digest,
            num_blocks=num_blocks,
            block_bytes=self.space.shape.block_bytes,
            expires_s=expiry_after(keep_s),
            part=self.part.ranks,
            slab=slab,
            is_early=is_early,
        )

    def _publishing(
        self,
        block_ids: object,
        keep_s: float,
        named: HandoffTicket | None = None,
        stage: AttachedStage | None = None,
    ) -> Publishing:
        copier, shape = self._registered(), self.space.shape
        if named is not None:
            ticket = replace(named, expires_s=expiry_after(keep_s))
        else:
            num_blocks = num_published(block_ids, copier.layout.block_size, shape.block_size)
            ticket = self._ticket(num_blocks, keep_s, stage.slab if stage else 0)
        chosen = copier if stage is None else stage.copier
        return Publishing(
            ticket, block_ids, shape.block_size, chosen, stage, self._store.call, self._store.say,
            self._store.tell_surely, keep_s, self._clears.get(self.space.digest),
        )  # fmt: skip

    def _complete(self, publishing: Publishing) -> HandoffTicket:
        with self._noting_stuck():
            return publishing.complete()

    def withdraw(self, ticket: HandoffTicket) -> bool:
        """Take back what this node's store holds for a ticket, because nobody will fetch it any more.

        Nothing is published under it from now on, either, and a fetch that waits for that ends. While blocks are still
        being copied for it no reader gets them, and their room comes back when the copies have ended.

        Returns:
            Whether this call voided the ticket, published or not. False when it was over before (fetched, expired,
            withdrawn), and for a ticket of another node or of an earlier life of this one's store.

        Raises:
            InvalidRequest: this is no ticket.
        """
        if not isinstance(ticket, HandoffTicket):
            raise InvalidRequest(f"ticket: wanted a HandoffTicket of Client.publish, got {type(ticket).__name__}")
        if (ticket.node_id, ticket.epoch.hex()) != (self.node_id, self.epoch):
            return False
        return bool(decode_count(self._store.call(Op.HANDOFF_WITHDRAW, encode(ticket.key))))


def _forget(expected: Work[HandoffTicket] | None) -> None:
    """Nothing is queued for it, or never ends."""
    if expected is not None:
        expected.forget()


def _log_failure(job: Job[HandoffTicket]) -> None:
    try:
        job.result(0.0)
    except Exception:
        logger.exception("%r failed after its ticket was given out; a fetch of it is told so", job)

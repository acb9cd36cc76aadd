"""What a client does for hand-offs; the other half of `kvstore.Client`."""

from __future__ import annotations

import contextlib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore.config import StoreConfig, parse_bytes
from kvstore.control_client import ControlClient
from kvstore.engine_copy import CopyOrder, EngineCopier, engine_pages, ordered
from kvstore.errors import (
    CopyStuck,
    InvalidRequest,
    KVStoreError,
    PeerLost,
    PoolExhausted,
    StoreUnavailable,
)
from kvstore.handoff import FetchResult, HandoffRoute, HandoffTicket, Publication, expiry_after
from kvstore.handoff_jobs import (
    Asked,
    ask_fetch,
    check_named,
    check_ticket,
    failed_fetch,
    run_fetch,
)
from kvstore.hashing import Namespace
from kvstore.jobs import CopyGuard
from kvstore.messages import U64
from kvstore.part import Part
from kvstore.publishing import Publishing, num_published
from kvstore.results import Job, Work
from kvstore.sides import check_skip
from kvstore.stage_client import AttachedStage, StageLink
from kvstore.stage_copier import EngineCaches
from kvstore.store_connections import StoreConnections
from kvstore.wire import Op

logger = logging.getLogger(__name__)


class HandoffVerbs(ABC):
    """Publishing and fetching; connections, jobs and the registered cache are the client's."""

    space: Namespace
    part: Part
    config: StoreConfig
    node_id: str
    epoch: str
    _store: StoreConnections
    _stuck: bool
    _caches: EngineCaches | None = None
    _stage_link: StageLink | None = None

    def attach_handoff(self, staging: str | int = "1GiB", peers: Sequence[str] = ()) -> HandoffRoute:
        """Let hand-offs of this client go from GPU to GPU, past host memory, where that is faster.

        The blocks go through a stage: memory of the cache's GPU that this node's mover has and lets others read. It is
        shared by all clients of the GPU, and stays while the mover lives. Without this call, or where GPUs cannot reach
        each other, hand-offs go through host memory; either way with the same contract and the same bytes.

        Args:
            staging: size of the stage, such as "1GiB": blocks that are published and fetched at once have to fit.
                The first client of a GPU decides.
            peers: nodes whose stages this client will fetch from. Their lanes are warmed up and measured now, which
                the first fetch from any other does by itself; attach there first.

        Returns:
            Which way hand-offs go, and why.

        Raises:
            InvalidRequest: no cache is registered.
            StoreUnavailable, PeerLost, TransferTimeout: the store or its mover is gone, or does not answer.
        """
        self._registered()
        assert self._caches is not None, "kept with the copier"
        if self._stage_link is not None:
            self._stage_link.close()
        self._stage_link = StageLink(self._store.ask, self._caches, parse_bytes(staging), tuple(peers))
        return self._stage_link.attach()

    @property
    def handoff_slab(self) -> int:
        """Where `begin_publish` puts blocks, for a ticket that is made elsewhere: in this stage, or 0, the arena."""
        return self._stage_link.slab if self._stage_link is not None else 0

    def prepare_ticket(self, num_blocks: int, *, ttl_s: float | None = None) -> HandoffTicket:
        """Return a ticket for blocks that this client will publish, to be sent ahead of them.

        A fetch waits until they are published under it, and there. So the reader's way to them, and all that comes
        before the READ, is over when they are.

        Args:
            num_blocks: stored blocks that will be published.
            ttl_s: as for `publish`; only the ticket's `expires_s` is made of it.

        Returns:
            The ticket, for the next `publish` or `begin_publish` of these blocks. Whoever will not publish after all
            says so with `withdraw`, or a fetch waits for its time.

        Raises:
            InvalidRequest: an argument is wrong.
        """
        if not isinstance(num_blocks, int) or num_blocks < 1:
            raise InvalidRequest(f"num_blocks: wanted a number of stored blocks from 1 on, got {num_blocks!r}")
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
            What the other client needs, to be sent there by any means. If the device fails after all, the ticket is
            void: the log says so, and the fetch.

        Raises:
            InvalidRequest: an argument is wrong; nothing changed.
            InvalidRequest, NamespaceMismatch, LayoutMismatch: the ticket is not one of this client, or was used
                before; nothing changed.
            PoolExhausted: the store has no room for all of the blocks; nothing changed.
            LayoutMismatch, KernelError: the cache is not as it was registered, or the device failed; nothing is kept.
            StoreUnavailable, PeerLost, TransferTimeout: the store is gone, drained, or does not answer.
        """
        keep_s, link = self._keep_s(ttl_s), self._stage_link
        self._check_named(ticket)
        begun = self._begin_in_stage(link, block_ids, keep_s, ticket)
        if begun is not None:
            try:
                begun.hold_engine()
            finally:  # Only now: a thread that is woken wants the interpreter, and the ticket is waited for.
                publication = self._complete_later(begun, link)
                publication.job.add_done_callback(_log_failure)
            return publication.ticket
        publishing = self._publishing(block_ids, keep_s, ticket)
        publishing.order()

        def run() -> HandoffTicket:
            with self._ending_job():
                connection, limit_s = self._store.of_thread(), self._store.call_timeout_s

                def ask(op: Op, payload: bytes, meanwhile: Callable[[], None] | None) -> bytes:
                    return connection.call(op, payload, timeout_s=limit_s, meanwhile=meanwhile)

                publishing.claim(ask)
                return self._complete(publishing)

        # The calls in it have their own timeouts.
        job = self._submit(run, str(publishing), publishing.guard, publishing.pages.order)
        published: HandoffTicket = job.result(None)
        return published

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
        publishing = self._begin_in_stage(link, block_ids, keep_s, ticket)
        if publishing is None:
            publishing = self._publishing(block_ids, keep_s, ticket)
            publishing.order()
            publishing.claim(self._store.call)
        return self._complete_later(publishing, link)

    def _begin_in_stage(
        self, link: StageLink | None, block_ids: object, keep_s: float, named: HandoffTicket | None = None
    ) -> Publishing | None:
        """Queue the copies into the stage, which stays mapped for them; None where the arena has to serve."""
        stage = link.take() if link is not None else None
        if link is None or stage is None:
            return None
        try:
            if named is None or named.slab == stage.slab:
                self._wake_store()  # The question after it is made meanwhile.
                publishing = self._publishing(block_ids, keep_s, named, stage)
                publishing.begin()
                return publishing
        except PoolExhausted:
            logger.debug("hand-off: the stage is full, the arena is taken")
        except (PeerLost, StoreUnavailable):
            # Its mover died: the arena serves, or says what else is wrong.
            link.lose(stage)
        except BaseException:
            link.leave(stage)
            raise
        link.leave(stage)
        return None

    def _complete_later(self, publishing: Publishing, link: StageLink | None) -> Publication:
        """Have a thread wait for the copies and tell the store; the link's stage is left behind that."""
        stage = publishing.stage

        def leave() -> None:
            if link is not None and stage is not None:
                link.leave(stage)

        def give_back() -> None:
            if not isinstance(work.future.exception(), CopyStuck):  # Else the stage stays mapped.
                leave()

        work = Work(lambda: self._complete(publishing), math.inf, give_back)
        work.begin()  # Cancelled it would leave slots that nobody gives back.
        try:
            job = self._submit(work, str(publishing), publishing.guard, publishing.pages.order)
        except BaseException:
            with self._noting_stuck():
                publishing.drop()
            leave()
            raise
        return Publication(publishing.ticket, job)

    def _keep_s(self, ttl_s: float | None) -> float:
        keep_s = self.config.lease_ttl_s if ttl_s is None else ttl_s
        if not 0 < keep_s < math.inf:
            raise InvalidRequest(f"ttl_s: wanted a number of seconds above 0, got {ttl_s}")
        return keep_s

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
        ticket = named
        if ticket is None:
            num_blocks = num_published(block_ids, copier.layout.block_size, shape.block_size)
            ticket = self._ticket(num_blocks, keep_s, stage.slab if stage else 0)
        chosen = copier if stage is None else stage.copier
        return Publishing(ticket, block_ids, shape.block_size, chosen, stage, self._store.call, self._store.say, keep_s)

    def _complete(self, publishing: Publishing) -> HandoffTicket:
        with self._noting_stuck():
            return publishing.complete()

    @contextlib.contextmanager
    def _noting_stuck(self) -> Iterator[None]:
        try:
            yield
        except CopyStuck:
            self._stuck = True
            raise

    def fetch(
        self,
        ticket: HandoffTicket,
        block_ids: object,
        skip_prefix_tokens: int = 0,
        *,
        timeout_s: float | None = None,
        num_copy_threads: int = 0,
    ) -> Job[FetchResult]:
        """Bring the blocks of a ticket into the engine's cache, wherever they were published.

        A ticket is good for one fetch that delivers everything; one that failed may be tried again in time.

        Args:
            ticket: of `publish`.
            block_ids: the engine's block for each of the ticket's.
            skip_prefix_tokens: tokens at the front that the engine has already: not one byte of them is written,
                whether or not they end at a block. Their blocks are moved all the same. See `Client.load`.
            timeout_s: give up after this long; the configured transfer timeout when None.
            num_copy_threads: see `Client.load`.

        Returns:
            A job; its result names the usable prefix and each block that is not, with a reason. Blocks after the
            usable prefix may hold anything.

        Raises:
            NamespaceMismatch: the ticket is of another namespace; nothing changed.
            LayoutMismatch: it is of another part or order of bytes; nothing changed.
            InvalidRequest: another argument is wrong; nothing changed.
            LayoutMismatch, InvalidRequest, KernelError: nothing can be copied to the cache, because it was resized, a
                graph is being captured, or the device failed; nothing was copied, but the ticket may be used up.
        """
        copier, link = self._registered(), self._stage_link
        with contextlib.ExitStack() as held:
            early, connection = None, None
            if len(self._store.for_fetches):
                connection = held.enter_context(self._store.for_fetches.taken())
                if link is not None and isinstance(ticket, HandoffTicket) and ticket.slab:
                    # Before all else: the store wakes meanwhile.
                    with contextlib.suppress(PeerLost):
                        connection.send(Op.HANDOFF_SOON, link.soon(ticket.node_id, ticket.slab))
            check_ticket(ticket, self.space, self.part.ranks)
            limit_s = self.config.transfer_timeout_s if timeout_s is None else timeout_s
            stage = held.enter_context(link.using()) if link is not None else None
            pages = engine_pages(block_ids, copier.layout, self.space.shape.block_size, 0, ticket.num_blocks)
            check_skip(self.space.shape, skip_prefix_tokens, ticket.num_blocks)
            num_skipped = min(skip_prefix_tokens // self.space.shape.block_size, ticket.num_blocks)
            if connection is not None:
                # First of all: what is left to do here takes as long as the store and its peer do to answer.
                with contextlib.suppress(PeerLost):
                    early = self._ask_fetch(held, connection, stage, ticket, limit_s)
            pages = ordered(pages, copier, num_copy_threads)
            copier.check_unchanged()
            guard, mapped = CopyGuard(pages.order), held.pop_all()

        asked = [] if early is None else [early]

        def run() -> FetchResult:
            try:
                if not asked:
                    connection = mapped.enter_context(self._store.for_fetches.taken())
                    asked.append(self._ask_fetch(mapped, connection, stage, ticket, limit_s))
            except (StoreUnavailable, PeerLost) as error:
                return failed_fetch(pages, ticket, num_skipped, f"store_lost: {error}")
            with self._noting_stuck():
                result = run_fetch(asked[0], copier, stage, pages, ticket, skip_prefix_tokens, guard, self.config)
            if link is not None and stage is not None and result.note.startswith("stage_lost"):
                link.lose(stage)
            return result

        def give_back() -> None:
            with contextlib.suppress(KVStoreError), mapped:
                if not work.future.cancelled() and isinstance(error := work.future.exception(), CopyStuck):
                    raise error  # The stage stays mapped.
                for each in asked:
                    each.give_back()

        work = Work(run, limit_s, give_back)
        try:
            return self._submit(work, f"fetch of {ticket.num_blocks} blocks", guard, pages.order)
        except BaseException:
            mapped.close()
            raise

    def _ask_fetch(
        self,
        held: contextlib.ExitStack,
        connection: ControlClient,
        stage: AttachedStage | None,
        ticket: HandoffTicket,
        timeout_s: float,
    ) -> Asked:
        asked = ask_fetch(connection, stage, ticket, self.config, timeout_s)
        held.enter_context(contextlib.closing(asked.pieces))
        return asked

    def withdraw(self, ticket: HandoffTicket) -> bool:
        """Take back what this node's store holds for a ticket, because nobody will fetch it any more.

        Nothing is published under it from now on, either, and a fetch that waits for that ends.

        Returns:
            Whether it was still held; False also for a ticket of another node.
        """
        if (ticket.node_id, ticket.epoch.hex()) != (self.node_id, self.epoch):
            return False
        return bool(U64.unpack(self._store.call(Op.HANDOFF_WITHDRAW, ticket.key))[0])

    @abstractmethod
    def _registered(self) -> EngineCopier:
        """Return the copier of the registered cache, or refuse."""

    @abstractmethod
    def _ending_job(self) -> contextlib.AbstractContextManager[None]:
        """Tell the store at once when a job's connection broke."""

    @abstractmethod
    def _submit(
        self, run: Callable[[], Any] | Work[Any], what: str, guard: CopyGuard, order: CopyOrder | None
    ) -> Job[Any]:
        """Run a job on a thread of the client, or `Work` on one that waits for it if that comes first."""


def _log_failure(job: Job[HandoffTicket]) -> None:
    try:
        job.result(0.0)
    except Exception:
        logger.exception("%r failed after its ticket was given out; a fetch of it is told so", job)

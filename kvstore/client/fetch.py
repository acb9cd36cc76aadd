"""What a client does for hand-offs: the fetching half, and all."""

from __future__ import annotations

import contextlib
import functools

from kvstore.blocks.ticket import HandoffTicket
from kvstore.bounds import MAX_COPY_THREADS, check_count, check_seconds
from kvstore.client.fetch_job import Asked, ask_fetch, check_ticket, failed_fetch, run_fetch
from kvstore.client.publish import PublishVerbs
from kvstore.client.results import FetchResult, Job
from kvstore.client.save_load import TIMED_OUT_IN_QUEUE, CopyGuard
from kvstore.client.stage_link import AttachedStage
from kvstore.client.work import Steps, Work
from kvstore.engine.copier import engine_pages, ordered
from kvstore.engine.side_tensors import check_skip
from kvstore.errors import CopyStuck, KVStoreError, PeerLost, StoreUnavailable, TransferError
from kvstore.rpc.client import ControlClient
from kvstore.rpc.framing import Op
from kvstore.runtime import clock


class HandoffVerbs(PublishVerbs):
    """Publishing and fetching; connections, jobs and the registered cache are the client's."""

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
            timeout_s: give up so long after this call; the configured transfer timeout when None.
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
        held, guard = contextlib.ExitStack(), CopyGuard()
        work: Work[FetchResult] | None = None
        try:
            early, connection = None, None
            if len(self._store.for_fetches):
                connection = held.enter_context(self._store.for_fetches.taken())
                if link is not None and isinstance(ticket, HandoffTicket) and ticket.slab:
                    # Before all else: the store wakes meanwhile.
                    with contextlib.suppress(PeerLost):
                        connection.send(Op.HANDOFF_SOON, link.soon(ticket.node_id, ticket.slab))
            check_ticket(ticket, self.space, self.part.ranks)
            limit_s = self.config.transfer_timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)
            check_count("num_copy_threads", num_copy_threads, 0, MAX_COPY_THREADS)
            deadline_s = clock.now_s() + limit_s
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
            guard, asked = CopyGuard(pages.order), [] if early is None else [early]

            def run() -> Steps[FetchResult]:
                try:
                    if not asked:
                        if (left_s := deadline_s - clock.now_s()) <= 0:
                            return failed_fetch(pages, ticket, num_skipped, TIMED_OUT_IN_QUEUE)
                        connection = held.enter_context(self._store.for_fetches.taken())
                        asked.append(self._ask_fetch(held, connection, stage, ticket, left_s))
                        yield asked[0].awaited()
                except (StoreUnavailable, TransferError) as error:
                    return failed_fetch(pages, ticket, num_skipped, f"store_lost: {error}")
                fetching = run_fetch(asked[0], copier, stage, pages, ticket, skip_prefix_tokens, guard, self.config)
                with self._noting_stuck():
                    result = yield from fetching
                if link is not None and stage is not None and result.note.startswith("stage_lost"):
                    link.lose(stage)
                return result

            def give_back() -> None:
                error = None if work is None or work.future.cancelled() else work.future.exception()
                interrupt = None if work is None else work.interrupt
                try:
                    with contextlib.suppress(KVStoreError), held:
                        if isinstance(error, CopyStuck):
                            raise error  # The stage stays mapped.
                        if interrupt is not None:
                            raise interrupt  # It may have come anywhere: the connection is closed.
                        if error is not None and not isinstance(error, KVStoreError):
                            raise error  # The same of a callback's, or a bug's.
                        for each in asked:
                            each.give_back()
                except BaseException as raised:
                    if raised is not error and raised is not interrupt:
                        raise

            # One that has yet to connect is not run by a thread that waits for it: that takes as long as it takes.
            work = Work(run, limit_s if early is not None else None, give_back)
            start = self._jobs.start
            if early is not None:
                start = functools.partial(self._jobs.start_asked, awaited=early.awaited())
            return self._submit(work, f"fetch of {ticket.num_blocks} blocks", guard, pages.order, start)
        except BaseException:
            if work is None:
                with held:
                    raise
            self._call_off(work, guard)  # It gives back what is held: it may be using it.
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

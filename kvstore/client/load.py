"""The steps of a load: ask once, and copy out each block when it comes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.codec import encode
from kvstore.blocks.priority import Priority, as_priority
from kvstore.bounds import MAX_COPY_THREADS, MAX_SLOTS, check_callable, check_count
from kvstore.client.attachment import Attachment
from kvstore.client.job import Job
from kvstore.client.results import BlockFailure, LoadResult, MissReason
from kvstore.client.submit import submit
from kvstore.client.work import CopyGuard, Steps, Work, next_piece
from kvstore.config import StoreConfig
from kvstore.engine.copier import EngineCopier, EnginePages, job_pages
from kvstore.engine.side_tensors import check_skip
from kvstore.errors import (
    CopyStuck,
    JobAbandoned,
    KVStoreError,
    ProtocolError,
    RegistrationFailed,
    StoreDraining,
    StoreUnavailable,
    TransferError,
)
from kvstore.rpc.client import ControlClient
from kvstore.rpc.exchange import Exchange
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import STAGE_BIT, AskLoad, LoadReport, decode_progress
from kvstore.runtime import clock

_COUNTS = ("num_local", "num_peer", "num_bytes", "num_descriptors", "num_locate_calls", "num_lease_calls", "num_disk")
#: Between stages, the pieces of an answer follow each other faster than this.
_AWAKE_S = 1e-3
#: The reason of a job that was not begun.
TIMED_OUT_IN_QUEUE = "timeout: its time ended before a thread of this client was free for it"


def begin_load(
    attached: Attachment,
    hashes: BlockHashes,
    block_ids: object,
    skip_tokens: int,
    timeout_s: float | None,
    on_queued: Callable[[], None] | None,
    num_copy_threads: int,
    priority: object,
) -> Job[LoadResult]:
    """Begin `Client.load`; see there for the arguments."""
    copier, chain, of_priority = attached.registered(), attached.chain(hashes), as_priority(priority)
    limit_s = attached.transfer_s(timeout_s)
    if on_queued is not None:
        check_callable("on_queued", on_queued)
    num_copy_threads = check_count("num_copy_threads", num_copy_threads, 0, MAX_COPY_THREADS)
    pages = job_pages(block_ids, copier, chain.start, len(chain), num_copy_threads)
    copier.check_unchanged()
    check_skip(attached.space.shape, skip_tokens, len(chain))
    chain.check_unique()
    return _begin(attached, copier, chain, pages, skip_tokens, limit_s, on_queued, of_priority)


def begin_prefetch(attached: Attachment, hashes: BlockHashes, timeout_s: float | None) -> Job[LoadResult]:
    """Begin `Client.prefetch`, a load without an engine."""
    chain = attached.chain(hashes)
    chain.check_unique()
    return _begin(attached, None, chain, None, 0, attached.transfer_s(timeout_s))


def _begin(
    attached: Attachment,
    copier: EngineCopier | None,
    chain: BlockHashes,
    pages: EnginePages | None,
    skip_tokens: int,
    timeout_s: float,
    on_queued: Callable[[], None] | None = None,
    priority: Priority = Priority.NORMAL,
) -> Job[LoadResult]:
    guard = CopyGuard(pages.order if pages is not None else None)
    num_skipped, config = skip_tokens // attached.space.shape.block_size, attached.store.config
    deadline_s = clock.now_s() + timeout_s

    def run() -> Steps[LoadResult]:
        if num_skipped >= len(chain):
            return LoadResult(num_blocks=len(chain))
        if (left_s := deadline_s - clock.now_s()) <= 0:
            return _failed(num_skipped, pages, len(chain), TIMED_OUT_IN_QUEUE)
        try:
            with attached.store.for_jobs.taken() as connection, attached.noting_stuck():
                return (
                    yield from run_load(
                        connection, copier, chain, pages, skip_tokens, guard, config, left_s, on_queued, priority
                    )
                )
        except (StoreUnavailable, TransferError) as error:
            return _failed(num_skipped, pages, len(chain), f"store_lost: {error}")

    what = "prefetch" if copier is None else "load"
    return submit(attached, Work(run), f"{what} of {len(chain)} blocks", guard)


def run_load(
    connection: ControlClient,
    copier: EngineCopier | None,
    chain: BlockHashes,
    pages: EnginePages | None,
    skip_tokens: int,
    guard: CopyGuard,
    config: StoreConfig,
    timeout_s: float,
    on_queued: Callable[[], None] | None = None,
    priority: Priority = Priority.NORMAL,
) -> Steps[LoadResult]:
    """Ask once, copy out readable blocks while the rest is on its way, release the lease.

    Blocks of skipped tokens alone are not asked for. Without a copier, and so without pages, the blocks only come into
    this node's memory. No other job uses the connection meanwhile.
    """
    first = skip_tokens // pages.stored_block_size if pages is not None else 0
    ttl_s = config.lease_ttl_s
    valid_until_s = clock.now_s() + ttl_s - config.lease_margin_s
    answer = Answer(len(chain) - first, reason="store_lost: the node store ended the load early")

    def queued() -> None:
        is_whole = first + answer.num_ready == len(chain) and not answer.report.reason
        if on_queued is not None and is_whole and clock.now_s() < valid_until_s:
            if copier is not None:
                copier.check_unchanged()
            on_queued()

    def steps() -> Steps[None]:
        question = encode(AskLoad(chain.tail(first), ttl_s, timeout_s, priority))
        pieces = connection.call_stream(Op.LOAD, question, timeout_s=timeout_s + config.call_timeout_s)
        yield from answer.copy_out(pieces, guard, copier, pages, first, skip_tokens, queued=queued)
        with contextlib.suppress(StoreUnavailable, TransferError):  # The bytes are in place even if the store ended.
            connection.send(Op.RELEASE, encode(answer.number))

    failure = yield from failing_closed(connection, steps(), lambda: (Op.RELEASE, encode(answer.number)))
    if failure:
        answer.num_ready, answer.report = 0, LoadReport(reason=failure)
    if clock.now_s() > valid_until_s:
        # The store may have reused slots while they were copied out, so no block counts.
        answer.num_ready, answer.report.reason = 0, "lease_expired"
    usable = first + answer.num_ready
    failed = failures(usable, pages, len(chain), answer.report.reason)
    return LoadResult(num_blocks=usable, failed=failed, **answer.counts())


def failing_closed(
    connection: ControlClient, steps: Steps[None], give_back: Callable[[], tuple[Op, bytes]]
) -> Steps[str]:
    """Do the steps of a job that copies out, and return why it failed, or "".

    Blocks copied before a failure may be incomplete, so none of them counts. `give_back` returns the message that tells
    the store that no copy runs any more.
    """
    try:
        yield from steps
    except RegistrationFailed as error:
        # The store works, but its blocks cannot be copied now.
        with contextlib.suppress(KVStoreError):
            connection.send(*give_back())
        return f"not_pinned: {error}"
    except CopyStuck:
        raise  # No result may say that the engine can reuse its blocks.
    except StoreDraining as error:
        return f"draining: {error}"
    except (StoreUnavailable, TransferError) as error:
        return f"store_lost: {error}"
    except JobAbandoned as error:
        # The rest of the answer is not awaited: closing the connection gives back what the store gave over it.
        connection.close()
        return f"abandoned: {error}"
    except KVStoreError:
        with contextlib.suppress(KVStoreError):
            connection.send(*give_back())
        raise
    except BaseException:
        connection.close()  # An interrupt or a caller's error: the store takes back its grants.
        raise
    return ""


class Answer:
    """The part of a streamed answer to a load or a fetch that has come so far.

    Until a report comes, `reason` says why nothing came.
    """

    def __init__(self, num_blocks: int, reason: str) -> None:
        self._num_blocks = num_blocks
        #: The number of the store's lease or fetch, 0 until its first piece.
        self.number = 0
        #: Number of blocks in place, from the first one asked for.
        self.num_ready = 0
        #: Its `reason` says why not everything came; empty when everything came.
        self.report = LoadReport(reason=reason)

    def copy_out(
        self,
        pieces: Exchange,
        guard: CopyGuard,
        copier: EngineCopier | None,
        pages: EnginePages | None,
        first: int = 0,
        skip_tokens: int = 0,
        stage_copier: EngineCopier | None = None,
        queued: Callable[[], None] = lambda: None,
    ) -> Steps[None]:
        """Copy each piece out of its slots while the next is on its way. Ends when all is in place.

        One copier is for slots in the arena, the other for slots in the stage of the cache's GPU; without the first
        nothing is copied. The answer counts from stored block `first` of the job. `queued` is called at its end, when
        all copies are queued, before they are waited for. `pieces` is closed here, because it holds the connection.

        Raises:
            LayoutMismatch: the engine's tensors were replaced meanwhile.
            ProtocolError: the slots do not fit the blocks that were asked for.
        """
        with contextlib.closing(pieces):
            try:
                while not pieces.is_finished:
                    progress = decode_progress((yield from next_piece(pieces, guard.check)))
                    self.number = progress.lease_id
                    chosen = stage_copier if self.number & STAGE_BIT else copier
                    slots = progress.slots_after(
                        self.num_ready, self._num_blocks, MAX_SLOTS if chosen is None else chosen.num_slots
                    )
                    if count := len(slots):
                        if chosen is None and copier is not None:
                            raise ProtocolError(
                                "wanted slots in the arena, got some in a stage that this client has not"
                            )
                        if chosen is not None and pages is not None:
                            at = first + progress.first
                            indexes = np.arange(at, at + count, dtype=np.int64)
                            with guard.copying:
                                guard.check()
                                chosen.out_of_slots(pages, indexes, slots.astype(np.int64), skip_tokens)
                            if chosen is stage_copier:
                                pieces.awake_s = _AWAKE_S
                        self.num_ready = progress.first + count
                    if progress.report is not None:
                        self.report = progress.report
                if pages is not None and pages.order is not None:
                    pages.order.end()
                queued()
            finally:  # Copies end before slots or blocks are given back, however this ends.
                if pages is not None:
                    try:
                        if stage_copier is not None:
                            stage_copier.finish(pages)
                    finally:
                        if copier is not None:
                            copier.finish(pages)
        if copier is not None:
            copier.check_unchanged()

    def counts(self) -> dict[str, Any]:
        """Return the result's fields about cost."""
        counts = {name: getattr(self.report, name) for name in _COUNTS}
        return {**counts, "peers": tuple(self.report.peers), "read_s": self.report.read_s}


def _failed(usable: int, pages: EnginePages | None, total: int, reason: str) -> LoadResult:
    return LoadResult(num_blocks=usable, failed=failures(usable, pages, total, reason))


def failures(usable: int, pages: EnginePages | None, total: int, reason: str) -> tuple[BlockFailure, ...]:
    """Return the failures of blocks [usable, total), all for one reason."""
    if usable >= total:
        return ()
    names = {kind.value for kind in MissReason}
    name = reason.split(":", 1)[0]
    kind = MissReason(name) if name in names else MissReason.OTHER if reason else MissReason.NOT_FOUND
    return tuple(
        BlockFailure(index=i, block_ids=pages.of_block(i) if pages else (), reason=kind, detail=reason)
        for i in range(usable, total)
    )

"""What a save and a load do, step by step, and how they are given up safely."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.blocks.chain import Chain
from kvstore.blocks.codec import decode_count, encode
from kvstore.blocks.part import Part
from kvstore.client.results import BlockFailure, LoadResult, MissReason, SaveResult
from kvstore.client.work import Awaited, Steps, asking, next_piece
from kvstore.config import StoreConfig
from kvstore.engine.copier import CopyOrder, EngineCopier, EnginePages
from kvstore.errors import (
    CopyStuck,
    JobAbandoned,
    KVStoreError,
    RegistrationFailed,
    StoreDraining,
    StoreUnavailable,
    TransferError,
)
from kvstore.rpc.client import ControlClient
from kvstore.rpc.exchange import Exchange
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import (
    STAGE_BIT,
    Ask,
    AskLoad,
    LoadReport,
    Prepare,
    WriteEnd,
    decode_progress,
    decode_ticket,
)
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

_COUNTS = ("num_local", "num_peer", "num_bytes", "num_descriptors", "num_locate_calls", "num_lease_calls")
#: Between stages the pieces of an answer follow each other faster than that.
_AWAKE_S = 1e-3
#: A call that gives a job up looks so often whether its copy has ended.
_LOOK_AGAIN_S = 1e-3
#: Before a save looks again for blocks that others did not write after all.
_PAUSE_S = 0.02
#: Of a job that was never begun.
TIMED_OUT_IN_QUEUE = "timeout: its time ended before a thread of this client was free for it"


class CopyGuard:
    """Stands between a job and the engine's blocks: once abandoned, no copy begins any more.

    Args:
        order: of the job's copies, where they go on beside the thread that began them.
    """

    def __init__(self, order: CopyOrder | None = None) -> None:
        #: Held by `with` alone, and `check` called under it first, while the engine's blocks, or the decision to
        #: publish them, are touched. Of Python's own: an interrupt behind a function that takes it leaves it locked.
        self.copying = threading.Lock()
        self._order = order
        self._abandoned = False

    def check(self) -> None:
        """Refuse to go on after `abandon`.

        Raises:
            JobAbandoned: the owner gave the job up.
        """
        if self._abandoned:
            raise JobAbandoned("the job was abandoned by its owner; the engine's blocks are its own again")

    def abandon(self, timeout_s: float) -> bool:
        """Let no copy begin any more, and wait for those that run; False when one outlasts the time."""
        self._abandoned = True
        deadline_s = clock.now_s() + timeout_s
        # Looked at and never taken here: an interrupt could leave it locked. A copy that comes now meets `check`.
        while self.copying.locked():
            if (left_s := deadline_s - clock.now_s()) <= 0:
                return False
            time.sleep(min(left_s, _LOOK_AGAIN_S))
        return self._order is None or self._order.settle(max(0.0, deadline_s - clock.now_s()))


def run_save(
    connection: ControlClient,
    copier: EngineCopier,
    chain: Chain,
    pages: EnginePages,
    part: Part,
    guard: CopyGuard,
    call_timeout_s: float,
    deadline_s: float,
    num_clears: int,
) -> Steps[SaveResult]:
    """Claim slots, copy, publish; wait for blocks that others are writing, and write them if those give up.

    A rank of several copies its part and waits for the others' parts; a block that they gave up is not tried again.

    Args:
        connection: of this job alone.
        copier: the engine's cache.
        chain: the blocks to store.
        pages: where their tokens lie in the engine.
        part: the part of each block that the engine holds.
        guard: stands before each copy.
        call_timeout_s: for each call.
        deadline_s: until when others are waited for, of kvstore.runtime.clock.
        num_clears: of the namespace, from when the save was asked for.

    Raises:
        ChainBroken: the chain's parent is not stored; nothing changed.
        JobAbandoned: given up; what had been copied completely may be findable.
        KernelError: the copies failed; nothing of them is stored.
        LayoutMismatch: the engine's tensors were replaced meanwhile; likewise.
        KVStoreError: the store failed.
    """
    # Written in an earlier round. What is evicted while others are waited for is written again, and counts once.
    earlier: set[int] = set()
    request = encode(Prepare(chain, part.num_parts, part.index, num_clears))
    while True:
        answer = yield from asking(connection, Op.PREPARE_STORE, request, timeout_s=call_timeout_s)
        ticket = decode_ticket(answer)
        indexes, slots = ticket.arrays()
        num_published, num_blocks = 0, len(chain) - ticket.num_refused
        if ticket.num_clears != num_clears:
            logger.info(
                "a save of %d blocks is dropped: their namespace was cleared since it was asked for", len(chain)
            )
            return SaveResult(num_blocks=0, num_written=0, num_refused=0)
        if ticket.write_id:
            end = encode(WriteEnd.of(ticket))
            try:
                with guard.copying:
                    guard.check()
                    copier.into_slots(pages, indexes.astype(np.int64), slots.astype(np.int64))
                    copier.check_unchanged()
                answer = yield from asking(connection, Op.COMPLETE_STORE, end, timeout_s=2 * call_timeout_s)
                num_published = decode_count(answer)
            except (CopyStuck, GeneratorExit):
                raise  # Its slots may still be written: they stay taken until this process ends.
            except BaseException:
                # A write that was published after all, with its answer lost, is not touched by this.
                with contextlib.suppress(KVStoreError):
                    yield from asking(connection, Op.ABORT_STORE, end, timeout_s=call_timeout_s)
                raise
        lost = num_published < len(indexes)
        written = (indexes if part.num_parts > 1 else indexes[:num_published]).tolist()
        if lost or ticket.num_awaited:
            left_s = max(0.0, deadline_s - clock.now_s())
            question = encode(Ask(chain.head(num_blocks), left_s))
            answer = yield from asking(connection, Op.AWAIT_STORE, question, timeout_s=left_s + call_timeout_s)
            num_stored = decode_count(answer)
            if num_stored < num_blocks and not lost and clock.now_s() < deadline_s:
                earlier.update(written)
                # A pause: where too many saves wait, the store answers at once.
                yield Awaited(connection.fileno(), min(deadline_s, clock.now_s() + _PAUSE_S))
                continue
            num_blocks = num_stored
        num_written = len(written)
        if earlier or part.num_parts > 1:
            end_index = num_blocks if part.num_parts > 1 else len(chain) - ticket.num_refused
            num_written = sum(index < end_index for index in earlier.union(written))
        return SaveResult(num_blocks=num_blocks, num_written=num_written, num_refused=ticket.num_refused)


def run_load(
    connection: ControlClient,
    copier: EngineCopier | None,
    chain: Chain,
    pages: EnginePages | None,
    skip_tokens: int,
    guard: CopyGuard,
    config: StoreConfig,
    timeout_s: float,
    on_queued: Callable[[], None] | None = None,
) -> Steps[LoadResult]:
    """Ask once, copy out what becomes readable while the rest is still on its way, give the lease back.

    Args:
        connection: of this job alone.
        copier: the engine's cache; None only brings the blocks into this node's memory.
        chain: the blocks wanted.
        pages: where their tokens lie in the engine; None without a copier.
        skip_tokens: tokens at the front that must not be written; blocks that lie in them are not asked for.
        guard: stands before each copy.
        config: of the store.
        timeout_s: for fetching.
        on_queued: called when all blocks are leased and their copies queued; see `Client.load`.
    """
    first = skip_tokens // pages.stored_block_size if pages is not None else 0
    ttl_s = config.lease_ttl_s
    valid_until_s = clock.now_s() + ttl_s - config.lease_margin_s
    answer = Answer(reason="store_lost: the node store ended the load early")
    try:
        pieces = connection.call_stream(
            Op.LOAD, encode(AskLoad(chain.tail(first), ttl_s, timeout_s)), timeout_s=timeout_s + config.call_timeout_s
        )

        def queued() -> None:
            is_whole = first + answer.num_ready == len(chain) and not answer.reason
            if on_queued is not None and is_whole and clock.now_s() < valid_until_s:
                if copier is not None:
                    copier.check_unchanged()
                on_queued()

        yield from answer.copy_out(pieces, guard, copier, pages, first, skip_tokens, queued=queued)
        with contextlib.suppress(StoreUnavailable, TransferError):  # The bytes are in place, whatever became of it.
            connection.send(Op.RELEASE, encode(answer.number))
    except RegistrationFailed as error:
        # Nothing is wrong with the store, but nothing of it can be copied now.
        answer.fail(f"not_pinned: {error}")
        with contextlib.suppress(KVStoreError):
            connection.send(Op.RELEASE, encode(answer.number))
    except CopyStuck:
        raise  # No result says that blocks are the engine's again.
    except StoreDraining as error:
        answer.fail(f"draining: {error}")
    except (StoreUnavailable, TransferError) as error:
        # Fail closed: what was copied so far may be incomplete, so none of it counts.
        answer.fail(f"store_lost: {error}")
    except JobAbandoned as error:
        # The rest of the answer is not waited for: the connection goes, and with it the lease.
        connection.close()
        answer.fail(f"abandoned: {error}")
    except KVStoreError:
        with contextlib.suppress(KVStoreError):
            connection.send(Op.RELEASE, encode(answer.number))
        raise
    except BaseException:
        connection.close()  # An interrupt, or an error of the caller's: the store takes back what it gave over it.
        raise
    if clock.now_s() > valid_until_s:
        # The store may have reused slots while they were copied out: nothing of it counts.
        answer.num_ready, answer.report.reason = 0, "lease_expired"
    usable = first + answer.num_ready
    return LoadResult(num_blocks=usable, failed=failures(usable, pages, len(chain), answer.reason), **answer.counts())


class Answer:
    """What the store said so far in its streamed answer to a load or a fetch.

    Args:
        reason: why nothing came, as long as no report did.
    """

    def __init__(self, reason: str) -> None:
        #: The lease or fetch that the store began, 0 until it said so.
        self.number = 0
        #: Blocks that are in place, from the first that was asked for.
        self.num_ready = 0
        self.report = LoadReport(reason=reason)

    @property
    def reason(self) -> str:
        """Why not everything came; empty when it did."""
        return self.report.reason

    def fail(self, reason: str) -> None:
        """Let nothing count of what came."""
        self.num_ready, self.report = 0, LoadReport(reason=reason)

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
        """Copy each piece out of its slots while the next is on its way; returns when all is in place.

        Args:
            pieces: the answer; closed here, because it holds the connection.
            guard: stands before each copy.
            copier: the engine's cache; None copies nothing.
            pages: where the tokens lie in the engine.
            first: the stored block of the job that the answer counts from.
            skip_tokens: tokens at the front of the job that must not be written.
            stage_copier: the engine's cache and the stage of its GPU, for slots that are there.
            queued: called at the end of the answer, when all copies are queued and before they are waited for.

        Raises:
            LayoutMismatch: the engine's tensors were replaced meanwhile.
        """
        with contextlib.closing(pieces), _Finishing(copier, stage_copier, pages):
            while not pieces.is_finished:
                _, payload = yield from next_piece(pieces, guard.check)
                progress = decode_progress(payload)
                self.number = progress.lease_id
                slots = progress.slots
                if count := len(slots):
                    chosen = stage_copier if self.number & STAGE_BIT else copier
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
        if copier is not None:
            copier.check_unchanged()

    def counts(self) -> dict[str, Any]:
        """Return the fields of a result that tell what it cost."""
        counts = {name: getattr(self.report, name) for name in _COUNTS}
        return {**counts, "peers": tuple(self.report.peers), "read_s": self.report.read_s}


class _Finishing:
    """Calls `finish` however the body ends, so that a device is through with it before slots or blocks are let go."""

    def __init__(
        self, copier: EngineCopier | None, stage_copier: EngineCopier | None, pages: EnginePages | None
    ) -> None:
        self._copier, self._stage_copier, self._pages = copier, stage_copier, pages

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        if self._pages is None:
            return
        try:
            if self._stage_copier is not None:
                self._stage_copier.finish(self._pages)
        finally:
            if self._copier is not None:
                self._copier.finish(self._pages)


def failed_load(usable: int, pages: EnginePages | None, total: int, reason: str) -> LoadResult:
    """Return the result of a load that ended before it began."""
    return LoadResult(num_blocks=usable, failed=failures(usable, pages, total, reason))


def failures(usable: int, pages: EnginePages | None, total: int, reason: str) -> tuple[BlockFailure, ...]:
    """Return the failures of blocks [usable, total), all for one reason."""
    if usable >= total:
        return ()
    names = {kind.value for kind in MissReason}
    word = reason.split(":", 1)[0]
    kind = MissReason(word) if word in names else MissReason.OTHER if reason else MissReason.NOT_FOUND
    return tuple(
        BlockFailure(index=i, block_ids=pages.of_block(i) if pages else (), reason=kind, detail=reason)
        for i in range(usable, total)
    )

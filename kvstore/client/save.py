"""The steps of a save: claim slots, copy, publish, wait for what others write."""

from __future__ import annotations

import contextlib
import logging

import numpy as np

from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.codec import decode_count, encode
from kvstore.blocks.part import Part
from kvstore.blocks.priority import check_terms
from kvstore.client.attachment import Attachment
from kvstore.client.job import Job
from kvstore.client.results import SaveResult
from kvstore.client.submit import submit
from kvstore.client.work import Awaited, CopyGuard, Steps, Work, asking
from kvstore.engine.copier import EngineCopier, EnginePages, job_pages
from kvstore.errors import CopyStuck, KVStoreError, ProtocolError
from kvstore.rpc.client import ControlClient
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import Ask, Prepare, WriteEnd, decode_ticket
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

#: Pause before a save asks again for blocks that other clients did not write after all.
_PAUSE_S = 0.02


def begin_save(
    attached: Attachment, hashes: BlockHashes, block_ids: object, priority: object, priority_s: object
) -> Job[SaveResult]:
    """Begin `Client.save`; see there for the arguments."""
    terms = check_terms(priority, priority_s)
    copier, chain = attached.registered(), attached.chain(hashes)
    store, part = attached.store, attached.part
    num_clears = attached.clears.get(chain.namespace)  # Read now: the namespace may be cleared before a thread is free.
    chain.check_unique()
    pages = job_pages(block_ids, copier, chain.start, len(chain))
    copier.check_unchanged()
    guard, limit_s = CopyGuard(pages.order), store.call_timeout_s
    asked = Prepare(chain, part.num_parts, part.index, num_clears, *terms)
    deadline_s = clock.now_s() + store.config.transfer_timeout_s

    def run() -> Steps[SaveResult]:
        with store.for_jobs.taken() as connection, attached.noting_stuck():
            saving = run_save(connection, copier, asked, pages, part, guard, limit_s, deadline_s)
            return (yield from saving)

    return submit(attached, Work(run), f"save of {len(chain)} blocks", guard)


def run_save(
    connection: ControlClient,
    copier: EngineCopier,
    asked: Prepare,
    pages: EnginePages,
    part: Part,
    guard: CopyGuard,
    call_timeout_s: float,
    deadline_s: float,
) -> Steps[SaveResult]:
    """Claim slots, copy and publish. Wait for other clients' blocks, and write those they give up.

    One of several ranks copies its part and waits for the other parts; a block that other ranks gave up is not retried.

    Other clients are waited for until `deadline_s`, by kvstore.runtime.clock. `asked` has the namespace's count of
    clearings when `Client.save` was called. No other job uses the connection meanwhile.

    Raises:
        ChainBroken: the chain's parent is not stored; nothing changed.
        JobAbandoned: the job was abandoned; blocks that were copied completely may be findable.
        KernelError: the copies failed; nothing of them is stored.
        LayoutMismatch: the engine's tensors were replaced meanwhile; nothing of them is stored.
        ProtocolError: the store named invalid blocks or slots; nothing is stored.
        KVStoreError: the store failed.
    """
    # Blocks written in earlier rounds. One evicted during a wait is written again, and counts once.
    earlier: set[int] = set()
    chain, request = asked.chain, encode(asked)
    while True:
        answer = yield from asking(connection, Op.PREPARE_STORE, request, timeout_s=call_timeout_s)
        ticket = decode_ticket(answer)
        if ticket.num_clears != asked.num_clears:
            logger.info(
                "a save of %d blocks is dropped: their namespace was cleared since it was asked for", len(chain)
            )
            return SaveResult(num_blocks=0, num_written=0, num_refused=0)
        try:
            indexes, slots = ticket.arrays(len(chain), copier.num_slots)
        except ProtocolError:
            connection.close()  # The store takes back what it gave over it.
            raise
        num_published, num_blocks = 0, len(chain) - ticket.num_refused
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
                raise  # A copy may still write the slots: they stay taken until this process ends.
            except BaseException:
                # This does not touch a write that was published although its answer was lost.
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
            if num_stored > num_blocks:
                raise ProtocolError(f"wanted word of {num_blocks} blocks, got one of {num_stored} that are stored")
            if num_stored < num_blocks and not lost and clock.now_s() < deadline_s:
                earlier.update(written)
                # A pause, because the store answers at once when too many saves wait.
                yield Awaited(connection.fileno(), min(deadline_s, clock.now_s() + _PAUSE_S))
                continue
            num_blocks = num_stored
        num_written = len(written)
        if earlier or part.num_parts > 1:
            end_index = num_blocks if part.num_parts > 1 else len(chain) - ticket.num_refused
            num_written = sum(index < end_index for index in earlier.union(written))
        return SaveResult(num_blocks=num_blocks, num_written=num_written, num_refused=ticket.num_refused)

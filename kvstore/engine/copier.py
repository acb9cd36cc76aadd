"""What the client asks of a copier: whatever moves blocks between one engine's cache and the arena's slots.

An engine cuts tokens into blocks of its own size, a multiple or a divisor of the stored one, so blocks of the
engine and slots do not pair up. A job therefore speaks of tokens: it begins with the first token of its first
hash, and `EnginePages` says where in the engine each of its tokens lies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from kvstore.engine.layout import EngineLayout
from kvstore.engine.registered import RegisteredCache
from kvstore.errors import InvalidRequest
from kvstore.kernels.merging import I64
from kvstore.kernels.spans import Paging, Spans, block_spans, position_spans


class CopyOrder(Protocol):
    """How the copies of one job stand to an engine's own work on a device; made in the thread that asks for the job."""

    def end(self) -> None:
        """Say that no more copies are queued for the job; may be said again."""

    def wait_on(self, stream: Any, timeout_s: float) -> bool:
        """Have work that is queued on a stream from now on begin after all copies of the job.

        Args:
            stream: of the engine's framework; None is the calling thread's current one.
            timeout_s: for the copies to be queued, which is all that the calling thread waits for.

        Returns:
            False when they were not all queued in time; the stream then waits for nothing.
        """

    def hold_engine(self) -> None:
        """Have the stream on which the job was asked for go on only after the copies that were queued so far.

        Raises:
            KernelError: the device failed.
        """

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing that was queued so far touches the engine's blocks any more; False when it still may."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EnginePages:
    """Where the tokens of one job lie in the engine; made by `engine_pages`.

    Token t of the job lies in engine block `ids[(offset_tokens + t) // engine_block_size]`, at token
    `(offset_tokens + t) % engine_block_size` of it.

    Args:
        ids: int64, engine blocks in the order of the chain, each once.
        offset_tokens: tokens of the first engine block before the job's first one; a multiple of the stored size.
        engine_block_size: tokens of an engine block.
        stored_block_size: tokens of a stored block; one of the two divides the other.
        order: of the job's copies; None where they are made by the thread that runs the job.
        num_threads: that share a copy in host memory; 0 for as many as its copier takes by itself.
    """

    ids: I64
    offset_tokens: int
    engine_block_size: int
    stored_block_size: int
    order: CopyOrder | None = None
    num_threads: int = 0

    def of_block(self, index: int) -> tuple[int, ...]:
        """Return the engine blocks that hold tokens of stored block `index` of the job."""
        begin = self.offset_tokens + index * self.stored_block_size
        end = begin + self.stored_block_size
        held = self.ids[begin // self.engine_block_size : -(-end // self.engine_block_size)]
        return tuple(held.tolist())


class EngineCopier(Protocol):
    """The registered cache of one engine, and the arena's slots.

    Nothing besides the named blocks, and in them the tokens of the job, is ever written. Copies into slots return
    when the bytes are in place. Copies out of slots may be queued only; `finish` waits for them, and has to be
    called, however the job ends, before its slots are given back. An error means that the copy touches nothing any
    more; CopyStuck alone means that it still may.

    It references the caller's tensors for as long as it lives, and never moves or replaces them.
    """

    cache: RegisteredCache
    #: Of the memory that slots are in.
    num_slots: int

    @property
    def layout(self) -> EngineLayout:
        """How the cache is arranged."""
        return self.cache.layout

    def check_unchanged(self) -> None:
        """Refuse tensors that are not those that were registered; on any thread.

        Copies go to and from the registered memory whatever became of the tensors. So this is asked when a job begins,
        and again when its copies are made, before anything is said of them: between the two the engine may have got
        other memory, which a load did not fill and a save did not read.

        Raises:
            LayoutMismatch: they were replaced, resized, restrided or moved; register them again.
        """
        self.cache.registered.check()

    def order(self) -> CopyOrder | None:
        """Record what the copies of a job come after, in the thread that asks for the job.

        Raises:
            InvalidRequest: the thread is doing what no copy can follow.
            KernelError: copies of this cache failed for good.
        """

    def into_slots(self, pages: EnginePages, indexes: I64, slots: I64) -> None:
        """Copy out of the engine into slots.

        Args:
            pages: where the job's tokens lie. Only read.
            indexes: ascending int64, which stored blocks of the job; all of each is copied.
            slots: int64, the slot of each; all different.
        """

    def out_of_slots(self, pages: EnginePages, indexes: I64, slots: I64, skip_tokens: int = 0) -> None:
        """Copy out of slots into the engine.

        Args:
            pages: where the job's tokens lie; written, but for the tokens of other blocks.
            indexes: ascending int64, which stored blocks of the job.
            slots: int64, the slot of each. Only read.
            skip_tokens: not a byte of the job's tokens below this one is written; counted from the job's first
                token, whichever blocks are copied.
        """

    def finish(self, pages: EnginePages) -> None:
        """Return when all that was queued for a job is in place; no more copies follow. May be called again.

        Raises:
            KernelError: the device failed; what was copied may be incomplete.
            CopyStuck: copies did not end in time.
        """

    def close(self) -> None:
        """Let go of the arena, so that it can be unmapped whoever still knows this object; it copies no more."""


def engine_pages(
    block_ids: object, layout: EngineLayout, stored_block_size: int, start: int, num_blocks: int
) -> EnginePages:
    """Check the engine's block ids of a job.

    Args:
        block_ids: flat integers: every engine block that holds a token of the job, in order.
        layout: of the engine.
        stored_block_size: tokens of a stored block.
        start: place of the job's first block in its chain; the chain's first token is the first of an engine block.
        num_blocks: stored blocks of the job.

    Raises:
        InvalidRequest: no integers, not as many as the job needs, out of range, or a block named twice.
    """
    try:
        # A range is not asked for its numbers one by one.
        ids = (
            np.arange(block_ids.start, block_ids.stop, block_ids.step)
            if isinstance(block_ids, range)
            else np.asarray(block_ids)
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"block_ids: wanted a flat list of integers, got something else ({error})") from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidRequest(f"block_ids: wanted a flat list of integers, got {ids.dtype} of shape {ids.shape}")
    engine = layout.block_size
    offset_tokens = start * stored_block_size % engine
    wanted = -(-(offset_tokens + num_blocks * stored_block_size) // engine) if num_blocks else 0
    if len(ids) != wanted:
        raise InvalidRequest(
            f"block_ids: wanted {wanted} engine blocks, got {len(ids)}; pass every block of {engine} tokens that holds "
            f"one of {num_blocks} stored blocks of {stored_block_size} tokens, of which the first begins at token "
            f"{offset_tokens} of its engine block"
        )
    # Of ufuncs, because the methods of arrays take a way through Python.
    ids = ids.astype(np.int64)
    if ids.size and int(np.maximum.reduce(ids.view(np.uint64))) >= layout.num_blocks:  # Those below 0 are the largest.
        raise InvalidRequest(f"block_ids: wanted ids in [0, {layout.num_blocks}), got {ids.min()} to {ids.max()}")
    if ids.size and int(np.maximum.reduce(np.bincount(ids))) > 1:
        raise InvalidRequest("block_ids: wanted each block once, got a block twice")
    return EnginePages(
        ids=ids, offset_tokens=offset_tokens, engine_block_size=engine, stored_block_size=stored_block_size
    )


def ordered(pages: EnginePages, copier: EngineCopier, num_threads: int = 0) -> EnginePages:
    """Return the pages of a job with the order of its copies; called in the thread that asks for the job.

    Args:
        pages: where its tokens lie.
        copier: that copies.
        num_threads: see `EnginePages`.

    Raises:
        InvalidRequest, KernelError: as for `EngineCopier.order`.
    """
    order = copier.order()
    return pages if order is None and not num_threads else replace(pages, order=order, num_threads=num_threads)


def job_spans(
    paging: Paging, pages: EnginePages, indexes: I64, slots: I64, num_slots: int, skip_tokens: int = 0
) -> Spans:
    """List what is copied for some stored blocks of a job; arguments as for `EngineCopier.out_of_slots`."""
    stored, engine = paging.stored_block_size, paging.engine_block_size
    first, end = (int(indexes[0]), int(indexes[-1]) + 1) if len(indexes) else (0, 0)
    begin = pages.offset_tokens + first * stored
    # The run begins with the engine block that holds `begin`; what comes before it there is nobody's.
    lead = begin % engine
    num_tokens = lead + (end - first) * stored if end else 0
    slot_ids = np.full(num_tokens // stored, -1, np.int64)
    slot_ids[lead // stored + indexes - first] = slots
    return block_spans(
        paging,
        pages.ids[begin // engine : -(-(begin - lead + num_tokens) // engine)],
        slot_ids,
        num_slots,
        num_tokens=num_tokens,
        skip_prefix_tokens=min(num_tokens, lead + max(0, skip_tokens - first * stored)),
    )


def position_job_spans(paging: Paging, pages: EnginePages, indexes: I64, skip_tokens: int = 0) -> Spans:
    """List what `job_spans` does where the slot of each stored block is its position in `indexes`."""
    stored, first = paging.stored_block_size, int(indexes[0]) if len(indexes) else 0
    if paging.engine_block_size == stored and skip_tokens <= first * stored:
        return position_spans(paging, pages.ids[indexes])  # `engine_pages` has checked them.
    positions = np.arange(len(indexes), dtype=np.int64)
    return job_spans(paging, pages, indexes, positions, len(positions), skip_tokens)

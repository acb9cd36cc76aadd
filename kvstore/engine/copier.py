"""The protocol of a copier, which moves blocks between one engine's cache and the arena's slots.

An engine's block size is a multiple or a divisor of the stored one, so engine blocks and slots do not pair up. A job
therefore counts in tokens, from the first token of its first hash. `EnginePages` says where in the engine each of its
tokens lies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from kvstore.bounds import clip
from kvstore.engine.layout import EngineLayout
from kvstore.engine.registered import RegisteredCache
from kvstore.errors import InvalidRequest
from kvstore.kernels.merging import I64
from kvstore.kernels.spans import Paging, Spans, block_spans, position_spans


class CopyOrder(Protocol):
    """Order of one job's copies and the engine's work on a device. Made in the thread that asks for the job."""

    def end(self) -> None:
        """Declare that no more copies are queued for the job; may be called again."""

    def wait_on(self, stream: Any, timeout_s: float) -> bool:
        """Make work that is queued on a stream from now on wait for all copies of the job.

        Args:
            stream: a stream of the engine's framework; None is the calling thread's current one.
            timeout_s: limit for the copies to be queued; the calling thread waits for nothing else.

        Returns:
            False when they were not all queued in time; the stream then waits for nothing.
        """

    def hold_engine(self) -> None:
        """Make the stream on which the job was asked for wait for the copies that are queued so far.

        Raises:
            KernelError: the device failed.
        """

    def settle(self, timeout_s: float) -> bool:
        """Wait until no queued copy touches the engine's blocks; return False if one still may."""


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
        order: the order of the job's copies; None where the thread that runs the job makes them.
        num_threads: threads that share a copy in host memory; 0 for the copier's default.
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

    Only the named blocks are ever written, and in them only the job's tokens. Copies into slots return when the bytes
    are in place. Copies out of slots may only be queued; `finish` waits for them, and must be called before the job's
    slots are given back, however the job ends. After an error the copy touches nothing any more; only after CopyStuck
    it still may.

    It references the caller's tensors as long as it lives, and never moves or replaces them.
    """

    cache: RegisteredCache
    #: Slots of the memory that it copies to and from.
    num_slots: int

    @property
    def layout(self) -> EngineLayout:
        """Return the layout of the cache."""
        return self.cache.layout

    def check_unchanged(self) -> None:
        """Refuse to continue if registered tensors were replaced; on any thread.

        Called when a job begins, and again after its copies, before their result is reported: in between, the engine
        may have got other memory, which a load did not fill and a save did not read.

        Raises:
            LayoutMismatch: they were replaced, resized, restrided or moved; register them again.
        """
        self.cache.registered.check()

    def order(self) -> CopyOrder | None:
        """Record the work that a job's copies must come after, in the thread that asks for the job.

        Raises:
            InvalidRequest: copies cannot be ordered after the thread's current work.
            KernelError: copies of this cache failed permanently.
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
            pages: where the job's tokens lie; written, except tokens of other blocks.
            indexes: ascending int64, which stored blocks of the job.
            slots: int64, the slot of each. Only read.
            skip_tokens: the job's tokens before this one are not written; counted from the job's first token, whichever
                blocks are copied.
        """

    def finish(self, pages: EnginePages) -> None:
        """Wait until all queued copies of a job are in place; no more follow. May be called again.

        Raises:
            KernelError: the device failed; copies may be incomplete.
            CopyStuck: copies did not end in time.
        """

    def close(self) -> None:
        """Release the arena, so that it can be unmapped even if this object is still referenced. Ends copying."""


def engine_pages(
    block_ids: object, layout: EngineLayout, stored_block_size: int, start: int, num_blocks: int
) -> EnginePages:
    """Check a job's block ids: every engine block that holds one of its tokens, in order.

    Args:
        block_ids: flat integers.
        layout: of the engine.
        stored_block_size: tokens of a stored block.
        start: place of the job's first block in its chain; the chain's first token is the first of an engine block.
        num_blocks: stored blocks of the job.

    Raises:
        InvalidRequest: no integers, not as many as the job needs, out of range, or one block twice.
    """
    try:
        # Fast path: numpy would read a range number by number.
        ids = (
            np.arange(block_ids.start, block_ids.stop, block_ids.step)
            if isinstance(block_ids, range)
            else np.asarray(block_ids)
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"block_ids: wanted a flat list of integers, got {_told(block_ids)} ({error})") from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidRequest(f"block_ids: wanted a flat list of integers, each below 2**63, got {_told(block_ids)}")
    engine = layout.block_size
    offset_tokens = start * stored_block_size % engine
    wanted = -(-(offset_tokens + num_blocks * stored_block_size) // engine) if num_blocks else 0
    if len(ids) != wanted:
        raise InvalidRequest(
            f"block_ids: wanted {wanted} engine blocks, got {len(ids)}; pass every block of {engine} tokens that holds "
            f"one of {num_blocks} stored blocks of {stored_block_size} tokens, of which the first begins at token "
            f"{offset_tokens} of its engine block"
        )
    # Ufuncs, because the array methods go through Python code.
    ids = ids.astype(np.int64)
    if ids.size and int(np.maximum.reduce(ids.view(np.uint64))) >= layout.num_blocks:  # Negative ids are the largest.
        raise InvalidRequest(f"block_ids: wanted ids in [0, {layout.num_blocks}), got {ids.min()} to {ids.max()}")
    if ids.size and int(np.maximum.reduce(np.bincount(ids))) > 1:
        raise InvalidRequest("block_ids: wanted each block once, got a block twice")
    return EnginePages(
        ids=ids, offset_tokens=offset_tokens, engine_block_size=engine, stored_block_size=stored_block_size
    )


def _told(block_ids: object) -> str:
    """Describe wrong block ids. Arrays only by their type: they may be on a device."""
    dtype, shape = getattr(block_ids, "dtype", None), getattr(block_ids, "shape", ())
    return clip(block_ids) if dtype is None else f"{dtype} of shape {tuple(shape)}"


def ordered(pages: EnginePages, copier: EngineCopier, num_threads: int = 0) -> EnginePages:
    """Return the pages of a job with the order of its copies; see `EngineCopier.order`."""
    order = copier.order()
    return pages if order is None and not num_threads else replace(pages, order=order, num_threads=num_threads)


def job_pages(
    block_ids: object, copier: EngineCopier, start: int, num_blocks: int, num_threads: int = 0
) -> EnginePages:
    """Check a job's block ids and order its copies; see `engine_pages` and `ordered`."""
    pages = engine_pages(block_ids, copier.layout, copier.cache.shape.block_size, start, num_blocks)
    return ordered(pages, copier, num_threads)


def job_spans(
    paging: Paging, pages: EnginePages, indexes: I64, slots: I64, num_slots: int, skip_tokens: int = 0
) -> Spans:
    """List the copies for some stored blocks of a job; arguments as for `EngineCopier.out_of_slots`."""
    stored, engine = paging.stored_block_size, paging.engine_block_size
    first, end = (int(indexes[0]), int(indexes[-1]) + 1) if len(indexes) else (0, 0)
    begin = pages.offset_tokens + first * stored
    # The run begins with the engine block that holds `begin`; tokens before it there have no slot.
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
    """List what `job_spans` lists if each stored block's slot is its position in `indexes`."""
    stored, first = paging.stored_block_size, int(indexes[0]) if len(indexes) else 0
    if paging.engine_block_size == stored and skip_tokens <= first * stored:
        return position_spans(paging, pages.ids[indexes])  # `engine_pages` has checked them.
    positions = np.arange(len(indexes), dtype=np.int64)
    return job_spans(paging, pages, indexes, positions, len(positions), skip_tokens)

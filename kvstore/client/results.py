"""What the client's calls return."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

from kvstore.blocks.ticket import HandoffTicket
from kvstore.bounds import check_callable, clip
from kvstore.client.work import Work
from kvstore.errors import InvalidRequest, JobAbandoned, JobRunning
from kvstore.runtime import clock
from kvstore.runtime.forks import check_process, this_process

T = TypeVar("T")


class MissReason(Enum):
    """Why a block of a load is not usable.

    STORE_LOST: the store of this node has ended, so make a new client. DRAINING: the store lives, and grants nothing
    until it is undrained; the client stays usable.
    """

    NOT_FOUND = "not_found"
    PEER_LOST = "peer_lost"
    TIMEOUT = "timeout"
    LEASE_EXPIRED = "lease_expired"
    POOL_FULL = "pool_full"
    CLEARED = "cleared"
    BUSY = "busy"
    ABANDONED = "abandoned"
    STORE_LOST = "store_lost"
    DRAINING = "draining"
    STALE = "stale"
    USED = "used"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"
    OWNER_GONE = "owner_gone"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFailure:
    """One block that a load did not deliver; its tokens may hold anything and must be recomputed.

    Args:
        index: position in the hashes given to `load`.
        block_ids: the engine's blocks that hold its tokens: one, or several if the engine's blocks are smaller than the
            stored ones. A larger one is named in the failures of several blocks. Empty without an engine.
        reason: why it was not delivered.
        detail: one sentence for a log.
    """

    index: int
    block_ids: tuple[int, ...]
    reason: MissReason
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """How a load ended.

    Args:
        num_blocks: usable prefix: blocks [0, num_blocks) of the hashes hold the right bytes, skipped blocks included.
        failed: one entry for each other block.
        num_local: blocks that were in this node's memory.
        num_peer: blocks that were fetched from other nodes.
        peers: the nodes they came from.
        num_bytes: bytes that crossed between nodes for this load.
        num_descriptors: NIXL descriptors that their READs needed, after merging neighbours.
        read_s: seconds between the first READ's start and the last one's end.
        num_locate_calls: how often the store asked the directory.
        num_lease_calls: how often it asked a peer.
    """

    num_blocks: int
    failed: tuple[BlockFailure, ...] = ()
    num_local: int = 0
    num_peer: int = 0
    peers: tuple[str, ...] = ()
    num_bytes: int = 0
    num_descriptors: int = 0
    read_s: float = 0.0
    num_locate_calls: int = 0
    num_lease_calls: int = 0

    @property
    def failed_block_ids(self) -> frozenset[int]:
        """The engine's blocks that hold a token which was not delivered."""
        return frozenset(block_id for failure in self.failed for block_id in failure.block_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchResult(LoadResult):
    """How a fetch ended: a load's result, with blocks counted from the ticket's first.

    Args:
        route: the memory that the blocks went through: "host" for the nodes' arenas, "gpu" for stages on GPUs.
        note: why not the other route, if a stage was attached and could not be used.
    """

    route: str = "host"
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """How a save ended.

    Args:
        num_blocks: blocks [0, num_blocks) are in the store now, written by this save or another. With several ranks,
            all parts are there. 0 when the namespace was cleared after the call of `save`.
        num_written: how many of them, or of their parts, this save wrote.
        num_refused: blocks at the end for which there was no slot; nothing of them is kept.
    """

    num_blocks: int
    num_written: int
    num_refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """Blocks that `Client.pin` keeps in this node's memory until `Client.unpin`.

    Args:
        pin_id: the store's number for the pin; 0 when no block was here.
        num_blocks: blocks [0, num_blocks) of the hashes are kept.
        num_refused: stored blocks after them for which the quota of pins had no room.
    """

    pin_id: int
    num_blocks: int
    num_refused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What a lookup found. It is a hint for other nodes, and exact for this one at that moment.

    Args:
        num_local: usable prefix length, in blocks, in this node's memory.
        nodes: (node id, prefix length) of other nodes, longest first.
    """

    num_local: int
    nodes: tuple[tuple[str, int], ...] = ()

    @property
    def num_blocks(self) -> int:
        """Longest usable prefix anywhere, in blocks."""
        return max([self.num_local, *(count for _, count in self.nodes)])


class Job(Generic[T]):
    """A job that runs in the background. May be awaited; a cancelled task leaves it running."""

    def __init__(
        self,
        future: Future[T],
        what: str,
        abandon: Callable[[float], bool],
        wait_on: Callable[[Any, float], bool] | None = None,
        work: Work[T] | None = None,
        call: Callable[[Callable[[], object]], object] = lambda callback: callback(),
    ) -> None:
        self._future, self._what, self._abandon, self._wait_on = future, what, abandon, wait_on
        self._work, self._call = work, call
        self._pid = this_process()

    def __repr__(self) -> str:
        return f"Job({self._what}, {'done' if self._future.done() else 'running'})"

    def done(self) -> bool:
        """Return whether the job has ended, with success or not.

        Raises:
            ForkedClient: this is a child of the process that began it.
        """
        check_process(self._pid)
        return self._future.done()

    def result(self, timeout: float | None = 60.0) -> T:
        """Wait for the end of the job and return its result.

        The calling thread may itself run a fetch whose own timeout is not longer than `timeout`.

        Args:
            timeout: seconds; None waits until the job ends, which its own timeouts bound.

        Raises:
            InvalidRequest: `timeout` is not a number.
            JobRunning: the job still runs and uses the engine's blocks; wait again or `abandon` it.
            JobAbandoned: the job was abandoned. A load or fetch that had begun returns a result that says so instead.
            ForkedClient: this is a child of the process that began it.
            KVStoreError: it failed.
        """
        check_process(self._pid)
        if timeout is not None:
            _check_number("timeout", timeout)
        work, left_s = self._work, timeout
        if work is not None and work.limit_s is not None:
            if timeout is None:
                work.do()
            elif timeout >= work.limit_s:
                until_s = clock.now_s() + timeout
                work.do(until_s)
                left_s = max(0.0, until_s - clock.now_s())
        try:
            return self._future.result(left_s)
        except CancelledError as error:
            raise self._abandoned() from error
        except TimeoutError as error:
            if self._future.done():
                return self._future.result(0)  # It ended just now, or the TimeoutError is the job's own.
            raise JobRunning(
                f"{self._what}: still running after {timeout} s; wait again, or abandon it before reusing its blocks"
            ) from error

    def _abandoned(self) -> JobAbandoned:
        return JobAbandoned(f"{self._what}: abandoned by its owner before it had begun; nothing was copied")

    def wait_on(self, stream: Any = None, timeout: float = 60.0) -> None:
        """Make work that is queued on a CUDA stream from now on wait for this job's copies.

        For a load the calling thread waits only until the copies are queued: for the store's answer and for blocks from
        other nodes, but not until the bytes are in place. For a save, and for caches on the CPU, it waits for the job.
        Before anything computed from the blocks is used, ask `result` which blocks are usable: a load may fail after
        its copies were queued.

        Args:
            stream: a torch.cuda.Stream of the cache's device; None is the calling thread's current one.
            timeout: seconds.

        Raises:
            InvalidRequest: `stream` is no stream of a device, or `timeout` is not a number.
            JobRunning: the copies are not all queued yet, and the stream waits for nothing.
            KernelError: the device failed.
            ForkedClient: this is a child of the process that began it.
        """
        check_process(self._pid)
        _check_number("timeout", timeout)
        if stream is not None and not callable(getattr(stream, "wait_event", None)):
            raise InvalidRequest(f"stream: wanted a torch.cuda.Stream, or None for the current one, got {clip(stream)}")
        if self._wait_on is not None:
            is_done = self._wait_on(stream, timeout)
        else:
            is_done = _has_ended(self._future, timeout)
        if not is_done:
            raise JobRunning(
                f"{self._what}: its copies are not all queued after {timeout} s; wait again, or abandon it"
            )

    def abandon(self, timeout: float = 5.0) -> bool:
        """Abandon the job, so that its engine blocks can be reused.

        Returns:
            True: from now on the job neither reads nor writes the engine's blocks, and a save publishes only what it
            had copied completely. False: a copy still runs after `timeout` seconds; the blocks must not be reused yet.

        Raises:
            ForkedClient: this is a child of the process that began it.
        """
        check_process(self._pid)
        _check_number("timeout", timeout)
        if self._future.cancel():
            return True
        return self._abandon(timeout)

    def add_done_callback(self, callback: Callable[[Job[T]], None]) -> None:
        """Call `callback(self)` after the job's end, on the client's thread for callbacks.

        It may call the client and wait for other jobs, for no job waits for that thread. Callbacks are called one after
        the other, so a callback must not wait for another one.

        Raises:
            InvalidRequest: `callback` cannot be called.
            ForkedClient: this is a child of the process that began it.
        """
        check_process(self._pid)
        check_callable("callback", callback)
        not_called = [callback]

        def call(_: object) -> None:
            if not_called:  # Only once: after an interrupt among callbacks all are called again.
                chosen = not_called.pop()
                self._call(lambda: chosen(self))

        self._future.add_done_callback(call)

    def __await__(self) -> Generator[Any, None, T]:
        check_process(self._pid)
        # Shielded: a cancelled task stops waiting, others may go on. Only the job's owner abandons it.
        waiting = asyncio.shield(asyncio.wrap_future(self._future))
        try:
            return (yield from waiting.__await__())
        except asyncio.CancelledError as error:
            if not self._future.cancelled():
                raise  # The waiting task was cancelled.
            raise self._abandoned() from error


def _has_ended(future: Future[Any], timeout_s: float) -> bool:
    """Wait for the end of a job, and return whether it ended in time."""
    try:
        future.exception(timeout_s)
    except CancelledError:
        return True
    except TimeoutError:
        return future.done()
    return True


def _check_number(name: str, value: object) -> None:
    # Negative is allowed: a caller that counts down to a deadline may pass it.
    try:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    except OverflowError:
        is_number = False
    if not is_number:
        raise InvalidRequest(f"{name}: wanted a number of seconds, got {clip(value)}")


@dataclass(frozen=True, slots=True, eq=False)
class Publication:
    """Blocks that are being published.

    Args:
        ticket: valid at once: a fetch waits until the blocks are in place.
        job: done when they are in place, and the engine may reuse its blocks.
    """

    ticket: HandoffTicket
    job: Job[HandoffTicket]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffRoute:
    """The route that a client's hand-offs take.

    Args:
        route: "gpu" from stage to stage, or "host" through the nodes' arenas.
        why_not: why it is "host".
        gb_per_s: rate of a warm READ from each named node; 0 for a node that cannot be reached from GPU to GPU.
    """

    route: str
    why_not: str = ""
    gb_per_s: dict[str, float] = field(default_factory=dict)

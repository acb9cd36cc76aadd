"""A job in the background: wait for it, order work after it, or abandon it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, TypeVar

from kvstore.bounds import check_callable, clip
from kvstore.client.work import Work
from kvstore.errors import InvalidRequest, JobAbandoned, JobRunning
from kvstore.runtime import clock
from kvstore.runtime.forks import check_process, this_process

T = TypeVar("T")


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
        if not (_has_ended(self._future, timeout) if self._wait_on is None else self._wait_on(stream, timeout)):
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

"""The work of a job, in steps. Between two steps it waits for others and holds no thread."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from kvstore.errors import JobAbandoned, TransferTimeout
from kvstore.rpc.client import ControlClient
from kvstore.rpc.exchange import Exchange
from kvstore.rpc.framing import Op
from kvstore.runtime import clock
from kvstore.runtime.job_future import JobFuture
from kvstore.runtime.parking import LONGEST_SLEEP_S

if TYPE_CHECKING:
    from kvstore.engine.copier import CopyOrder  # Importing it imports torch, which results do not need.

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Nearly every answer comes sooner. A later one depends on other processes, and no thread waits for it.
_PATIENCE_S = 2e-3
#: Interval at which a call that abandons a job checks whether its copy has ended.
_LOOK_AGAIN_S = 1e-3


class Awaited(NamedTuple):
    """The wait before a job's next step: until descriptor `fd` can be read, at most until `until_s`."""

    fd: int
    until_s: float

    def wait(self, wake_fd: int = -1, until_s: float = math.inf) -> None:
        """Wait on the calling thread, at most until `until_s`, or until `wake_fd` can be read."""
        if self.fd < 0:
            return  # It was closed; the next step finds that out.
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        if wake_fd >= 0:
            poll.register(wake_fd, select.POLLIN)
        poll.poll(1e3 * min(max(0.0, min(self.until_s, until_s) - clock.now_s()), LONGEST_SLEEP_S))


#: Yields its waits, and returns the result. Any thread may do the next step, but only one at a time.
Steps = Generator[Awaited, None, T]


def in_one_step(run: Callable[[], T]) -> Steps[T]:
    """Return the steps of work that never waits."""
    yield from ()
    return run()


def asking(connection: ControlClient, op: Op, payload: bytes, *, timeout_s: float) -> Steps[bytes]:
    """Ask the store, and return the answer's payload; see `ControlClient.call` for what is raised."""
    until_s = clock.now_s() + timeout_s
    question = connection.ask(op, payload)
    try:  # Right after `ask`: an interrupt in between would leave the connection taken.
        answer = question.take(min(timeout_s, _PATIENCE_S))
        while answer is None:
            if clock.now_s() >= until_s:
                raise TransferTimeout(f"{connection.name}: no answer in time; the connection was closed")
            yield Awaited(connection.fileno(), until_s)
            answer = question.take(_PATIENCE_S)
    finally:
        question.close()
    return answer


def next_piece(pieces: Exchange, check: Callable[[], None]) -> Steps[bytes]:
    """Return the next piece of an answer; see `Exchange` for what is raised.

    `check` is called before each wait, and raises when waiting is of no use any more.
    """
    while (piece := pieces.take(_PATIENCE_S)) is None:
        check()
        if clock.now_s() >= pieces.until_s:
            pieces.close()
            raise TransferTimeout("the node store did not go on with its answer in time; the connection was closed")
        yield Awaited(pieces.fileno(), pieces.until_s)
    return piece[1]


def nothing() -> None:
    """Do nothing: the default of the callbacks of work."""


class CopyGuard:
    """Guard of the engine's blocks: once the job is abandoned, no copy begins any more.

    Args:
        order: the job's copies on a device, which continue without the thread that began them; else None.
    """

    def __init__(self, order: CopyOrder | None = None) -> None:
        #: Held while the engine's blocks, or the decision to publish them, are touched; call `check` first under it.
        #: Only taken by `with`: an interrupt after a function that takes it would leave it locked.
        self.copying = threading.Lock()
        self.order = order
        self._abandoned = False

    def check(self) -> None:
        """Refuse to continue after `abandon`.

        Raises:
            JobAbandoned: the owner abandoned the job.
        """
        if self._abandoned:
            raise JobAbandoned("the job was abandoned by its owner; the engine's blocks are its own again")

    def abandon(self, timeout_s: float) -> bool:
        """Let no more copies begin, and wait for running ones. Return False if one outlasts the time."""
        self._abandoned = True
        deadline_s = clock.now_s() + timeout_s
        # Never taken here, because an interrupt could leave it locked. A copy that begins now fails in `check`.
        while self.copying.locked():
            if (left_s := deadline_s - clock.now_s()) <= 0:
                return False
            time.sleep(min(left_s, _LOOK_AGAIN_S))
        return self.order is None or self.order.settle(max(0.0, deadline_s - clock.now_s()))


class Work(Generic[T]):
    """The work of one job, done once. Client threads do it, or a thread that waits for its result.

    The waiting thread may be interrupted anywhere, for example by Ctrl-C. So the work knows which call has taken it,
    and its result is kept before the future is told: another thread continues from there.

    Args:
        begin: returns its steps.
        limit_s: about the longest time it takes; a thread that waits for the result at least this long may do the work.
            None: no waiting thread may.
        after: gives back what the job holds, on a client thread after the result, good or bad; nobody waits for it.
    """

    def __init__(
        self, begin: Callable[[], Steps[T]], limit_s: float | None = None, after: Callable[[], None] = nothing
    ) -> None:
        self._begin, self.limit_s, self.after = begin, limit_s, after
        self._steps: Steps[None] | None = None
        # Held for a moment only: `_taker` stands for the call that does the work. Reentrant, because a signal handler
        # may use it too.
        self._lock = threading.RLock()
        self._taker: object = None
        self._looks_again = self._is_beginning = self._has_begun = self._is_cancelled = False
        #: Whether `after` was called, or is being.
        self.is_left = False
        self._wake_fd = -1
        self._unpark: Callable[[], None] = nothing
        #: Set when the start was interrupted, so that no caller has the job.
        self.is_called_off = False
        #: The exception that interrupted a waiting thread within a step, and so ended the job.
        self.interrupt: BaseException | None = None
        #: Its result, once its steps have ended.
        self._value: T | None = None
        self._error: BaseException | None = None
        self._is_over = self._is_telling = self._is_told = False
        #: Called once by a waiting thread that did the work to its end.
        self.ended_elsewhere: Callable[[], None] = nothing
        #: Called by a waiting thread that leaves the work before its end: another thread must continue.
        self.left_elsewhere: Callable[[], None] = nothing
        #: Called when nothing is left to do for it; set by `JobThreads`, which counts it.
        self.forget: Callable[[], None] = nothing
        self.future: JobFuture[T] = JobFuture()

    def begin(self) -> None:
        """Mark it as begun before its first step: the job can be abandoned, but not cancelled."""
        self._is_beginning = True
        self.future.set_running_or_notify_cancel()
        self._has_begun = True

    def leave(self) -> bool:
        """Return whether the caller must call `after`: the first caller must. Several threads may see the end."""
        with self._lock:
            was_left, self.is_left = self.is_left, True
        return not was_left

    def go_on(self, park: Callable[[Awaited], Callable[[], None]]) -> bool:
        """Do steps to the end or until it waits for others, and return whether it ended here.

        Args:
            park: has `go_on` called again after the wait, and returns a function that cancels that. If it cannot park,
                this thread waits.
        """
        if not self._take(object()):
            return False
        while (awaited := self._step()) is not None:
            with self._lock:  # So that it is not taken again before `_unpark` is set.
                if not self._looks_again:
                    try:
                        self._unpark = park(awaited)
                    except (OSError, RuntimeError, ValueError) as error:
                        if awaited.fd >= 0:  # A closed connection is not waited for.
                            logger.warning("a job holds a thread while it waits, for it cannot be parked: %s", error)
                    else:
                        self._taker = None
                        return False
                is_parked_nowhere, self._looks_again = not self._looks_again, False
            if is_parked_nowhere:
                self._wait(awaited)
        return True

    def park(self, awaited: Awaited, park: Callable[[Awaited], Callable[[], None]]) -> None:
        """Park it before its first step; see `go_on`."""
        with self._lock:
            self._unpark = park(awaited)

    def look_again(self) -> bool:
        """Make it check whether it is still wanted. Return whether the caller must call `go_on` for that."""
        with self._lock:
            self._looks_again = self._taker is not None
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
            return self._unpark is not nothing

    def do(self, until_s: float = math.inf) -> bool:
        """Do it on the calling thread unless another does; return whether it was done here.

        Args:
            until_s: by kvstore.runtime.clock; waits after that time are left to other threads.
        """
        me = object()
        try:
            if not self._take(me):
                return False
            while (awaited := self._step(is_waiter=True)) is not None:
                if clock.now_s() >= until_s:
                    self._leave_to_others(me)
                    return False
                self._wait(awaited, until_s)
            self.ended_elsewhere()
        except BaseException:  # Errors of a step are the job's; this one interrupted the caller's wait (Ctrl-C).
            self._leave_to_others(me)
            raise
        return not self.future.cancelled()

    def _leave_to_others(self, taker: object) -> None:
        with self._lock:
            is_left = self._taker is taker
            if is_left:
                self._taker = None
        if is_left:
            self.left_elsewhere()

    def _wait(self, awaited: Awaited, until_s: float = math.inf) -> None:
        """Wait on the calling thread, which `look_again` wakes."""
        try:
            with self._lock:
                looks_again, self._looks_again = self._looks_again, False
                if not looks_again and self._wake_fd < 0:
                    with contextlib.suppress(OSError):  # Without it `look_again` cannot end the wait early.
                        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            if not looks_again:
                awaited.wait(self._wake_fd, until_s)
        finally:
            with self._lock:
                wake_fd, self._wake_fd = self._wake_fd, -1
                if wake_fd >= 0:
                    os.close(wake_fd)

    def _take(self, taker: object) -> bool:
        with self._lock:
            if self._taker is not None:
                return False
            self._taker = taker  # Permanently, if this is the end.
            self._unpark()
            self._unpark = nothing
            return True

    def _step(self, *, is_waiter: bool = False) -> Awaited | None:
        """Do one step and return the next wait; None at the end.

        In a thread that waits for the result, `is_waiter`, an interrupt is raised as well, and ends the job.
        """
        if self._is_cancelled:
            return None
        if not self._is_over:
            try:
                if self._steps is None:
                    if not self._has_begun:
                        again, self._is_beginning = self._is_beginning, True  # True again after an interrupt in here.
                        if not (again and self.future.running()) and not self.future.set_running_or_notify_cancel():
                            self._is_cancelled = True
                            return None
                        self._has_begun = True
                    self._steps = self._all_steps()
                return next(self._steps)
            except StopIteration:
                pass
            except BaseException as error:
                if not self._is_over:
                    self._error, self._is_over = error, True
                    if is_waiter and not isinstance(error, Exception):
                        self.interrupt = error
                        self._error = JobAbandoned("a thread that waited for it, and did it meanwhile, was interrupted")
                if self.interrupt is error:
                    self._steps = None
                    self._tell()
                    raise
        self._steps = None
        self._tell()
        return None

    def _all_steps(self) -> Steps[None]:
        """Run the steps, and keep their result before the end is visible: a generator returns it once."""
        self._value = yield from self._begin()
        self._is_over = True

    def _tell(self) -> None:
        """Give the result to the future, and again if an interrupt came in the middle of that."""
        future = self.future
        if self._is_told:
            return
        again, self._is_telling = self._is_telling, True
        if again and future.done():
            future.tell_again()  # A done future takes no second result.
        elif self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._value)  # type: ignore[arg-type]  # The steps have returned it, so it is a T.
        self._is_told = True

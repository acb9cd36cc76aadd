"""What a job does, in steps: between two of them it waits for others, and holds no thread."""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Generic, NamedTuple, TypeVar

from kvstore import clock
from kvstore.control_client import Answers, ControlClient
from kvstore.errors import TransferTimeout
from kvstore.parking import LONGEST_SLEEP_S
from kvstore.wire import Op

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Nearly every answer comes sooner. One that takes longer depends on others, and no thread waits for it.
_PATIENCE_S = 2e-3


class Awaited(NamedTuple):
    """What work waits for before its next step: a descriptor that can be read, but no longer than to `until_s`."""

    fd: int
    until_s: float

    def wait(self) -> None:
        """Wait for it on the calling thread."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        poll.poll(1e3 * min(max(0.0, self.until_s - clock.now_s()), LONGEST_SLEEP_S))


#: Yields what it waits for, and returns the result. Any thread may do the next step, but one at a time.
Steps = Generator[Awaited, None, T]


def in_one_step(run: Callable[[], T]) -> Steps[T]:
    """Return the steps of work that waits for nobody."""
    yield from ()
    return run()


def asking(connection: ControlClient, op: Op, payload: bytes, *, timeout_s: float) -> Steps[bytes]:
    """Ask the store, and return the answer's payload; see `ControlClient.call` for what is raised."""
    question, until_s = connection.ask(op, payload), clock.now_s() + timeout_s
    try:
        answer = question.take(min(timeout_s, _PATIENCE_S))
        while answer is None:
            if clock.now_s() >= until_s:
                raise TransferTimeout(f"{connection.name}: no answer in time; the connection was closed")
            yield Awaited(connection.fileno(), until_s)
            answer = question.take(_PATIENCE_S)
    finally:
        question.close()
    return answer


def next_piece(pieces: Answers, check: Callable[[], None]) -> Steps[tuple[bool, bytes]]:
    """Return the next piece of an answer, and whether it is the last; see `Answers` for what is raised.

    Args:
        pieces: the answer.
        check: called before others are waited for; raises when that is of no use any more.
    """
    while (piece := pieces.take(_PATIENCE_S)) is None:
        check()
        if clock.now_s() >= pieces.until_s:
            pieces.close()
            raise TransferTimeout("the node store did not go on with its answer in time; the connection was closed")
        yield Awaited(pieces.fileno(), pieces.until_s)
    return piece


def nothing() -> None:
    """Come after work that leaves nothing to give back."""


class Work(Generic[T]):
    """What a job does, once: on threads of the client, or on one that waits for its result if that comes first.

    Args:
        begin: returns its steps.
        limit_s: it takes hardly longer; a thread that waits for the result for as long may do it. None: never.
        after: gives back what nobody waits for, on a thread of the client once the result is there, whatever that is.
    """

    def __init__(
        self, begin: Callable[[], Steps[T]], limit_s: float | None = None, after: Callable[[], None] = nothing
    ) -> None:
        self._begin, self.limit_s, self.after = begin, limit_s, after
        self._steps: Steps[T] | None = None
        # Held for a moment only: who does the work has `_is_taken`.
        self._lock = threading.Lock()
        self._is_taken = self._looks_again = self._has_begun = False
        self._unpark: Callable[[], None] = nothing
        #: Called once by a thread that did the work to its end while it waited for it.
        self.ended_elsewhere: Callable[[], None] = nothing
        #: Called by such a thread when it is interrupted before the end: another one has to go on.
        self.left_elsewhere: Callable[[], None] = nothing
        self.future: Future[T] = Future()

    def begin(self) -> None:
        """Say first of all that it has begun: from now on the job can be abandoned, but not cancelled."""
        self._has_begun = True
        self.future.set_running_or_notify_cancel()

    def go_on(self, park: Callable[[Awaited], Callable[[], None]]) -> bool:
        """Do it up to its end, or until it waits for others; whether it ended here.

        Args:
            park: has `go_on` called again when what is waited for is there; returns what ends that. What it cannot
                park is waited for here.
        """
        if not self._take():
            return False
        while (awaited := self._step()) is not None:
            with self._lock:  # So that it is not taken again before it is known how to end its waiting.
                if not self._looks_again:
                    try:
                        self._unpark = park(awaited)
                    except (OSError, RuntimeError) as error:
                        logger.warning("a job holds a thread while it waits, for it cannot be parked: %s", error)
                    else:
                        self._is_taken = False
                        return False
                is_parked_nowhere, self._looks_again = not self._looks_again, False
            if is_parked_nowhere:
                awaited.wait()
        return True

    def park(self, awaited: Awaited, park: Callable[[Awaited], Callable[[], None]]) -> None:
        """Have it wait before its first step; see `go_on`."""
        with self._lock:
            self._unpark = park(awaited)

    def look_again(self) -> bool:
        """Have it look whether it is still wanted before it waits on; whether `go_on` has to be called for that."""
        with self._lock:
            self._looks_again = self._is_taken
            return self._unpark is not nothing

    def do(self) -> bool:
        """Do it to its end on the calling thread, unless another does; whether it was done here."""
        if not self._take():
            return False
        try:
            while (awaited := self._step()) is not None:
                awaited.wait()
        except BaseException:  # What is raised in a step is the job's; this interrupts the caller's wait (Ctrl-C).
            with self._lock:
                self._is_taken = False
            self.left_elsewhere()
            raise
        self.ended_elsewhere()
        return not self.future.cancelled()

    def _take(self) -> bool:
        with self._lock:
            if self._is_taken:
                return False
            self._is_taken = True  # For good, if this is the end.
            self._unpark()
            self._unpark = nothing
            return True

    def _step(self) -> Awaited | None:
        """Go on to where it waits for others; None at the end."""
        try:
            if self._steps is None:
                if self._has_begun:
                    if self.future.done():  # An interrupt came right behind its end.
                        return None
                else:
                    self._has_begun = True
                    if not self.future.set_running_or_notify_cancel():
                        return None
                self._steps = self._begin()
            return next(self._steps)
        except StopIteration as end:
            self._steps = None
            self.future.set_result(end.value)
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for.
            self._steps = None
            self.future.set_exception(error)
        return None

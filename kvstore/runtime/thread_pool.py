"""Run blocking steps on a few threads, without a result object for each step.

Python's own pool makes a future for each step, with a condition and its locks: more than twice the work of handing the
step over. These futures would be unused here, because a job has its own future.

There is no lock. A signal handler may run between any two instructions, also while a thread is being started, and may
wait there for the work of these threads. A thread that needed a lock of the interrupted code would wait for the handler
in turn. So all shared state is changed by single calls of built-in containers, which nothing can interrupt.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

from kvstore.runtime.forks import this_process

logger = logging.getLogger(__name__)


_Step = Callable[[], object]
_LOOK_AGAIN_S = 1e-3


class ThreadPool:
    """Runs steps in order on up to `most` threads, each started when needed; for any threads.

    Every accepted step runs, unless `close` drops it; an ending interpreter waits for that. The owner must call
    `close`, or the threads stay.

    Args:
        most: the most threads.
        name: of the threads; a number is appended.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name, self._pid = most, name, this_process()
        self._queue: SimpleQueue[_Step | None] = SimpleQueue()
        #: Numbers of threads that may still be started; below, the started threads until they end.
        self._places: deque[int] = deque(range(most))
        self._threads: list[threading.Thread] = []
        #: Threads that do not run yet, with the starting thread's id and their number. A remover owns that number.
        self._unbegun: dict[threading.Thread, tuple[int, int]] = {}
        #: The callers that are in the middle of starting a thread.
        self._starters: dict[int, None] = {}
        #: One entry per thread that waits for a step, or has just taken one and not said so yet.
        self._idle: deque[None] = deque()
        self._is_closed = self._is_finishing = False
        # The interpreter would wait for non-daemon threads in vain, and would stop daemons in the middle of a step.
        atexit.register(self._finish)

    def run(self, step: _Step) -> bool:
        """Run a step soon on a thread of this pool; an error of the step is logged.

        Returns:
            False after `close`, or when no thread at all can be started: then the step does not run.
        """
        if self._is_closed:
            return False
        # Before the start: a signal handler that interrupts it may wait for this step, which other threads can run.
        self._queue.put(step)
        if self._is_short() and not self._start() and self._take_back(step):
            return False
        if self._is_closed and not self._threads:  # The last thread may have looked before this step came.
            self._run_rest()
        return True

    def _is_short(self, num_coming: int = 0) -> bool:
        """Return whether a step is waiting for which no thread is idle, or one of `num_coming` that begin.

        Asked after a step was queued, and by each thread after it has taken one. So a step that comes just when a
        thread is not idle any more is seen by one of the two.
        """
        # After `close`, one None stays in the queue.
        return self._queue.qsize() > len(self._idle) + num_coming + self._is_closed

    def hurry(self) -> None:
        """Begin accepted steps even if the start of their thread was interrupted."""
        for thread in tuple(self._unbegun):
            if (entry := self._unbegun.pop(thread, None)) is not None:
                self._drop(thread)
                self._places.appendleft(entry[1])
        if self._is_short() and not self._start():
            self._run_rest()

    def _start(self) -> bool:
        """Start one more thread unless there are enough; return whether there is any thread, or one comes."""
        own = threading.get_ident()
        try:
            self._starters[own] = None
            return self._start_one()
        finally:
            self._starters.pop(own, None)

    def _start_one(self) -> bool:
        try:
            place = self._places.popleft()
        except IndexError:
            if (found := self._place_of_interrupted()) is None:
                return True
            place = found
        handled = sys.exception()  # Of the caller, so it is the context of every error from here on.
        thread = threading.Thread(target=self._work, name=f"{self._name}_{place}", daemon=True)
        self._unbegun[thread] = threading.get_ident(), place
        try:
            self._threads.append(thread)
            thread.start()
        except BaseException as error:
            if self._unbegun.pop(thread, None) is not None:  # If it runs all the same, it ends at once.
                self._drop(thread)
                self._places.appendleft(place)
            if not isinstance(error, RuntimeError) or error.__context__ is not handled:
                raise  # An interrupt, or an error that Python made of one.
            # No thread is left, or the interpreter ends.
            if not self._threads:
                return False
            logger.warning("%d threads of %s do the work of %d: %s", len(self._threads), self._name, self._most, error)
        return True

    def _place_of_interrupted(self) -> int | None:
        """Return the place of a thread whose start was interrupted by this thread's current signal handler."""
        own = threading.get_ident()
        for thread, (starter, place) in tuple(self._unbegun.items()):
            if starter == own and self._unbegun.pop(thread, None) is not None:
                self._drop(thread)
                return place
        if self._threads or any(starter != own for starter in tuple(self._starters)):
            return None
        return 0  # An interrupt came after the call that took the only place.

    def _work(self) -> None:
        thread = threading.current_thread()
        # First: while it is neither idle nor being started, a thread too many could be started.
        self._idle.append(None)
        if self._unbegun.pop(thread, None) is None:  # Its place was given to another thread.
            self._idle.pop()
            self._drop(thread)
            self._start_more()
            return
        while True:
            step = self._queue.get()
            self._idle.pop()
            if step is None:
                step = self._next_step()
                self._queue.put(None)  # For the next thread.
                if step is None:
                    break
            else:
                self._start_more()
            self._do(step)
            del step  # A sleeping thread must keep no client alive.
            self._idle.append(None)
        self._drop(thread)
        if not self._threads:
            self._run_rest()
            self._forget()

    def _start_more(self) -> None:
        """Start a thread for a step that came when this one was about to take another, or to end."""
        if self._is_short(len(self._unbegun)):
            self._start()

    def _drop(self, thread: threading.Thread) -> None:
        with contextlib.suppress(ValueError):  # Its start was interrupted before it was listed.
            self._threads.remove(thread)

    def _do(self, step: _Step) -> None:
        try:
            step()
        except BaseException:
            logger.exception("a thread of %s met an unexpected error", self._name)

    def _next_step(self) -> _Step | None:
        """Return the next step of the queue; None if there is none."""
        with contextlib.suppress(Empty):
            while True:
                if (step := self._queue.get_nowait()) is not None:
                    return step
        return None

    def _run_rest(self) -> None:
        """Run all queued steps on the calling thread, because no other thread will."""
        while (step := self._next_step()) is not None:
            self._do(step)
        if self._is_closed:
            self._queue.put(None)

    def _take_back(self, own: _Step) -> bool:
        """Remove a step for which there is no thread; False if a thread has taken it."""
        steps, was_there = list[_Step](), False
        while (step := self._next_step()) is not None:
            if step is own and not was_there:
                was_there = True
            else:
                steps.append(step)
        for step in steps:
            self._queue.put(step)
        if self._is_closed:
            self._queue.put(None)
        if not self._threads and steps:
            self._run_rest()  # Other callers relied on the thread that could not be started.
        return was_there

    def close(self, *, wait: bool = False, drop: bool = False) -> None:
        """Accept no more steps; may be called again.

        Args:
            wait: wait for all accepted steps; not on a thread of this pool.
            drop: discard the steps that no thread has begun.
        """
        if this_process() != self._pid:  # In a forked child the threads are gone.
            return
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(Empty):
                while drop:
                    self._queue.get_nowait()
            self._forget()
        self._queue.put(None)  # In each call: an interrupted one may not have done it.
        self._start_more()  # Before the None, a thread that had taken a step counted one waiting step too few.
        while wait and (threads := tuple(self._threads)):
            for thread in threads:
                if thread not in self._unbegun and thread.ident is not None:
                    thread.join()
            self.hurry()
            if any(thread.ident is None for thread in self._threads):
                time.sleep(_LOOK_AGAIN_S)  # A thread is being started now.

    def _forget(self) -> None:
        if not self._threads and not self._is_finishing:
            atexit.unregister(self._finish)

    def _finish(self) -> None:
        self._is_finishing = True
        self.close(wait=True)

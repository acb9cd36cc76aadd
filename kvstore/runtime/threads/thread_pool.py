"""Run blocking steps on a few threads, without a result object for each step.

Python's own pool makes a future for each step, with a condition and its locks: more than twice the work of handing the
step over. These futures would be unused here, because a job has its own future.

There is no lock. A signal handler may run between any two instructions, also while a thread is being started, and may
wait there for the work of these threads. A thread that needed a lock of the interrupted code would wait for the handler
in turn. So all shared state is changed by single calls of C code, which nothing can interrupt. A handler may raise,
too: after each such call, all threads and places can be found in one of the containers.
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
    """Runs steps in order on up to `most` threads. For any threads.

    Every accepted step runs, unless `close` drops it; an ending interpreter waits for that. The owner must call
    `close`, or the threads stay.

    Args:
        most: the most threads.
        name: of the threads; a number is appended.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name, self._pid = most, name, this_process()
        self.queue: SimpleQueue[_Step | None] = SimpleQueue()
        #: A place is the number of a thread that may be started. It moves with its thread: from the free places to the
        #: threads that do not run yet, then to those that run, and back.
        self._places: deque[int] = deque(range(most))
        self.unbegun: dict[threading.Thread, int] = {}
        self.threads: dict[threading.Thread, int] = {}
        #: One entry per thread that waits for a step, or has just taken one and not said so yet.
        self.idle: deque[None] = deque()
        self._is_closed = self._is_finishing = False
        # The interpreter would wait for non-daemon threads in vain, and would stop daemons in the middle of a step.
        atexit.register(self._finish)

    def run(self, step: _Step) -> bool:
        """Run a step soon on a thread of this pool. An error of the step is logged.

        Returns:
            False after `close`, in a forked child, or when no thread at all can be started: the step does not run.
        """
        if self._is_closed or this_process() != self._pid:
            return False
        # Before the start: a signal handler that interrupts it may wait for this step, which other threads can run.
        self.queue.put(step)
        if self._is_short() and not self._start() and self._take_back(step):
            return False
        if self._is_closed and not self._has_threads():  # The last thread may have looked before this step came.
            self._run_rest()
        return True

    def _is_short(self, num_coming: int = 0) -> bool:
        """Return whether a step waits without an idle thread, or one of `num_coming` that begin.

        Asked after a step was queued, and by each thread after it has taken one. So a step that comes just when a
        thread is not idle any more is seen by one of the two.
        """
        # After `close`, one None stays in the queue.
        return self.queue.qsize() > len(self.idle) + num_coming + self._is_closed

    def _has_threads(self) -> bool:
        """Return whether there is any thread, or one begins. In this order: the first become the second."""
        return bool(self.unbegun or self.threads)

    def hurry(self) -> None:
        """Begin accepted steps even if the start of their thread was interrupted."""
        while self._take_place_back():
            pass
        if self._is_short() and not self._start():
            self._run_rest()

    def _start(self) -> bool:
        """Start one more thread unless there are enough. Return whether there is any thread, or one comes."""
        if not (self.unbegun or self._places):
            return True
        handled = sys.exception()  # Of the caller, so it is the context of every error from here on.
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        try:
            if self.take_place(thread):
                thread.start()
        except BaseException as error:
            self._give_place_back(thread)  # If it runs all the same, it ends at once.
            if not isinstance(error, RuntimeError) or error.__context__ is not handled:
                raise  # An interrupt, or an error that Python made of one.
            # No thread is left, or the interpreter ends.
            if not self._has_threads():
                return False
            logger.warning("%d threads of %s do the work of %d: %s", len(self.threads), self._name, self._most, error)
        return True

    def take_place(self, thread: threading.Thread) -> bool:
        """Give a free place to a thread that is about to be started. False if there is none."""
        while True:
            places = map(deque.popleft, (self._places,))  # Taken by `update`: out of the one and into the other.
            with contextlib.suppress(IndexError):
                self.unbegun.update(zip((thread,), places, strict=True))
                return True
            if not self._take_place_back():
                return False

    def _take_place_back(self) -> bool:
        """Free the place of one thread that may never begin; False if there is none.

        Its start may have been interrupted for good, or goes on only after the calling signal handler. Another caller
        may be in the middle of it, too: then that thread ends at once, and there is the caller's thread.
        """
        own = threading.current_thread()
        for thread in tuple(self.unbegun):
            if (thread is own or not thread.is_alive()) and self._give_place_back(thread):
                return True
        return False

    def _give_place_back(self, thread: threading.Thread) -> bool:
        """Free the place of a thread that does not run yet. False if it runs, or has none."""
        with contextlib.suppress(KeyError):
            self._places.extendleft(map(self.unbegun.pop, (thread,)))
            return True
        return False

    def _begin(self, thread: threading.Thread) -> bool:
        """Count a thread among those that run. False if its place was given to another one."""
        with contextlib.suppress(KeyError):
            self.threads.update(zip((thread,), map(self.unbegun.pop, (thread,)), strict=True))
            return True
        return False

    def _work(self) -> None:
        thread = threading.current_thread()
        # First: while it is neither idle nor being started, a thread too many could be started.
        self.idle.append(None)
        if not self._begin(thread):
            self.idle.pop()
            self._start_more()
            return
        thread.name = f"{self._name}_{self.threads[thread]}"
        while True:
            step = self.queue.get()
            self.idle.pop()
            if step is None:
                step = self._next_step()
                self.queue.put(None)  # For the next thread.
                if step is None:
                    break
            else:
                self._start_more()
            self._do(step)
            del step  # A sleeping thread must keep no client alive.
            self.idle.append(None)
        self._places.extend(map(self.threads.pop, (thread,)))
        if not self._has_threads():
            self._run_rest()
            self._forget()

    def _start_more(self) -> None:
        """Start a thread for a step that came while this one took another, or ended."""
        if self._is_short(len(self.unbegun)) and not self._start():
            self._run_rest()

    def _do(self, step: _Step) -> None:
        try:
            step()
        except BaseException:
            logger.exception("a thread of %s met an unexpected error", self._name)

    def _next_step(self) -> _Step | None:
        """Return the next step of the queue; None if there is none."""
        with contextlib.suppress(Empty):
            while True:
                if (step := self.queue.get_nowait()) is not None:
                    return step
        return None

    def _run_rest(self) -> None:
        """Run all queued steps on the calling thread, unless there is another one for them.

        It takes a place for that, so that no more steps run at once than there may be threads; except where a step
        that it runs, or a signal handler in the middle of one, adds others: these may be waited for.
        """
        own = threading.current_thread()
        while self.queue.qsize() > self._is_closed and self.take_place(own):
            try:
                while own in self.unbegun and (step := self._next_step()) is not None:
                    self._do(step)
            finally:
                self._give_place_back(own)
                if self._is_closed:
                    self.queue.put(None)

    def _take_back(self, own: _Step) -> bool:
        """Remove a step for which there is no thread. False if a thread has taken it."""
        steps, was_there = list[_Step](), False
        while (step := self._next_step()) is not None:
            if step is own and not was_there:
                was_there = True
            else:
                steps.append(step)
        for step in steps:
            self.queue.put(step)
        if self._is_closed:
            self.queue.put(None)
        if steps and not self._has_threads():
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
        # All in each call: an interrupted one may not have done it.
        self._is_closed = True
        with contextlib.suppress(Empty):
            while drop:
                self.queue.get_nowait()
        self._forget()
        self.queue.put(None)
        self._start_more()  # Before the None, a thread that had taken a step counted one waiting step too few.
        while wait and self._has_threads():
            for thread in tuple(self.threads):
                thread.join()
            self.hurry()
            if self._has_threads():  # Of a join that was interrupted, Python may say that the thread has ended.
                time.sleep(_LOOK_AGAIN_S)

    def _forget(self) -> None:
        if not self._is_finishing and not self._has_threads():
            atexit.unregister(self._finish)

    def _finish(self) -> None:
        self._is_finishing = True
        self.close(wait=True)

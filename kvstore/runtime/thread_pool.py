"""A few threads for what blocks, without an object for each result.

Python's own pool makes a future for each thing that it runs, with a condition and its locks: more than twice the work
of handing it over. Nobody would wait for these here, for a job has a future of its own.

There is no lock. The handler of a signal may run between any two instructions, also while a thread is being started,
and may wait there for what these threads do: one that needed a lock of the interrupted code would wait for the handler.
So what is shared is changed by single calls of built-in containers alone, which nothing comes between.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

from kvstore.runtime.forks import this_process

logger = logging.getLogger(__name__)


#: What is handed over: what to run, and whether a thread that had nothing to do was found for it.
_Item = tuple[Callable[[], object], bool]
_LOOK_AGAIN_S = 1e-3


class ThreadPool:
    """Runs things one after the other on up to `most` threads, each started when it is needed; for any threads.

    What was taken is run, also when the interpreter ends, which then waits for it. Its owner calls `close`, or the
    threads stay.

    Args:
        most: threads.
        name: of the threads, which get a number behind it.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name, self._pid = most, name, this_process()
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        #: Numbers of threads that may be started yet, and those that were, until they end.
        self._places: deque[int] = deque(range(most))
        self._threads: list[threading.Thread] = []
        #: Of them those that do not run yet, with who starts them and their number; who takes one out has its place.
        self._unbegun: dict[threading.Thread, tuple[int, int]] = {}
        #: One for each thread that has nothing to do, and for which nothing is handed over.
        self._idle: deque[None] = deque()
        self._is_closed = self._is_finishing = False
        # Threads that are no daemons would be waited for in vain, and daemons alone would be stopped anywhere.
        atexit.register(self._finish)

    def run(self, step: Callable[[], object]) -> bool:
        """Have something run soon; an error of it is logged.

        Returns:
            False after `close`, and when no thread at all can be started: then it is not run.
        """
        if self._is_closed:
            return False
        is_expected = True
        try:
            self._idle.pop()
        except IndexError:
            is_expected = False
        item = (step, is_expected)
        # First: what interrupts the start of a thread may wait for this, and have another thread do it.
        self._queue.put(item)
        if not is_expected and not self._start() and self._take_back(item):
            return False
        if self._is_closed and not self._threads:  # The last one may have looked before this came.
            self._run_rest()
        return True

    def hurry(self) -> None:
        """See to it that what was taken is begun, though the start of its thread may have been interrupted."""
        for thread in tuple(self._unbegun):
            if (entry := self._unbegun.pop(thread, None)) is not None:
                self._drop(thread)
                self._places.appendleft(entry[1])
        # Behind `close` one that is no step stays in the queue.
        if self._queue.qsize() > self._is_closed and not self._idle and not self._start():
            self._run_rest()

    def _start(self) -> bool:
        """Start one more thread unless there are enough; whether there is any."""
        try:
            place = self._places.popleft()
        except IndexError:
            if (found := self._place_of_interrupted()) is None:
                return True
            place = found
        thread = threading.Thread(target=self._work, name=f"{self._name}_{place}", daemon=True)
        self._unbegun[thread] = threading.get_ident(), place
        try:
            self._threads.append(thread)
            thread.start()
        except BaseException as error:
            if self._unbegun.pop(thread, None) is not None:  # Should it come to run all the same, it ends at once.
                self._drop(thread)
                self._places.appendleft(place)
            if not isinstance(error, RuntimeError) or error.__context__ is not None:
                raise  # An interrupt, or what Python makes of one in there.
            # No more threads, or the interpreter ends.
            if not self._threads:
                return False
            logger.warning("%d threads of %s do the work of %d: %s", len(self._threads), self._name, self._most, error)
        return True

    def _place_of_interrupted(self) -> int | None:
        """Return the place of a thread that this one is just starting, below the handler of a signal that it runs."""
        own = threading.get_ident()
        for thread, (starter, place) in tuple(self._unbegun.items()):
            if starter == own and self._unbegun.pop(thread, None) is not None:
                self._drop(thread)
                return place
        return None if self._threads else 0  # An interrupt came behind the call that took the only place.

    def _work(self) -> None:
        thread = threading.current_thread()
        if self._unbegun.pop(thread, None) is None:
            self._drop(thread)
            return  # Its place was given to another one.
        while True:
            self._idle.append(None)
            item = self._queue.get()
            if item is None:
                item = self._next_step()
                self._queue.put(None)  # For the next one.
                if item is None:
                    break
            step, is_expected = item
            if not is_expected:
                try:
                    self._idle.pop()
                except IndexError:  # Something else was handed over because this thread had nothing to do.
                    self._start()
            del item
            self._do(step)
            del step  # While this sleeps it keeps nobody's client alive.
        self._drop(thread)
        if not self._threads:
            self._run_rest()
            self._forget()

    def _drop(self, thread: threading.Thread) -> None:
        with contextlib.suppress(ValueError):  # Its start was interrupted before it was noted.
            self._threads.remove(thread)

    def _do(self, step: Callable[[], object]) -> None:
        try:
            step()
        except BaseException:
            logger.exception("a thread of %s met an unexpected error", self._name)

    def _next_step(self) -> _Item | None:
        """Return what was handed over next; None if nothing was."""
        with contextlib.suppress(Empty):
            while True:
                if (item := self._queue.get_nowait()) is not None:
                    return item
        return None

    def _run_rest(self) -> None:
        """Run here what was handed over, because there is no thread for it."""
        while (item := self._next_step()) is not None:
            self._do(item[0])
        if self._is_closed:
            self._queue.put(None)

    def _take_back(self, own: _Item) -> bool:
        """Take something back for which there is no thread; False if one has taken it after all."""
        items = []
        while (item := self._next_step()) is not None:
            items.append(item)
        for item in items:
            if item is not own:
                self._queue.put(item)
        if self._is_closed:
            self._queue.put(None)
        if not self._threads and len(items) > 1:
            self._run_rest()  # Others counted on the thread that could not be started.
        return any(item is own for item in items)

    def close(self, *, wait: bool = False, drop: bool = False) -> None:
        """Take nothing more; may be called again.

        Args:
            wait: for what was taken; not by a thread of this pool.
            drop: what no thread has begun.
        """
        if this_process() != self._pid:  # In a forked child the threads are gone.
            return
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(Empty):
                while drop:
                    self._queue.get_nowait()
            self._forget()
        self._queue.put(None)  # Each time: one that was interrupted may not have.
        while wait and (threads := tuple(self._threads)):
            for thread in threads:
                if thread not in self._unbegun and thread.ident is not None:
                    thread.join()
            self.hurry()
            if any(thread.ident is None for thread in self._threads):
                time.sleep(_LOOK_AGAIN_S)  # It is being started just now.

    def _forget(self) -> None:
        if not self._threads and not self._is_finishing:
            atexit.unregister(self._finish)

    def _finish(self) -> None:
        self._is_finishing = True
        self.close(wait=True)

"""A few threads for what blocks, without an object for each result.

Python's own pool makes a future for each thing that it runs, with a condition and its locks: more than twice the work
of handing it over. Nobody would wait for these here, for a job has a future of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from kvstore.runtime.forks import this_process

logger = logging.getLogger(__name__)


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
        # Of a kind that one thread may take twice: what is collected while it is held may close this.
        self._lock = threading.RLock()
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        #: Taken, and not at its end.
        self._num_pending = 0
        self._is_closed = self._is_finishing = False
        # Threads that are no daemons would be waited for in vain, and daemons alone would be stopped anywhere.
        atexit.register(self._finish)

    def run(self, step: Callable[[], object]) -> bool:
        """Have something run soon; an error of it is logged.

        Returns:
            False after `close`, and when no thread at all can be started: then it is not run.
        """
        with self._lock:
            if self._is_closed:
                return False
            if self._num_pending >= len(self._threads) < self._most and not self._start():
                return False
            self._num_pending += 1
            self._queue.put(step)
        return True

    def _start(self) -> bool:
        """Start one more thread; whether there is any."""
        thread = threading.Thread(target=self._work, name=f"{self._name}_{len(self._threads)}", daemon=True)
        try:
            self._threads.append(thread)
            thread.start()
        except BaseException as error:
            if thread in self._threads and not thread.is_alive():  # If it comes to run all the same, it notes itself.
                self._threads.remove(thread)
            if not isinstance(error, RuntimeError) or error.__context__ is not None:
                raise  # An interrupt, or what Python makes of one in there.
            # No more threads, or the interpreter ends.
            if not self._threads:
                return False
            logger.warning("%d threads of %s do the work of %d: %s", len(self._threads), self._name, self._most, error)
        return True

    def _work(self) -> None:
        with self._lock:
            if (thread := threading.current_thread()) not in self._threads:
                self._threads.append(thread)
        while (step := self._queue.get()) is not None:
            try:
                step()
            except BaseException:
                logger.exception("a thread of %s met an unexpected error", self._name)
            del step  # While this sleeps it keeps nobody's client alive.
            with self._lock:
                self._num_pending -= 1
        with self._lock:
            self._queue.put(None)  # For the next one.
            self._threads.remove(thread)
            self._forget()

    def close(self, *, wait: bool = False, drop: bool = False) -> None:
        """Take nothing more; may be called again.

        Args:
            wait: for what was taken; not by a thread of this pool.
            drop: what no thread has begun.
        """
        if this_process() != self._pid:  # In a forked child the threads are gone, and the lock may be held for ever.
            return
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                with contextlib.suppress(Empty):
                    while drop:
                        self._queue.get_nowait()
                self._queue.put(None)
                self._forget()
            threads = tuple(self._threads)
        if wait:
            for thread in threads:
                thread.join()

    def _forget(self) -> None:
        if not self._threads and not self._is_finishing:
            atexit.unregister(self._finish)

    def _finish(self) -> None:
        self._is_finishing = True
        self.close(wait=True)

"""The threads of one client's jobs."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from kvstore.client.work import Awaited, Work, nothing
from kvstore.errors import StoreUnavailable
from kvstore.runtime.parking import Parking
from kvstore.runtime.thread_pool import ThreadPool

logger = logging.getLogger(__name__)

_NUM_COPYING, _NUM_PUBLISHING = 4, 16


class JobThreads:
    """Few threads that copy, more for publications, one for callbacks; what waits for others holds none of them.

    Work that waits for the store's answer is parked: an early fetch until its blocks are published, a save until other
    ranks have saved their parts, a load until peers have sent their blocks. A publication waits for its own copies
    alone, perhaps until the device has computed the blocks, so no thread that copies does that. Threads are started
    when they are needed.
    """

    def __init__(self) -> None:
        self._copying = ThreadPool(_NUM_COPYING, "raykv-client")
        self._publishing = ThreadPool(_NUM_PUBLISHING, "raykv-publish")
        self._callbacks = ThreadPool(1, "raykv-callbacks")
        self._callback_thread = 0
        self._parking = Parking()
        # Their threads would outlive a client that is collected; nothing is to be done then, or it would have this.
        for threads in (self._copying, self._publishing, self._callbacks, self._parking):
            weakref.finalize(self, threads.close).atexit = False
        self._works: set[Work[Any]] = set()
        self._all_ended = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        """How many jobs have not ended."""
        return len(self._works)

    @property
    def num_parked(self) -> int:
        """How many jobs wait for others now."""
        return len(self._parking)

    def start(self, work: Work[Any]) -> None:
        """Do work on a thread that copies, as soon as one is free.

        Raises:
            StoreUnavailable: nothing is taken any more.
        """
        self._enter(work)
        self._run(self._copying, partial(self._go_on, work))

    def expect(self, work: Work[Any]) -> None:
        """Count work that is begun by its caller, until it is started and over, or `forget` is called for it.

        Raises:
            StoreUnavailable: nothing is taken any more.
        """
        self._enter(work)

    def settle(self, work: Work[Any]) -> None:
        """Have work come to its end of which nobody knows how far its start came, and which was abandoned.

        It may be under way, or queued, or over: then nothing more is done. What holds for it is given back at its end,
        and by nobody else, for until then it may use that.
        """
        if work.forget is nothing:  # It was not begun at all, or is over.
            work.forget = partial(self._leave, work)
            self._works.add(work)
            if work.is_left:
                work.forget()
        self._run(self._copying, partial(self._go_on, work))

    def start_asked(self, work: Work[Any], awaited: Awaited) -> None:
        """Do work when the answer is there that it has asked for already; see `start` for what is raised."""
        self._enter(work)
        try:
            work.park(awaited, lambda each: self._park(work, each))
        except (OSError, RuntimeError, ValueError):
            self._run(self._copying, partial(self._go_on, work))  # It waits there.
        work.future.add_done_callback(lambda future: self.wake(work) if future.cancelled() else None)

    def publish(self, work: Work[Any]) -> None:
        """Do the work of a publication; see `start` for what is raised."""
        self._enter(work)
        self._run(self._publishing, partial(self._go_on, work))

    def wake(self, work: Work[Any]) -> None:
        """Have work that waits look whether it is still wanted."""
        if work.look_again():
            self._run(self._copying, partial(self._go_on, work))

    def call(self, callback: Callable[[], object]) -> None:
        """Run a caller's callback: one after the other, on a thread for which no job waits."""

        def run() -> None:
            self._callback_thread = threading.get_ident()
            try:
                callback()
            except Exception:
                logger.exception("the callback of a job failed")
            finally:
                self._callback_thread = 0

        self._run(self._callbacks, run)

    def shutdown(self, timeout_s: float | None = None) -> bool:
        """Wait for all work, whether that ended in time; nothing is taken any more. Callbacks are not waited for."""
        for threads in (self._copying, self._publishing, self._parking):
            threads.hurry()  # This may be asked for by who interrupted the start of one of their threads.
        with self._all_ended:
            self._closed = True
            if not self._all_ended.wait_for(lambda: not self._works, timeout_s):
                return False
        self._copying.close(wait=True)
        self._publishing.close(wait=True)
        self._parking.close()
        return True

    def await_callbacks(self, timeout_s: float) -> None:
        """Wait for the callbacks of jobs that ended, unless a callback asks for that; no more come after it."""
        if threading.get_ident() != self._callback_thread:
            called = threading.Event()
            self.call(called.set)
            called.wait(timeout_s)
        self._callbacks.close()

    def _enter(self, work: Work[Any]) -> None:
        if work in self._works:
            return  # It was expected, and is waited for.
        leave_others, work.forget = work.forget, partial(self._leave, work)
        self._works.add(work)  # Before the look, and without a lock: `shutdown` looks after it has closed.
        leave_others()  # Those of a store that has ended since they expected it.
        if self._closed:
            self._leave(work)
            raise StoreUnavailable("wanted an open client, got a closed one; make a new one")
        if work.limit_s is not None:
            work.ended_elsewhere = lambda: self._run(self._copying, partial(self._end, work))
            work.left_elsewhere = lambda: self._run(self._copying, partial(self._go_on, work))

    def _go_on(self, work: Work[Any]) -> None:
        if work.go_on(lambda awaited: self._park(work, awaited)):
            self._end(work)

    def _park(self, work: Work[Any], awaited: Awaited) -> Callable[[], None]:
        return self._parking.park(
            awaited.fd, awaited.until_s, lambda: self._run(self._copying, partial(self._go_on, work))
        )

    def _end(self, work: Work[Any]) -> None:
        if not work.leave():
            return
        try:
            work.after()
        except Exception:
            logger.exception("a job that ended could not give back what it held")
        finally:
            work.forget()
            work.ended_elsewhere = work.left_elsewhere = work.forget = nothing  # They refer to the work.

    def _leave(self, work: Work[Any]) -> None:
        self._works.discard(work)
        if self._closed:
            with self._all_ended:
                self._all_ended.notify_all()

    @staticmethod
    def _run(threads: ThreadPool, step: Callable[[], object]) -> None:
        if not threads.run(step):  # The client or the interpreter ends, or no thread can be started.
            step()

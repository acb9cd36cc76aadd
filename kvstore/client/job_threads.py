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
from kvstore.runtime.threads.thread_pool import ThreadPool

logger = logging.getLogger(__name__)

_NUM_COPYING, _NUM_PUBLISHING = 4, 16


class JobThreads:
    """The threads of one client: few that copy, more for publications, one for callbacks.

    Work that waits for the store's answer is parked and holds no thread: an early fetch until its blocks are published,
    a save until other ranks have saved their parts, a load until peers have sent their blocks. A publication waits only
    for its own copies, perhaps until the device has computed the blocks, so it runs on no copying thread. Threads are
    started when they are needed.
    """

    def __init__(self) -> None:
        self._copying = ThreadPool(_NUM_COPYING, "raykv-client")
        self._publishing = ThreadPool(_NUM_PUBLISHING, "raykv-publish")
        self._callbacks = ThreadPool(1, "raykv-callbacks")
        self._callback_thread = 0
        self._parking = Parking()
        # Else their threads would outlive a collected client. Pending work would refer to this, so there is none then.
        for threads in (self._copying, self._publishing, self._callbacks, self._parking):
            weakref.finalize(self, threads.close).atexit = False
        self._works: set[Work[Any]] = set()
        self._all_ended = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        """Return how many jobs have not ended."""
        return len(self._works)

    @property
    def num_parked(self) -> int:
        """Return how many jobs are parked."""
        return len(self._parking)

    def start(self, work: Work[Any]) -> None:
        """Do work on a copying thread, as soon as one is free. Raises what `expect` raises."""
        self.expect(work)
        self._run(self._copying, partial(self._go_on, work))

    def expect(self, work: Work[Any]) -> None:
        """Count work that its caller begins. It counts until it was started and has ended, or was forgotten.

        Raises:
            StoreUnavailable: the client was closed.
        """
        if work in self._works:
            return  # Its start comes after `expect`.
        leave_others, work.forget = work.forget, partial(self._leave, work)
        self._works.add(work)  # Without a lock, before `_closed` is read: `shutdown` sets that before it reads this.
        leave_others()  # Threads of a store that has ended since they expected it.
        if self._closed:
            self._leave(work)
            raise StoreUnavailable("wanted an open client, got a closed one; make a new one")
        if work.limit_s is not None:
            work.ended_elsewhere = lambda: self._run(self._copying, partial(self._end, work))
            work.left_elsewhere = lambda: self._run(self._copying, partial(self._go_on, work))

    def settle(self, work: Work[Any]) -> None:
        """Bring abandoned work to its end after an interrupted start.

        It may be running, queued or ended; ended work is not done again. It alone gives back what it holds, at its end,
        because it may use that until then.
        """
        if work.forget is nothing:  # It has not begun, or has ended.
            work.forget = partial(self._leave, work)
            self._works.add(work)
            if work.is_left:
                work.forget()
        self._run(self._copying, partial(self._go_on, work))

    def start_asked(self, work: Work[Any], awaited: Awaited) -> None:
        """Do work whose question was already sent, once the answer is there. Raises what `expect` raises."""
        self.expect(work)
        try:
            work.park(awaited, lambda each: self._park(work, each))
        except (OSError, RuntimeError, ValueError):
            self._run(self._copying, partial(self._go_on, work))  # It waits on that thread.
        work.future.add_done_callback(lambda future: self.wake(work) if future.cancelled() else None)

    def publish(self, work: Work[Any]) -> None:
        """Do the work of a publication; raises what `expect` raises."""
        self.expect(work)
        self._run(self._publishing, partial(self._go_on, work))

    def wake(self, work: Work[Any]) -> None:
        """Make waiting work check whether it is still wanted."""
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
        """Take no more work, and wait for all except callbacks. Return whether it ended in time."""
        for threads in (self._copying, self._publishing, self._parking):
            threads.hurry()  # The caller may have interrupted the start of one of their threads.
        with self._all_ended:
            self._closed = True
            if not self._all_ended.wait_for(lambda: not self._works, timeout_s):
                return False
        self._copying.close(wait=True)
        self._publishing.close(wait=True)
        self._parking.close()
        return True

    def await_callbacks(self, timeout_s: float) -> None:
        """Wait for the callbacks of ended jobs, unless called from a callback. Take no more callbacks."""
        if threading.get_ident() != self._callback_thread:
            called = threading.Event()
            self.call(called.set)
            called.wait(timeout_s)
        self._callbacks.close()

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
        if not threads.run(step):  # The client or the interpreter is ending, or no thread can be started.
            step()

"""Where work waits for others: one thread watches the connections of all of it."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import os
import select
import threading
from collections.abc import Callable
from functools import partial

from kvstore.runtime import clock
from kvstore.runtime.forks import this_process

logger = logging.getLogger(__name__)

#: The kernel takes no sleep of more than some weeks; after this the thread looks, and sleeps on.
LONGEST_SLEEP_S = 3600.0


class Parking:
    """Calls what is parked when its descriptor can be read, or its time is over. For any threads.

    Its thread runs from the first that is parked on.
    """

    def __init__(self) -> None:
        # Of a kind that one thread may take twice: what is collected while it is held may close this.
        self._lock = threading.RLock()
        self._pid = this_process()
        self._epoll: select.epoll | None = None
        self._wake_fd = -1
        #: What no thread watches yet: the first of its threads that takes it out does, any other one ends.
        self._unbegun: dict[select.epoll, None] = {}
        #: By descriptor: a number of its own, and what is called.
        self._parked: dict[int, tuple[int, Callable[[], None]]] = {}
        #: Of each that was parked, also of those that are gone: (until, number, descriptor).
        self._deadlines: list[tuple[float, int, int]] = []
        self._numbers = itertools.count(1)
        #: Called at once, by the thread: their descriptors are gone.
        self._left_behind: list[Callable[[], None]] = []
        self._sleeps_until_s = math.inf
        self._closed = False

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, fd: int, until_s: float, then: Callable[[], None]) -> Callable[[], None]:
        """Have `then` called once, on the thread that watches: it must not block.

        Args:
            fd: nothing else is parked with it; it stays open until `then` is called, or what is returned.
            until_s: of kvstore.runtime.clock, when `then` is called at the latest.
            then: what goes on.

        Returns:
            What ends this; after it `then` may still be called, if that had begun.

        Raises:
            OSError, RuntimeError: there is no descriptor or thread for it; nothing is parked.
            ValueError: `fd` was closed; likewise.
        """
        self.hurry()
        with self._lock:
            is_new = self._epoll is None
            epoll = self._epoll if self._epoll is not None else self._make()
            # What is parked there still had a descriptor that was closed by others, and whose number is this one's now.
            left_behind = self._take(fd)
            number = next(self._numbers)
            try:
                epoll.register(fd, select.EPOLLIN)
                self._parked[fd] = number, then
                heapq.heappush(self._deadlines, (until_s, number, fd))
                if until_s < self._sleeps_until_s:
                    # With the lock held, or the thread could end meanwhile, and the number be another file's.
                    os.eventfd_write(self._wake_fd, 1)
            except (OSError, ValueError):
                raise  # Of `register`.
            except BaseException:  # An interrupt: the caller cannot end this, for it does not know how.
                self._parked[fd] = number, then
                self._take(fd, number)
                raise
            finally:
                if left_behind is not None:
                    self._left_behind.append(left_behind)
                    os.eventfd_write(self._wake_fd, 1)
        if is_new:
            # Not under the lock, which the thread takes: a handler of a signal that comes meanwhile may wait for it.
            self._start(epoll, fd, number)
        return partial(self._leave, fd, number)

    def hurry(self) -> None:
        """See to it that what is parked is watched, though the start of the thread may have been interrupted."""
        for epoll in tuple(self._unbegun):
            with contextlib.suppress(RuntimeError):  # No thread can be started: the one who begins it says so.
                threading.Thread(target=self._run, args=(epoll,), name="raykv-waiting", daemon=True).start()

    def close(self) -> None:
        """End the thread once nothing is parked any more; may be called again."""
        if this_process() != self._pid:  # In a forked child there is no such thread, and the lock may be held for ever.
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._epoll is not None:
                os.eventfd_write(self._wake_fd, 1)

    def _make(self) -> select.epoll:
        with contextlib.ExitStack() as undo:
            wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, wake_fd)
            epoll = undo.enter_context(select.epoll())
            epoll.register(wake_fd, select.EPOLLIN)
            undo.pop_all()
        self._unbegun[epoll] = None
        self._epoll, self._wake_fd = epoll, wake_fd
        return epoll

    def _start(self, epoll: select.epoll, fd: int, number: int) -> None:
        """Start the thread; where that fails what was parked with this number is parked no more, and others go on."""
        try:
            threading.Thread(target=self._run, args=(epoll,), name="raykv-waiting", daemon=True).start()
        except BaseException:
            with self._lock:
                self._take(fd, number)
                if epoll not in self._unbegun:
                    raise  # An interrupt: it runs all the same.
                del self._unbegun[epoll]
                others = [*self._left_behind, *(self._take(each) for each in tuple(self._parked))]
                self._left_behind.clear()
                self._deadlines.clear()
                self._epoll, self._sleeps_until_s = None, math.inf
                epoll.close()
                os.close(self._wake_fd)
            for then in others:
                if then is not None:
                    then()
            raise

    def _leave(self, fd: int, number: int) -> None:
        with self._lock:
            self._take(fd, number)

    def _take(self, fd: int, number: int | None = None) -> Callable[[], None] | None:
        """Return what is parked with a descriptor, and watch that no more."""
        found = self._parked.get(fd)
        if found is None or self._epoll is None or number not in (None, found[0]):
            return None
        del self._parked[fd]
        with contextlib.suppress(OSError):  # Closed all the same, it is watched no more.
            self._epoll.unregister(fd)
        return found[1]

    def _run(self, epoll: select.epoll) -> None:
        try:
            del self._unbegun[epoll]
        except KeyError:
            return  # Another thread watches it, or nobody is to: its start was interrupted.
        wait_s = 0.0
        while True:
            ready = epoll.poll(wait_s)
            with self._lock:
                found = [*self._left_behind, *(self._take(fd) for fd, _ in ready)]
                self._left_behind.clear()
                now_s = clock.now_s()
                while self._deadlines and self._deadlines[0][0] <= now_s:
                    _, number, fd = heapq.heappop(self._deadlines)
                    found.append(self._take(fd, number))
                self._sleeps_until_s = self._deadlines[0][0] if self._deadlines else math.inf
                wait_s = min(self._sleeps_until_s - now_s, LONGEST_SLEEP_S) if self._deadlines else -1.0
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                if self._closed and not self._parked:
                    if not any(found):
                        self._epoll = None
                        epoll.close()
                        os.close(self._wake_fd)
                        return
                    wait_s = 0.0  # What was found goes on first.
            for then in found:
                if then is None:
                    continue
                try:
                    then()
                except Exception:
                    logger.exception("what was parked could not go on")
            found, then = [], None  # While this sleeps it keeps nobody's client alive.

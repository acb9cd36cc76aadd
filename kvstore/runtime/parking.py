"""Park work that waits for an answer. One thread watches the connections of all parked work."""

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

#: The kernel accepts no sleep longer than some weeks; after this time the thread checks, and sleeps again.
LONGEST_SLEEP_S = 3600.0


class Parking:
    """Calls parked callbacks when their descriptor can be read or their deadline passes. For any threads.

    Its thread starts with the first call of `park`.
    """

    def __init__(self) -> None:
        # Reentrant: a finalizer that runs while it is held may call `close`.
        self._lock = threading.RLock()
        self._pid = this_process()
        self._epoll: select.epoll | None = None
        self._wake_fd = -1
        #: An epoll that no thread watches yet. The first thread that removes it watches it; any other thread ends.
        self._unbegun: dict[select.epoll, None] = {}
        #: By descriptor: a unique number, and the callback.
        self._parked: dict[int, tuple[int, Callable[[], None]]] = {}
        #: (until, number, descriptor) of everything that was parked, also of what has left.
        self._deadlines: list[tuple[float, int, int]] = []
        self._numbers = itertools.count(1)
        #: The thread calls these at once: their descriptors are closed.
        self._left_behind: list[Callable[[], None]] = []
        self._sleeps_until_s = math.inf
        self._closed = False

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, fd: int, until_s: float, then: Callable[[], None]) -> Callable[[], None]:
        """Call `then` once, on the watching thread, when `fd` can be read or at `until_s`.

        Args:
            fd: parked once at a time. The caller keeps it open until `then` or the returned function is called.
            until_s: time of kvstore.runtime.clock; `then` is called at the latest then.
            then: continues the parked work; must not block.

        Returns:
            A function that ends the parking. A call of `then` that had begun may still follow it.

        Raises:
            OSError, RuntimeError: there is no descriptor or thread for it; nothing is parked.
            ValueError: `fd` was closed; nothing is parked.
        """
        self.hurry()
        with self._lock:
            is_new = self._epoll is None
            epoll = self._epoll if self._epoll is not None else self._make()
            # An entry under this number is left behind: its descriptor was closed, and the number was reused for `fd`.
            left_behind = self._take(fd)
            number = next(self._numbers)
            try:
                epoll.register(fd, select.EPOLLIN)
                self._parked[fd] = number, then
                heapq.heappush(self._deadlines, (until_s, number, fd))
                if until_s < self._sleeps_until_s:
                    # Under the lock, or the thread could end meanwhile and the number belong to another file.
                    os.eventfd_write(self._wake_fd, 1)
            except (OSError, ValueError):
                raise  # Raised by `register`.
            except BaseException:  # An interrupt: the caller gets no function to end this.
                self._parked[fd] = number, then
                self._take(fd, number)
                raise
            finally:
                if left_behind is not None:
                    self._left_behind.append(left_behind)
                    os.eventfd_write(self._wake_fd, 1)
        if is_new:
            # Not under the lock: the thread takes it, and a signal handler here may wait for the thread.
            self._start(epoll, fd, number)
        return partial(self._leave, fd, number)

    def hurry(self) -> None:
        """Start the watching thread if its first start was interrupted."""
        for epoll in tuple(self._unbegun):
            with contextlib.suppress(RuntimeError):  # No thread can be started: the `park` call that began it raises.
                threading.Thread(target=self._run, args=(epoll,), name="raykv-waiting", daemon=True).start()

    def close(self) -> None:
        """End the thread once nothing is parked any more; may be called again."""
        if this_process() != self._pid:  # A forked child has no such thread, and the lock may stay taken forever.
            return
        with self._lock:
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
        """Start the thread. If that fails, remove the entry of this number and call all others at once."""
        try:
            threading.Thread(target=self._run, args=(epoll,), name="raykv-waiting", daemon=True).start()
        except BaseException:
            with self._lock:
                self._take(fd, number)
                if epoll not in self._unbegun:
                    raise  # An interrupt: the thread runs all the same.
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
        """Return the callback parked with a descriptor, and stop watching it."""
        found = self._parked.get(fd)
        if found is None or self._epoll is None or number not in (None, found[0]):
            return None
        del self._parked[fd]
        with contextlib.suppress(OSError):  # It was closed, so it is not watched any more.
            self._epoll.unregister(fd)
        return found[1]

    def _run(self, epoll: select.epoll) -> None:
        try:
            del self._unbegun[epoll]
        except KeyError:
            return  # Another thread watches it, or none should: its start was interrupted.
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
                    wait_s = 0.0  # The callbacks found are called first.
            for then in found:
                if then is None:
                    continue
                try:
                    then()
                except Exception:
                    logger.exception("what was parked could not go on")
            found, then = [], None  # A sleeping thread must keep no client alive.

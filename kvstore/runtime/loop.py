"""Run the control thread: an epoll, a tick, and a guard against errors."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable

from kvstore.runtime import clock
from kvstore.runtime.guard import Guard

logger = logging.getLogger(__name__)

#: How long the thread sleeps when no message comes and no ticks are wanted.
_IDLE_S = 5.0
#: After so many failures in a row, with rests in between, the thread does not count as serving any more.
_MAX_FAILURES_IN_ROW = 10
_READABLE, _WRITABLE = select.EPOLLIN, select.EPOLLOUT


class ControlLoop:
    """Calls the callbacks of ready descriptors, and ticks.

    No callback may block. The thread logs and counts an error of a callback, and continues.

    Args:
        on_tick: called about every `tick_s` seconds while `wants_ticks()` is true.
        on_end: called once, on the thread, when it ends.
    """

    def __init__(
        self,
        on_tick: Callable[[], None],
        wants_ticks: Callable[[], bool],
        tick_s: float,
        on_end: Callable[[], None],
    ) -> None:
        self._on_tick, self._wants_ticks, self._tick_s, self._on_end = on_tick, wants_ticks, tick_s, on_end
        self._epoll = select.epoll()
        #: By descriptor: called when it has something to read.
        self._when_ready: dict[int, Callable[[], None]] = {}
        self._when_writable: dict[int, Callable[[], None]] = {}
        #: Descriptors that count as readable in the next round, whatever the kernel says.
        self._again: set[int] = set()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.watch(self._wake_read, self._woken)
        self._thread = threading.Thread(target=self._run, name="raykv-control", daemon=True)
        self._stopping = self._has_ended = False
        #: Held to write to the pipe and to close it: after close, its number may belong to another file.
        self._ending, self._pid = threading.Lock(), os.getpid()
        self._awake_until_s = 0.0
        #: Set when a round is completed, for callers of `is_serving`.
        self._asked: list[threading.Event] = []
        self._polls, self._calls = Guard(logger, "control: waiting for messages"), Guard(logger, "control: a callback")
        self._ticks = Guard(logger, "control: a tick")

    @property
    def num_failures(self) -> int:
        """How often a call on this thread raised an unexpected error."""
        return self._polls.num_failures + self._calls.num_failures + self._ticks.num_failures

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended, and calls nothing any more."""
        return self._has_ended

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @staticmethod
    def now_s() -> float:
        """Return the time on the clock of the ticks."""
        return clock.now_s()

    def is_own_thread(self) -> bool:
        """Return whether the caller is this thread."""
        return threading.get_ident() == self._thread.ident

    def wake(self) -> None:
        """Make the thread check its timers; it also does so after each message."""
        if self.is_own_thread() or os.getpid() != self._pid:
            return
        with self._ending, contextlib.suppress(OSError):
            if not self._has_ended:
                os.write(self._wake_write, b"x")

    def stay_awake(self, seconds: float) -> None:
        """Poll for messages without sleeping for so long, because one comes soon; 0 ends that."""
        self._awake_until_s = clock.now_s() + seconds if seconds else 0.0
        if seconds:
            self.wake()

    def is_serving(self, within_s: float) -> bool:
        """Return whether the thread completes a round in time. False also when its ticks keep failing.

        Asks the thread itself, which answers at once unless it hangs. From any thread.
        """
        if self._stopping or not self._thread.is_alive() or self._ticks.num_in_row >= _MAX_FAILURES_IN_ROW:
            return False
        if self.is_own_thread():
            return True
        answered = threading.Event()
        self._asked.append(answered)
        self.wake()
        if answered.wait(within_s):
            return True
        with contextlib.suppress(ValueError):
            self._asked.remove(answered)
        return False

    def stop(self, timeout_s: float) -> None:
        """End the thread; may be called again."""
        self._stopping = True
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def watch(self, fd: int, then: Callable[[], None], when_writable: Callable[[], None] | None = None) -> None:
        """Call `then`, which must not block, on this thread whenever a descriptor can be read.

        The caller must unwatch a descriptor before closing it; `then` may be called once more at that moment. If `then`
        raises, its descriptor is unwatched, because it would raise again at once, forever. `when_writable` is called
        when the descriptor can be written to, while `want` says so. Call this on the thread, or before it starts.

        Raises:
            OSError: the kernel cannot watch it, for example for lack of memory; it is not watched.
        """
        self._when_ready[fd] = then
        if when_writable is not None:
            self._when_writable[fd] = when_writable
        try:
            self._epoll.register(fd, _READABLE)
        except BaseException:
            self._when_ready.pop(fd, None)
            self._when_writable.pop(fd, None)
            raise

    def want(self, fd: int, *, readable: bool, writable: bool) -> None:
        """Set the events that a descriptor is watched for, from any thread. Its end is always noticed."""
        with contextlib.suppress(OSError, ValueError):  # It is not watched any more.
            self._epoll.modify(fd, (_READABLE if readable else 0) | (_WRITABLE if writable else 0))

    def call_again(self, fd: int) -> None:
        """Treat a watched descriptor as readable in the next round. Part of its input is still unserved."""
        self._again.add(fd)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor; on the thread."""
        self._when_writable.pop(fd, None)
        self._again.discard(fd)
        if self._when_ready.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def _run(self) -> None:
        try:
            self._go_round()
        finally:
            try:
                self._on_end()
            finally:
                with self._ending:
                    self._has_ended = True
                    self._epoll.close()
                    os.close(self._wake_read)
                    os.close(self._wake_write)

    def _go_round(self) -> None:
        wait_s = next_tick_s = 0.0
        while not self._stopping:
            try:
                # Look all callbacks up before calling one: a callback may close a descriptor, and its number be reused.
                found = self._poll(0.0 if self._again else wait_s)
                if len(found) == 1 and found[0][1] == _READABLE and not self._again:  # The usual case.
                    fd = found[0][0]
                    ready = [(fd, self._when_ready[fd])]
                else:
                    ready = self._ready(found)
            except Exception as error:  # noqa: BLE001
                pause_s = self._polls.failed(error)
                if self._polls.num_in_row >= _MAX_FAILURES_IN_ROW:
                    logger.critical("control: messages cannot be waited for any more; this store serves nobody now")
                    return
                time.sleep(pause_s)
                continue
            if self._polls.num_in_row:
                self._polls.passed()
            for fd, then in ready:
                try:
                    then()
                except Exception as error:  # noqa: BLE001
                    self._calls.failed(error)
                    if then in (self._when_ready.get(fd), self._when_writable.get(fd)):
                        self.unwatch(fd)
            now_s = clock.now_s()
            wait_s = next_tick_s - now_s
            if wait_s <= 0:
                wait_s, pause_s = self._tick(bool(ready))
                next_tick_s = now_s + pause_s
            if self._asked:
                asked, self._asked = self._asked, []
                for answered in asked:
                    answered.set()

    def _ready(self, found: list[tuple[int, int]]) -> list[tuple[int, Callable[[], None]]]:
        ready = []
        for fd, events in found:
            if events & _WRITABLE:
                ready.append((fd, self._when_writable[fd]))
            if events & ~_WRITABLE:
                ready.append((fd, self._when_ready[fd]))
        if self._again:
            found_fds = {fd for fd, events in found if events & ~_WRITABLE}
            ready += [(fd, self._when_ready[fd]) for fd in self._again - found_fds]
            self._again.clear()
        return ready

    def _tick(self, was_busy: bool) -> tuple[float, float]:
        """Tick if wanted. Return how long to sleep and when to ask again, in seconds from now."""
        try:
            # Asked once a tick and not after each message; so a busy round is followed by one more short sleep.
            wanted = self._wants_ticks()
            if wanted:
                self._on_tick()
        except Exception as error:  # noqa: BLE001
            pause_s = max(self._tick_s, self._ticks.failed(error))
            return pause_s, pause_s
        self._ticks.passed()
        return (self._tick_s if wanted or was_busy else _IDLE_S), self._tick_s

    def _poll(self, wait_s: float) -> list[tuple[int, int]]:
        while self._awake_until_s:
            if found := self._epoll.poll(0):
                return found
            if clock.now_s() > self._awake_until_s:
                self._awake_until_s = 0.0
        return self._epoll.poll(wait_s)

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

"""Run the operations of a disk on few threads: reads before writes, each with a time limit.

A call to the system that hangs cannot be ended. So an operation that is overdue turns the disk off, the waiting ones
fail at once, and the store continues without its disk. When the call returns after all, the disk may be tried again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.disk.breaker import Breaker
from kvstore.errors import DiskUnavailable, KVStoreError
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

#: How often operations that run are compared with their time limit.
_LOOK_S = 0.25
#: Half of them may write. With fewer the disk waits while checksums are computed (`kvstore bench disk`).
_NUM_THREADS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """A read of the disk.

    Args:
        run: blocks until the disk has answered; raises OSError when it refuses.
        on_end: called once with the error, or None; on a thread of the disk, or on the caller's.
    """

    run: Callable[[], None]
    on_end: Callable[[Exception | None], None]


class DiskThreads:
    """The threads of one disk. Any thread may call.

    Args:
        write_some: writes some of what waits, and returns False if nothing did. At most half of the threads write at
            once, so that a read never waits behind all of them. Raises OSError when the disk refuses. Calls `answered`
            when it has not.
        timeout_s: after this long, an operation counts as hanging.
        num_threads: at least 2.
        on_off: called, without a lock, when the disk was turned off.
        on_again: called, without a lock, when it did an operation after that.
    """

    def __init__(
        self,
        write_some: Callable[[], bool],
        timeout_s: float,
        num_threads: int = _NUM_THREADS,
        on_off: Callable[[str], None] = lambda reason: None,
        on_again: Callable[[], None] = lambda: None,
    ) -> None:
        self._write_some, self._timeout_s, self._on_off, self._on_again = write_some, timeout_s, on_off, on_again
        self._hangs = f"the disk hangs: no answer in {timeout_s:g} s"
        self._most_writing = num_threads // 2
        self._lock = threading.Lock()
        # One condition each: a notification that wakes the watcher would be lost for the others.
        self._work, self._look = threading.Condition(self._lock), threading.Condition(self._lock)
        self._is_watcher_asleep = False
        #: How often `write_soon` was called: what is offered while a thread finds nothing to write is not overlooked.
        self._num_asked = 0
        self.breaker = Breaker()
        self._reads: deque[Read] = deque()
        #: When each operation that runs was begun, by thread.
        self._running: dict[int, float] = {}
        self._num_writing = 0
        self._has_writes = self._is_closed = False
        # Daemons: one that hangs must not keep the process.
        self.threads = [
            threading.Thread(target=self._serve, name=f"raykv-disk-{number}", daemon=True)
            for number in range(num_threads)
        ]
        self.threads.append(threading.Thread(target=self._watch, name="raykv-disk-watch", daemon=True))

    def start(self) -> None:
        """Start the threads."""
        for thread in self.threads:
            thread.start()

    @property
    def is_off(self) -> bool:
        """Whether the disk is not asked now."""
        with self._lock:
            return self._is_closed or self._is_off()

    @property
    def reason(self) -> str:
        """Why the disk is off, or was off last; "" if it never was."""
        with self._lock:
            # From the moment on when it counts as off, also before the watcher has looked.
            return self._hangs if self._is_overdue(clock.now_s()) else self.breaker.reason

    def _is_off(self) -> bool:
        now_s = clock.now_s()
        return self.breaker.is_off(now_s) or self._is_overdue(now_s)

    def _is_overdue(self, now_s: float) -> bool:
        return any(now_s > began_s + self._timeout_s for began_s in self._running.values())

    def read(self, reads: list[Read]) -> None:
        """Queue reads, the first first.

        Raises:
            DiskUnavailable: the disk is off, or the store ends; none was queued.
        """
        with self._lock:
            if self._is_closed or self._is_off():
                why = self._hangs if self._is_overdue(clock.now_s()) else self.breaker.reason
                raise DiskUnavailable(f"the disk is off: {why or 'the store ends'}; it is tried again")
            self._reads += reads
            self._work.notify(len(reads))

    def write_soon(self) -> None:
        """Have `write_some` called; never waits for the disk."""
        with self._lock:
            self._num_asked += 1
            self._has_writes = True
            if self._has_work():
                self._work.notify()
            self._wake_watcher()

    def stop(self, timeout_s: float) -> bool:
        """Take nothing more and wait for what runs; return whether all of it ended."""
        with self._lock:
            self._is_closed = True
            self._work.notify_all()
            self._look.notify_all()
        self._fail_all(DiskUnavailable("the store ends"))
        until_s = clock.now_s() + timeout_s
        for thread in self.threads:
            if thread.ident is not None:
                thread.join(max(0.0, until_s - clock.now_s()))
        return not any(thread.is_alive() for thread in self.threads)

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._work.wait_for(self._has_work)
                if self._is_closed:
                    return
                read = self._reads.popleft() if self._reads else None
                if read is None:
                    self._num_writing += 1
                num_asked, own = self._num_asked, threading.get_ident()
                self._running[own] = clock.now_s()
                if self._has_work():
                    self._work.notify()  # A thread for each, so that the disk has several calls to do at once.
                self._wake_watcher()
            has_more = False
            error: Exception | None = None
            try:
                if read is not None:
                    read.run()
                else:
                    has_more = self._write_some()
            except (OSError, KVStoreError) as raised:
                error, has_more = raised, read is None
            except Exception as raised:
                logger.exception("an operation of the disk failed unexpectedly")
                error, has_more = raised, read is None  # More may wait: the next turn looks.
            went_off = False
            with self._lock:
                num_trips = self.breaker.num_trips
                began_s = self._running.pop(own)
                self._num_writing -= read is None
                is_on_again = read is not None and error is None and self._has_passed(began_s)
                if isinstance(error, OSError):
                    self.breaker.failed(error, clock.now_s())
                    went_off = self.breaker.num_trips > num_trips
                if read is None:
                    self._has_writes = has_more or self._num_asked != num_asked
                self._work.notify()
            if read is not None:
                with contextlib.suppress(Exception):
                    read.on_end(error)
            if went_off:
                self._went_off()
            elif is_on_again:
                self._on_again()

    def answered(self) -> None:
        """Note that the disk did what `write_some` asked it for; called on the thread that runs this."""
        with self._lock:
            is_on_again = self._has_passed(self._running[threading.get_ident()])
        if is_on_again:
            self._on_again()

    def _has_passed(self, began_s: float) -> bool:
        """Note that the disk did an operation; return whether it was off before. Under the lock."""
        now_s = clock.now_s()
        # An answer that came late, or beside a call that hangs, shows no disk that works.
        return now_s <= began_s + self._timeout_s and not self._is_overdue(now_s) and self.breaker.passed()

    def _has_work(self) -> bool:
        if self._is_closed or self._reads:
            return True
        return self._has_writes and self._num_writing < self._most_writing and not self._is_off()

    def _watch(self) -> None:
        while True:
            with self._lock:
                if self._is_closed:
                    return
                self._is_watcher_asleep = not (self._running or self._has_writes)
                self._look.wait(None if self._is_watcher_asleep else _LOOK_S)
                now_s = clock.now_s()
                num_trips = self.breaker.num_trips
                if self._is_overdue(now_s):
                    self.breaker.trip(self._hangs, now_s)
                elif self._has_writes:
                    self._work.notify_all()  # The disk's rest may have passed.
                went_off = self.breaker.num_trips > num_trips
            if went_off:
                self._went_off()

    def _wake_watcher(self) -> None:
        if self._is_watcher_asleep:
            self._is_watcher_asleep = False
            self._look.notify()

    def _went_off(self) -> None:
        reason = self.breaker.reason
        self._fail_all(DiskUnavailable(f"the disk is off: {reason}"))
        self._on_off(reason)

    def _fail_all(self, error: DiskUnavailable) -> None:
        with self._lock:
            reads = list(self._reads)
            self._reads.clear()
        for read in reads:
            with contextlib.suppress(Exception):
                read.on_end(error)

"""Wait for work of other threads for a bounded time, so that an event loop never waits for a tokenizer or a store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from kvstore.runtime.threads.own_thread import on_thread

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Bounded:
    """Threads that do one kind of work, and how long callers wait for it. Used from event loops.

    A caller that has waited long enough goes on with None; the work goes on, and what it returns is dropped. At most
    `max_open` pieces of work are open; more are not begun.

    Args:
        name: of the work, for logs and threads.
        wait_s: how long a caller waits.
        pause_s: no work is begun for so long after a piece that failed or was late; 0: no pause.
        num_threads: that do the work.
        max_open: pieces of work that wait or are being done.
    """

    def __init__(self, name: str, wait_s: float, pause_s: float = 0.0, num_threads: int = 1, max_open: int = 4) -> None:
        self._name, self._wait_s, self._pause_s, self._max_open = name, wait_s, pause_s, max_open
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"raykv-{name}")
        self._num_open = 0
        self._again_s = float("-inf")
        #: Pieces of work that were not begun, failed, or came late.
        self.num_without = 0

    async def do(self, work: Callable[..., T], *args: Any) -> T | None:
        """Do a piece of work in a thread; None if that failed, took too long, or could not begin."""
        if self._num_open >= self._max_open or time.monotonic() < self._again_s:
            self.num_without += 1
            return None
        self._num_open += 1
        loop = asyncio.get_running_loop()
        future = self._pool.submit(work, *args)
        future.add_done_callback(lambda done: self._ended(loop, done))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._wait_s)
        except TimeoutError:
            self._pause(f"took longer than {self._wait_s:g} s")
        except Exception as error:  # noqa: BLE001 - whatever the work raises, the request is routed without it.
            self._pause(f"failed: {type(error).__name__}: {error}")
        return None

    def close(self) -> None:
        """Begin no more work; does not wait for what is being done."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ended(self, loop: asyncio.AbstractEventLoop, future: Future[Any]) -> None:
        if not future.cancelled():
            future.exception()
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._close_one)

    def _close_one(self) -> None:
        self._num_open -= 1

    def _pause(self, why: str) -> None:
        self.num_without += 1
        self._again_s = time.monotonic() + self._pause_s
        logger.info("%s %s; requests are routed without it for %g s", self._name, why, self._pause_s)


class Learned(Generic[T]):
    """Something that takes long to find out: a thread does, and callers take what is known now. Used from one thread.

    Args:
        name: of what is learned, for logs.
        find: returns it, or None if it cannot be known yet.
        pause_s: between two attempts.
    """

    def __init__(self, name: str, find: Callable[[], T | None], pause_s: float) -> None:
        self._name, self._find, self._pause_s = name, find, pause_s
        self._value: T | None = None
        self._attempt: Future[T | None] | None = None
        self._again_s = float("-inf")
        self._is_due = True

    def get(self) -> T | None:
        """Return what is known, or None; begins to find out what is not."""
        if self._attempt is not None and self._attempt.done():
            self._take(self._attempt)
            self._attempt = None
        if self._is_due and self._attempt is None and time.monotonic() >= self._again_s:
            self._is_due, self._attempt = False, on_thread(f"raykv-{self._name}", self._find)
        return self._value

    def renew(self) -> None:
        """Find it out once more; what is known stays known meanwhile."""
        self._is_due = True

    def _take(self, attempt: Future[T | None]) -> None:
        error = attempt.exception()
        if error is not None:
            logger.warning("%s: %s: %s; tried again in %g s", self._name, type(error).__name__, error, self._pause_s)
        elif (value := attempt.result()) is not None:
            self._value = value
            return
        self._is_due, self._again_s = True, time.monotonic() + self._pause_s

"""The threads of one client's jobs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvstore.results import Work

T = TypeVar("T")

_NUM_COPYING, _NUM_WAITING = 4, 16


class JobThreads:
    """Few threads for jobs that are served at once, and more for those that wait until others have done something.

    A fetch may come seconds before its blocks are published, and a publication before its blocks are computed: saves
    and loads do not stand behind them. Threads are started when they are needed.
    """

    def __init__(self) -> None:
        self._copying = ThreadPoolExecutor(_NUM_COPYING, thread_name_prefix="raykv-client")
        self._waiting = ThreadPoolExecutor(_NUM_WAITING, thread_name_prefix="raykv-waiting")

    def submit(self, run: Callable[[], T]) -> Future[T]:
        """Run a save or a load."""
        return self._copying.submit(run)

    def see_done(self, work: Work[T]) -> None:
        """Have a thread see a hand-off's work done, and do what comes after it; see `Work.see_done`."""
        self._waiting.submit(work.see_done)

    def shutdown(self) -> None:
        """Wait for all; nothing is taken any more."""
        for threads in (self._copying, self._waiting):
            threads.shutdown()

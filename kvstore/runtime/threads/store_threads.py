"""Run a node store's blocking work on few threads. One kind never waits for another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from functools import partial

from kvstore.runtime.threads.thread_pool import ThreadPool

_MAX_QUEUED = 256


class Blocking(Enum):
    """Kinds of blocking work, each with the process it waits for. A kind has as many threads as it can use."""

    LOOKUP = "lookup"  # the shards of the directory, each of which takes one question at a time
    STATS = "stats"  # the mover
    STAGE = "stage"  # the mover; and peers, to warm up
    SPILL = "spill"  # the mover
    RELEASE = "release"  # peers
    FETCH = "fetch"  # peers, to connect to them
    ATTACH = "attach"  # the disk, when it is divided


_NUM_THREADS = {
    Blocking.LOOKUP: 4, Blocking.STATS: 2, Blocking.STAGE: 2, Blocking.SPILL: 4, Blocking.RELEASE: 2,
    Blocking.FETCH: 16, Blocking.ATTACH: 2,
}  # fmt: skip


class StoreThreads:
    """Runs blocking work outside the control thread; for any threads. A thread is started when it is needed.

    Args:
        num_shards: of the directory. Each may hang, with one question, and the others are asked meanwhile.
    """

    def __init__(self, num_shards: int = 1) -> None:
        self._num_threads = {**_NUM_THREADS, Blocking.LOOKUP: _NUM_THREADS[Blocking.LOOKUP] + num_shards - 1}
        self.threads = {kind: ThreadPool(count, f"raykv-{kind.value}") for kind, count in self._num_threads.items()}
        self._lock = threading.Lock()
        self.num_pending = dict.fromkeys(Blocking, 0)

    def submit(self, kind: Blocking, run: Callable[[], object], *, is_admitted: bool = False) -> bool:
        """Run a function soon on a thread of its kind.

        Args:
            kind: what the function waits for.
            run: the function; an error of it is logged.
            is_admitted: it continues work that was counted when it began, so even a full queue takes it.

        Returns:
            False when the queue is full, the store ends, or no thread can be started; then it does not run.
        """
        with self._lock:
            if not is_admitted and self.num_pending[kind] >= self._num_threads[kind] + _MAX_QUEUED:
                return False
            self.num_pending[kind] += 1
        if self.threads[kind].run(partial(self._run, kind, run)):
            return True
        with self._lock:
            self.num_pending[kind] -= 1
        return False

    def _run(self, kind: Blocking, run: Callable[[], object]) -> None:
        try:
            run()  # The pool logs an error.
        finally:
            with self._lock:
                self.num_pending[kind] -= 1

    def stop(self) -> None:
        """Accept nothing more and drop the queue; do not wait for running work."""
        for threads in self.threads.values():
            threads.close(drop=True)

"""The threads of a node store for what blocks: few, with a bounded queue, and no kind of work waits behind another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import Enum
from functools import partial

from kvstore.runtime.thread_pool import ThreadPool

logger = logging.getLogger(__name__)

_MAX_QUEUED = 256


class Blocking(Enum):
    """What blocks, and on whom. A kind has as many threads as are of use to it at once."""

    LOOKUP = "lookup"  # on the directory, which is asked one thing at a time
    STATS = "stats"  # on the mover
    STAGE = "stage"  # on the mover, and for warming up on peers
    SPILL = "spill"  # on the mover
    RELEASE = "release"  # on peers
    FETCH = "fetch"  # on peers, to connect to them


_NUM_THREADS = {
    Blocking.LOOKUP: 4, Blocking.STATS: 2, Blocking.STAGE: 2, Blocking.SPILL: 4, Blocking.RELEASE: 2,
    Blocking.FETCH: 16,
}  # fmt: skip


class StoreThreads:
    """Runs what blocks, off the control thread; for any threads. A thread is started when it is needed."""

    def __init__(self) -> None:
        self._threads = {kind: ThreadPool(count, f"raykv-{kind.value}") for kind, count in _NUM_THREADS.items()}
        self._lock = threading.Lock()
        self._num_pending = dict.fromkeys(Blocking, 0)

    def submit(self, kind: Blocking, run: Callable[[], object], *, is_admitted: bool = False) -> bool:
        """Have something run soon.

        Args:
            kind: of what it waits for.
            run: what; an error of it is logged.
            is_admitted: it goes on with what was bounded when it began, so the queue takes it in any case.

        Returns:
            False when so much waits that it is not taken, the store ends, or no thread can be started.
        """
        with self._lock:
            if not is_admitted and self._num_pending[kind] >= _NUM_THREADS[kind] + _MAX_QUEUED:
                return False
            self._num_pending[kind] += 1
        if self._threads[kind].run(partial(self._run, kind, run)):
            return True
        with self._lock:
            self._num_pending[kind] -= 1
        return False

    def _run(self, kind: Blocking, run: Callable[[], object]) -> None:
        try:
            run()
        except Exception:
            logger.exception("a thread of kind %s met an unexpected error", kind.value)
        finally:
            with self._lock:
                self._num_pending[kind] -= 1

    def stop(self) -> None:
        """Take nothing more; what runs is not waited for."""
        for threads in self._threads.values():
            threads.close(drop=True)

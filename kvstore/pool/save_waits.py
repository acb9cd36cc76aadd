"""Wait for blocks that are being written, for a bounded time. One thread watches the time; no caller's thread waits."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
from collections.abc import Callable

from kvstore.blocks.chain import BlockHashes
from kvstore.pool.pool import Pool
from kvstore.runtime import clock

logger = logging.getLogger(__name__)

#: More ends than this, of which most may have ended, are gone through.
_FEW = 1024
_End = tuple[float, int, Pool, int]


class SaveWaits:
    """The waits of one node store, each until its blocks are there, or its time is over. Any thread may call.

    The thread starts with the first wait that has to wait.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        #: (until, number, pool, watch). Waits that have ended stay until their time, or until there are too many.
        self.ends: list[_End] = []
        self._most = _FEW
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def wait(self, pool: Pool, chain: BlockHashes, until_s: float, then: Callable[[int], None]) -> None:
        """Call `then` with the number of leading blocks that are here, once no writer decides that, or at `until_s`.

        Args:
            pool: of the blocks.
            chain: the first of which is being written; if it is not, `then` is called at once.
            until_s: time of kvstore.runtime.clock.
            then: called once, on the thread that ends the wait, which may be this one; must not block.
        """
        watch_id = pool.watch(chain, then)
        if not pool.is_watching(watch_id):
            return
        with self._condition:
            if self._has_thread():
                if len(self.ends) >= self._most:
                    self.ends = [end for end in self.ends if end[2].is_watching(end[3])]
                    heapq.heapify(self.ends)
                    self._most = max(_FEW, 2 * len(self.ends))
                heapq.heappush(self.ends, (until_s, next(self._numbers), pool, watch_id))
                self._condition.notify()
                return
        pool.end_watch(watch_id)

    def close(self) -> None:
        """End all waits now, and the thread; may be called again."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
            thread = self._thread
        if thread is not None:
            thread.join(1.0)

    def _has_thread(self) -> bool:
        if self._thread is None and not self._is_closed:
            thread = threading.Thread(target=self._run, name="raykv-save-waits", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # There are too many threads: then nobody waits.
                return False
            self._thread = thread
        return not self._is_closed

    def _run(self) -> None:
        while True:
            with self._condition:
                next_s = self.ends[0][0] if self.ends else math.inf
                left_s = next_s - clock.now_s()
                if left_s > 0 and not self._is_closed:
                    self._condition.wait(None if left_s == math.inf else left_s)
                now_s, due = clock.now_s(), list[_End]()
                while self.ends and (self._is_closed or self.ends[0][0] <= now_s):
                    due.append(heapq.heappop(self.ends))
                is_closed = self._is_closed
            for _, _, pool, watch_id in due:
                try:
                    pool.end_watch(watch_id)
                except Exception:
                    logger.exception("a wait for a save could not be ended")
            if is_closed:
                return

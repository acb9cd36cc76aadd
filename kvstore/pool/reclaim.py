"""Keep some slots of a pool free, on a thread of its own, so that claims rarely have to evict.

When a claim leaves fewer free slots than the low watermark, the loop evicts until as many as the high watermark are
free: in the order of the pool's own policy, and in short steps, between which others have the pool's lock. With a
disk tier that is written back, that tier writes the blocks first, as long as it works.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import asdict, dataclass
from typing import Protocol

from kvstore.pool.pool import Pool
from kvstore.runtime.guard import Guard

logger = logging.getLogger(__name__)

#: Blocks that one step evicts: about a millisecond under the pool's lock.
_AT_ONCE = 128
#: Pause between two steps, so that waiting threads get the lock.
_PAUSE_S = 1e-4
#: Pause after a wait in which the disk brought nothing.
_REST_S = 0.02
#: How long one wait takes at most; then the loop looks whether the disk still works, or something can be evicted.
_LOOK_S = 0.1


class WritesBack(Protocol):
    """A tier below the memory, which takes blocks before they are evicted."""

    @property
    def can_write_back(self) -> bool:
        """Whether it takes blocks now."""

    def write_back(self, num_blocks: int, timeout_s: float) -> int | None:
        """Have the next victims written and evicted; return how many went since the last call.

        Waits for some of them, not longer than `timeout_s`. None if there is nothing that can be evicted.
        """

    def evicted(self, hashes: list[bytes], num_low: int) -> None:
        """Count blocks that were evicted by others; see `Pool.keep_free`. Under the memory pool's lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimStats:
    """Counts of one loop.

    Args:
        is_alive: whether its thread runs.
        num_evicted: blocks that it evicted.
        num_failures: steps that failed; after each it rested, and went on.
    """

    is_alive: bool
    num_evicted: int
    num_failures: int


class Reclaimer:
    """The eviction loop of one pool; it runs until `stop`. Any thread may call.

    Args:
        pool: its slots.
        low: the loop begins when fewer slots are free, as a share of all slots.
        high: it ends when so many are free.
        disk: takes blocks before they are evicted; None if they are just evicted.
    """

    def __init__(self, pool: Pool, low: float, high: float, disk: WritesBack | None = None) -> None:
        self._pool, self._disk = pool, disk
        self._low_slots = low_slots = math.ceil(low * pool.num_slots)
        self._high_slots = max(low_slots, math.ceil(high * pool.num_slots))
        self._is_short, self._closed = threading.Event(), threading.Event()
        self._num_evicted, self._guard = 0, Guard(logger, "the eviction loop")
        self.thread = threading.Thread(target=self._run, name="raykv-reclaim", daemon=True)
        pool.keep_free(low_slots, self._is_short.set, None if disk is None else disk.evicted)
        self.thread.start()

    def stop(self, timeout_s: float = 2.0) -> bool:
        """End the loop and wait for it; may be called again. Return whether it has ended."""
        self._closed.set()
        self._is_short.set()
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def stats(self) -> dict[str, object]:
        """Return the counts; see `ReclaimStats`."""
        return asdict(
            ReclaimStats(
                is_alive=self.thread.is_alive(), num_evicted=self._num_evicted, num_failures=self._guard.num_failures
            )
        )

    def _run(self) -> None:
        while True:
            # Below the low watermark nothing could be evicted: it may be possible soon, without another claim.
            self._is_short.wait(_LOOK_S if self._pool.num_free < self._low_slots else None)
            self._is_short.clear()
            if self._closed.is_set():
                return
            try:
                self._reclaim()
                self._guard.passed()
            except Exception as error:  # noqa: BLE001 - logged by the guard.
                self._is_short.set()
                self._closed.wait(self._guard.failed(error))

    def _reclaim(self) -> None:
        """Evict until enough slots are free, or nothing more can be evicted now."""
        while not self._closed.is_set() and (num_short := self._high_slots - self._pool.num_free) > 0:
            if self._disk is not None and self._disk.can_write_back:
                num_gone = self._disk.write_back(num_short, _LOOK_S)
                if num_gone is None:
                    return
                self._num_evicted += num_gone
                if not num_gone:  # The writes take long, or fail.
                    self._closed.wait(_REST_S)
            elif num_evicted := self._pool.evict(min(num_short, _AT_ONCE)):
                self._num_evicted += num_evicted
                time.sleep(_PAUSE_S)
            else:
                return

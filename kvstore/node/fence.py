"""The fence kills a mover whose abandoned READs hold too many slots, or too long.

Dropping a READ does not stop it while the agent that posted it makes progress. Only the end of the mover's
process stops it surely (docs/adr/0004). So the fence kills the mover; the kernel reports when the process is
gone; then the slots are free, and the node store starts another mover.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore.config import StoreConfig
from kvstore.mover.link import MoverLink
from kvstore.pool.pool import Pool
from kvstore.remote.covered_read import is_quarantine_full
from kvstore.runtime import clock
from kvstore.runtime.life import log_life

logger = logging.getLogger(__name__)

#: A killed process is gone in milliseconds, unless it hangs in the kernel: then it is killed, and logged, again.
_GONE_WITHIN_S = 5.0


class MoverFence:
    """Watches the READs that one node's mover left behind; runs on the control thread.

    Args:
        config: has the two bounds, `max_quarantined_fraction` and `max_quarantine_s`.
        mover: the link to the mover; only the process behind it is ever killed.
        pools: returns the pools whose slots may wait for READs: the arena's and the stages'.
    """

    def __init__(self, config: StoreConfig, mover: MoverLink, pools: Callable[[], list[Pool]]) -> None:
        self._config, self._mover, self._pools = config, mover, pools
        self.killed_pid, self._again_s = 0, 0.0
        self.num_fenced = 0
        #: Whether the store ends in order, and its mover with it: no loss, so no warning tells of that.
        self.expects_end = False

    def wants_ticks(self) -> bool:
        """Return whether there is anything to watch."""
        return self._mover.num_abandoned > 0 or self._mover.lost_touch()

    def check(self) -> None:
        """Kill the mover if a bound is exceeded."""
        if reason := self._reason(clock.now_s()):
            self.kill(reason)

    def kill(self, reason: str) -> None:
        """Kill the mover, unless it was killed less than `_GONE_WITHIN_S` ago."""
        now_s, pid = clock.now_s(), self._mover.pid
        if pid == self.killed_pid and now_s < self._again_s:
            return
        self.killed_pid, self._again_s = pid, now_s + _GONE_WITHIN_S
        if self._mover.fence():
            self.num_fenced += 1
            if not self.expects_end:
                log_life("mover_killed", level=logging.WARNING, mover_pid=pid, reason=reason)
        else:
            logger.error("mover %d cannot be killed from here, its slots stay out of use: %s", pid, reason)

    def _reason(self, now_s: float) -> str:
        if self._mover.lost_touch():
            return "it closed its connection, so it can report nothing any more"
        since_s = self._mover.abandoned_since_s()
        if since_s is None:
            return ""
        if now_s - since_s > self._config.max_quarantine_s:
            return f"a READ that was given up is not over after {now_s - since_s:.1f} s"
        for pool in self._pools():
            if is_quarantine_full(pool, self._config.max_quarantined_fraction):
                return f"{pool.num_quarantined} of {pool.num_slots} slots wait for READs that were given up"
        return ""

"""Keep a thread alive that must not end. Count its failures, log a few, and rest after each."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

_PAUSES_S = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
#: At most one log entry per this time; the next entry counts the ones held back.
_LOG_EVERY_S = 10.0


@dataclass(slots=True)
class LogLimit:
    """Lets `at_once` entries in `every_s` seconds through, and counts the others."""

    every_s: float = _LOG_EVERY_S
    num_held_back: int = 0
    at_once: int = 1
    _next_s: float = 0.0
    _num_passed: int = 0

    def passes(self) -> bool:
        """Return whether an entry may be written now."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s, self._num_passed = now_s + self.every_s, 0
        if self._num_passed >= self.at_once:
            self.num_held_back += 1
            return False
        self._num_passed += 1
        return True

    def take_held_back(self) -> int:
        """Return how many entries were held back since the last call."""
        count, self.num_held_back = self.num_held_back, 0
        return count


@dataclass(slots=True)
class Guard:
    """Counts the failures of one step of a thread.

    Args:
        logger: gets the traceback of some of them.
        what: the step, for the log.
    """

    logger: logging.Logger
    what: str
    num_failures: int = 0
    num_in_row: int = 0
    _limit: LogLimit = field(default_factory=LogLimit)

    def failed(self, error: Exception) -> float:
        """Count a failure; return how many seconds to rest before the next try."""
        pause_s = _PAUSES_S[min(self.num_in_row, len(_PAUSES_S) - 1)]
        self.num_failures += 1
        self.num_in_row += 1
        if self._limit.passes():
            more = self._limit.take_held_back()
            text = "%s failed, and is tried again (%d more failures were not logged)"
            self.logger.error(text, self.what, more, exc_info=error)
        return pause_s

    def passed(self) -> None:
        """Note that the step succeeded."""
        self.num_in_row = 0

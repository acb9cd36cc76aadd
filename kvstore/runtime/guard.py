"""What keeps a thread alive that must not end: failures are counted, few are logged, and each is followed by a rest."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

_PAUSES_S = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
#: One entry in the log for each that often; what is not logged is counted in the next one.
_LOG_EVERY_S = 10.0


@dataclass(slots=True)
class LogLimit:
    """Lets one entry in `every_s` seconds through, and counts the others."""

    every_s: float = _LOG_EVERY_S
    num_held_back: int = 0
    _next_s: float = 0.0

    def passes(self) -> bool:
        """Whether an entry may be written now."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            self.num_held_back += 1
            return False
        self._next_s = now_s + self.every_s
        return True

    def take_held_back(self) -> int:
        """Return how many entries were held back since this was asked last."""
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
    _limit: LogLimit | None = None

    def failed(self, error: Exception) -> float:
        """Note a failure; returns how long to rest before the step is tried again, seconds."""
        if self._limit is None:
            self._limit = LogLimit()
        pause_s = _PAUSES_S[min(self.num_in_row, len(_PAUSES_S) - 1)]
        self.num_failures += 1
        self.num_in_row += 1
        if self._limit.passes():
            more = self._limit.take_held_back()
            text = "%s failed, and is tried again (%d more failures were not logged)"
            self.logger.error(text, self.what, more, exc_info=error)
        return pause_s

    def passed(self) -> None:
        """Note that the step went well."""
        self.num_in_row = 0

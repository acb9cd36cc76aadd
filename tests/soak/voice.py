"""What a client of the soak tells its driver: counts, findings, and in its log what it was about to do."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from multiprocessing.connection import Connection
from pathlib import Path

_REPORT_S = 0.5
_TAIL = 12


class Voice:
    """One for each life of a client.

    Args:
        name: of the client and its life, which comes before each finding.
        log_file: takes a line for each operation before it begins.
        driver: is told.
    """

    def __init__(self, name: str, log_file: Path, driver: Connection) -> None:
        self._name, self._driver = name, driver
        self._log = os.open(log_file, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._slowest_s: dict[str, float] = {}
        self._reported_s = 0.0
        self._num_done = 0
        #: Counts since the last report, by words.
        self.counts: Counter[tuple[str, ...]] = Counter()

    def note(self, what: object) -> None:
        """Write a line into the log; the last ones go with each finding."""
        line = f"{time.monotonic():.3f} {what}"
        self._tail.append(line)
        os.write(self._log, f"{line}\n".encode())

    def timed(self, verb: str, seconds: float) -> None:
        """Count an operation that has ended."""
        self._num_done += 1
        self._slowest_s[verb] = max(seconds, self._slowest_s.get(verb, 0.0))

    def finding(self, text: str) -> None:
        """Say at once that something is wrong."""
        self._driver.send(("finding", f"{self._name}: {text}\n  " + "\n  ".join(self._tail)))

    def report(self, *, now: bool = False) -> None:
        """Tell the counts now and then."""
        if not now and time.monotonic() < self._reported_s + _REPORT_S:
            return
        self._reported_s = time.monotonic()
        self._driver.send(("report", (dict(self.counts), self._slowest_s, self._num_done)))
        self.counts.clear()

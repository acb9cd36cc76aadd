"""An event that happens once, for objects that are made while somebody waits."""

from __future__ import annotations

import threading


class Latch:
    """What `threading.Event` is to who never clears it, made in a fraction of the time; for any threads."""

    __slots__ = ("_first", "_is_set", "_lock")

    def __init__(self) -> None:
        self._is_set = False
        self._first = iter((True,))
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let go whoever waits, now and later; may be called again."""
        if next(self._first, False):  # True for one caller alone, even if two call in the same moment.
            self._is_set = True
            self._lock.release()

    def is_set(self) -> bool:
        """Whether it happened."""
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        """Wait until it happens; False when it did not in time."""
        if not self._is_set and self._lock.acquire(timeout=max(0.0, timeout_s)):
            self._lock.release()  # To the next one that waits.
        return self._is_set

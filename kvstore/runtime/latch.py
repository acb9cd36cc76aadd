"""Define an event that happens once and is cheap to make."""

from __future__ import annotations

import threading


class Latch:
    """A `threading.Event` without `clear`, made in a fraction of the time; for any threads."""

    __slots__ = ("_first", "_is_set", "_lock")

    def __init__(self) -> None:
        self._is_set = False
        self._first = iter((True,))
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Release all present and later waiters; may be called again."""
        if next(self._first, False):  # True for exactly one caller, even if two call at the same moment.
            self._is_set = True
            self._lock.release()

    def is_set(self) -> bool:
        """Return whether the event happened."""
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        """Wait until the event happens; False when it does not in time."""
        if not self._is_set and self._lock.acquire(timeout=max(0.0, timeout_s)):
            self._lock.release()  # For the next waiter.
        return self._is_set

"""Turn a failing disk off, with a reason, and try it again later. No locking here: the threads hold their lock."""

from __future__ import annotations

import errno

#: Errors in a row after which the disk is not asked for a while.
_MOST_ERRORS = 3
#: With these nothing can be stored, whatever is tried.
_AT_ONCE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENODEV, errno.ENXIO}
#: How long the disk is not asked; doubled each time that it fails again, up to the most.
_FIRST_REST_S, _MOST_REST_S = 5.0, 300.0


class Breaker:
    """Whether a disk may be asked.

    It is off from a failure until its rest has passed. Then one more failure turns it off again, for twice as long.
    """

    def __init__(self) -> None:
        #: Why the disk is off, or was off last.
        self.reason = ""
        self.num_trips = 0
        self._until_s, self._rest_s, self._num_errors, self._is_off = 0.0, _FIRST_REST_S, 0, False

    def is_off(self, now_s: float) -> bool:
        """Return whether the disk must not be asked now."""
        return self._is_off and now_s < self._until_s

    def failed(self, error: OSError, now_s: float) -> None:
        """Note that the disk refused an operation."""
        self._num_errors += 1
        if self._is_off or self._num_errors >= _MOST_ERRORS or error.errno in _AT_ONCE:
            self.trip(f"the disk refused: {error}", now_s)

    def trip(self, reason: str, now_s: float) -> None:
        """Turn the disk off."""
        if self.is_off(now_s):
            return
        self._rest_s = min(2 * self._rest_s, _MOST_REST_S) if self._is_off else _FIRST_REST_S
        self.reason, self._is_off, self._until_s = reason, True, now_s + self._rest_s
        self._num_errors = 0
        self.num_trips += 1

    def passed(self) -> bool:
        """Note that the disk did an operation: it is on. Return whether it was off before."""
        was_off, self._is_off, self._num_errors = self._is_off, False, 0
        return was_off

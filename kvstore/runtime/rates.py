"""Measure how fast bytes come from somewhere, to choose between places that have the same bytes."""

from __future__ import annotations

_SHARE = 0.2


class MeasuredRate:
    """Bytes per second lately: each new measurement counts a fifth. Any thread may call.

    Two threads that note at once may lose one of their measurements; the others make up for it.
    """

    def __init__(self) -> None:
        #: 0 before the first measurement.
        self.bytes_per_s = 0.0

    def note(self, num_bytes: int, seconds: float) -> None:
        """Note that so many bytes came in so many seconds."""
        if num_bytes > 0 and seconds > 0:
            measured, known = num_bytes / seconds, self.bytes_per_s
            self.bytes_per_s = measured if not known else known + _SHARE * (measured - known)

"""Read the clock of leases, which continues while the machine is suspended.

While this machine is suspended, peers continue, and the leases that they granted expire. Every time that is compared
with the end of a lease, a claim or a grant must be of this clock. Other durations may use another clock.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from kvstore.bounds import MAX_TTL_S, check_ttl

#: Seconds since the machine was started, suspended time included where the system counts it (Linux).
#: Bound once, because every call of a client reads it.
now_s: Callable[[], float] = (
    functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)


def deadline_after(ttl_s: float, most_s: float = MAX_TTL_S) -> float:
    """Return the time of this clock that is `ttl_s` seconds ahead.

    Raises:
        InvalidRequest: `ttl_s` is not a time, or too long.
    """
    return now_s() + check_ttl("ttl_s", ttl_s, most_s)

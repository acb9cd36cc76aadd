"""The clock by which leases are granted and end: it goes on while the machine is suspended.

A peer goes on while this machine sleeps, and the leases that it granted end. Every time that is compared with the end
of a lease, a claim or a grant is of this clock. How long something waits, or took, may be of another.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

#: The seconds since the machine was started, with those in which it was suspended where the system counts them (Linux).
#: Bound once, because it is asked in every call of a client.
now_s: Callable[[], float] = (
    functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)

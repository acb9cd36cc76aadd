"""Provide the pause of a polling thread."""

from __future__ import annotations

import select


def give_way() -> None:
    """Let other threads of this process run, for less than a microsecond.

    A sleep, even of 0 s, takes 50 us, the slack of a Linux timer (python/cpython#125997). That issue ended with
    yielding the core instead. This may take the full turn of another process, milliseconds, even one of the lowest
    priority: sched_yield(2) promises nothing to threads that are not real-time.
    """
    select.select((), (), (), 0)

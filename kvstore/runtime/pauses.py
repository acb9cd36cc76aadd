"""Pauses of a thread that looks again and again whether something has happened."""

from __future__ import annotations

import select


def give_way() -> None:
    """Let other threads of this process have the interpreter, for less than a microsecond.

    A sleep, even of no time, takes the 50 us by which Linux lets a timer be late (python/cpython#125997). To yield the
    core instead, which that issue ends with, may take as long as a turn of whatever else is to run there, milliseconds,
    even if that has the lowest priority: sched_yield(2) promises nothing to threads that are not real-time.
    """
    select.select((), (), (), 0)

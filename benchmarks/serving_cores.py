"""Which core of a shared machine is as fast as cores are there.

On a virtual machine some cores are at little more than half their speed for seconds, while the host has others work
beside them; the launches of an engine's step then take as much longer. A loop in Python tells.
"""

from __future__ import annotations

import os
import time

#: How much longer than at its best the loop takes on a core that is not free.
SLOW = 1.4
_NUM_TURNS, _NUM_TRIES = 4_000, 3


def loop_s() -> float:
    """Return how long a short loop takes on this core, the shortest of some tries."""
    return min(_one_loop_s() for _ in range(_NUM_TRIES))


def to_fastest_core() -> float:
    """Move this thread to the core that is fastest now, where it stays until the system moves it; returns `loop_s`."""
    cores, times_s = os.sched_getaffinity(0), {}
    try:
        for core in cores:
            os.sched_setaffinity(0, {core})
            times_s[core] = loop_s()
        fastest = min(times_s, key=lambda core: times_s[core])
        os.sched_setaffinity(0, {fastest})
    finally:
        os.sched_setaffinity(0, cores)
    return times_s[fastest]


def _one_loop_s() -> float:
    begin_s, total = time.perf_counter(), 0
    for turn in range(_NUM_TURNS):
        total += turn * turn
    return time.perf_counter() - begin_s

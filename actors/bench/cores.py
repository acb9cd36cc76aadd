"""Cores for the processes of a benchmark: some sleep, and on a shared machine some are slow for seconds."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

_NUM_TURNS, _NUM_TRIES = 2_000, 3
_END_S = 10.0
#: This program ends with the process that started it.
_SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == int(sys.argv[2]):
    for _ in range(100_000):
        pass
"""


def faster_half(least: int = 8) -> set[int]:
    """Return the faster half of the cores that this thread may use, measured with a Python loop.

    Args:
        least: with fewer than twice this many cores, all are returned.
    """
    cores, times_s = os.sched_getaffinity(0), dict[int, float]()
    if len(cores) < 2 * least:
        return cores
    try:
        for core in cores:
            os.sched_setaffinity(0, {core})
            times_s[core] = min(_loop_s() for _ in range(_NUM_TRIES))
    finally:
        os.sched_setaffinity(0, cores)
    return set(sorted(times_s, key=times_s.__getitem__)[: len(cores) // 2])


def keep_on(cores: set[int], pids: Iterable[int]) -> None:
    """Restrict processes, with all their threads, to these cores; skip processes that have ended."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread), cores)


@contextlib.contextmanager
def kept_awake() -> Iterator[None]:
    """Keep this thread's cores awake: each runs a loop that yields at once to everything else.

    A waiting thread is woken faster on a core that does not sleep, as on a host with `idle=poll`.
    """
    with contextlib.ExitStack() as ending:
        for core in sorted(os.sched_getaffinity(0)):
            spinner = subprocess.Popen([sys.executable, "-I", "-c", _SPIN, str(core), str(os.getpid())])
            ending.callback(spinner.wait, _END_S)
            ending.callback(spinner.kill)
        yield


def _loop_s() -> float:
    begin_s, total = time.perf_counter(), 0
    for turn in range(_NUM_TURNS):
        total += turn * turn
    return time.perf_counter() - begin_s

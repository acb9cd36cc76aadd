"""Choose how many threads of a process may copy at once."""

from __future__ import annotations

import os

_MAX_COPY_THREADS = 4


def num_copy_threads() -> int:
    """Return how many threads may share one large copy: a quarter of the cores, one to four.

    One core is slower than the memory of a large machine. On a small machine the engine needs the other cores.
    """
    return min(max(len(os.sched_getaffinity(0)) // 4, 1), _MAX_COPY_THREADS)


def num_idle_copy_threads() -> int:
    """Return how many threads may share a copy on idle cores: one per core, up to four."""
    return min(len(os.sched_getaffinity(0)), _MAX_COPY_THREADS)

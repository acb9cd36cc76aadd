"""Go through a pool in slices: each holds its lock for a moment, and what waits for the lock gets it in between."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvstore.pool.pool import Pool

T = TypeVar("T")
#: Items of a slice, each of which costs a microsecond or two.
AT_ONCE = 512
#: Slots of a slice that is read with NumPy, and of which few cost more.
SLOTS_AT_ONCE = 4096
#: Pause between two slices, so that waiting threads get the lock.
_PAUSE_S = 1e-4


def slices(items: Sequence[T], at_once: int = AT_ONCE) -> Iterator[Sequence[T]]:
    """Yield the items in slices, with a pause after each but the last."""
    for first in range(0, len(items), at_once):
        yield items[first : first + at_once]
        if first + at_once < len(items):
            time.sleep(_PAUSE_S)


def names_of(pool: Pool) -> list[bytes]:
    """Return the namespaces that have blocks in a pool, or had some a moment ago."""
    return pool.look(lambda table, leases: list(table.index.spaces))

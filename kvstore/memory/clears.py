"""Count the clearings of namespaces, in memory that this node's workers may read.

A worker reads the counter when a save is requested, and the store compares it when the save claims slots. So bytes
computed before a clearing are never stored after it, however late the claim is. All namespaces share a few counters: if
two groups share one, clearing the first also drops saves of the second that have not claimed slots yet.

A store's counters begin at random, unless it goes on from those of its last life. One that is told of clearings by
others counts one for several of them, so from 0 it could come to a number that a worker read before.
"""

from __future__ import annotations

import secrets

_GROUP_BYTES = 2
#: A power of two, at most 256 ** _GROUP_BYTES: so all namespaces of one group share a counter.
_NUM_COUNTERS = 256
CLEARS_BYTES = 8 * _NUM_COUNTERS


def group_of(namespace: bytes) -> bytes:
    """Return the group of a namespace: the first bytes of its digest. A group is cleared together.

    So the record of clearings has a fixed size, and no clearing is ever forgotten. There are 65,536 groups, so two
    namespaces in use at once are hardly ever in the same one.
    """
    return namespace[:_GROUP_BYTES]


class ClearCounts:
    """The counters, 64 bits each. No locking here: writers run under the pool's lock, readers need none.

    Args:
        memory: `CLEARS_BYTES`, used in place, not copied; when None, private memory, all 0.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        self._counters = (memoryview(bytearray(CLEARS_BYTES)) if memory is None else memory).cast("Q")

    def begin_at_random(self) -> None:
        """Let no number be one of another life, before anyone reads these; leaves room for 2 ** 63 clearings."""
        first = secrets.randbits(63)
        for at in range(_NUM_COUNTERS):
            self._counters[at] = first

    def get(self, namespace: bytes) -> int:
        """Return a number that was another one before a namespace, or one that shares it, was cleared. Never waits."""
        return int(self._counters[_place_of(namespace)])

    def add(self, namespace: bytes) -> None:
        """Count a clearing; call this before new blocks of the namespace can be stored."""
        self._counters[_place_of(namespace)] += 1

    def continue_from(self, counters: bytes) -> None:
        """Go on from the counters of the store's last life, before anyone reads these; skips what is no such row."""
        if len(counters) == CLEARS_BYTES:
            self._counters[:] = memoryview(counters).cast("Q")

    def copy(self) -> bytes:
        """Return all counters, for `continue_from`."""
        return self._counters.tobytes()

    def leave(self) -> None:
        """Copy the counters to private memory, because the given memory is about to be freed."""
        self._counters = memoryview(bytearray(self._counters)).cast("Q")


def _place_of(namespace: bytes) -> int:
    return int.from_bytes(namespace[:8], "little") % _NUM_COUNTERS

"""How often namespaces were cleared here, in memory that this node's workers may read: a few counters for all.

A worker reads the counter when a save is asked for, and the store compares it when the save claims slots: bytes that
were computed before a clearing are not stored after it, however long they waited between. Two groups of namespaces may
share a counter; clearing one then costs the other the saves that are under way.
"""

from __future__ import annotations

_GROUP_BYTES = 2
#: A power of two, and at most 256 ** _GROUP_BYTES, so that namespaces of one group share a counter.
_NUM_COUNTERS = 256
CLEARS_BYTES = 8 * _NUM_COUNTERS


def group_of(namespace: bytes) -> bytes:
    """Return the group of a namespace: those of one group, whose digests begin alike, are cleared together.

    So what is kept of clearings is bounded for good, and nothing of it is ever forgotten. There are 65,536 groups: of
    so many namespaces as engines serve at once, hardly two are in one.
    """
    return namespace[:_GROUP_BYTES]


class ClearCounts:
    """The counters, 64 bits each. No locking here: of the writers the pool holds its lock, a reader needs none.

    Args:
        memory: `CLEARS_BYTES`, kept, not copied; of its own, and all 0, when None.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        self._counters = (memoryview(bytearray(CLEARS_BYTES)) if memory is None else memory).cast("Q")

    def get(self, namespace: bytes) -> int:
        """Return how often a namespace was cleared, or another that shares its counter. Waits for nobody."""
        return int(self._counters[_place_of(namespace)])

    def add(self, namespace: bytes) -> None:
        """Count a clearing, before anything new of the namespace can be stored."""
        self._counters[_place_of(namespace)] += 1

    def leave(self) -> None:
        """Go on in memory of its own: that which was given is about to go."""
        self._counters = memoryview(bytearray(self._counters)).cast("Q")


def _place_of(namespace: bytes) -> int:
    return int.from_bytes(namespace[:8], "little") % _NUM_COUNTERS

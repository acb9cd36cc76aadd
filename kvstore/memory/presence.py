"""Count the first blocks of chains on this node, in memory that its workers may read.

Many first blocks share one small counter. At 0, no chain whose first block maps to it is here: a worker need not ask
the store for it. Any other value proves nothing. A chain without its first block is unusable, so only first blocks are
counted, and saving or evicting a long chain changes one counter.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections import Counter
from collections.abc import Iterable

import numpy as np

from kvstore.errors import ConfigError
from kvstore.memory.clears import CLEARS_BYTES, ClearCounts
from kvstore.runtime.forks import withhold

EPOCH_BYTES = 8
#: Whether this node is the only one that has blocks.
ALONE_AT = EPOCH_BYTES
#: How often namespaces were cleared, see kvstore.memory.clears; before the end of the page.
CLEARS_AT = 2048
#: The counters begin here, on a new page.
HEAD_BYTES = 4096
#: A counter that reached this value keeps it, because the real count is not known any more.
FULL = 255
#: One counter per this much of the arena: a few blocks, while a chain has many.
_BYTES_PER_COUNTER = 16 << 10
_FEWEST, _MOST = 1 << 12, 1 << 24
_SEAL_FUTURE_WRITE = 0x10


class PresenceCounts:
    """The number of first blocks that map to each counter. Any thread may call.

    Args:
        counters: one byte each, all 0; their number is a power of two. Used in place, not copied.
    """

    def __init__(self, counters: memoryview | bytearray) -> None:
        self._shared, self._mask = _Counters(counters), len(counters) - 1
        #: What this object counted, if others count into the same counters.
        self._own: bytearray | None = None
        if not len(counters) or len(counters) & self._mask:
            raise ConfigError(f"counters: wanted a power of two of them, got {len(counters)}")

    def beside(self) -> PresenceCounts:
        """Return an object that counts the first blocks of another tier into the same counters."""
        other = PresenceCounts(bytearray(self._mask + 1))
        with self._shared.lock:
            if self._own is None:
                self._own = bytearray(self._shared.memory)
            other._shared, other._own = self._shared, bytearray(self._mask + 1)
        return other

    def add(self, block_hash: bytes) -> None:
        """Count a first block that is about to become findable."""
        self._change(place_of(block_hash, self._mask), 1)

    def drop(self, block_hash: bytes) -> None:
        """Count one less: the first block cannot be found any more."""
        self._change(place_of(block_hash, self._mask), -1)

    def _change(self, at: int, number: int) -> None:
        with self._shared.lock:
            for counters in (self._shared.memory, self._own):
                if counters is not None and counters[at] < FULL:
                    counters[at] += number

    def leave(self) -> None:
        """Copy the counters to private memory, because the given memory is about to be freed."""
        with self._shared.lock:
            self._shared.memory = bytearray(self._shared.memory)

    def check(self, first_blocks: Iterable[bytes]) -> None:
        """Assert that exactly these first blocks are counted here."""
        counted = Counter(place_of(block_hash, self._mask) for block_hash in first_blocks)
        for at, number in enumerate(self._shared.memory if self._own is None else self._own):
            assert number in (counted[at], FULL), f"presence: counter {at} is {number}, wanted {counted[at]}"


class _Counters:
    """Counters that several tiers of a node count into."""

    def __init__(self, memory: memoryview | bytearray) -> None:
        self.memory, self.lock = memory, threading.Lock()


class PresenceTable:
    """Shared memory of one epoch of a node store. It has the epoch, the alone flag, and both kinds of counters.

    Args:
        epoch: of the store.
        capacity_bytes: size of its arena; decides the number of counters.

    Raises:
        ConfigError: there is no memory for it; nothing stays allocated.
    """

    def __init__(self, epoch: bytes, capacity_bytes: int) -> None:
        wanted = min(max(capacity_bytes // _BYTES_PER_COUNTER, _FEWEST), _MOST)
        num_bytes = HEAD_BYTES + (1 << (wanted - 1).bit_length())
        #: Sealed: receivers of it can only read.
        self.fd = os.memfd_create("raykv-presence", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, num_bytes)
            memory = mmap.mmap(self.fd, num_bytes)
            withhold(memory, int(np.frombuffer(memory, np.uint8).ctypes.data), num_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals | _SEAL_FUTURE_WRITE)
        except OSError as error:
            os.close(self.fd)
            raise ConfigError(f"could not allocate {num_bytes} bytes of shared memory: {error}") from error
        memory[:EPOCH_BYTES] = epoch
        self._head: memoryview | bytearray = memoryview(memory)[:HEAD_BYTES]
        self.clears = ClearCounts(memoryview(memory)[CLEARS_AT : CLEARS_AT + CLEARS_BYTES])
        self.clears.begin_at_random()
        self.counts = PresenceCounts(memoryview(memory)[HEAD_BYTES:])

    def set_alone(self, alone: bool) -> None:
        """Record whether no other node has any blocks, from now on."""
        self._head[ALONE_AT] = int(alone)

    def close(self) -> None:
        """Release the memory; call this once. The memory exists as long as another process maps it."""
        self.set_alone(False)
        # The pool, or a thread with news of the directory, may still write for a moment.
        self.counts.leave()
        self.clears.leave()
        self._head = bytearray(HEAD_BYTES)
        os.close(self.fd)


def place_of(block_hash: bytes, mask: int) -> int:
    """Return the counter of a block; hashes are evenly distributed."""
    return int.from_bytes(block_hash[:8], "little") & mask

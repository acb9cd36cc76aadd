"""Read the presence table of a worker's store. A chain that is surely absent costs no request.

The head of the table has the counters of clearings, which every client maps.
"""

from __future__ import annotations

import mmap
import select

import numpy as np

from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import StoreUnavailable
from kvstore.memory.arena import check_memory
from kvstore.memory.clears import CLEARS_BYTES, ClearCounts
from kvstore.memory.presence import ALONE_AT, CLEARS_AT, EPOCH_BYTES, HEAD_BYTES, place_of
from kvstore.rpc.client import ControlClient
from kvstore.rpc.connect import connect_local
from kvstore.runtime.forks import withhold

_HELLO = {"role": "presence", "protocol": PROTOCOL_VERSION}


class PresenceView:
    """The table of one epoch of a store. An idle connection closes when that store ends, and shows this.

    Args:
        control_path: the node store's socket.
        epoch: the expected epoch, as in the store's greeting.
        timeout_s: for the connection.

    Raises:
        ConfigError: the process that answers is no store of this user.
        StoreNotRunning: no process answers.
        StoreUnavailable: the store has another epoch.
    """

    def __init__(self, control_path: str, epoch: str, *, timeout_s: float) -> None:
        self.connection, memory = _map_table(control_path, epoch, timeout_s)
        withhold(memory, int(np.frombuffer(memory, np.uint8).ctypes.data), len(memory))
        self.memory: mmap.mmap | None = memory
        self._mask = len(memory) - HEAD_BYTES - 1

    def is_absent(self, first_block: bytes, *, remote: bool) -> bool:
        """Return whether a chain surely cannot be found; never waits.

        Args:
            first_block: hash of the chain's first block.
            remote: whether other nodes count too: then no chain is surely absent unless this node is alone.

        Returns:
            False also when the store has ended, so that the caller asks it and gets the error.
        """
        memory = self.memory
        if memory is None or (remote and not memory[ALONE_AT]):
            return False
        return not memory[HEAD_BYTES + place_of(first_block, self._mask)] and not self._has_ended()

    def _has_ended(self) -> bool:
        # A new poll object each time: two threads must not share one.
        fd = self.connection.fileno()
        if fd < 0:
            return True  # Closed by another thread.
        look = select.poll()
        look.register(fd, select.POLLIN)
        return bool(look.poll(0))

    def close(self) -> None:
        """End the connection; the memory is unmapped after its last reader. May be called again."""
        self.memory = None
        self.connection.close()


def map_clears(control_path: str, epoch: str, *, timeout_s: float) -> ClearCounts:
    """Map the counters of clearings of one epoch of a store; `leave` releases the store's memory.

    Arguments and errors are those of `PresenceView`; the connection is closed at once.
    """
    connection, memory = _map_table(control_path, epoch, timeout_s, HEAD_BYTES)
    connection.close()
    return ClearCounts(memoryview(memory)[CLEARS_AT : CLEARS_AT + CLEARS_BYTES])


def _map_table(
    control_path: str, epoch: str, timeout_s: float, num_bytes: int | None = None
) -> tuple[ControlClient, mmap.mmap]:
    """Return (connection to the store, its table, the first `num_bytes` or all of it); closed on failure."""
    connection, file = connect_local(control_path, _HELLO, timeout_s=timeout_s)
    try:
        with file:
            check_memory(file.fileno())
            # All of the table is read soon, its head rarely.
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if num_bytes is None else 0)
            memory = mmap.mmap(file.fileno(), num_bytes or 0, flags=flags, prot=mmap.PROT_READ)
        if (found := memory[:EPOCH_BYTES].hex()) != epoch:
            raise StoreUnavailable(f"wanted epoch {epoch}, got {found}: the store was restarted; make a new client")
    except BaseException:
        connection.close()
        raise
    return connection, memory

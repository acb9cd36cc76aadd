"""Pin the arena for a GPU. A thread registers its slots with CUDA in pieces, requested pieces first.

A piece is whole slots and whole pages, because the driver refuses a copy that spans two registrations.
docs/adr/0007-copies-of-cuda-caches.md says why there are pieces, and why a copy waits for them.
"""

from __future__ import annotations

import logging
import math
import mmap
import threading
import time
from collections.abc import Callable
from enum import Enum

from kvstore.errors import RegistrationFailed
from kvstore.kernels.merging import I64

logger = logging.getLogger(__name__)

PIECE_BYTES = 256 << 20
_CLOSE_TIMEOUT_S = 30.0


class _State(Enum):
    WAITING = "waiting"
    REGISTERED = "registered"
    REFUSED = "refused"


class ArenaPinning:
    """The registrations of one mapping of the arena; registering begins at once.

    The first piece is registered before all others. So after waiting for any piece, a check of the arena's first byte
    finds pinned memory.

    Args:
        address: of slot 0 in this process; page-aligned.
        slot_bytes: distance between two slots.
        num_slots: slots from there on.
        register: `register(address, num_bytes)` pins a range or raises RuntimeError.
        unregister: `unregister(address)` undoes it.
        piece_bytes: intended size of one piece.
    """

    def __init__(
        self,
        address: int,
        slot_bytes: int,
        num_slots: int,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        # The smallest number of slots that ends at a page boundary.
        unit = mmap.PAGESIZE // math.gcd(slot_bytes, mmap.PAGESIZE)
        self.slots_per_piece = max(1, piece_bytes // (slot_bytes * unit)) * unit
        self._address, self._slot_bytes, self._num_slots = address, slot_bytes, num_slots
        self._register, self._unregister = register, unregister
        self._states = [_State.WAITING] * -(-num_slots // self.slots_per_piece)
        self._why = ""
        self.wanted: list[int] = []
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="raykv-pin", daemon=True)
        self._thread.start()

    @property
    def num_registered_bytes(self) -> int:
        """Bytes that are registered now."""
        with self._changed:
            pieces = [at for at, state in enumerate(self._states) if state is _State.REGISTERED]
        return sum(self._range(piece)[1] for piece in pieces)

    def wait(self, slots: I64, timeout_s: float) -> None:
        """Wait until all these slots are registered; their pieces come before pieces without a waiter.

        Raises:
            RegistrationFailed: the driver refused a piece, one is not registered in time, or this was closed.
        """
        pieces = sorted(set((slots // self.slots_per_piece).tolist()))
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            missing = [piece for piece in pieces if self._states[piece] is not _State.REGISTERED]
            self.wanted += missing
            while missing and not self._closing:
                if any(self._states[piece] is _State.REFUSED for piece in missing):
                    raise RegistrationFailed(
                        f"the driver refused to pin memory of the store: {self._why}; free host memory, or give the "
                        "store a smaller capacity"
                    )
                if not self._changed.wait(deadline_s - time.monotonic()) and time.monotonic() >= deadline_s:
                    raise RegistrationFailed(
                        f"wanted {len(missing)} pieces of the store's memory pinned within {timeout_s} s, got none of "
                        "them in time; they go on being pinned, try again later"
                    )
                missing = [piece for piece in missing if self._states[piece] is not _State.REGISTERED]
            if self._closing:
                raise RegistrationFailed("the store's memory is being unmapped; make a new client")

    def close(self) -> bool:
        """Unregister everything; no copy may be running. May be called again.

        Returns:
            Whether the memory may be unmapped: True once the thread has ended.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the driver still pins memory of a store after %s s; it stays mapped", _CLOSE_TIMEOUT_S)
            return False
        for piece, state in enumerate(self._states):
            if state is not _State.REGISTERED:
                continue
            self._states[piece] = _State.WAITING
            try:
                self._unregister(self._range(piece)[0])
            except RuntimeError as error:
                # After a kernel error the driver refuses everything; the pages stay pinned until the process ends.
                logger.warning("memory of a store could not be unpinned: %s", error)
        return True

    def _run(self) -> None:
        began_s = time.monotonic()
        while (piece := self._next()) is not None:
            try:
                self._register(*self._range(piece))
                state = _State.REGISTERED
            except Exception as error:  # noqa: BLE001 - waiting callers must receive it; the next piece is tried.
                state, self._why = _State.REFUSED, str(error)
                logger.warning("a piece of the store's memory could not be pinned: %s", error)
            with self._changed:
                self._states[piece] = state
                self._changed.notify_all()
        logger.info("pinned %d bytes of the store in %.1f s", self.num_registered_bytes, time.monotonic() - began_s)

    def _next(self) -> int | None:
        with self._changed:
            if self._closing:
                return None
            waiting = [piece for piece, state in enumerate(self._states) if state is _State.WAITING]
            self.wanted = [piece for piece in self.wanted if self._states[piece] is _State.WAITING]
            if 0 in waiting:
                return 0
            return self.wanted[0] if self.wanted else min(waiting, default=None)

    def _range(self, piece: int) -> tuple[int, int]:
        """Return (address, bytes) of a piece; the last one is extended to a page boundary."""
        first = piece * self.slots_per_piece
        count = min(self.slots_per_piece, self._num_slots - first)
        num_bytes = -(-count * self._slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return self._address + first * self._slot_bytes, num_bytes

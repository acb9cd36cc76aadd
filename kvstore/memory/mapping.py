"""Hold this process's mapping of its store's arena, and its registrations with CUDA."""

from __future__ import annotations

import functools
import threading

from kvstore.kernel_errors import kernel_errors
from kvstore.memory.arena import Arena
from kvstore.memory.pinning import ArenaPinning


class ArenaMapping:
    """A mapped arena. The first cache on a GPU pins it; it is unpinned before it is unmapped."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.pinning: ArenaPinning | None = None
        self._closed = self._is_pinning = False
        # Reentrant: a signal handler on a thread that holds it may call `close`.
        self._lock = threading.RLock()

    def pinned(self, slot_bytes: int, num_slots: int, device: int) -> ArenaPinning:
        """Return the registrations of the arena; the first call begins to make them, for all devices.

        Raises:
            ConfigError: there is no CUDA driver.
            KernelError: the device cannot use registered memory.
        """
        from kvstore.kernels import host_register

        with self._lock:
            if self.pinning is None:
                try:
                    self._is_pinning = True
                    with kernel_errors("pinning the store's memory"):
                        host_register.check_same_addresses(device)
                    self.pinning = ArenaPinning(
                        self.arena.address,
                        slot_bytes,
                        num_slots,
                        functools.partial(host_register.register, device=device),
                        functools.partial(host_register.unregister, device=device),
                    )
                finally:
                    self._is_pinning = False
            return self.pinning

    def close(self, *, copies_are_over: bool) -> bool:
        """Unpin and unmap; may be called again.

        Returns:
            False when it stays mapped, because a GPU may still copy from or to it, or this thread is pinning it.
        """
        with self._lock:
            if self._closed:
                return True
            if self._is_pinning or (self.pinning is not None and not (copies_are_over and self.pinning.close())):
                return False
            self._closed = True
            self.arena.close()
        return True

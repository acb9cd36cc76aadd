"""Define the future of a job. It completes even if a waiter is interrupted anywhere, as by Ctrl-C."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class _Condition(threading.Condition):
    """A condition that stays unlocked after an interrupt.

    Python's condition takes its lock inside a Python function. An interrupt after that leaves the lock taken forever,
    and the thread that has the result waits for it. An interrupt in its `wait` raises an error of the lock instead.
    """

    # On the instance, these are the lock's own C functions: no signal is handled between them and the `with` block.
    __slots__ = ("__enter__", "__exit__")

    def __init__(self) -> None:
        super().__init__()
        lock = self._lock  # type: ignore[attr-defined]  # typeshed leaves it out.
        self.__enter__, self.__exit__ = lock.__enter__, lock.__exit__  # type: ignore[method-assign]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until notified or until a timeout; the caller holds the lock, once."""
        waiter, is_told = threading.Lock(), False
        waiter.acquire()
        self._waiters.append(waiter)  # type: ignore[attr-defined]
        try:
            self.release()  # An interrupt is safe only if this is first in `try`, and `acquire` first in `finally`.
            is_told = waiter.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))
        finally:
            self.acquire()
            if not is_told:
                with contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)  # type: ignore[attr-defined]
        return is_told


class JobFuture(Future[T]):
    """The result of a job."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = _Condition()

    def tell_again(self) -> None:
        """Wake the waiters and call the callbacks again, because an interrupt may have prevented it."""
        with self._condition:
            self._condition.notify_all()
        self._invoke_callbacks()  # type: ignore[attr-defined]

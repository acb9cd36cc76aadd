"""The future of a job: one whose waiter may be interrupted anywhere, as by Ctrl-C, and which ends all the same."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class _Condition(threading.Condition):
    """A condition that no interrupt leaves locked.

    That of Python enters in a function of Python. An interrupt behind the lock in there leaves it locked for ever, and
    the thread that has the result waits for it. And one in `wait` ends with an error of the lock instead.
    """

    # Of the instance: so they are the functions of the lock itself, behind which `with` is served before any signal.
    __slots__ = ("__enter__", "__exit__")

    def __init__(self) -> None:
        super().__init__()
        lock = self._lock  # type: ignore[attr-defined]  # typeshed leaves it out.
        self.__enter__, self.__exit__ = lock.__enter__, lock.__exit__  # type: ignore[method-assign]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until notified or until a timeout occurs; with the lock taken once."""
        waiter, is_told = threading.Lock(), False
        waiter.acquire()
        self._waiters.append(waiter)  # type: ignore[attr-defined]
        try:
            self.release()  # Nothing comes before it in `try`, and nothing before `acquire` in `finally`.
            is_told = waiter.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))
        finally:
            self.acquire()
            if not is_told:
                with contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)  # type: ignore[attr-defined]
        return is_told


class JobFuture(Future[T]):
    """What comes of a job."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = _Condition()

    def tell_again(self) -> None:
        """Wake the waiters and call the callbacks of a future that has its result: an interrupt may have kept that."""
        with self._condition:
            self._condition.notify_all()
        self._invoke_callbacks()  # type: ignore[attr-defined]

"""Run a function on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def on_thread(name: str, do: Callable[[], T]) -> Future[T]:
    """Run a function on a thread of its own, which does not keep the process alive.

    Args:
        name: of the thread.
        do: the function; the future has its result, or the error that it raised.

    Raises:
        RuntimeError, MemoryError: no thread can be started now; `do` does not run.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(do())
        except BaseException as error:  # noqa: BLE001 - raised where the future is read.
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future

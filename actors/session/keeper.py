"""A thread that lives as long as this process, and connects it to a Ray, or begins one for it.

The caller gives up what takes too long: ray.init waits for minutes for a GCS that hangs meanwhile. And Linux ends Ray's
processes with the thread that began them (PR_SET_PDEATHSIG), and a thread that calls `kvstore.start` may end long
before its store.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from kvstore.errors import StoreBusy, StoreUnavailable

#: How long an interrupted call waits for the end of what it began; a second interrupt ends the wait.
_UNDO_S = 20.0


class _Job:
    def __init__(self, begin: Callable[[], object], undo: Callable[[], object]) -> None:
        self._begin, self._undo = begin, undo
        self._lock = threading.Lock()
        self._given_up = self._has_begun = False
        self.error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        if not self._given_up:
            try:
                self._begin()
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for it.
                self.error = error
        with self._lock:
            self._has_begun = True
            is_unwanted = self._given_up
        if is_unwanted and self.error is None:
            with contextlib.suppress(Exception):
                self._undo()
        self.done.set()

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
            if not self._has_begun or self.error is not None:
                return  # `run` undoes it.
        self._undo()


class Keeper:
    """Runs functions that begin processes which live until this process ends. One thread at a time may call."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._last: _Job | None = None

    def do(self, begin: Callable[[], object], undo: Callable[[], object], deadline_s: float) -> None:
        """Run `begin` and wait for its end; if the wait is interrupted or too long, run `undo` after it.

        Raises:
            StoreUnavailable: `begin` was not done by `deadline_s`. It is undone as soon as it is done.
            Exception: the error of `begin`, which must leave nothing then.
        """
        if self._thread is None or not self._thread.is_alive():  # Also in a fork, which has only its own thread.
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=_run, args=(self._jobs,), name="raykv-keeper", daemon=True)
            self._thread.start()
        self._last = job = _Job(begin, undo)
        self._jobs.put(job)
        try:
            is_done = job.done.wait(min(max(0.0, deadline_s - time.monotonic()), threading.TIMEOUT_MAX))
        except BaseException:
            job.give_up()
            job.done.wait(_UNDO_S)
            raise
        if not is_done:
            job.give_up()
            raise StoreUnavailable(
                "this process was not connected to its Ray in time, and is disconnected as soon as it is; see whether "
                "`ray status` answers, or give it more timeout_s="
            )
        if job.error is not None:
            raise job.error

    def settle(self, deadline_s: float) -> None:
        """Wait until the last job has ended.

        Raises:
            StoreBusy: a job that an earlier call abandoned is not undone by `deadline_s`.
        """
        if self._last is None or self._thread is None or not self._thread.is_alive():
            return
        if not self._last.done.wait(max(0.0, deadline_s - time.monotonic())):
            raise StoreBusy("this process is still leaving a Ray that an earlier call gave up; try again")


def _run(jobs: queue.SimpleQueue[_Job]) -> None:
    while True:
        jobs.get().run()


#: One for the whole process, like Ray.
KEEPER = Keeper()

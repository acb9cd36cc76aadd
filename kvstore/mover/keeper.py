"""Keep a node store's mover running: start one, wait until it is ready, replace it if it fails or dies.

The caller decides how a mover is started: actors/node_store.py makes Ray actors, tests make plain processes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from kvstore.errors import KVStoreError
from kvstore.runtime.guard import Guard

logger = logging.getLogger(__name__)

#: Pause between a mover's end and the start of the next one; doubled each time it does not become ready.
REPLACE_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
_STARTED_WITHIN_S = 60.0


class StartedMover(Protocol):
    """A mover's process that is starting."""

    def wait_started(self, timeout_s: float) -> None:
        """Wait until it runs.

        Raises:
            KVStoreError: it does not run in time, or not at all.
        """

    def kill(self) -> None:
        """End it, if it runs; may be called again.

        Raises:
            KVStoreError: it could not be reached; it may still run.
        """


class MoverKeeper:
    """One mover at a time.

    Args:
        name: of the node, for the log.
        start: starts a mover's process.
        wait_ready: waits up to that many seconds until a mover has announced itself; returns whether it has.
        ready_within_s: how long that may take after the process has started.
        pause_s: between a mover's end and the start of the next one.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], StartedMover],
        wait_ready: Callable[[float], bool],
        ready_within_s: float,
        pause_s: float = REPLACE_PAUSE_S,
    ) -> None:
        self._name, self._start_one, self._wait_ready = name, start, wait_ready
        self._ready_within_s, self._pause_s = ready_within_s, pause_s
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._mover: StartedMover | None = None

    def start(self) -> None:
        """Start the first mover, on a thread: like every later one it may fail to start."""
        threading.Thread(target=self._bring_up, args=(0.0,), name="raykv-mover-up", daemon=True).start()

    def replace(self) -> None:
        """Start another mover, because the present one is gone; this may take any time."""
        if not self._stopping.is_set():
            self._bring_up(self._pause_s)

    def stop(self) -> None:
        """Start no more movers, and end the present one."""
        self._stopping.set()
        if self._mover is not None:
            self._end(self._mover)

    def _bring_up(self, pause_s: float) -> None:
        guard = Guard(logger, f"node {self._name}: starting a mover")
        with self._lock:
            while not self._wait_ready(0.0) and not self._stopping.wait(pause_s):
                mover = None
                try:
                    self._mover = mover = self._start_one()
                    mover.wait_started(_STARTED_WITHIN_S)
                    if self._wait_ready(self._ready_within_s):
                        return
                except KVStoreError as error:
                    logger.warning("node %s: the mover did not start: %s", self._name, error)
                except Exception as error:  # noqa: BLE001 - logged by the guard; nothing else starts another one.
                    guard.failed(error)
                # End it also if it is only slow: it must not stay beside the next one.
                if mover is not None:
                    self._end(mover)
                pause_s = min(2 * max(pause_s, self._pause_s), _MAX_PAUSE_S)

    def _end(self, mover: StartedMover) -> None:
        try:
            mover.kill()
        except Exception as error:  # noqa: BLE001 - the store's fence ends a mover that it can see.
            logger.warning("node %s: the mover could not be ended: %s", self._name, error)

"""Keeps a node store's mover up: starts one, sees that it gets ready, and starts another when it does not or is gone.

How a mover is started is the caller's: actors/node_store.py makes Ray actors, tests make plain processes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from kvstore.errors import KVStoreError

logger = logging.getLogger(__name__)

#: Between a mover's end and the start of the next one; doubled each time it does not come up.
REPLACE_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
_STARTED_WITHIN_S = 60.0


class StartedMover(Protocol):
    """A mover's process that is on its way."""

    def wait_started(self, timeout_s: float) -> None:
        """Wait until it runs.

        Raises:
            KVStoreError: it does not, or not in time.
        """

    def kill(self) -> None:
        """End it, if it runs; may be called again."""


class MoverKeeper:
    """One mover at a time.

    Args:
        name: of the node, for the log.
        start: starts a mover's process.
        wait_ready: waits for so many seconds until a mover has announced itself to the store; whether it has.
        ready_within_s: how long that may take once it runs.
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
        """Bring the first one up, on a thread: like every later one it may fail to come."""
        threading.Thread(target=self._bring_up, args=(0.0,), name="raykv-mover-up", daemon=True).start()

    def replace(self) -> None:
        """The mover is gone: bring up another one, which may take any time."""
        if not self._stopping.is_set():
            logger.warning("node %s: the mover died; starting another", self._name)
            self._bring_up(self._pause_s)

    def stop(self) -> None:
        """Start no more, and end the one there is."""
        self._stopping.set()
        if self._mover is not None:
            self._mover.kill()

    def _bring_up(self, pause_s: float) -> None:
        with self._lock:
            while not self._wait_ready(0.0) and not self._stopping.wait(pause_s):
                self._mover = mover = self._start_one()
                try:
                    mover.wait_started(_STARTED_WITHIN_S)
                    if self._wait_ready(self._ready_within_s):
                        return
                except KVStoreError as error:
                    logger.warning("node %s: the mover did not start: %s", self._name, error)
                # One that died before it was ready ends here too; a slow one must not stay beside the next.
                mover.kill()
                pause_s = min(2 * max(pause_s, self._pause_s), _MAX_PAUSE_S)

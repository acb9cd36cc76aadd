"""Say in shared memory whether this node is alone, as the directory knows it."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable

from kvstore.rpc.client import ControlClient

logger = logging.getLogger(__name__)

_LOOK_MS = 5_000


class Solitude:
    """Says that a node is alone while the directory's connection is open and silent.

    Args:
        say: called with True or False; must not block.
    """

    def __init__(self, say: Callable[[bool], None]) -> None:
        self._say, self._lock, self._number = say, threading.Lock(), 0

    def begin(self, connection: ControlClient) -> None:
        """Say that the node is alone, and watch the connection. Nothing may be asked on it before `end`."""
        try:
            fd = connection.duplicate()
        except OSError:
            return  # It is closed already.
        with self._lock:
            self._number += 1
            watch = threading.Thread(target=self._watch, args=(fd, self._number), name="raykv-alone", daemon=True)
            try:
                watch.start()
            except RuntimeError as error:
                os.close(fd)  # Without a watch thread `say(False)` would never be called.
                logger.warning("this node is not said to be alone: %s", error)
                return
            self._say(True)

    def end(self) -> None:
        """Say that the node is not alone any more, and end the watch."""
        with self._lock:
            self._number += 1
            self._say(False)

    def _watch(self, fd: int, number: int) -> None:
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            while not poll.poll(_LOOK_MS) and number == self._number:
                pass
        finally:
            os.close(fd)
            with self._lock:
                if number == self._number:
                    self._say(False)

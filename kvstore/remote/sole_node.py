"""Whether this node is alone, said in shared memory: taken back as soon as the directory takes it back."""

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
    """Says that a node is alone while the connection on which the directory said so is open and silent.

    Args:
        say: told True and False; must not block.
    """

    def __init__(self, say: Callable[[bool], None]) -> None:
        self._say, self._lock, self._number = say, threading.Lock(), 0

    def begin(self, connection: ControlClient) -> None:
        """Say so, and watch the connection, on which nothing may be asked before `end`."""
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
                os.close(fd)  # Without a watch nobody would take it back.
                logger.warning("this node is not said to be alone: %s", error)
                return
            self._say(True)

    def end(self) -> None:
        """Take it back; nothing happens where it was not said."""
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

"""Repeat messages that a store must receive, until it answers."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable

from kvstore.errors import KVStoreError, StoreUnavailable, TransferError
from kvstore.rpc.framing import Op
from kvstore.runtime.latch import Latch

logger = logging.getLogger(__name__)

#: Pauses before each repetition; the last one is used from then on.
PAUSES_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


class Retelling:
    """Sends messages that only this client can send, such as the end of a publication's writes. For any thread.

    A thread repeats unanswered messages until the store has answered all, or the store or the client has ended. Then
    what they held is taken back without a message.

    Args:
        ask: asks the store; see `StoreConnections.call`.
        is_over: whether the store or the client has ended.
    """

    def __init__(self, ask: Callable[[Op, bytes], object], is_over: Callable[[], bool]) -> None:
        self._ask, self._is_over = ask, is_over
        # Reentrant: a signal handler on a thread that holds it may call `tell`.
        self._lock = threading.RLock()
        self._untold: deque[tuple[Op, bytes]] = deque()
        self._has_thread = False
        self._closed = Latch()  # Not an Event: a signal handler may call `close` inside another `close`.

    def __len__(self) -> int:
        """Return how many messages are not answered yet."""
        return len(self._untold)

    def tell(self, op: Op, payload: bytes) -> None:
        """Send a message now, and repeat it until the store answers; the store may get it twice."""
        message = (op, payload)
        self._untold.append(message)  # First, so that an interrupt of the call does not lose it.
        try:
            self._is_told(message)
        finally:
            if self._untold:
                self._start()

    def close(self) -> None:
        """Stop sending; may be called again."""
        self._closed.set()

    def _is_told(self, message: tuple[Op, bytes]) -> bool:
        try:
            self._ask(*message)
        except (TransferError, StoreUnavailable) as error:
            logger.debug("%s was not answered: %s", message[0].name, error)
            return False
        except KVStoreError as error:
            logger.debug("%s was refused: %s", message[0].name, error)
        with self._lock, contextlib.suppress(ValueError):  # The other thread may have sent and removed it.
            self._untold.remove(message)
        return True

    def _start(self) -> None:
        with self._lock:
            if self._has_thread or self._is_closed():
                return
            try:
                threading.Thread(target=self._run, name="raykv-retelling", daemon=True).start()
            except RuntimeError as error:  # No thread can be started; the next message tries again.
                logger.warning("%d messages to the node store wait: %s", len(self._untold), error)
                return
            self._has_thread = True

    def _is_closed(self) -> bool:
        return self._closed.is_set() or self._is_over()

    def _run(self) -> None:
        num_in_row = 0
        try:
            while (message := self._next()) is not None:
                if self._is_told(message):
                    num_in_row = 0
                    continue
                self._closed.wait(PAUSES_S[min(num_in_row, len(PAUSES_S) - 1)])
                num_in_row += 1
        except BaseException:
            self._has_thread = False  # The next message starts another thread.
            raise

    def _next(self) -> tuple[Op, bytes] | None:
        """Return the first unanswered message; None ends the thread and records that it has ended."""
        with self._lock:
            if self._untold and not self._is_closed():
                return self._untold[0]
            self._has_thread = False
            return None

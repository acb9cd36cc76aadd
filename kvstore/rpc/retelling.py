"""What a store has to hear in the end, although it did not answer: told again, until it does."""

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

#: Before it is told again; the last one for good.
PAUSES_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


class Retelling:
    """Tells a store what only this client knows, such as that a publication writes no more. For any thread.

    What was not answered is told again on a thread that runs until all of it was, or the store or the client ended:
    the store takes back by itself what they held.

    Args:
        ask: asks the store; see `StoreConnections.call`.
        is_over: whether the store or the client has ended.
    """

    def __init__(self, ask: Callable[[Op, bytes], object], is_over: Callable[[], bool]) -> None:
        self._ask, self._is_over = ask, is_over
        # Of a kind that one thread may take twice: the handler of a signal may tell something under it.
        self._lock = threading.RLock()
        self._untold: deque[tuple[Op, bytes]] = deque()
        self._has_thread = False
        self._closed = Latch()  # No Event: `close` may come in the handler of a signal, within another one.

    def __len__(self) -> int:
        """How many messages were not answered yet."""
        return len(self._untold)

    def tell(self, op: Op, payload: bytes) -> None:
        """Tell it now, or as soon as the store answers; a message may be told twice."""
        message = (op, payload)
        self._untold.append(message)  # First: an interrupt of the call loses nothing.
        try:
            self._is_told(message)
        finally:
            if self._untold:
                self._start()

    def close(self) -> None:
        """Tell nothing any more; may be called again."""
        self._closed.set()

    def _is_told(self, message: tuple[Op, bytes]) -> bool:
        try:
            self._ask(*message)
        except (TransferError, StoreUnavailable) as error:
            logger.debug("%s was not answered: %s", message[0].name, error)
            return False
        except KVStoreError as error:
            logger.debug("%s was refused: %s", message[0].name, error)
        with self._lock, contextlib.suppress(ValueError):  # The other thread may have told it, too.
            self._untold.remove(message)
        return True

    def _start(self) -> None:
        with self._lock:
            if self._has_thread or self._is_closed():
                return
            try:
                threading.Thread(target=self._run, name="raykv-retelling", daemon=True).start()
            except RuntimeError as error:  # No thread can be started: the next message has it tried again.
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
            self._has_thread = False  # The next message starts another one.
            raise

    def _next(self) -> tuple[Op, bytes] | None:
        """Return the first message that was not answered; None ends the thread, as far as others can see."""
        with self._lock:
            if self._untold and not self._is_closed():
                return self._untold[0]
            self._has_thread = False
            return None

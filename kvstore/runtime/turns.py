"""Give threads turns. They are like a lock that is safe from interrupts, such as Ctrl-C.

An interrupt right after the call that takes a lock leaves it locked forever: no code knows that it was taken. A turn is
an object. Its thread can always see whether it has the turn, and gives it up however the call ends.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from kvstore.runtime import clock

#: One per task done in turn: holds the id of its thread, or 0 if any thread may continue the task.
Turn = list[int]
#: A waiting thread also checks this often by itself: an interrupt may lose the notification of its turn.
_LOOK_AGAIN_S = 0.05
#: Replaces the thread id in a turn that has ended or was given up.
_ENDED = -1


class _Waiter:
    __slots__ = ("turn", "woken")

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.woken: SimpleQueue[None] = SimpleQueue()


class Turns:
    """Turns one after the other, in the order in which they were asked for.

    Where every microsecond counts, a caller takes and ends its turn with its own code, as `take` and `end` do.

    Attributes:
        lock: held for a moment only and by `with` alone, so no interrupt comes between the lock and the block.
        now: the current turn; None between two turns.
        first: wakes the thread whose turn is next; None while none waits.
    """

    __slots__ = ("first", "lock", "now", "waiting")

    def __init__(self) -> None:
        # Reentrant: a signal handler may run on a thread that holds it.
        self.lock = threading.RLock()
        self.now: Turn | None = None
        self.first: SimpleQueue[None] | None = None
        self.waiting: list[_Waiter] = []

    def take(self, turn: Turn) -> bool:
        """Take a turn if none is taken and no thread waits. Return whether it was taken."""
        with self.lock:
            if self.now is None and self.first is None:
                self.now = turn
        return self.now is turn

    def wait(self, turn: Turn, timeout_s: float, check: Callable[[Turn], None]) -> bool:
        """Take a turn after all earlier requests; False when that is not in time.

        Args:
            turn: the caller must end it in any case, also when this is interrupted; others then pass it.
            timeout_s: the longest wait.
            check: called with the current turn; raises when waiting for it is useless. Also called with an earlier turn
                that this thread waits for below a signal handler: that turn cannot come before this wait ends.
        """
        waiter, until_s = _Waiter(turn), clock.now_s() + timeout_s
        try:
            with self.lock:
                own = next((each.turn for each in self.waiting if each.turn[0] == turn[0] != 0), None)
                self.waiting.append(waiter)
            if own is not None:
                check(own)
            while True:
                with self.lock:
                    self._look(waiter)
                    now = self.now
                if now is turn:
                    return True
                if now is not None:
                    check(now)
                if (left_s := until_s - clock.now_s()) <= 0:
                    return False
                with contextlib.suppress(Empty):
                    waiter.woken.get(timeout=min(left_s, _LOOK_AGAIN_S))
        finally:
            with self.lock:
                if waiter in self.waiting:
                    self.waiting.remove(waiter)
                self.first = self.waiting[0].woken if self.waiting else None

    def _look(self, waiter: _Waiter) -> None:
        while self.waiting[0].turn[0] == _ENDED:  # Interrupted ones. `waiter` is in the list, not ended.
            del self.waiting[0]
        self.first = self.waiting[0].woken
        if self.now is None and self.waiting[0] is waiter:
            self.now = waiter.turn

    def end(self, turn: Turn) -> None:
        """End a turn, taken or not, and wake the next thread; may be called again."""
        turn[0] = _ENDED
        if self.now is turn:
            self.now = None
        if self.now is None and (first := self.first) is not None:
            first.put(None)

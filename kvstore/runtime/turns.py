"""Whose turn it is: what a lock is for, among threads that may be interrupted behind any call, as by Ctrl-C.

An interrupt behind the call that takes a lock leaves it locked for ever, for nobody knows that it was taken. A turn is
an object of its own: its thread can always see whether it has it, and gives it up whatever ends it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from kvstore.runtime import clock

#: One for each thing that is done in turn, with the number of the thread that does it, or 0 where any thread may go on.
Turn = list[int]
#: One that waits also looks that often by itself: word of its turn may be lost to an interrupt.
_LOOK_AGAIN_S = 0.05


#: In place of the number, of a turn that has ended or was given up.
_ENDED = -1


class _Waiter:
    __slots__ = ("turn", "woken")

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.woken: SimpleQueue[None] = SimpleQueue()


class Turns:
    """Turns one after the other, in the order in which they were asked for.

    Where every microsecond counts a caller takes and ends its turn itself, which `take` and `end` show.

    Attributes:
        lock: held for a moment only, by `with` alone, which Python enters and leaves as one with what is in it.
        now: the turn that there is; None between two.
        first: wakes the thread whose turn is next; None while none waits.
    """

    __slots__ = ("_waiting", "first", "lock", "now")

    def __init__(self) -> None:
        # Of a kind that one thread may take twice: the handler of a signal may run under it.
        self.lock = threading.RLock()
        self.now: Turn | None = None
        self.first: SimpleQueue[None] | None = None
        self._waiting: list[_Waiter] = []

    def take(self, turn: Turn) -> bool:
        """Take a turn if it is free and no thread waits; whether it was taken."""
        with self.lock:
            if self.now is None and self.first is None:
                self.now = turn
        return self.now is turn

    def wait(self, turn: Turn, timeout_s: float, check: Callable[[Turn], None]) -> bool:
        """Take a turn when all that asked for one before have had theirs; False when that is not in time.

        Args:
            turn: to be ended by the caller in any case, also when this is interrupted: then others pass it.
            timeout_s: the longest wait.
            check: called with the turn that there is; raises when waiting for it is of no use. And with one that this
                thread waits for already, as in the handler of a signal: it does not come before this wait has ended.
        """
        waiter, until_s = _Waiter(turn), clock.now_s() + timeout_s
        try:
            with self.lock:
                own = next((each.turn for each in self._waiting if each.turn[0] == turn[0] != 0), None)
                self._waiting.append(waiter)
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
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                self.first = self._waiting[0].woken if self._waiting else None

    def _look(self, waiter: _Waiter) -> None:
        while self._waiting[0].turn[0] == _ENDED:  # It was interrupted. The end of this one is to come.
            del self._waiting[0]
        self.first = self._waiting[0].woken
        if self.now is None and self._waiting[0] is waiter:
            self.now = waiter.turn

    def end(self, turn: Turn) -> None:
        """Give a turn up, if it was taken; may be called again."""
        turn[0] = _ENDED
        if self.now is turn:
            self.now = None
        if self.now is None and (first := self.first) is not None:
            first.put(None)

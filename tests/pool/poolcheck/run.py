"""One run of two or three threads over real code, in an order that is given.

The threads are real ones that hand a baton on, so one runs at a time and a schedule is exact. They may hand it on
at points only: when a lock is about to be taken (so also inside of a step that was split in two) and where a
scenario says `step()`. What lies between two points touches nothing shared, unless code forgot its lock; for that
there are `files`: each of their lines, and each release, is a point too, also inside of a critical section.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from poolcheck.lock import ExploredLock
from poolcheck.states import state_of

_WAIT_S = 20.0

#: Takes the run; returns the bodies of the threads and what to check at the end.
Scenario = Callable[["Run"], tuple[Sequence[Callable[[], None]], Callable[[], None]]]


class ScheduleFailed(AssertionError):
    """A schedule broke something; `schedule` repeats it."""

    def __init__(self, text: str, schedule: tuple[int, ...]) -> None:
        super().__init__(text)
        self.schedule = schedule


class _Stop(BaseException):
    """Ends the other threads of a run that has failed, or was in its state before."""


class _Known(Exception):
    """Ends a run: all that follows has been run, or will be."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What could run at a point, what did, and who ran before (-1: it could not go on).

    `fresh` are those of the threads that have not gone on from this state with as few switches.
    """

    enabled: tuple[int, ...]
    chosen: int
    before: int
    fresh: tuple[int, ...]


@dataclass(eq=False)
class Run:
    """One run of a scenario under one schedule.

    Args:
        schedule: the choices to begin with; after them a thread runs on for as long as it can.
        files: files of which each line is a point.
        num_checked: how many of its first choices another run has made; what that one has checked on the way is
            the same here.
        known: with how few switches each thread went on, or will, from each state; this run adds its own, and ends
            where there is nothing to add.
    """

    schedule: tuple[int, ...]
    files: frozenset[str] = frozenset()
    num_checked: int = 0
    known: dict[tuple[bytes, int], int] | None = None
    check: Callable[[], None] = lambda: None
    choices: list[Choice] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    num_points: int = 0

    def __post_init__(self) -> None:
        self.locks: list[ExploredLock] = []
        #: Whether a lock was held since the last check; without its lock any line may change something.
        self.changed = True
        self._current = -1
        self._error: BaseException | None = None
        self._waiting_for: dict[int, Callable[[], bool]] = {}
        self._left: set[int] = set()
        self._batons: list[threading.Lock] = []
        self._idents: list[int] = []
        self._num_passed: list[int] = []
        self._shared: object = None
        self._all_ended = threading.Lock()

    # What scenarios and locks call.

    def lock(self) -> ExploredLock:
        """Return a lock; each time that it is taken is a point."""
        made = ExploredLock(self)
        self.locks.append(made)
        return made

    def step(self, name: str = "step") -> None:
        """Let another thread run here, if the schedule says so."""
        me = self._current
        if me < 0:
            return
        if self._error is not None:
            raise _Stop
        self.num_points += 1
        self.names.append(f"{me}:{name}")
        self._num_passed[me] += 1
        self._hand_on(me, can_go_on=True)

    def wait_until(self, condition: Callable[[], bool], name: str = "wait") -> None:
        """Let others run until a condition holds; the threads that wait do not run meanwhile."""
        me = self._current
        if me < 0:
            assert condition(), f"{name} outside of a thread"
            return
        while not self._holds(condition):
            if self._error is not None:
                raise _Stop
            self.names.append(f"{me}:{name} waits")
            self._waiting_for[me] = condition
            self._hand_on(me, can_go_on=False)
            self._waiting_for.pop(me, None)

    @property
    def current(self) -> int:
        """Number of the running thread, -1 outside of the run."""
        return self._current

    # The run itself.

    def execute(self, scenario: Scenario) -> None:
        """Run the scenario; raises ScheduleFailed with the cause chained."""
        bodies, at_end = scenario(self)
        self._left = set(range(len(bodies)))
        self._batons = [threading.Lock() for _ in bodies]
        self._num_passed = [0 for _ in bodies]
        self._shared = bodies, at_end
        self._all_ended.acquire()
        for baton in self._batons:
            baton.acquire()
        for me, body in enumerate(bodies):
            # Not threading.Thread: thousands are started, and that one waits for each.
            self._idents.append(_thread.start_new_thread(self._body, (me, body)))
        self._hand_on(-1, can_go_on=False)
        if not self._all_ended.acquire(timeout=_WAIT_S):
            self._error = self._error or AssertionError("the threads did not end")
        self._current = -1
        if isinstance(self._error, _Known):
            return
        if self._error is None:
            try:
                at_end()  # The last thread has checked the rest.
            except Exception as error:  # noqa: BLE001
                self._error = error
        if self._error is not None:
            chosen = tuple(choice.chosen for choice in self.choices)
            text = f"{type(self._error).__name__}: {self._error}\nschedule {'.'.join(map(str, chosen))}\n"
            raise ScheduleFailed(text + " ".join(self.names[-40:]), chosen) from self._error

    def _body(self, me: int, body: Callable[[], None]) -> None:
        try:
            self._wait_for_baton(me)
            if self.files:
                sys.settrace(self._trace)
            body()
        except _Stop:
            pass
        except BaseException as error:  # noqa: BLE001
            self._error = self._error or error
        finally:
            sys.settrace(None)
            self._left.discard(me)
            if self._error is None:
                self._checked(raising=False)
            self._hand_on(me, can_go_on=False)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self.files or frame.f_code.co_name == "check_integrity":
            return None
        if event == "line":
            self.step(f"{frame.f_code.co_name}:{frame.f_lineno}")
        return self._trace

    def _holds(self, condition: Callable[[], bool]) -> bool:
        # As if from outside: locks let it pass and nothing in it is a point.
        me, self._current = self._current, -1
        try:
            return condition()
        finally:
            self._current = me

    def _checked(self, *, raising: bool = True) -> None:
        if len(self.choices) < self.num_checked:
            return
        me, self._current = self._current, -1
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            self.check()
        except Exception as error:
            if raising:
                raise
            self._error = error
        finally:
            self._current = me
            sys.settrace(tracer)

    def _hand_on(self, me: int, *, can_go_on: bool) -> None:
        if self._error is not None:
            self._end_others(me)
            return
        waiting = self._waiting_for
        enabled = tuple(i for i in sorted(self._left) if i not in waiting or self._holds(waiting[i]))
        if not enabled:
            if self._left:
                self._error = AssertionError(f"threads {sorted(self._left)} wait for ever")
                self._end_others(me)
            else:
                self._all_ended.release()
            return
        at = len(self.choices)
        fresh = self._fresh(me, enabled, can_go_on=can_go_on)
        if not fresh:
            self._error = _Known()
            self._end_others(me)
            return
        # Also where it waits: nobody else checks this state. What has ended was checked then.
        if me in self._left and self.changed and not any(lock.owner >= 0 for lock in self.locks):
            self.changed = bool(self.files)
            self._checked()
        if len(enabled) == 1:
            chosen = enabled[0]
        else:
            # If it cannot go on, which one does costs nothing; if it can, the others are known where it is.
            chosen = self.schedule[at] if at < len(self.schedule) else me if can_go_on else fresh[0]
            if chosen not in enabled:
                self._error = AssertionError(f"the schedule names thread {chosen} at choice {at}, possible: {enabled}")
                self._end_others(me)
                return
            self.choices.append(Choice(enabled, chosen, me if can_go_on else -1, fresh))
        if chosen != me:
            self._current = chosen
            self._batons[chosen].release()
            if me in self._left:
                self._wait_for_baton(me)

    def _fresh(self, me: int, enabled: tuple[int, ...], *, can_go_on: bool) -> tuple[int, ...]:
        """Return, and note, the threads that nobody has let go on from here with as few switches; all if unknown."""
        if self.known is None or len(enabled) == 1 or len(self.choices) < len(self.schedule):
            return enabled
        more = (self._num_passed, sorted(self._waiting_for), self._shared)
        state = state_of(self._idents, self._left, self, __file__, more)
        if not state:
            return enabled
        spent = sum(choice.before >= 0 and choice.chosen != choice.before for choice in self.choices)
        fresh = []
        for thread in enabled:
            cost = spent + int(can_go_on and thread != me)
            if self.known.get((state, thread), cost + 1) > cost:
                self.known[state, thread] = cost
                fresh.append(thread)
        return tuple(fresh)

    def _end_others(self, me: int) -> None:
        # One at a time, as always: the next one unwinds when this one has ended.
        if me in self._left:
            raise _Stop
        if not self._left:
            self._all_ended.release()
            return
        chosen = min(self._left)
        self._current = chosen
        self._waiting_for.clear()
        self._batons[chosen].release()

    def _wait_for_baton(self, me: int) -> None:
        if not self._batons[me].acquire(timeout=_WAIT_S):
            self._error = self._error or AssertionError(f"thread {me} waited {_WAIT_S} s for its turn")
            raise _Stop
        if self._error is not None:
            raise _Stop

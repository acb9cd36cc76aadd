"""Runs two or three threads over real code in every order that up to some pre-emptions can make.

The threads are real ones that hand a baton on, so one runs at a time and a schedule is exact. They may hand it on
at points only: when a lock is about to be taken (so also inside of a step that was split in two) and where a
scenario says `step()`. What lies between two points touches nothing shared, unless code forgot its lock; for that
there are `files`: each of their lines, and each release, is a point too, also inside of a critical section.

A schedule is the thread chosen at each point where there was a choice. A failure prints it, and `replay` runs it.
"""

from __future__ import annotations

import _thread
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

_WAIT_S = 20.0

#: Takes the run; returns the bodies of the threads and what to check at the end.
Scenario = Callable[["Run"], tuple[Sequence[Callable[[], None]], Callable[[], None]]]


class ScheduleFailed(AssertionError):
    """A schedule broke something; `schedule` repeats it."""

    def __init__(self, text: str, schedule: tuple[int, ...]) -> None:
        super().__init__(text)
        self.schedule = schedule


class _Stop(BaseException):
    """Ends the other threads of a run that has failed."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What could run at a point, what did, and who ran before (-1: it could not go on)."""

    enabled: tuple[int, ...]
    chosen: int
    before: int


@dataclass(frozen=True, slots=True)
class Explored:
    """How much was run."""

    num_schedules: int
    num_points: int


@dataclass(eq=False)
class Run:
    """One run of a scenario under one schedule.

    Args:
        schedule: the choices to begin with; after them a thread runs on for as long as it can.
        files: files of which each line is a point.
        num_checked: how many of its first choices another run has made; what that one has checked on the way is
            the same here.
    """

    schedule: tuple[int, ...]
    files: frozenset[str] = frozenset()
    num_checked: int = 0
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
        if self.changed and not any(lock.owner >= 0 for lock in self.locks):
            self.changed = bool(self.files)
            self._checked()
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
        self._all_ended.acquire()
        for baton in self._batons:
            baton.acquire()
        for me, body in enumerate(bodies):
            # Not threading.Thread: thousands are started, and that one waits for each.
            _thread.start_new_thread(self._body, (me, body))
        self._hand_on(-1, can_go_on=False)
        if not self._all_ended.acquire(timeout=_WAIT_S):
            self._error = self._error or AssertionError("the threads did not end")
        self._current = -1
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
        if len(enabled) == 1:
            chosen = enabled[0]
        else:
            chosen = self.schedule[at] if at < len(self.schedule) else me if can_go_on else enabled[0]
            if chosen not in enabled:
                self._error = AssertionError(f"the schedule names thread {chosen} at choice {at}, possible: {enabled}")
                self._end_others(me)
                return
            self.choices.append(Choice(enabled, chosen, me if can_go_on else -1))
        if chosen != me:
            self._current = chosen
            self._batons[chosen].release()
            if me in self._left:
                self._wait_for_baton(me)

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


class ExploredLock:
    """A lock of one run, not re-entrant; to take it is a point."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.owner = -1

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, letting others run first and while it is taken."""
        if self._run.current < 0:
            return True
        self._run.step("acquire")
        assert self.owner != self._run.current, "a thread takes the lock that it holds"
        self._run.wait_until(lambda: self.owner < 0, "lock")
        self.owner = self._run.current
        return True

    def release(self) -> None:
        """Give it back."""
        if self._run.current < 0:
            return
        self.owner = -1
        self._run.changed = True
        if self._run.files:
            self._run.step("release")

    def locked(self) -> bool:
        """Whether a thread holds it."""
        return self.owner >= 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def replay(scenario: Scenario, schedule: str | tuple[int, ...], files: frozenset[str] = frozenset()) -> Run:
    """Run one schedule, as a failure printed it."""
    if isinstance(schedule, str):
        schedule = tuple(int(word) for word in schedule.split(".") if word)
    run = Run(schedule, files)
    run.execute(scenario)
    return run


def explore(
    scenario: Scenario,
    *,
    max_preemptions: int = 3,
    files: frozenset[str] = frozenset(),
    max_schedules: int = 50_000,
) -> Explored:
    """Run every schedule with up to `max_preemptions` switches away from a thread that could have gone on.

    Raises:
        ScheduleFailed: one of them broke something.
    """
    todo: list[tuple[int, ...]] = [()]
    num_schedules = num_points = 0
    # A baton goes from hand to hand several times faster on one processor.
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(processors)[os.getpid() % len(processors)]})
    try:
        while todo:
            start = todo.pop()
            run = Run(start, files, num_checked=len(start))
            run.execute(scenario)
            num_schedules += 1
            num_points += run.num_points
            assert num_schedules <= max_schedules, f"more than {max_schedules} schedules; make the scenario smaller"
            chosen = tuple(choice.chosen for choice in run.choices)
            spent = 0
            for at, choice in enumerate(run.choices):
                if at >= len(start):
                    for other in choice.enabled:
                        cost = int(choice.before >= 0 and other != choice.before)
                        if other != choice.chosen and spent + cost <= max_preemptions:
                            todo.append((*chosen[:at], other))
                spent += choice.before >= 0 and choice.chosen != choice.before
    finally:
        os.sched_setaffinity(0, processors)
    return Explored(num_schedules, num_points)

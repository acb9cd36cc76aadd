"""Runs two or three threads over real code in every order that up to some pre-emptions can make.

A schedule is the thread chosen at each point where there was a choice. A failure prints it, and `replay` runs it.
One that comes to a state from which every thread has gone on before, with no fewer switches left, ends there: what
follows is run already.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from poolcheck.run import Run, Scenario


@dataclass(frozen=True, slots=True)
class Explored:
    """How much was run."""

    num_schedules: int
    num_points: int


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
    prune: bool = True,
) -> Explored:
    """Run every schedule with up to `max_preemptions` switches away from a thread that could have gone on.

    Args:
        scenario: what to run.
        max_preemptions: how many such switches.
        files: files of which each line is a point.
        max_schedules: how many may be begun.
        prune: end those that come to a state in which another has been; not where lines are points.

    Raises:
        ScheduleFailed: one of them broke something.
    """
    # By how many switches they have made. Those with few come first: so a state is come to with the fewest at once, and
    # what follows it is run once.
    todo: list[list[tuple[int, ...]]] = [[()], *([] for _ in range(max_preemptions))]
    num_schedules = num_points = 0
    known: dict[tuple[bytes, int], int] | None = {} if prune and not files else None
    # A baton goes from hand to hand several times faster on one processor.
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(processors)[os.getpid() % len(processors)]})
    try:
        while any(todo):
            start = next(filter(None, todo)).pop()
            run = Run(start, files, num_checked=len(start), known=known)
            run.execute(scenario)
            num_schedules += 1
            num_points += run.num_points
            assert num_schedules <= max_schedules, f"more than {max_schedules} schedules; make the scenario smaller"
            chosen = tuple(choice.chosen for choice in run.choices)
            spent = 0
            for at, choice in enumerate(run.choices):
                if at >= len(start):
                    for other in choice.fresh:
                        cost = int(choice.before >= 0 and other != choice.before)
                        if other != choice.chosen and spent + cost <= max_preemptions:
                            todo[spent + cost].append((*chosen[:at], other))
                spent += choice.before >= 0 and choice.chosen != choice.before
    finally:
        os.sched_setaffinity(0, processors)
    return Explored(num_schedules, num_points)

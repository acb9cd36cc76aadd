"""Say how much blocks matter to eviction, and for how long."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from kvstore.bounds import check_ttl, clip
from kvstore.errors import InvalidRequest


class Priority(IntEnum):
    """How much the blocks of a save matter when the memory is full; a greater one never goes before a lesser one.

    LOW: evicted before all others, and not written to disk. HIGH: evicted only when no other block can go, soft pins
    excepted.
    """

    LOW = 0
    NORMAL = 1
    HIGH = 2


@dataclass(frozen=True, slots=True)
class Retention:
    """The priority of a write's blocks, and when it ends.

    Args:
        priority: until then; NORMAL from then on.
        until_s: by the clock of the pool.
    """

    priority: Priority = Priority.NORMAL
    until_s: float = math.inf


#: Of all blocks for which nothing else was said.
NORMAL = Retention()
#: Of a reader of LOW priority: it makes no block NORMAL, and none LOW.
OF_LOW_READER = Retention(Priority.LOW, -math.inf)


def as_priority(value: object) -> Priority:
    """Return a priority, given as one or by its name in small letters.

    Raises:
        InvalidRequest: the value is neither.
    """
    if isinstance(value, Priority):
        return value
    if isinstance(value, str):
        for priority in Priority:
            if value == priority.name.lower():
                return priority
    raise InvalidRequest(f"priority: wanted 'low', 'normal' or 'high', or a kvstore.Priority, got {clip(value)}")


def check_priority_s(value: object) -> float | None:
    """Return for how many seconds a priority holds; None for as long as its blocks are here.

    Raises:
        InvalidRequest: the value is not a number above 0, or exceeds a day.
    """
    return None if value is None else check_ttl("priority_s", value)


def check_terms(priority: object, priority_s: object) -> tuple[Priority, float | None]:
    """Return what a caller says of its blocks: the priority, and for how many seconds.

    Raises:
        InvalidRequest: see `as_priority` and `check_priority_s`; or NORMAL has a time, which would do nothing.
    """
    terms = as_priority(priority), check_priority_s(priority_s)
    if terms[0] is Priority.NORMAL and terms[1] is not None:
        raise InvalidRequest(
            f"priority_s: wanted it with priority 'low' or 'high', got {clip(priority_s)} with 'normal', which has no "
            "end; give one of these priorities, or leave priority_s out"
        )
    return terms


def retention_of(priority: object, priority_s: object, now_s: float) -> Retention:
    """Return the retention that begins at `now_s`.

    Raises:
        InvalidRequest: see `as_priority` and `check_priority_s`.
    """
    priority, seconds = as_priority(priority), check_priority_s(priority_s)
    return Retention(priority, math.inf if seconds is None else now_s + seconds)

"""Log the events in the life of a store: one line each, as `event=... key=value ...`, or JSON (docs/logs.md)."""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvstore.runtime.guard import LogLimit

logger = logging.getLogger("kvstore.life")

#: Lines of one kind that pass a limit in ten seconds, where a client could cause them without end.
MOST_LINES = 20
#: The reason of an end, unless the caller says more.
ASKED_TO_STOP = "stop was asked for"
_PLAIN = re.compile(r"[A-Za-z0-9_./:+@-]+")
_MOST_CHARS = 300
#: Event, time, level and pid come before all others.
_NUM_FIRST = 4


class Whole(str):
    """Text that a line has unchanged, whatever its length; other text is cut, and its spaces are made one."""


def log_life(event: str, *, level: int = logging.INFO, limit: LogLimit | None = None, **facts: Any) -> None:
    """Log one event. It goes to the logger "kvstore.life", and never raises.

    Args:
        event: its name, of small letters.
        level: of the line.
        limit: for events that a client could cause without end; the next line says how many were held back.
        facts: what is known of it: text, `Whole` text, numbers, or None for what is left out. No secrets, tokens or
            salts.
    """
    if not logger.isEnabledFor(level):
        return
    if limit is not None:
        if not limit.passes():
            return
        facts["num_held_back"] = limit.take_held_back() or None
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line: dict[str, Any] = {"event": event, "time": now, "level": logging.getLevelName(level).lower()}
    line |= {"pid": os.getpid(), **{name: _short(value) for name, value in facts.items() if value is not None}}
    logger.log(level, "%s", _Line(line, _wants_json()))


def tell_whose(**whose: str) -> None:
    """Have all lines of this process say whose they are, like store="default"; a line that says it itself keeps it."""

    def complete(record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and record.args and isinstance(line := record.args[0], _Line):
            record.args = (line.of(whose),)
        return True

    logger.addFilter(complete)


@dataclass(frozen=True, slots=True)
class _Line:
    """What a line says, by name; its text is made by the handlers, so that the process can add whose it is."""

    facts: dict[str, Any]
    as_json: bool

    def of(self, whose: dict[str, str]) -> _Line:
        names = list(self.facts)
        first = {name: self.facts[name] for name in names[:_NUM_FIRST]}
        return _Line({**first, **whose, **self.facts}, self.as_json)

    def __str__(self) -> str:
        if self.as_json:
            return json.dumps(self.facts)
        return " ".join(f"{name}={_word(value)}" for name, value in self.facts.items())


def _wants_json() -> bool:
    return os.environ.get("RAYKV_LOG_FORMAT", "").strip().lower() == "json"


def _short(value: Any) -> str | int | float | bool:
    if isinstance(value, bool | int | float | Whole):
        return value
    text = " ".join(str(value).split())
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."


def _word(value: str | int | float | bool) -> str:
    """Return a value without spaces around it; text with other signs is written as in JSON."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)

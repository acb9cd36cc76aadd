"""JSON documents that a person can read and compare: one row per line."""

from __future__ import annotations

import json
from typing import Any

_LINE_CHARS = 240


def as_document(value: Any) -> str:
    """Return a value as JSON, divided into lines only where it is too long for one."""
    return _lines(value, "") + "\n"


def _lines(value: Any, indent: str) -> str:
    line = json.dumps(value)
    if len(line) <= _LINE_CHARS or not isinstance(value, dict | list):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(str(name))}: {_lines(each, inner)}" for name, each in value.items()]
        return "{\n" + ",\n".join(inner + part for part in parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _lines(each, inner) for each in value) + f"\n{indent}]"

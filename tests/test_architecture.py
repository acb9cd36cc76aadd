"""docs/architecture.md names modules, classes and functions that exist, and every room."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvstore"

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
#: `name` in [text](../kvstore/file.py), or in "the same file" as the one before.
NAMED = re.compile(r"`([\w.]+)` in (?:\[([^\]]+)\]\(\.\./kvstore/([^)]+)\)|the same file)")


def names_in(path: Path) -> set[str]:
    """Functions and classes of a module, and methods as Class.method."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found.update(f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef))
    return found


def all_named() -> list[tuple[str, str]]:
    found, last = [], ""
    for name, _, path in NAMED.findall(PAGE):
        last = path or last
        found.append((name, last))
    return found


@pytest.mark.parametrize(("name", "path"), sorted(set(all_named())))
def test_a_name_is_where_the_page_says(name, path):
    assert name in names_in(PACKAGE / path)


def test_no_name_of_code_stands_without_its_file():
    called = re.findall(r"`([A-Za-z_]+\.[a-z_]+|(?:run|plan)_[a-z_]+)`", PAGE)
    named = [name for name, _ in all_named()]
    assert len(named) > 40
    assert sorted(called) == sorted(name for name in named if name in called)


def test_a_link_says_where_it_leads():
    links = re.findall(r"\[([\w/]+\.py)\]\(\.\./kvstore/([^)]+)\)", PAGE)
    assert links
    assert [text for text, path in links if text != path] == []


def test_every_room_has_a_line():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert set(re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE)) == rooms

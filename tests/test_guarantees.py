"""The page of promises names tests; each of them has to be there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def defined_in(source: str) -> set[str]:
    """Return the names of the top-level tests and test classes of a module."""
    return {node.name for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_the_page_names_tests():
    assert len(NAMED) > 40
    assert defined_in("def a(): ...\nclass B: ...\nc = 1") == {"a", "B"}


@functools.cache  # one file shows many promises
def defined_at(path: str) -> set[str]:
    return defined_in((ROOT / path).read_text())


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_test_that_the_page_names_exists(path, name):
    assert (ROOT / path).is_file()
    assert name in defined_at(path)


def test_every_row_names_what_shows_it():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) > 25
    for row in rows:
        assert re.search(r"`(tests/[\w/]+\.py::\w+|make \w+)` ?(,|\|$)", row), row

"""Each promise of docs/guarantees.md has tests on the page of tests; each of them has to be there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROMISES = (ROOT / "docs" / "guarantees.md").read_text()
SHOWN_BY = (ROOT / "docs" / "guarantees-tests.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PROMISES + SHOWN_BY)))


def defined_in(source: str) -> set[str]:
    """Return the names of the top-level tests and test classes of a module."""
    return {node.name for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def rows_of(page: str) -> list[tuple[str, list[str]]]:
    """Return each row of the tables of a page, with the heading above it."""
    rows, heading = [], ""
    for line in page.splitlines():
        if line.startswith("## "):
            heading = line
        elif line.startswith("|") and not line.startswith(("| name |", "|---")):
            rows.append((heading, [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]))
    return rows


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


def test_both_pages_have_the_same_rows_in_the_same_order():
    promised = [(heading, cells[0]) for heading, cells in rows_of(PROMISES)]
    shown = [(heading, cells[0]) for heading, cells in rows_of(SHOWN_BY)]
    assert promised == shown
    assert len({name for _, name in promised}) == len(promised) > 25


def test_every_promise_has_a_text_and_its_columns():
    for _, cells in rows_of(PROMISES):
        assert len(cells) == 4, cells
        assert all(cells[:2]), cells


def test_every_row_names_what_shows_it():
    shown_by = r"`(tests/[\w/]+\.py::\w+|make [\w-]+)`"
    for _, cells in rows_of(SHOWN_BY):
        assert len(cells) == 2, cells
        assert re.fullmatch(rf"{shown_by}(, {shown_by})*", cells[1]), cells

"""The tests themselves: they use the names that code has for them, and what several of them need is in no test."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parent
#: Places that reach into a private attribute of an object of another module.
MOST_PRIVATES = 90
#: Those of Python, torch, Ray and others, which have no public name.
FOREIGN = {
    "_args", "_backlog", "_current_frames", "_dummy_run", "_events", "_exit", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_global_node", "_neg_view", "_private", "_replace", "_save_to_state_dict",
    "_sleep", "_target", "_version",
}  # fmt: skip


def trees():
    for path in sorted(TESTS.rglob("*.py")):
        yield path.relative_to(TESTS), ast.parse(path.read_text(encoding="utf-8"))


def privates(tree):
    """Every `x._name` where x is not the object itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not is_own and node.attr not in FOREIGN:
                yield node.attr


def test_tests_reach_into_few_privates():
    found = [f"{path}: {name}" for path, tree in trees() for name in privates(tree)]
    assert len(found) <= MOST_PRIVATES, found


def test_no_test_module_is_imported():
    def imported(tree):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                yield from [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)

    wrong = [
        f"{path} imports {name}"
        for path, tree in trees()
        for name in imported(tree)
        if name.startswith(("tests.", "test_")) and name.rpartition(".")[2].startswith("test_")
    ]
    assert wrong == []


def test_no_target_names_a_folder_of_tests_and_files_in_it():
    """Then pytest collects what it finds in the folder by itself, and not those files."""
    for line in (TESTS.parent / "Makefile").read_text(encoding="utf-8").splitlines():
        named = [word for word in line.split() if word.startswith("tests/")]
        assert not [(one, other) for one in named for other in named if other.startswith(f"{one}/")], line

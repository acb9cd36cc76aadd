from __future__ import annotations

import ast
import sys

import pytest


@pytest.mark.ray
def test_it_prints_what_its_docstring_shows(run_example, repo_root):
    source = (repo_root / "examples/actor_handle.py").read_text(encoding="utf-8")
    shown = [line.strip() for line in (ast.get_docstring(ast.parse(source)) or "").splitlines()]
    command = "$ python examples/actor_handle.py"

    run = run_example(sys.executable, "examples/actor_handle.py", timeout_s=90)

    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == shown[shown.index(command) + 1 :]

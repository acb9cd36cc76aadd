from __future__ import annotations

import ast
import sys

import pytest


@pytest.mark.ray
def test_it_prints_what_its_docstring_shows(run_example, repo_root):
    source = (repo_root / "examples/transformers_generate.py").read_text(encoding="utf-8")
    shown = (ast.get_docstring(ast.parse(source)) or "").splitlines()
    command = "$ python examples/transformers_generate.py"

    run = run_example(sys.executable, "examples/transformers_generate.py", timeout_s=110)

    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == shown[shown.index(command) + 1 :]

"""What the example of Ray Serve refuses before it starts a Ray, a store or an engine."""

from __future__ import annotations

import sys

import pytest


@pytest.mark.parametrize(("option", "value"), [("--replicas", "0"), ("--replicas", "-1"), ("--port", "70000")])
def test_a_number_that_cannot_be_is_refused_with_its_option_and_range(run_example, option, value):
    run = run_example(sys.executable, "examples/serve_openai.py", option, value, timeout_s=60)

    assert run.returncode == 2
    assert f"Invalid value for '{option}': {value} is not in the range" in run.stderr
    assert "Traceback" not in run.stderr

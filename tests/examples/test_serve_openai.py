"""What the example of Ray Serve refuses before it starts a Ray, a store or an engine."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("option", "value"), [("--replicas", "0"), ("--replicas", "-1"), ("--port", "70000")])
def test_a_number_that_cannot_be_is_refused_with_its_option_and_range(run_example, option, value):
    run = run_example(sys.executable, "examples/serve_openai.py", option, value, timeout_s=60)

    assert run.returncode == 2
    assert f"Invalid value for '{option}': {value} is not in the range" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_deployment_says_again_and_again_that_it_is_under_way(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    said = ""
    with import_module("serve_app").telling("the app is being deployed on the Ray at h:1", every_s=0.01):
        while said.count("the app is being deployed on the Ray at h:1") < 3:
            said += capsys.readouterr().err
    assert said.startswith("the app is being deployed on the Ray at h:1; this takes some minutes\n")

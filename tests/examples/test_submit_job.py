from __future__ import annotations

import sys

import pytest


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_submitted_job_uses_the_store(run_example):
    """With a token; CI runs the example without one besides, which differs in the first answer alone."""
    run = run_example("examples/submit_job.sh", "token", timeout_s=180, PYTHON=sys.executable)

    assert run.returncode == 0, run.stdout + run.stderr
    assert "asked without a token it answers 401" in run.stdout
    assert "job: another process loaded 8 blocks, identical: yes" in run.stdout


def test_an_unknown_mode_starts_nothing(run_example):
    run = run_example("examples/submit_job.sh", "closed", timeout_s=10, PYTHON=sys.executable)

    assert run.returncode == 2
    assert "usage:" in run.stderr
    assert run.stdout == ""


def test_a_missing_interpreter_is_named(run_example):
    run = run_example("examples/submit_job.sh", timeout_s=10, PYTHON="/nowhere/python")

    assert run.returncode == 2
    assert "/nowhere/python" in run.stderr

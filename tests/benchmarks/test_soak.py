"""The soak itself, short: real processes, real faults, the TCP lane. `make soak MINUTES=10` is the long one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

MORE = ("--clients", "4", "--json")

pytestmark = [pytest.mark.ray, pytest.mark.soak]


@pytest.mark.timeout(240)
def test_a_short_soak_finds_nothing(repo_root):
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.soak",
            *["--minutes", "0.2", "--faults", "2", "--seed", "1", "--clients", "4", "--json"],
        ],
        cwd=repo_root,
        env={**os.environ, "PYTHONPATH": str(repo_root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=220)
    except BaseException:
        process.send_signal(signal.SIGINT)  # so that it can end what it started
        try:
            process.wait(20)
        finally:
            process.kill()
        raise
    assert process.returncode == 0, f"{out[-4000:]}\n{err[-4000:]}"
    result = json.loads(out)
    assert result["findings"] == []
    assert sum(result["counts"]["operations"].values()) > 200
    assert result["counts"]["blocks"]["verified"] > 1000
    assert result["counts"]["blocks"]["from peers"] > 0
    assert result["counts"]["blocks"]["from disk"] > 0
    assert result["disk"]["blocks compared at the end, from disk"] > 0
    assert result["num_verified_at_end"] > 0
    assert sum(result["faults"].values()) >= 2

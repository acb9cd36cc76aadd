"""The fuzzer, as long as a test may take; `make fuzz FRAMES=1000000` is the long run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

NUM_FRAMES = 20_000


@pytest.mark.timeout(300)
def test_wrong_frames_find_nothing(repo_root):
    run = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--frames", str(NUM_FRAMES), "--json"],
        cwd=repo_root,
        env={**os.environ, "PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    outcome = json.loads(run.stdout)
    assert outcome["findings"] == []
    assert sum(outcome["frames"].values()) >= NUM_FRAMES
    assert outcome["frames"]["answers"] > 0
    assert outcome["healthy"]["num_verified_blocks"] > 0

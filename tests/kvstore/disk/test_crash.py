"""SIGKILL while blocks are written, and torn files: right bytes or a miss. See tests/kvstore/disk/crash.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
KILLS = int(os.environ.get("RAYKV_DISK_KILLS", "15"))


def test_a_store_that_is_killed_while_it_writes():
    command = [sys.executable, "-m", "tests.kvstore.disk.crash", "--kills", str(KILLS)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["kills"] == KILLS + 1
    assert found["num_right"] > 0, found
    assert found["lives_beside_other_sizes"] > 0, found

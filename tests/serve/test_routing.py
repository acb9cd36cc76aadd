"""The benchmark of routers, small, with replicas that only take time: real Ray Serve, the same requests for each."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from running import ROOT

RUN_S = 500


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(RUN_S + 60)
def test_more_of_the_prompts_is_cached_than_by_turns():
    words = ["--simulated", "--json", "--requests", "64", "--routers", "prefix,round robin"]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.serve_routing", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip

    assert run.returncode == 0, run.stderr[-5_000:]
    rows = json.loads(run.stdout[run.stdout.index('{\n "benchmark"') :])["rows"]
    shares = {row["router"]: row["cached_share"] for row in rows}
    assert {row["num_requests"] for row in rows} == {64}
    assert shares["prefix"] > shares["round robin"], rows

"""A rolling restart under a running app: every request is answered, and what was cached is found afterwards."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from running import ROOT

RUN_S = 1_200


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(RUN_S + 60)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM here; `make test-serve` has it")
def test_nodes_get_a_new_setting_while_requests_run_and_keep_their_blocks():
    run = subprocess.run(
        [sys.executable, "tests/serve/rolling.py"], cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert run.returncode == 0, run.stderr[-5_000:]
    seen = json.loads(run.stdout.splitlines()[-1])

    assert seen["failures"] == []
    # The engines' own caches hold less than half of the prompts that are asked in a round.
    assert max(seen["cache_tokens"]) < seen["kept_tokens_before"] / 4, seen
    assert seen["num_answers_meanwhile"] > 0, seen
    assert [said["is_warm"] for said in seen["restarted"].values()] == [True, True], seen
    assert not set(seen["epochs_before"]) & set(seen["epochs_after"])
    assert seen["setting"] == 7.0
    # Of the prompts that nobody asked meanwhile: nothing of them was computed and saved anew.
    assert seen["kept_tokens_after"] >= 0.9 * seen["kept_tokens_before"] > 0, seen
    assert 32 * seen["kept_blocks_of_store"] >= 0.9 * seen["kept_tokens_before"], seen

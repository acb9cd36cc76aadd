"""The vLLM examples, as a reader would run them; only where vLLM is installed."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

START_S = 60
RUN_S = 280

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not in this environment; `make test-vllm` has it"
)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(RUN_S + 2 * START_S)
def test_answers_are_the_same_cold_and_warm_and_blocks_come_from_the_store(run_example):
    run = run_example(sys.executable, "examples/vllm_cold_warm.py", "--json", timeout_s=RUN_S)

    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(run.stdout.splitlines()[-1])
    assert all(row["identical"] for row in rows)
    assert [row["num_tokens_from_store"] for row in rows] == [0, 32, 32, 992]
    # A thousand tokens: far from the threshold, so that a busy machine does not matter.
    assert rows[3]["warm_first_token_s"] < rows[3]["cold_first_token_s"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(RUN_S + 2 * START_S)
def test_what_one_node_prefilled_another_decodes_the_same_by_hand_offs_and_then_through_the_store(run_example):
    run = run_example(sys.executable, "examples/vllm_prefill_decode.py", "--json", "--both", timeout_s=RUN_S)

    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(run.stdout.splitlines()[-1])
    assert all(row["identical"] for row in rows)
    for handoff in (True, False):
        of_way = [row for row in rows if row["handoff"] == handoff]
        block = of_way[1]["num_tokens"]  # "one block exactly": the smallest that this vLLM's attention takes
        assert block in (16, 32)
        found = [row["num_tokens_found"] for row in of_way]
        assert found == [row["num_tokens"] // block * block for row in of_way] == [0, block, block, 992, *found[4:]]
        assert len(found) == 6

"""The benchmarks of serving, small: benchmarks.serving_gpu with one engine, benchmarks.serving with two of its ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN_S = 400


def run(tmp_path, module, *words, before=""):
    """Run a benchmark; return what it wrote to --output."""
    output = tmp_path / "found.json"
    program = f"from benchmarks import {module} as module\n{before}\nmodule.main()"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-c", program, "--device", "cpu", "--rounds", "1", "--output", str(output), *words],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5_000:]
    return json.loads(output.read_text(encoding="utf-8"))


def test_first_tokens_from_the_store_in_one_process_for_each_way(tmp_path):
    found = run(tmp_path, "serving_gpu", "--way", "raykv", "--tokens", "128", "--capacity", "64MiB")
    assert found["failed"] == {}
    assert {(row["way"], row["state"]) for row in found["rows"]} == {("raykv", "cold"), ("raykv", "warm")}


def test_first_tokens_from_the_store_beside_a_dict_of_tensors(tmp_path):
    """Two engines in place of four; tests/benchmarks/test_serving.py has the ratios, which are of all four."""
    two = (
        "module.ratios = lambda rows: []\n"
        "made = module.Engines\n"
        "module.Engines = lambda model, ways: made(model, {name: ways[name] for name in ('raykv', 'dict')})"
    )
    found = run(tmp_path, "serving", "--part", "first-tokens", "--tokens", "64", before=two)
    assert found["refused"] == {}
    assert {(row["way"], row["state"]) for row in found["rows"]} == {
        (way, state) for way in ("raykv", "dict") for state in ("cold", "warm")
    }

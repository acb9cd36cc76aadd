"""What the serving benchmark for a GPU makes of its times and answers; its engines need a GPU and run by hand."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.serving_gpu import kv_bytes_of_token, ratios, same_answers, save_config


def row(way, state, first_token_s, num_tokens=10_000):
    return {"way": way, "state": state, "num_tokens": num_tokens, "first_token_s": first_token_s}


def test_a_token_of_the_large_model_is_128_kib():
    assert kv_bytes_of_token("cuda") == 128 << 10


def test_the_bound_is_the_engines_own_cache_and_one_copy_over_the_link():
    rows = [row("none", "cold", 0.2), row("own", "cold", 0.2), row("own", "again", 0.01)]
    rows += [row("raykv", "cold", 0.21), row("raykv", "again", 0.01), row("raykv", "warm", 0.0462144)]
    more = {"none": {"link_gb_per_s": 65.536}, "own": {"link_gb_per_s": 65.536}, "raykv": {}}
    assert ratios({"rows": rows, "more": more}, "cuda") == [
        {"way": "own", "num_tokens": 10_000, "cold / no connector": 1.0},
        {"way": "raykv", "num_tokens": 10_000, "cold / no connector": 1.05},
        {"way": "raykv", "num_tokens": 10_000, "bound_s": 0.03, "warm / bound": 1.54},
    ]


def test_without_a_link_there_is_no_bound():
    rows = [row("own", "again", 0.01), row("raykv", "warm", 0.05)]
    assert ratios({"rows": rows, "more": {"own": {"link_gb_per_s": None}, "raykv": {}}}, "cpu") == []


def test_answers_are_compared_with_the_prefix_cache_of_both_engines():
    answers = {
        "own": {(512, 0): {"cold": [1], "again": [2]}, (512, 1): {"cold": [3], "again": [3]}},
        "raykv": {(512, 0): {"cold": [1], "again": [2], "warm": [2]}, (512, 1): {"again": [3], "warm": [4]}},
    }
    found = {(row["way"], row["state"]): row for row in same_answers(answers)}
    warm, cold = found["raykv", "warm"], found["own", "cold"]
    assert (warm["num_prompts"], warm["as_own_cache_of_this_engine"], warm["as_own_cache_of_plain_engine"]) == (2, 1, 1)
    assert (cold["num_prompts"], cold["as_own_cache_of_this_engine"]) == (2, 1)


def test_the_config_is_one_that_transformers_reads(tmp_path):
    config = json.loads(Path(save_config(str(tmp_path), "cuda"), "config.json").read_text())
    assert (config["architectures"], config["num_hidden_layers"], config["num_key_value_heads"]) == (
        ["LlamaForCausalLM"], 32, 8,
    )  # fmt: skip

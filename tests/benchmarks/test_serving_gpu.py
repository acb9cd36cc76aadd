"""What the serving benchmark for a GPU makes of its times and answers; its engines need a GPU and run by hand."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.serving_gpu import kv_bytes_of_token, ratios, rows_of, same_answers, save_config


def row(way, state, first_token_s, num_tokens=10_000):
    return {"way": way, "state": state, "num_tokens": num_tokens, "first_token_s": first_token_s}


def answer(*tokens, first_token_s=0.1, num_cached=0):
    return {
        "tokens": list(tokens), "first_token_s": first_token_s, "times_s": [first_token_s], "num_cached": num_cached,
        "num_slow": 1,
    }  # fmt: skip


def test_a_token_of_the_large_model_is_128_kib():
    assert kv_bytes_of_token("cuda") == 128 << 10


def test_the_bound_is_the_engines_own_cache_and_one_copy_over_the_link():
    rows = [row("none", "cold", 0.2), row("own", "cold", 0.2), row("own", "again", 0.01)]
    rows += [row("raykv", "cold", 0.21), row("raykv", "warm", 0.0462144)]
    assert ratios(rows, 65.536, "cuda") == [
        {"way": "own", "num_tokens": 10_000, "cold / no connector": 1.0},
        {"way": "raykv", "num_tokens": 10_000, "cold / no connector": 1.05},
        {"way": "raykv", "num_tokens": 10_000, "bound_s": 0.03, "warm / bound": 1.54},
    ]


def test_without_a_link_there_is_no_bound():
    assert ratios([row("own", "again", 0.01), row("raykv", "warm", 0.05)], None, "cpu") == []


def test_a_time_is_the_median_of_all_rounds_but_the_first():
    answers = {number: answer(1, first_token_s=took_s, num_cached=512 - number)
               for number, took_s in enumerate((9.0, 0.3, 0.1, 0.2))}  # fmt: skip
    assert rows_of({("raykv", "warm", 512): answers}) == [
        row("raykv", "warm", 0.2, 512) | {"times_s": [0.3, 0.1, 0.2], "num_cached": 509, "num_slow": 3}
    ]


def test_answers_are_compared_with_the_plain_engines_prefix_cache_prompt_by_prompt():
    times = {
        ("own", "again", 512): {0: answer(1, 2), 1: answer(3, 4)},
        ("own", "again", 999): {0: answer(5, 6)},
        ("raykv", "warm", 512): {0: answer(1, 2), 1: answer(1, 2)},
        ("raykv", "warm", 999): {0: answer(5, 6), 1: answer(7, 8)},
    }
    found = {row["way"]: row for row in same_answers(times)}
    assert found["raykv"] == {
        "way": "raykv", "state": "warm", "num_prompts": 3, "num_same": 2, "num_different_answers": 2,
    }  # fmt: skip


def test_the_config_is_one_that_transformers_reads(tmp_path):
    config = json.loads(Path(save_config(str(tmp_path), "cuda"), "config.json").read_text())
    assert (config["architectures"], config["num_hidden_layers"], config["num_key_value_heads"]) == (
        ["LlamaForCausalLM"], 32, 8,
    )  # fmt: skip

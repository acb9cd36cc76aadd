from __future__ import annotations

import importlib
import json
import sys

import pytest

BLOCK_BYTES = 8 * 2 * 4 * 32 * 64 * 4


@pytest.fixture
def demo(repo_root, monkeypatch):
    monkeypatch.syspath_prepend(str(repo_root / "examples"))
    return importlib.import_module("prefill_decode")


def row(hit: str, **changes: object) -> dict[str, object]:
    same = {"kv_identical": True, "logits_identical": True, "tokens_identical": True, "identical": True}
    moved = {"nixl_bytes": 10 if hit == "peer" else 0, "prefill_node": {}}
    return {"request": f"a {hit}", "hit": hit, **moved, **same, **changes}


def run_demo(run_example, *options):
    command = (sys.executable, "examples/prefill_decode.py", "--json", *options)
    run = run_example(*command, timeout_s=200)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def check_stored(result):
    rows, summary = result["rows"], result["summary"]
    assert summary["problems"] == []
    assert summary["num_identical"] == summary["num_requests"] == len(rows) >= 8
    assert all(row["kv_identical"] and row["logits_identical"] and row["tokens_identical"] for row in rows)
    kinds = ("full_peer_hits", "engine_hits", "local_hits", "mixed_hits", "partial_hits", "misses")
    assert all(summary[f"num_{kind}"] >= 1 for kind in kinds), summary
    # NIXL's own count, the loads' count and the blocks that came from the peer say the same.
    from_peer = sum(row["num_blocks_peer"] for row in rows) * BLOCK_BYTES
    assert sum(row["nixl_bytes"] for row in rows) == from_peer > 0
    assert summary["nixl_bytes"] == from_peer + sum(row["prefill_node"]["nixl_bytes"] for row in rows)
    for each in rows:
        parts = ("num_blocks_engine", "num_blocks_own", "num_blocks_peer", "num_blocks_recomputed")
        assert sum(each[part] for part in parts) == each["num_blocks"] == each["num_prompt_tokens"] // 32
        assert each["nixl_gb_per_s"] > 0 or each["num_blocks_peer"] == 0
        assert each["ttft_cached_s"] > 0 < each["ttft_uncached_s"]
    assert [each["hit"] for each in rows[:3]] == ["too short", "peer", "engine"]
    assert [each["num_prompt_tokens"] for each in rows[1:3]] == [64, 65]  # on a block boundary, one past it


def check_handed_off(result, route):
    rows, summary = result["rows"], result["summary"]
    assert summary["problems"] == []
    assert summary["num_identical"] == summary["num_requests"] == len(rows) >= 8
    assert summary["routes"] == [route]
    assert {row["hit"] for row in rows} == {"peer", "engine", "mixed", "too short"}
    assert all(row["num_blocks_recomputed"] == row["num_blocks_own"] == 0 for row in rows)
    # A hand-off is whole, or not needed; nothing of one is found by another.
    needed = [row["num_blocks"] for row in rows if row["num_blocks_engine"] < row["num_blocks"]]
    assert summary["nixl_bytes"] == sum(needed) * BLOCK_BYTES > 0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_all_requests_are_identical_to_a_run_without_a_store_by_hand_offs_and_then_by_the_store(
    run_example, demo, capsys
):
    """Hand-offs come first: had they stored anything, the store's hits would not be those of a new one."""
    handed_off, stored = run_demo(run_example, "--both", "--new-tokens", "4")
    assert (handed_off["handoff"], stored["handoff"]) == (True, False)
    check_handed_off(handed_off, "host")
    check_stored(stored)
    for result in (handed_off, stored):
        demo.show(result)
        shown = capsys.readouterr().out
        num_requests = result["summary"]["num_requests"]
        assert f"{num_requests} of {num_requests} requests identical" in shown
        assert sum(line.rstrip().endswith(" yes") for line in shown.splitlines()) == num_requests


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.timeout(240)
def test_all_requests_are_identical_to_a_run_without_a_store_on_a_gpu(run_example):
    for package in ("ray", "transformers"):  # Where there is a GPU, they may not be.
        pytest.importorskip(package, reason=f"needs {package}")
    check_stored(run_demo(run_example, "--store", "--new-tokens", "8", "--device", "cuda"))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.multi_gpu(2)
@pytest.mark.timeout(240)
def test_hand_offs_from_gpu_to_gpu_give_the_same_answers_and_store_nothing(run_example):
    for package in ("ray", "transformers"):
        pytest.importorskip(package, reason=f"needs {package}")
    check_handed_off(run_demo(run_example, "--handoff", "--new-tokens", "4", "--device", "cuda"), "gpu")


@pytest.mark.parametrize("name", ["kv_identical", "logits_identical", "tokens_identical"])
def test_a_difference_is_a_problem(demo, name):
    rows = [row(hit) for hit in demo.REQUIRED]
    assert demo.summarize(rows, 10)["problems"] == []
    rows[0] = row(rows[0]["hit"], **{name: False, "identical": False})

    summary = demo.summarize(rows, 10)

    assert summary["num_identical"] == len(rows) - 1
    assert len(summary["problems"]) == 1
    assert name.split("_")[0] in summary["problems"][0]


def test_a_missing_class_of_hits_is_a_problem(demo):
    for missing in demo.REQUIRED:
        rows = [row(hit, nixl_bytes=1) for hit in demo.REQUIRED if hit != missing]
        assert demo.summarize(rows, len(rows))["problems"] == [f"no request was of the class {missing!r}"]


def test_bytes_that_nixl_did_not_move_are_a_problem(demo):
    rows = [row(hit) for hit in demo.REQUIRED]
    assert demo.summarize(rows, 0)["problems"] == ["NIXL moved no bytes"]
    assert len(demo.summarize(rows, 9)["problems"]) == 1


@pytest.mark.parametrize(
    ("num_blocks", "engine", "own", "peer", "expected"),
    [
        (0, 0, 0, 0, "too short"),
        (3, 0, 0, 0, "miss"),
        (3, 0, 0, 2, "partial"),
        (3, 1, 0, 1, "partial"),
        (3, 3, 0, 0, "engine"),
        (3, 0, 3, 0, "own"),
        (3, 0, 0, 3, "peer"),
        (3, 1, 2, 0, "mixed"),
        (3, 0, 1, 2, "mixed"),
    ],
)
def test_hit_classes(demo, num_blocks, engine, own, peer, expected):
    counts = {"num_blocks": num_blocks, "num_blocks_engine": engine, "num_blocks_own": own, "num_blocks_peer": peer}
    assert demo.hit_class(counts) == expected
    assert expected in demo.CLASSES

"""`kvstore replay` and `kvstore trace make` as a person and a program see them."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvstore import cli
from kvstore.replay import files
from kvstore.tools.documents import as_document

ROOT = Path(__file__).resolve().parents[3]


def run(*words):
    return CliRunner().invoke(cli.main, [str(word) for word in words], prog_name="kvstore")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "conversation.jsonl"
    result = run("trace", "make", "conversation", "--seconds", 60, "--seed", 1, "--output", path)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.endswith(f" requests written to {path}\n")
    return path


@pytest.mark.parametrize("words", [["replay"], ["trace"], ["trace", "make"]], ids=" ".join)
def test_help(words):
    result = run(*words, "--help")
    assert result.exit_code == 0
    assert result.output.startswith("Usage: kvstore")
    command = cli.main
    for word in words:
        command = command.commands[word]
    assert all(parameter.help for parameter in command.params if isinstance(parameter, click.Option))


def test_help_describes_every_kind():
    from kvstore.replay.kinds import KINDS

    shown = run("trace", "make", "--help").output
    assert all(f"\n  {kind} " in shown for kind in KINDS)


def test_a_table_for_a_person(trace):
    result = run("replay", trace, "--blocks", "50,500")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "conversation.jsonl (mooncake)" in result.stdout
    for word in ("default", "lru", "bound", "500", "hit ratio", "evictions", "us/ref"):
        assert word in result.stdout


def test_json_is_one_list_of_rows(trace):
    result = run(
        "replay", trace, "--blocks", "500", "--blocks", "50", "--policy", "lru", "--policy", "bound,lru", "--json"
    )
    assert (result.exit_code, result.stderr) == (0, "")
    rows = json.loads(result.stdout)
    assert result.stdout == as_document(rows)
    assert [(row["capacity_blocks"], row["policy"]) for row in rows] == [
        (50, "lru"),
        (50, "bound"),
        (500, "lru"),
        (500, "bound"),
    ]
    wanted = {"policy", "capacity_blocks", "prefix_hit_ratio", "num_references", "num_hits", "num_evictions"}
    assert all(
        wanted | {"us_per_reference", "modelled_ttft_p50_s", "modelled_ttft_p99_s"} == row.keys() for row in rows
    )
    assert rows[0]["num_hits"] <= rows[1]["num_hits"] <= rows[3]["num_hits"]
    assert all(len(line) < 240 for line in result.stdout.splitlines())


def test_output_is_a_document_with_its_origin(trace, tmp_path):
    result = run(
        "replay", trace, "--blocks", 100, "--output", tmp_path / "o.json", "--plot", tmp_path / "p.svg", "--json"
    )
    assert result.exit_code == 0, result.output
    text = (tmp_path / "o.json").read_text()
    document = json.loads(text)
    assert text == as_document(document)
    assert document["rows"] == json.loads(result.stdout)
    assert {"hardware", "versions", "commit", "mode", "jitter_s", "block_bytes"} <= document.keys()
    assert document["trace"]["num_references"] == document["rows"][0]["num_references"]
    assert (tmp_path / "p.svg").read_text().startswith("<svg")


def test_nodes_and_jitter(trace):
    words = ("--nodes", 3, "--routing", "prefix", "--tie-blocks", 1, "--jitter-s", 3, "--policy", "lru", "--json")
    (row,) = json.loads(run("replay", trace, "--blocks", 100, *words).stdout)
    assert (row["num_nodes"], row["routing"], row["tie_blocks"]) == (3, "prefix", 1)
    assert 1 / 3 <= row["largest_node_share"] < 1


def test_disks_peers_and_a_restart(trace):
    words = ("--nodes", 2, "--rows", 100, "--policy", "lru", "--disk-blocks", 5000, "--restart-at", 50)
    (row,) = json.loads(run("replay", trace, "--blocks", 300, *words, "--json").stdout)
    assert (row["disk_blocks"], row["restart_at"]) == (5000, 50)
    tiers = [row[f"num_hits_{tier}"] for tier in ("memory", "disk", "peer")]
    assert sum(tiers) == row["num_hits"]
    assert min(tiers) > 0
    assert row["num_hits_disk_after_restart"] > 0
    shown = run("replay", trace, "--blocks", 300, *words).stdout
    for word in ("memory", "disk", "peer", "on disk", "5,000"):
        assert word in shown
    assert "…" not in shown


def test_a_real_replay_gets_the_plan_and_stands_beside_the_simulator(trace):
    seen = []

    def real(found, plan, settings, begin):
        seen.append((len(found.requests), plan, settings))
        begin("real")()
        return [{"policy": "lru", "capacity_blocks": size, "num_verified": 7} for size in plan.capacities]

    words = ("--mode", "real", "--blocks", "20,30", "--rows", 40, "--disk-path", "d", "--wait-written", "--json")
    rows = json.loads(CliRunner().invoke(cli.main, ["replay", str(trace), *map(str, words)], obj=real).stdout)
    assert [(row["mode"], row["capacity_blocks"]) for row in rows] == [
        ("real", 20), ("simulate", 20), ("real", 30), ("simulate", 30),
    ]  # fmt: skip
    ((num_requests, plan, settings),) = seen
    assert (num_requests, plan.num_nodes, plan.disk_blocks, plan.policies) == (40, 2, 0, ["lru"])
    assert (settings.block_bytes, settings.disk_path, settings.is_settled) == (65536, str(Path("d").absolute()), True)


def test_the_stores_own_policy_has_the_name_that_start_gives_it(trace):
    rows = json.loads(run("replay", trace, "--blocks", "50", "--policy", "learned,default", "--json").stdout)
    assert [row["policy"] for row in rows] == ["default"]


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        (["--blocks", "0"], "InvalidRequest", "--blocks: wanted numbers of blocks from 1 to 8388608, got '0'"),
        (["--blocks", "10,-5"], "InvalidRequest", "--blocks: wanted numbers of blocks from 1 to 8388608, got '-5'"),
        (["--blocks", "many"], "InvalidRequest", "got 'many'; write them like 1000,5000"),
        (["--blocks", ","], "InvalidRequest", "got ''"),
        (["--blocks", "9" * 50], "InvalidRequest", "got '9999"),
        (["--blocks", "9", "--policy", "mru"], "ConfigError", "--policy: wanted default, lru, bound or all, got 'mru'"),
        (["--blocks", "9", "--format", "xml"], "ConfigError", "wanted mooncake, bailian, weka, csv, got 'xml'"),
        (["--blocks", "9", "--block-tokens", "-1"], "InvalidRequest", "--block-tokens: wanted 1 or more, got -1"),
        (["--blocks", "9", "--nodes", "0"], "InvalidRequest", "--nodes: wanted 1 to 1024, got 0"),
        (["--blocks", "9", "--routing", "x"], "InvalidRequest", "--routing: wanted round-robin or prefix, got 'x'"),
        (["--blocks", "9", "--jitter-s", "nan"], "InvalidRequest", "--jitter-s: wanted a number of seconds"),
        (["--blocks", "9", "--load-gb-per-s", "0"], "InvalidRequest", "--load-gb-per-s: wanted a number from 1e-15"),
        (["--blocks", "9", "--block-bytes", "0"], "InvalidRequest", "--block-bytes: wanted a number from 1e-15"),
        (["--blocks", "9", "--block-bytes", "x"], "ConfigError", "--block-bytes: wanted a size"),
        (["--blocks", "9", "--rows", "-1"], "InvalidRequest", "--rows: wanted 0 or more, got -1; 0 takes all"),
        (["--blocks", "9", "--disk-blocks", "-1"], "InvalidRequest", "--disk-blocks: wanted 0 to 8388608, got -1"),
        (["--blocks", "9", "--restart-at", "5"], "InvalidRequest", "and --disk-blocks with it, got 5 and None"),
        (["--blocks", "9", "--disk-blocks", "9", "--rows", "5", "--restart-at", "5"], "InvalidRequest",
         "--restart-at: wanted a number below that of the requests, 5, got 5"),
        (["--blocks", "9", "--wait-written"], "InvalidRequest", "--wait-written: wanted --mode real with them"),
        (["--blocks", "9", "--disk-path", "/x"], "InvalidRequest", "--disk-path, --wait-written: wanted --mode real"),
        (["--blocks", "9", "--mode", "real", "--policy", "bound"], "ConfigError", "with --mode real, got bound"),
        (["--blocks", "1", "--mode", "real"], "InvalidRequest", "--mode real: wanted 2 or more --blocks"),
        (["--blocks", "9", "--mode", "real", "--nodes", "17"], "InvalidRequest", "up to 16 --nodes, got 9, 0 and 17"),
        (["--blocks", "9", "--mode", "real", "--block-bytes", "5000"], "InvalidRequest", "wanted a multiple of 4096"),
        (["--blocks", "9", "--mode", "real", "--plot", "a.svg"], "InvalidRequest", "--plot: wanted --mode simulate"),
        (["--blocks", "9", "--plot", "a.jpg"], "InvalidRequest", "--plot: wanted a name that ends in .svg or .png"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line_and_exit_status_2(trace, words, kind, says):
    result = run("replay", trace, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{kind}: ")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    shown = json.loads(run("replay", trace, *words, "--json").stdout)
    assert shown["error"] == kind
    assert says in shown["text"]


def test_a_bad_trace_names_its_line(tmp_path):
    (tmp_path / "bad").write_text('{"timestamp": 0, "input_length": 1, "hash_ids": [0]}\n{"timestamp": \n')
    result = run("replay", tmp_path / "bad", "--blocks", 5, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"] == "InvalidRequest"
    assert "line 2: wanted a line of the mooncake format" in json.loads(result.stdout)["text"]
    assert "No such file" in run("replay", tmp_path / "none", "--blocks", 5).stderr


def test_a_full_disk_leaves_no_half_file_and_the_table_is_shown(trace, tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    for words in (("replay", trace, "--blocks", 50), ("trace", "make", "loop", "--seconds", 10)):
        result = run(*words, "--output", tmp_path / "o")
        assert result.exit_code == 2
        assert "got No space left on device; no part of it was left" in result.stderr
        assert ("bound" in result.stdout) == (words[0] == "replay")
    assert os.listdir(tmp_path) == []


def test_make_writes_the_same_to_stdout_and_to_a_file(trace):
    assert run("trace", "make", "conversation", "--seconds", 60, "--seed", 1).stdout == trace.read_text()


@pytest.mark.parametrize(("words", "kind"), [(["chat"], "ConfigError"), (["loop", "--seconds", "0"], "InvalidRequest")])
def test_make_refuses(words, kind):
    result = run("trace", "make", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{kind}: ")


def test_stdout_that_is_full_is_a_typed_error():
    code = "from kvstore.cli import main; main()"
    command = [sys.executable, "-c", code, "trace", "make", "loop", "--seconds", "10"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONUNBUFFERED", None)  # Python itself writes once more when it ends.
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 2
    assert done.stderr.startswith("ConfigError: wanted to write ")
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("statement", "others"), [("import kvstore", {"kvstore.pool"}), ("import kvstore.cli", set())])
def test_what_is_not_asked_for_is_not_imported(statement, others):
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert loaded.isdisjoint({"torch", "ray", "matplotlib", "kvstore.replay.report", "kvstore.replay.traces", *others})
    assert ("kvstore.replay" in loaded) == (statement == "import kvstore.cli")

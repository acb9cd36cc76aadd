"""The benchmark of eviction policies: a row for each trace, policy and capacity, in the form of all results."""

import json

import pytest

from benchmarks import eviction
from kvstore.replay.kinds import KINDS
from kvstore.replay.report import POLICIES
from kvstore.tools.documents import as_document


def run(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["eviction.py", "--seconds", "20", "--blocks", "20,500", *map(str, words)])
    eviction.main()


def test_all_kinds_and_policies(monkeypatch, capsys, tmp_path):
    run(monkeypatch, "--json", "--output", tmp_path / "o.json")
    text = capsys.readouterr().out
    document = json.loads(text)
    assert text == as_document(document) == (tmp_path / "o.json").read_text()
    assert document["benchmark"] == "eviction"
    assert [trace["name"] for trace in document["traces"]] == list(KINDS)
    keys = [(row["trace"], row["capacity_blocks"], row["policy"]) for row in document["rows"]]
    assert keys == [(kind, size, policy) for kind in KINDS for size in (20, 500) for policy in POLICIES]
    for row in document["rows"]:
        assert row["of_bound"] is None or 0 <= row["of_bound"] <= 1
        assert len(json.dumps(row)) < 240


def test_a_table_and_a_file(monkeypatch, capsys, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "hash_ids": [0]}\n' * 2)
    run(monkeypatch, "--kinds", "loop", "--policies", "lru,bound", "--trace", path)
    shown = capsys.readouterr().out
    assert "loop" in shown
    assert "own.jsonl" in shown
    assert shown.count("bound") == 2
    assert "0.5000" in shown


def test_a_share_of_nothing_is_none():
    assert eviction.share(3, 4) == pytest.approx(0.75)
    assert eviction.share(0, 0) is None
    assert eviction.share(1, None) is None

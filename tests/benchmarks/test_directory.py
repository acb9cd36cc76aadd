"""The benchmark of the directory's index: a row for each call, and every answer checked."""

import json

from benchmarks import directory
from kvstore.tools.documents import as_document


def test_every_call_has_a_row(monkeypatch, capsys, tmp_path):
    words = ["--nodes", "3", "--blocks", "20000", "--json", "--output", tmp_path / "o.json"]
    monkeypatch.setattr("sys.argv", ["directory.py", *map(str, words)])
    directory.main()
    text = capsys.readouterr().out
    document = json.loads(text)
    assert text == as_document(document) == (tmp_path / "o.json").read_text()
    assert document["num_entries"] == 60_000
    assert 16 < document["bytes_per_entry"] <= 64
    assert [row["what"] for row in document["rows"]] == [
        "announce a batch", "locate a prompt", "resync a batch", "forget a node, a step", "locate a prompt afterwards",
    ]  # fmt: skip
    assert all(0 < row["p50_ms"] <= row["p99_ms"] <= row["most_ms"] for row in document["rows"])

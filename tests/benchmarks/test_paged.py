"""The benchmark of the paged cache: a row for each call and cache, in the form of all results."""

import json

from benchmarks import paged
from kvstore.tools.documents import as_document


def no_sglang(page_size, num_tokens):
    raise ImportError("not here")


def test_every_call_has_a_row(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("benchmarks.paged_sglang.make_all", no_sglang)
    words = ["--tokens", "1024", "--edges", "1,4", "--rounds", "2", "--json", "--output", tmp_path / "o.json"]
    monkeypatch.setattr("sys.argv", ["paged.py", *map(str, words)])
    paged.main()
    text = capsys.readouterr().out
    document = json.loads(text)
    assert text == as_document(document) == (tmp_path / "o.json").read_text()
    assert document["note"] == "without SGLang: not here"
    keys = [(row["page_size"], row["edges"], row["call"]) for row in document["rows"]]
    assert keys == [(size, edges, call) for size in (1, 16) for edges in (1, 4) for call in paged.CALLS]
    assert all(0 < row["least_us"] <= row["us"] <= row["greatest_us"] for row in document["rows"])

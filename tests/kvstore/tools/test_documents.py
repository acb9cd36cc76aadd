"""What is printed as a document can be read back, a row a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.tools.documents import as_document

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"rows": [{"call": f"call {i}", "us": i / 3} for i in range(40)], "of": None},
        {"nested": {"a": ["long text " * 30], "b": [[1] * 200, {"c": "\u00e9\n" * 200}]}},
        {"1": "a key " * 50},
    ],
)
def test_it_can_be_read_back(value):
    assert json.loads(as_document(value)) == value


def test_a_row_is_a_line():
    rows = [{"lane": "tcp", "block_bytes": 65536, "us": i} for i in range(20)]
    lines = as_document({"rows": rows}).splitlines()
    assert [json.loads(line.rstrip(",")) for line in lines[2:-2]] == rows


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("*.json")), ids=lambda path: path.stem)
def test_a_committed_result_is_such_a_document(path):
    text = path.read_text(encoding="utf-8")
    assert text == as_document(json.loads(text))

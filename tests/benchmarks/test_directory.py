"""The benchmark of the directory's shards: a row for each call, and every answer checked."""

import json

from benchmarks import directory
from kvstore.tools.documents import as_document

WHAT = [
    "announce a batch", "locate a prompt", "walk a prompt", "resync a batch", "forget a node, a step",
    "locate a prompt afterwards", "restart, a batch", "restart, a prompt between",
]  # fmt: skip


def test_every_call_of_each_shard_has_a_row(monkeypatch, capsys, tmp_path):
    words = ["--nodes", "3", "--blocks", "20000", "--shards", "2", "--chain", "500"]
    monkeypatch.setattr("sys.argv", ["directory.py", *words, "--json", "--output", str(tmp_path / "o.json")])
    directory.main()
    text = capsys.readouterr().out
    document = json.loads(text)
    assert text == as_document(document) == (tmp_path / "o.json").read_text()
    assert sum(shard["num_entries"] for shard in document["shards"]) == 60_000
    assert all(16 < shard["bytes_per_entry"] <= 64 for shard in document["shards"])
    assert [(row["shard"], row["what"]) for row in document["rows"]] == [(at, what) for at in range(2) for what in WHAT]
    assert all(0 < row["p50_ms"] <= row["p99_ms"] <= row["most_ms"] for row in document["rows"])
    assert {"hardware", "versions", "commit"} <= document.keys()


def test_a_node_announces_each_block_to_one_shard():
    cluster = directory.Cluster(num_nodes=1, num_blocks=40_000, num_chain_blocks=100, num_shards=3)
    pieces = [list(cluster.batches(0, shard)) for shard in range(3)]
    added = [b"".join(directory.decode_batch(message).added for message in each) for each in pieces]
    assert sum(map(len, added)) == 40_000 * 32
    assert [len(each) for each in pieces] == [-(-len(data) // (directory.PIECE_BLOCKS * 32)) for data in added]

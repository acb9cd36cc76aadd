"""What `kvstore status` prints of a directory: a line for each shard."""

from __future__ import annotations

import pytest

from kvstore.tools.terminal import show_status

SHARD = {"num_blocks": 1234, "num_nodes": 4, "num_bytes": 3 << 20, "num_dropped": 0}


@pytest.mark.parametrize(
    ("shards", "lines"),
    [
        ([SHARD], ["directory: 1,234 blocks of 4 nodes in 3 MiB"]),
        (
            [SHARD, SHARD | {"num_dropped": 5000}],
            [
                "directory, shard 0: 1,234 blocks of 4 nodes in 3 MiB",
                "directory, shard 1: 1,234 blocks of 4 nodes in 3 MiB   not noted, for lack of room: 5,000",
            ],
        ),
        ([SHARD, {"error": "no answer"}], ["directory, shard 1: no answer"]),
        ([], []),
    ],
)
def test_each_shard_has_a_line(capsys, shards, lines):
    stats = {"name": "s", "nodes": {}, "without_store": [], "problems": {}, "starting": {}, "directory": shards}
    show_status(stats, 1 << 30)
    shown = capsys.readouterr().out.splitlines()
    assert len([line for line in shown if line.startswith("directory")]) == len(shards)
    assert [line for line in lines if line not in shown] == [], shown

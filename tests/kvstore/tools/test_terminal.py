"""What `kvstore status` prints: a line for each shard of the directory, and for each tenant of a node."""

from __future__ import annotations

import os
import shlex
import sys

import pytest

from kvstore.config import StoreConfig
from kvstore.tools.doctor import Check, Status
from kvstore.tools.settings import settings_of
from kvstore.tools.terminal import progress, show_check, show_status

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
    show_status(stats, StoreConfig())
    shown = capsys.readouterr().out.splitlines()
    assert len([line for line in shown if line.startswith("directory")]) == len(shards)
    assert [line for line in lines if line not in shown] == [], shown


def test_the_settings_that_are_not_the_defaults_are_shown_as_set_takes_them(capsys):
    stats = {"name": "s", "nodes": {}, "without_store": [], "problems": {}, "starting": {}}
    show_status(stats, StoreConfig(name="s"))
    assert "settings: the defaults" in capsys.readouterr().out.splitlines()
    config = StoreConfig(name="s", lease_ttl_s=60.0, metrics=False, tenants={"a": {"max_bytes": "1MiB"}})
    show_status(stats, config)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("settings: ")]
    given = shlex.split(line.removeprefix("settings: "))
    assert StoreConfig(name="s", **settings_of(given)) == config


@pytest.mark.parametrize(
    "path", ["/m/:cd:/x", "/a\tb", "/a  b", "/a[b]c", "/x\\[red]y", "/q\"q'", "/\x1b[31mred", "/" + "x" * 300]
)
def test_settings_are_shown_as_they_are_whatever_signs_they_have(capsys, path):
    config = StoreConfig(disk_path=path, disk_capacity_bytes=1 << 30)
    show_status({"name": "s", "nodes": {}, "without_store": [], "problems": {}, "starting": {}}, config)
    assert f"settings: {config.chosen()}" in capsys.readouterr().out.splitlines()


def test_each_tenant_of_a_node_has_a_line_with_its_quotas_and_refusals_only_where_there_are_some(capsys):
    idle = dict.fromkeys(
        ("num_bytes", "num_pinned_bytes", "num_disk_bytes", "num_handoffs", "num_evicted", "num_evicted_by_quota",
         "num_refused_bytes", "num_refused_pins", "num_refused_handoffs", "num_refused_disk"), 0,
    )  # fmt: skip
    idle |= dict.fromkeys(("max_bytes", "max_pinned_bytes", "max_disk_bytes", "max_handoffs"))
    busy = {
        "num_bytes": 992 << 10, "max_bytes": 1 << 20, "max_pinned_bytes": 4096, "num_disk_bytes": 5 << 20,
        "num_evicted": 578, "num_evicted_by_quota": 570, "num_refused_bytes": 1234, "num_refused_handoffs": 3,
        "num_handoffs": 2, "max_handoffs": 2,
    }  # fmt: skip
    node = {
        "host": "h", "epoch": "e", "draining": False, "pid": 1, "mover_pid": 2, "pool": None, "nixl": None,
        "capacity_bytes": 1 << 30, "tenants": {"a": idle | busy, "b": idle},
    }  # fmt: skip
    show_status({"name": "s", "nodes": {"n": node}, "without_store": [], "problems": {}, "starting": {}}, StoreConfig())
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if "hand-offs" in line]
    cannot = {"n": node | {"mover_pid": 0, "mover_problem": "could not start UCX"}}
    show_status({"name": "s", "nodes": cannot, "without_store": [], "problems": {}, "starting": {}}, StoreConfig())
    assert "no mover can begin, so blocks of other nodes are misses: could not start UCX" in capsys.readouterr().out
    assert [line.split(maxsplit=1)[1] for line in lines] == [
        "a: 992 KiB of 1 MiB, pinned 0 B of 4 KiB, disk 5 MiB, hand-offs 2 of 2, evicted 578, 570 by quota   "
        "refused: 1,234 blocks by max_bytes, 3 hand-offs",
        "b: 0 B, pinned 0 B, hand-offs 0, evicted 0",
    ]


def test_progress_that_nobody_reads_ends_nothing(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        with progress() as say:
            say("first")
            say("second")
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # Its close writes what is left.


def test_control_characters_of_errors_are_shown_and_not_sent(capsys):
    evil = "no \x1b[2Janswer\x07"
    stats = {"name": "s", "nodes": {"a": {"error": evil}}, "without_store": [], "problems": {"a": evil}}
    show_status(stats | {"starting": {}, "directory": [{"error": evil}]}, StoreConfig())
    show_check(Check(name="ray", status=Status.FAIL, found=evil, fix=evil))
    text = capsys.readouterr().out
    assert text.count("no \\x1b[2Janswer\\x07") == 5
    assert "\x1b" not in text

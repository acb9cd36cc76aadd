"""The findings of the doctor and of the lane probe, and where a measurement comes from."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kvstore.errors import TransferError
from kvstore.memory.room import Room
from kvstore.tools import doctor, lane_probe
from kvstore.tools.doctor import Check, Status, human_bytes, judge_lane, machine_checks
from kvstore.tools.lane_probe import LaneReport, probe_lane, probe_plugins, read_transports, ucx_settings, ucx_version
from kvstore.tools.provenance import commit, provenance

# What UCX 1.23 writes with UCX_PROTO_INFO=used, shortened.
LOG = """\
[17.8] [vm:9:0]     ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from /x/libucp.so)
[17.8] [vm:9:0]          parser.c:2587 UCX  INFO  UCX_* env variables: UCX_TLS=tcp,cma UCX_LOG_LEVEL=info
[17.8] [vm:9:0]      ucp_worker.c:1997 UCX  INFO    p9 self cfg#0 rma_am(tcp/lo)  am(tcp/lo cma/memory)
[17.8] [vm:9:0]      ucp_worker.c:1997 UCX  INFO    p9 intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)
"""
TABLES = """\
[17.9] [vm:9:0]   +-------+-------------+----------------------+---------+
[17.9] [vm:9:0]   | p9 intra-node cfg#1                                  |
[17.9] [vm:9:0]   | active message by ucp_am_send*(egr) from host memory |
[17.9] [vm:9:0]   | Count |    Range    |     Description      | Config  |
[17.9] [vm:9:0]   |     6 |   1..262136 | zero-copy            | tcp/lo  |
[17.9] [vm:9:0]   +-------+--------+-------------+-----------------------------------+
[17.9] [vm:9:0]   | p9 intra-node cfg#1                                              |
[17.9] [vm:9:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[17.9] [vm:9:0]   | Count | Range  | Description |              Config               |
[17.9] [vm:9:0]   |     0 | 0..99  | copy        | posix/memory                      |
[17.9] [vm:9:0]   |     6 | 0..inf | zero-copy   | 50% on rc_mlx5/mlx5_0:1/path0 and 50% on cma/memory |
"""


def test_the_transports_of_reads_are_those_with_a_count():
    assert read_transports(LOG + TABLES) == ("rc_mlx5/mlx5_0:1", "cma/memory")


def test_without_tables_the_lanes_of_the_connection_are_named():
    assert read_transports(LOG) == ("tcp/lo", "cma/memory")
    assert read_transports("") == ()


def test_ucx_says_its_version_and_what_the_user_set():
    assert ucx_version(LOG) == "1.23.0"
    assert ucx_settings(LOG) == {"UCX_TLS": "tcp,cma", "UCX_LOG_LEVEL": "info"}
    assert (ucx_version(""), ucx_settings("")) == ("", {})


@pytest.mark.parametrize(
    ("lane", "transports", "settings", "status", "fix"),
    [
        ("default", ("cma/memory",), {}, Status.OK, ""),
        ("default", ("tcp/lo",), {}, Status.WARN, "CMA"),
        ("default", ("tcp/lo",), {"UCX_TLS": "tcp"}, Status.WARN, "UCX_TLS"),
        ("tcp", ("tcp/lo",), {"UCX_TLS": "tcp"}, Status.OK, ""),
    ],
)
def test_tcp_within_one_host_is_worth_a_warning(lane, transports, settings, status, fix):
    report = LaneReport(transports=transports, gb_per_s=4.25, ucx="1.23.0", settings=settings)
    check = judge_lane("Lane", lane, report)
    assert check.status is status
    assert fix in check.fix
    assert transports[0] in check.found
    assert "4.2 GB/s" in check.found
    assert ("UCX_TLS" in check.found) == (lane == "default" and bool(settings))


def test_bytes_really_cross_between_two_processes(monkeypatch):
    monkeypatch.delenv("UCX_TLS", raising=False)
    report = probe_lane("tcp")
    assert report.gb_per_s > 0
    assert report.transports
    assert all(name.startswith("tcp/") for name in report.transports)
    assert report.ucx


def test_ucx_is_among_the_plugins_that_load():
    assert "DRAM_SEG" in probe_plugins()["UCX"]


def test_a_child_that_dies_is_an_error_and_no_hang(monkeypatch):
    monkeypatch.setattr(lane_probe.sys, "executable", "/bin/false")
    with pytest.raises(TransferError, match="ended early"):
        probe_lane()
    with pytest.raises(TransferError, match="died without an answer"):
        probe_plugins()


def test_every_finding_is_plain_json_with_a_remedy_when_it_is_bad(monkeypatch):
    def no_lane(lane: str) -> LaneReport:
        raise TransferError("wanted success, got nothing")

    monkeypatch.setattr(doctor, "probe_lane", no_lane)
    checks = [look() for _, look in machine_checks()]
    rows = json.loads(json.dumps([check.as_row() for check in checks]))
    assert all(set(row) == {"name", "status", "found", "fix", "values"} for row in rows)
    assert all(row["fix"] for row in rows if row["status"] != "ok")
    assert all(row["found"] for row in rows)
    assert len({row["name"] for row in rows}) == len(rows) == 12
    assert [row["status"] for row in rows if row["name"].startswith("Lane")] == ["fail", "fail"]


@pytest.mark.parametrize(
    ("room_bytes", "status"), [(1 << 40, Status.OK), (1 << 30, Status.WARN), (1 << 28, Status.FAIL)]
)
def test_little_memory_is_found(monkeypatch, room_bytes, status):
    monkeypatch.setattr(doctor, "find_room", lambda: Room(room_bytes + 5, "cgroup limit", 5, "RAY_some_variable=1"))
    check = doctor.check_memory()
    assert check.status is status
    assert "limited by the cgroup limit; 5 B more must stay free for Ray (RAY_some_variable=1)" in check.found
    assert (check.values["room_bytes"], check.values["kept_bytes"]) == (room_bytes, 5)


def test_locked_memory_fails_only_with_an_rdma_device(monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (1 << 16, 1 << 16))
    monkeypatch.setattr(doctor, "_names_in", lambda path: [])
    assert doctor.check_memlock().status is Status.OK
    monkeypatch.setattr(doctor, "_names_in", lambda path: ["mlx5_0"])
    check = doctor.check_memlock()
    assert check.status is Status.FAIL
    assert "64 KiB" in check.found


def test_no_nixl_is_a_failure_with_the_command_that_helps(monkeypatch):
    monkeypatch.setattr(doctor, "package_version", lambda package: None)
    check = doctor.check_nixl()
    assert check.status is Status.FAIL
    assert "pip install nixl-cu12" in check.fix


def test_nixl_without_ucx_is_a_failure(monkeypatch):
    monkeypatch.setattr(doctor, "probe_plugins", lambda: {"POSIX": ["DRAM_SEG"], "UCX": []})
    check = doctor.check_nixl()
    assert check.status is Status.FAIL
    assert "not: UCX" in check.found


@pytest.mark.parametrize(("text", "status"), [("", Status.OK), ("1", Status.OK), ("2", Status.WARN)])
def test_yama_matters_from_two_on(monkeypatch, text, status):
    monkeypatch.setattr(doctor, "_first_line", lambda path: text)
    assert doctor.check_ptrace().status is status


def test_sizes_are_readable():
    assert [human_bytes(n) for n in (0, 1023, 1 << 20, 3 << 29)] == ["0 B", "1023 B", "1 MiB", "1.5 GiB"]


def test_a_row_is_plain():
    row = Check(name="a", status=Status.WARN, found="b", fix="c", values={"d": 1}).as_row()
    assert row == {"name": "a", "status": "warn", "found": "b", "fix": "c", "values": {"d": 1}}


def test_provenance_names_machine_versions_and_commit():
    found = json.loads(json.dumps(provenance()))
    assert set(found) == {"hardware", "versions", "commit"}
    assert found["hardware"]["num_cores"] >= 1
    assert found["hardware"]["memory_bytes"] > 1 << 28
    assert {"python", "raykv", "ray", "torch", "numpy"} <= set(found["versions"])


def test_the_commit_is_that_of_the_checkout_and_says_if_it_was_changed(tmp_path: Path):
    def git(*words: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True, timeout=30)

    assert commit(tmp_path) is None
    git("init")
    assert commit(tmp_path) is None  # no commit yet
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    found = commit(tmp_path)
    assert found is not None
    assert (len(found["id"]), found["dirty"]) == (40, False)
    (tmp_path / "a").write_text("2")
    assert commit(tmp_path) == {"id": found["id"], "dirty": True}
    inside = tmp_path / "venv"
    inside.mkdir()
    assert commit(inside) is None  # a wheel below somebody's checkout is not that commit

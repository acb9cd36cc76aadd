"""The life of one node store, as its log tells it: these events, in this order, and no others."""

from __future__ import annotations

import errno
import json
import logging
import socket
import subprocess
import sys
import textwrap

import pytest

from kvstore.disk import breaker
from kvstore.disk.slot_file import SlotFile
from kvstore.remote.directory import DirectoryServer

HOLDS = """
    import sys
    import kvstore
    from tests.kvstore.conftest import SHAPE
    client = kvstore.Client(sys.argv[1], kvstore.Namespace(model="m", shape=SHAPE))
    pinned = client.pin(client.space.block_hashes(range(8)))
    print(pinned.num_blocks, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def events(caplog, monkeypatch):
    """What was logged since the last call, without what differs from run to run."""
    monkeypatch.setenv("RAYKV_LOG_FORMAT", "json")

    def take():
        found = [json.loads(record.getMessage()) for record in caplog.records if record.name == "kvstore.life"]
        caplog.clear()
        assert all(each.keys() >= {"event", "time", "level", "pid"} for each in found)
        return found

    with caplog.at_level(logging.INFO, "kvstore.life"):
        yield take


def named(events):
    return [event["event"] for event in events]


def test_a_life_is_told_event_by_event(cluster, events, wait_until, tmp_path, repo_root):
    told = []

    def heard(name):
        told.extend(events())
        return next((each for each in told if each["event"] == name), None)

    core = cluster.add("a", disk_path=str(tmp_path), disk_capacity_bytes=1 << 20)
    started = heard("store_started")
    assert (started["node"], started["epoch"]) == ("a", core.state.epoch.hex())
    assert started["capacity_bytes"] == core.state.config.capacity_bytes

    worker = cluster.worker("a")
    worker.save(cluster.space.block_hashes(range(8)), [0, 1])
    assert wait_until(lambda: heard("disk_on"))["num_restored"] == 0

    words = [sys.executable, "-c", textwrap.dedent(HOLDS), core.control_path]
    with subprocess.Popen(words, cwd=repo_root, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline().strip() == "2"
        process.kill()
        gone = wait_until(lambda: heard("worker_gone"))
    assert (gone["worker_pid"], gone["num_leases_and_writes"], gone["num_handoffs"]) == (process.pid, 1, 0)
    assert (gone["how"], "tenant" in gone) == ("died", False)

    core.state.pool_service.clear(cluster.space.digest)
    cleared = heard("namespace_cleared")
    assert cleared == {**cleared, "namespace": cluster.space.digest.hex()[:12], "version": 1, "num_blocks": 2}

    cluster.kill_mover("a")
    assert wait_until(lambda: heard("mover_gone"))["num_reads"] == 0

    cluster.directory.stop()
    core.state.hints.publish_soon()
    assert wait_until(lambda: heard("directory_lost"))["level"] == "warning"
    cluster.directory = DirectoryServer("127.0.0.1", settle_s=0.0)
    assert wait_until(lambda: heard("directory_resynced"))["shard"] == 0

    with socket.create_connection(("127.0.0.1", core.control.server.port), timeout=5) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        refused = wait_until(lambda: heard("client_refused"))
    assert refused["host"] == "127.0.0.1"

    core.begin_drain(0)
    core.drain(0.0)
    core.undrain()
    worker.client.close()
    cluster.stop_node("a")
    told.extend(events())
    assert named(told) == [
        "store_started", "disk_on", "worker_gone", "namespace_cleared", "mover_gone", "directory_lost",
        "directory_resynced", "client_refused", "store_draining", "store_undrained", "store_stopped",
    ]  # fmt: skip
    assert told[-1]["reason"] == "stop was asked for"


def test_the_end_of_a_mover_is_no_loss_where_the_store_ends(cluster, events, wait_until):
    core, told = cluster.add("a"), []
    core.control.fence.expects_end = True
    cluster.kill_mover("a")
    wait_until(lambda: core.state.mover.connection is None)
    cluster.stop_node("a")
    told.extend(events())
    assert named(told) == ["store_started", "store_stopped"]


def test_a_disk_that_fails_is_told_with_its_reason_and_so_is_its_return(
    cluster, events, wait_until, tmp_path, monkeypatch
):
    monkeypatch.setattr(breaker, "_FIRST_REST_S", 0.05)
    core = cluster.add("a", mover=False, disk_path=str(tmp_path), disk_capacity_bytes=1 << 20)
    worker = cluster.worker("a")
    worker.save(cluster.hashes(2), range(2))
    wait_until(lambda: core.state.disk.stats()["num_written"] == 2)
    events()

    def refuses(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as failing:
        failing.setattr(SlotFile, "write", refuses)
        worker.save(cluster.hashes(2, seed=5), range(2))
        (off,) = wait_until(events)
    assert (off["event"], off["level"], off["path"]) == ("disk_off", "error", core.state.disk.stats()["path"])
    assert "No space left" in off["reason"]
    wait_until(lambda: not core.state.disk.is_off)
    worker.save(cluster.hashes(2, seed=6), range(2))
    (again,) = wait_until(events)
    assert again["event"] == "disk_on"


def test_many_strangers_write_few_lines(cluster, events, wait_until):
    core = cluster.add("a", mover=False)
    events()
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", core.control.server.port), timeout=5) as stranger:
            stranger.sendall(bytes(100))
    wait_until(lambda: core.control.server.strangers.num_cut == 50)
    assert 1 <= len(events()) <= 2


def test_a_worker_that_closes_with_pins_open_is_told_from_one_that_died(cluster, events, wait_until):
    told = []

    def gone():
        told.extend(events())
        return next((each for each in told if each["event"] == "worker_gone"), None)

    cluster.add("a", tenants={"batch": {}})
    worker, hashes = cluster.worker("a", tenant="batch"), cluster.space.block_hashes(range(8))
    worker.save(hashes, [0, 1])
    worker.client.pin(hashes)
    worker.client.close()
    said = wait_until(gone)
    assert (said["how"], said["tenant"], said["num_leases_and_writes"]) == ("closed", "batch", 1)

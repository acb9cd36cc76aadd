"""A restart with settings that cannot work on a node: refused before it, or the memory waits for a better one."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from click.testing import CliRunner

import kvstore
from kvstore.actors.restart import changing, holding, rolling
from kvstore.cli import main
from kvstore.errors import ConfigError, StoreNotRunning, StoreUnavailable
from kvstore.node.handover.transfer import handover_path

pytestmark = pytest.mark.ray
NAME = "refused"


@pytest.fixture(scope="module")
def store(ray_cluster):
    made = kvstore.start("2MiB", name=NAME, lease_ttl_s=5.0)
    yield made
    made.destroy()


def epochs(store):
    return {node: said["epoch"] for node, said in store.stats()["nodes"].items()}


def supervisor_log(get):
    supervisor = ray.get_actor(f"raykv/{NAME}/supervisor", namespace="raykv")
    pid = get(supervisor.__ray_call__.remote(lambda self: os.getpid()))
    return Path(os.readlink(f"/proc/{pid}/fd/2"))


def test_what_cannot_work_on_a_node_is_refused_and_nothing_is_restarted(
    store, make_space, chain_of, node_ids, open_engine, tmp_path, get
):
    engine, chain = open_engine(store, make_space("kept"), node_ids[0]), chain_of(make_space("kept"), 4)
    engine.save(chain)
    before, config, log = epochs(store), store.config, supervisor_log(get)
    wrong = [
        {"disk_path": "/proc/nvme", "disk_capacity": "1GiB"},
        {"disk_path": str(tmp_path), "disk_capacity": "4000TiB"},
    ]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with contextlib.suppress(ImportError):
            import zmq  # noqa: F401 - the stores have it, then.

            wrong.append({"events_endpoint": f"tcp://127.0.0.1:{taken.getsockname()[1]}"})
        for changes in wrong:
            with pytest.raises(ConfigError, match=r"node \w+: (disk_path|disk_capacity_bytes|events_endpoint): wanted"):
                store.restart(**changes)
    assert (epochs(store), store.config, supervisor_log(get)) == (before, config, log)
    assert kvstore.connect(NAME).config == config
    assert engine.load(chain).num_blocks == 4
    assert os.listdir(tmp_path) == []


def test_the_memory_of_a_node_whose_next_store_fails_is_kept_for_a_restart_that_works(
    store, make_space, chain_of, node_ids, open_engine, monkeypatch, eventually, get
):
    node, space = node_ids[1], make_space("held")
    engine, chain = open_engine(store, space, node), chain_of(space, 4)
    engine.save(chain)
    with monkeypatch.context() as patch:
        for module in (changing, rolling):  # As for a disk that breaks just now.
            patch.setattr(module, "check_node", lambda *_: None)
        with pytest.raises(StoreUnavailable, match=rf"node {node} has no store again: disk_path.*kept for \d+ s"):
            store.restart([node], disk_path="/proc/nvme", disk_capacity="1GiB")
    with pytest.raises(StoreNotRunning, match=r"has no store named 'refused' \(disk_path: wanted"):
        store.control_path(node_id=node)
    first = holding.holders_of(NAME, node)[0]
    get(first.__ray_call__.remote(lambda self: self._holder.keep_longer(50.0)))  # As if most of its time was over.
    assert 0.0 < holding.kept_s(NAME, node) <= 50.0
    assert holding.keep_longer(NAME, [node])
    assert 150.0 < holding.kept_s(NAME, node) <= 180.0
    assert not holding.keep_longer(NAME, [other for other in node_ids if other != node])
    found = store.restart([node], disk_path="", disk_capacity=0)[node]
    assert (found["is_warm"], found["num_blocks"] >= 4) == (True, True), found
    assert open_engine(store, space, node).load(chain).num_local == 4
    store.restart()  # All have the same settings again.
    eventually(lambda: not store.stats()["problems"], 30)


def test_what_cannot_work_any_more_at_the_turn_of_a_node_ends_the_restart_before_it(
    store, node_ids, monkeypatch, eventually
):
    first, second = sorted(node_ids)
    before = epochs(store)

    def check_node(node_id, handle, config):
        if node_id == second:
            raise ConfigError(f"node {second}: another process has the address")

    monkeypatch.setattr(rolling, "check_node", check_node)
    says = f"node {second} was not restarted, and its store serves on: another process has.*; restarted: {first}; the "
    says += "others are as they were; the store has the new settings now: another restart goes on with them, or"
    with pytest.raises(StoreUnavailable, match=says):
        store.restart(lease_ttl_s=7.0, wait_s=0.0)
    after = epochs(store)
    assert (after[first] != before[first], after[second] == before[second]) == (True, True)
    monkeypatch.undo()
    store.restart([second], lease_ttl_s=7.0, wait_s=0.0)
    eventually(lambda: not store.stats()["problems"], 30)


def test_a_restart_warns_of_no_other_settings_and_the_command_says_each_step(store, get, node_ids, eventually):
    done = CliRunner().invoke(main, ["restart", "--name", NAME, "--wait", "1", "--set", "lease_ttl_s=6"])
    assert done.exit_code == 0, done.output
    for node in node_ids:
        steps = [line for line in done.stderr.splitlines() if line.startswith(f"node {node[:12]}: ")]
        assert ["drains" in steps[0], "ends" in steps[1], "next" in steps[2]] == [True] * 3, done.stderr
        assert sum(node in line for line in done.stdout.splitlines()) == 1
    log = supervisor_log(get)
    eventually(lambda: log.read_text().count("event=node_joined") == len(node_ids), 30)
    assert "node_without_store" not in log.read_text()
    as_json = CliRunner().invoke(main, ["restart", "--name", NAME, "--wait", "1", "--json"])
    assert as_json.exit_code == 0
    assert as_json.stdout.count("\n") == 1


def test_a_store_that_a_restart_ends_says_so(store, get, node_ids):
    pid = get(kvstore.node_store(node_ids[0], name=NAME).pids.remote())["store"]
    log = Path(os.readlink(f"/proc/{pid}/fd/2"))
    store.restart([node_ids[0]], wait_s=0.0)
    assert 'reason="a restart"' in log.read_text()


def test_the_end_of_a_store_frees_the_memory_that_is_kept_and_leaves_no_file_of_a_socket(
    ray_cluster, make_space, chain_of, node_ids, open_engine
):
    made, node = kvstore.start("2MiB", name="ends"), node_ids[0]
    path = Path(handover_path("ends", node))
    try:
        engine = open_engine(made, make_space("ends"), node)
        engine.save(chain_of(make_space("ends"), 4))
        engine.client.close()
        with pytest.MonkeyPatch.context() as patch:
            for module in (changing, rolling):
                patch.setattr(module, "check_node", lambda *_: None)
            with pytest.raises(StoreUnavailable, match="kept for"):
                made.restart([node], disk_path="/proc/nvme", disk_capacity="1GiB")
        assert path.exists()
    finally:
        made.destroy()
    assert not path.exists()


def test_a_restart_leaves_no_file_of_a_socket_where_no_client_had_come_and_its_log_says_why(ray_cluster, get):
    made = kvstore.start("2MiB", name="unused")
    try:
        found = made.restart(wait_s=0.0)
        assert not any(each["is_warm"] for each in found.values())
        handles = [kvstore.node_store(node, name="unused") for node in found]
        told = [get(handle.beginning.remote())["why_cold"] for handle in handles]  # As `cold_start` in the log has it.
        assert told == [each["why_cold"] for each in found.values()]
        assert all("it was empty: no namespace has attached" in why for why in told)
        assert not any(Path(handover_path("unused", node)).exists() for node in found)
    finally:
        made.stop()


@pytest.mark.parametrize(
    ("kept_s", "says"), [(0.0, "its memory is lost"), (170.4, "its memory is kept for 170 s, for")]
)
def test_an_error_says_whether_a_holder_still_has_the_memory(store, node_ids, monkeypatch, kept_s, says):
    def fail(*_):
        raise StoreUnavailable("why")

    old = SimpleNamespace(_actor_id="old")
    fakes = {
        "find_actor": old, "check_node": None, "make_holder": (old, ""), "end_actor": None, "call": None,
        "_unworkable": "", "kept_s": kept_s,
    }  # fmt: skip
    for name, value in fakes.items():
        monkeypatch.setattr(rolling, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(rolling, "_wait_for_next", fail)
    supervisor, nothing = SimpleNamespace(plan_end=None), lambda *_: None
    turn = rolling.Turn("name", node_ids[0], supervisor, store.config, 3600.0, nothing, nothing)
    with pytest.raises(StoreUnavailable) as raised:
        turn.run(cold=False)
    assert turn.outcome(raised.value).startswith(f"node {node_ids[0]} has no store again: why; {says}")

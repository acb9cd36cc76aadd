"""The life of a store on a real Ray, as the stderr of its actors tells it."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import pytest

import kvstore
from kvstore.errors import StoreUnavailable

pytestmark = pytest.mark.ray

NAME = "told"


def lines_of(pid):
    """The events that a process wrote to its stderr, which Ray keeps in a file."""
    text = Path(os.readlink(f"/proc/{pid}/fd/2")).read_text()
    return [line for line in text.splitlines() if line.startswith("event=")]


def words(line):
    return dict(re.findall(r"(\w+)=(\S+)", line))


def test_the_actors_of_a_store_write_its_life_to_their_logs(
    ray_cluster, node_ids, make_space, chain_of, open_engine, eventually
):
    import ray

    store = kvstore.start("8MiB", name=NAME, address=ray_cluster.address, lease_ttl_s=2.0)
    try:
        pids = {node: each["pid"] for node, each in store.stats()["nodes"].items()}
        supervisor = ray.get_actor(f"raykv/{NAME}/supervisor", namespace="raykv")
        pid = ray.get(supervisor.__ray_call__.remote(lambda self: os.getpid()), timeout=30)
        began, *joined = lines_of(pid)
        assert words(began)["event"] == "supervisor_started"
        assert f'version="raykv {kvstore.__version__} (' in began
        assert began.endswith('settings="capacity_bytes=8388608 lease_ttl_s=2.0"')
        joined = [words(line) for line in joined if "node_without_store" not in line]
        assert [(each["event"], each["store"]) for each in joined] == [("node_joined", NAME)] * 2
        assert {each["node"] for each in joined} == set(node_ids)

        space = make_space("told")
        engine = open_engine(store, space, node_ids[0])
        engine.save(chain_of(space, 3))
        store.clear(space)
        store.drain(node_ids[0], 5.0)
        ray.get(kvstore.node_store(node_ids[0], name=NAME).undrain.remote(), timeout=30)
        said = [words(line) for line in lines_of(pids[node_ids[0]])]
        assert {(each["store"], each["node"]) for each in said} == {(NAME, node_ids[0])}
        named = [each["event"] for each in said]
        assert named == ["store_started", "namespace_cleared", "store_draining", "store_undrained"]
        assert [words(line)["event"] for line in lines_of(pids[node_ids[1]])] == ["store_started", "namespace_cleared"]

        engine.save(chain_of(space, 4, seed=1))
        engine.client.close()
        store.restart([node_ids[0]], lease_ttl_s=3.0)
        after = store.stats()["nodes"][node_ids[0]]["pid"]
        warm, started = [words(line) for line in lines_of(after)]
        assert (warm["event"], warm["num_blocks"], warm["node"]) == ("warm_restart", "4", node_ids[0])
        assert started["event"] == "store_started"
        supervisor = ray.get_actor(f"raykv/{NAME}/supervisor", namespace="raykv")
        pid = ray.get(supervisor.__ray_call__.remote(lambda self: os.getpid()), timeout=30)
        assert lines_of(pid)[0].endswith('settings="capacity_bytes=8388608 lease_ttl_s=3.0"')

        # A planned end is no loss, also where the supervisor has seen the store already.
        eventually(lambda: all(node in "".join(lines_of(pid)) for node in node_ids), 30)
        log = Path(os.readlink(f"/proc/{pid}/fd/2"))
        store.restart()
        assert "node_lost" not in log.read_text()
        supervisor = ray.get_actor(f"raykv/{NAME}/supervisor", namespace="raykv")
        pid = ray.get(supervisor.__ray_call__.remote(lambda self: os.getpid()), timeout=30)
        eventually(lambda: all(node in "".join(lines_of(pid)) for node in node_ids), 30)
        assert "node_lost" not in "".join(lines_of(pid))
        after = store.stats()["nodes"][node_ids[0]]["pid"]

        # A store that was killed is lost, also if another one is there before anybody looks.
        eventually(lambda: node_ids[0] in [words(line).get("node") for line in lines_of(pid)], 30)
        before = len(lines_of(pid))
        os.kill(after, signal.SIGKILL)
        eventually(lambda: "event=node_joined" in "".join(lines_of(pid)[before:]), 60)
        said = [words(line) for line in lines_of(pid)[before:] if "node_without_store" not in line]
        assert [(each["event"], each["node"]) for each in said] == [
            ("node_lost", node_ids[0]), ("node_joined", node_ids[0]),
        ]  # fmt: skip
    finally:
        store.stop()


def test_a_start_that_gave_up_is_the_reason_at_each_end(ray_cluster, node_ids):
    """Both nodes are one machine here, so one of the two stores has the port and the other cannot."""
    logs = Path(ray_cluster.head_node.get_session_dir_path(), "logs")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(StoreUnavailable, match=r"not every node had a store in time.*another process has it"):
        kvstore.start("8MiB", name="half", address=ray_cluster.address, events_endpoint=address, timeout_s=10.0)
    said = [line for log in logs.glob("worker-*.err") for line in log.read_text().splitlines() if "store=half" in line]
    (gave_up,) = [words(line) for line in said if "event=start_gave_up" in line]
    assert gave_up["ends_store"] == "true"
    ends = [line for line in said if "_stopped" in line]
    assert sorted(words(line)["event"] for line in ends) == ["store_stopped", "supervisor_stopped"]
    assert all(line.endswith('reason="its start gave up"') for line in ends)

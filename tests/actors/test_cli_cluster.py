"""The command line against a real Ray of two nodes."""

from __future__ import annotations

import json
import os

import click
import pytest
from click.testing import CliRunner

from kvstore import cli

pytestmark = pytest.mark.ray

NAME = "from-the-cli"


def run(*words: str) -> click.testing.Result:
    return CliRunner().invoke(cli.main, list(words), prog_name="kvstore")


def test_start_status_stop(ray_cluster):
    assert run("status", "--name", NAME).exit_code == 2
    try:
        started = run("start", "--name", NAME, "--capacity", "64MiB", "--address", ray_cluster.address)
        assert started.exit_code == 0, started.output
        assert started.stdout == f"store '{NAME}' runs on 2 node(s) of the Ray at {ray_cluster.address}, 64 MiB each\n"
        assert started.stderr.splitlines()[0] == f"starting store '{NAME}' in the Ray at {ray_cluster.address}"

        result = run("status", "--name", NAME, "--json")
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        nodes = list(found["nodes"].values())
        assert len(nodes) == 2
        assert found["without_store"] == []
        assert found["name"] == NAME
        for node in nodes:
            assert node["capacity_bytes"] == 64 << 20
            assert node["mover_pid"] > 0
            assert node["nixl"]["num_bytes"] == 0

        shown = run("status", "--name", NAME)
        assert shown.exit_code == 0
        assert all(node["epoch"] in shown.stdout for node in nodes)
        assert "2 of 2 nodes" in shown.stdout

        watched = run("top", "--name", NAME, "--once", "--json", "--interval", "0.1")
        assert watched.exit_code == 0, watched.output
        rows = json.loads(watched.stdout)["nodes"]
        assert [row["node"] for row in rows] == sorted(found["nodes"])
        assert all(row["seconds"] >= 0.1 and row["num_slots"] == 0 for row in rows)

        other = run("start", "--name", NAME, "--capacity", "65MiB")
        assert other.exit_code == 2
        assert other.stderr.splitlines()[-1].startswith("IncompatibleStore: ")

        doctor = run("doctor", "--json", "--no-idle", "--address", ray_cluster.address)
        rows = {row["name"]: row for row in json.loads(doctor.stdout)}
        assert {"Python", "NIXL", "Lane on this host", "CUDA", "Memory", "Ray", "Ray cluster"} <= set(rows)
        assert "Idle cost" not in rows
        assert rows["Ray cluster"]["values"]["stores"] == [NAME]
        assert rows["Lane on this host"]["values"]["gb_per_s"] > 0
    finally:
        stopped = run("stop", "--name", NAME)
    assert stopped.exit_code == 0, stopped.output
    again = run("stop", "--name", NAME)
    assert again.exit_code == 2
    assert again.stderr.startswith("StoreNotRunning: ")


class Other:
    """A supervisor of another version, which knows other questions."""

    def ping(self):
        return True


@pytest.fixture
def headless(ray_cluster):
    """The name of a store, and its supervisor."""
    import ray

    name = "headless"
    assert run("start", "--name", name, "--capacity", "8MiB", "--address", ray_cluster.address).exit_code == 0
    yield name, ray.get_actor(f"raykv/{name}/supervisor", namespace="raykv")
    run("stop", "--name", name)


def check_stop(name, address, node_ids):
    """Stop a store by the command line: it says what it stops, and leaves nothing."""
    import ray

    done = run("stop", "--name", name)
    assert done.exit_code == 0, done.output
    said = done.stdout.splitlines()
    assert said[0].startswith(f"stopping store '{name}' of the Ray at {address}, ")
    assert all(f"raykv/{name}/node/{node_id}" in said[0] for node_id in node_ids)
    assert said[1:] == [f"store '{name}' of the Ray at {address} stopped"]
    left = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    assert not any(actor.startswith(f"raykv/{name}/") for actor in left)


def test_a_store_whose_supervisor_hangs_is_found_shown_and_stopped(ray_cluster, node_ids, stopped, headless):
    import ray

    import kvstore

    name, supervisor = headless
    stopped(ray.get(supervisor.__ray_call__.remote(lambda self: os.getpid()), timeout=30))
    done = run("status", "--name", name, "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert sorted(said["nodes"]) == sorted(node_ids)
    assert not said["without_store"]
    assert "supervisor" in said["problems"]
    assert kvstore.connect(name, timeout_s=30).config.capacity_bytes == 8 << 20
    check_stop(name, ray_cluster.address, node_ids)


@pytest.mark.parametrize("is_replaced", [False, True], ids=["is gone", "is of another version"])
def test_a_store_that_its_supervisor_cannot_answer_for_is_stopped(ray_cluster, node_ids, headless, is_replaced):
    import ray

    name, supervisor = headless
    ray.kill(supervisor)
    if is_replaced:
        path = f"raykv/{name}/supervisor"
        other = ray.remote(Other).options(name=path, namespace="raykv", num_cpus=0).remote()
        ray.get(other.ping.remote(), timeout=30)
    check_stop(name, ray_cluster.address, node_ids)


def test_an_address_that_does_not_answer_is_a_finding():
    from kvstore.actors.doctor import diagnose

    check = diagnose.check_cluster("127.0.0.1:1")
    assert check.status.value == "fail"
    assert "127.0.0.1:1" in check.found
    assert check.fix


def test_the_token_file_is_looked_for_and_not_read(monkeypatch, tmp_path):
    from kvstore.actors.doctor import diagnose

    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert diagnose.check_auth().status.value == "fail"
    (tmp_path / "token").write_text("x" * 20)
    (tmp_path / "token").chmod(0o644)
    check = diagnose.check_auth()
    assert check.status.value == "warn"
    assert "chmod 600" in check.fix
    assert "xxx" not in json.dumps(check.as_row())
    (tmp_path / "token").chmod(0o600)
    assert diagnose.check_auth().status.value == "ok"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "off" in diagnose.check_auth().found


@pytest.mark.parametrize(("percent", "status"), [(0.9, "ok"), (1.0, "warn")])
def test_three_percent_of_a_core_is_the_limit_when_idle(monkeypatch, percent, status):
    from kvstore.actors.doctor import diagnose

    seen = dict.fromkeys(("store", "mover", "client"), percent)
    monkeypatch.setattr(diagnose, "_ask", lambda *_: seen)
    check = diagnose.check_idle(10.0)
    assert check.status.value == status
    assert check.values == {**seen, "total": 3 * percent, "seconds": 10.0}

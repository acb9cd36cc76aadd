"""A handle ends what it started, and nothing else; no call of it connects a process to Ray.

The scripts are what users run: processes of their own, beside a Ray that `ray start` began and a store of others in it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

#: Of every script: what a call said, and to which Ray the process is connected afterwards.
PRELUDE = """
import json, logging, os, signal, sys, time
import kvstore, ray

logged = []
class Keep(logging.Handler):
    def emit(self, record):
        logged.append([record.levelname, record.getMessage()])
logging.getLogger("kvstore").addHandler(Keep())
logging.getLogger("kvstore").setLevel("INFO")

def tried(call):
    try:
        call()
    except BaseException as error:
        return type(error).__name__
    return None

def ray_of():
    return ray.get_runtime_context().gcs_address if ray.is_initialized() else None

def say(**what):
    print(json.dumps(what | {"ray": ray_of()}), flush=True)

space = kvstore.Namespace(
    model="m", shape=kvstore.KVShape(num_layers=1, num_kv_heads=1, head_dim=16, dtype="float16", block_size=16)
)
def verbs(store):
    hashes = space.block_hashes(range(16))
    return {
        "client": tried(lambda: store.client(space)), "node_ids": tried(store.node_ids),
        "locate": tried(lambda: store.locate(hashes)), "clear": tried(lambda: store.clear(space)),
        "drain": tried(lambda: store.drain("n")), "stats": tried(store.stats), "destroy": tried(store.destroy),
        "node_store": tried(kvstore.node_store),
    }
"""


class World:
    """A folder for Ray, in which processes know nothing of other Rays."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        self.environment |= {"RAY_TMPDIR": folder, "RAYKV_SOCKET_DIR": f"{folder}/s"}

    def run(self, script: str, timeout_s: float = 120, **environment: str | None) -> list[dict]:
        """Run a script to its end; returns what it said."""
        changed = {key: value for key, value in (self.environment | environment).items() if value is not None}
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script)],
            env=changed, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def port_of(said: dict) -> int:
    """The port of the Ray that a script was connected to; it may call its host by several names."""
    return int(said["ray"].rpartition(":")[2])


@pytest.fixture
def world():
    with tempfile.TemporaryDirectory(prefix="rk", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield World(folder)


@pytest.fixture(scope="module")
def head():
    """A Ray that `ray start --head` began, and its world."""
    with tempfile.TemporaryDirectory(prefix="rk", dir="/tmp", ignore_cleanup_errors=True) as folder:
        made = World(folder)
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        port, agent, client = (one.getsockname()[1] for one in sockets)
        for one in sockets:
            one.close()
        command = [
            *[str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--node-ip-address=127.0.0.1"],
            *[f"--port={port}", "--include-dashboard=false", "--num-cpus=2", "--object-store-memory=83886080"],
            *["--no-monitor", "--include-log-monitor=false"],
            *[f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"],
            *["--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"],
        ]
        environment = made.environment | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
        with open(f"{folder}/head.log", "w") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            import waiting

            record = made.folder / "ray" / "ray_current_cluster"
            assert waiting.eventually(lambda: process.poll() is not None or record.exists(), 90)
            assert process.poll() is None, (made.folder / "head.log").read_text()[-2000:]
            made.address = record.read_text()
            made.port = port
            yield made
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


@pytest.fixture(scope="module")
def theirs(head):
    """A store of others in that Ray, which all tests must leave as it is: says whether it still has its first epoch."""
    script = f"""
        store = kvstore.start("16MiB", name="theirs", address={head.address!r})
        say(epoch=[node["epoch"] for node in store.stats()["nodes"].values()])
    """
    (said,) = head.run(script)
    assert len(said["epoch"]) == 1
    yield lambda: head.run(script)[0]["epoch"] == said["epoch"]
    head.run(f'kvstore.connect("theirs", address={head.address!r}).destroy()')


def test_after_its_ray_has_ended_a_handle_touches_no_other_ray(head, theirs):
    said = head.run("""
        store = kvstore.start("16MiB", name="theirs", address="local")
        own = ray_of()
        say(first=own)
        store.stop()
        say(stopped=True)
        say(verbs=verbs(store))
        say(again=tried(store.stop), closed=tried(store.close))
    """)
    assert said[0]["first"] is not None
    assert port_of(said[0]) != head.port
    assert [line["ray"] for line in said[1:]] == [None] * 3
    assert set(said[2]["verbs"].values()) == {"StoreNotRunning"}
    assert said[3] == {"again": None, "closed": None, "ray": None}
    assert theirs()


def test_a_process_that_went_to_another_ray_does_not_take_the_handle_there(head, theirs):
    said = head.run("""
        store = kvstore.start("16MiB", name="theirs", address="local")
        ray.shutdown()
        theirs = kvstore.connect("theirs")
        port = theirs.address.rpartition(":")[2]
        verbs_ = verbs(store)
        del verbs_["node_store"]
        say(verbs=verbs_, stop=tried(store.stop), again=tried(store.stop))
        say(other=[tried(lambda: kvstore.start(address=address)) for address in ("127.0.0.1:1", "local")])
        hosts = ("127.0.0.1", "localhost")
        say(same=[tried(lambda: kvstore.connect("theirs", address=f"{host}:{port}")) for host in hosts])
    """)
    assert set(said[0]["verbs"].values()) == {"WrongCluster"}
    assert (said[0]["stop"], said[0]["again"], port_of(said[0])) == (None, None, head.port)
    assert said[1]["other"] == ["WrongCluster"] * 2
    assert said[2]["same"] == [None, None]
    assert theirs()


def test_a_start_beside_a_ray_joins_it_and_says_so_once(head, theirs):
    said = head.run("""
        store = kvstore.start("16MiB", name="theirs")
        say(address=store.address, logged=logged[:])
        store.stop()
        say(logged=logged[1:], verbs=verbs(store))
        with kvstore.start("16MiB", name="mine") as mine:
            say(started=logged[-1])
        say(verbs=verbs(mine))
        mine.stop()
        say(gone=tried(lambda: kvstore.connect("mine")))
    """)
    assert said[0]["address"] == said[0]["ray"]
    assert port_of(said[0]) == head.port
    (line,) = said[0]["logged"]
    assert line[0] == "INFO"
    assert line[1] == f"store 'theirs' joined in the Ray at {said[0]['ray']}: `ray start` began it on this machine"
    assert "others started it" in said[1]["logged"][0][1]
    assert said[2]["started"][1].startswith(f"store 'mine' started in the Ray at {said[0]['ray']}")
    assert set(said[3]["verbs"].values()) == {"StoreNotRunning"}
    assert said[4]["gone"] == "StoreNotRunning"
    assert port_of(said[4]) == head.port
    assert theirs()


def test_a_store_that_ends_for_all_ends_for_its_starter_too(head):
    said = head.run("""
        store = kvstore.start("16MiB", name="short")
        kvstore.connect("short").destroy()
        say(gone=tried(lambda: kvstore.connect("short")))
        again = kvstore.start("16MiB", name="short")
        say(stop=tried(store.stop), lives=tried(lambda: kvstore.connect("short").stats()), logged=logged[-2:])
        again.stop()
        say(gone=tried(lambda: kvstore.connect("short")))
    """)
    assert said[0]["gone"] == said[2]["gone"] == "StoreNotRunning"
    assert (said[1]["stop"], said[1]["lives"]) == (None, None)
    assert any("started again by others" in line for _, line in said[1]["logged"])


def test_two_stores_of_one_process_do_not_end_each_other(world):
    said = world.run("""
        one = kvstore.start("16MiB", name="one")
        with kvstore.start("16MiB", name="two") as two:
            again = kvstore.start("16MiB", name="one")
            again.stop()
            say(one=tried(one.stats), two=tried(two.stats))
            one.stop()
            say(one=tried(one.stats), two=tried(two.stats), logged=logged[-1])
            child = os.fork()
            if not child:
                print(json.dumps({"fork": [tried(two.stats), tried(two.stop), tried(two.close)]}), flush=True)
                os._exit(0)
            os.waitpid(child, 0)
            say(two=tried(two.stats))
        say(two=tried(two.stats))
    """)
    assert (said[0]["one"], said[0]["two"]) == (None, None)
    assert (said[1]["one"], said[1]["two"]) == ("StoreNotRunning", None)
    assert "two" in said[1]["logged"][1]
    assert said[2] == {"fork": ["StoreNotRunning", None, None]}
    assert said[3]["two"] is None
    assert said[4] == {"two": "StoreNotRunning", "ray": None}


@pytest.fixture(scope="module")
def unstopped():
    """What a script said that started a store in a Ray of its own, in a home without a token, and did not stop it."""
    with tempfile.TemporaryDirectory(prefix="rk", dir="/tmp", ignore_cleanup_errors=True) as folder:
        (said,) = World(folder).run(
            """
            store = kvstore.start("16MiB")
            paths = [ray.get(kvstore.node_store().control_path.remote(), timeout=30)]
            token = os.path.expanduser("~/.ray/auth_token")
            say(paths=paths, logged=logged, there=all(map(os.path.exists, paths)),
                mode=oct(os.stat(token).st_mode & 0o777), in_folder=os.listdir(os.path.dirname(token)))
        """,
            HOME=f"{folder}/fresh", RAY_AUTH_MODE=None,
        )  # fmt: skip
        yield said


def test_a_store_that_nobody_stopped_ends_with_its_process_and_leaves_nothing(unstopped):
    assert unstopped["there"]
    assert not any(map(os.path.exists, unstopped["paths"]))
    assert "a Ray of this process alone" in unstopped["logged"][0][1]


def test_a_token_of_a_new_ray_is_for_its_owner_only(unstopped):
    assert (unstopped["mode"], unstopped["in_folder"]) == ("0o600", ["auth_token"])


def test_a_stop_after_the_head_died_ends_in_bounded_time(world):
    (said,) = world.run("""
        import subprocess
        from kvstore.actors.session.probing import check_answers
        store = kvstore.start("16MiB")
        children = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(os.getpid())]
        listed = subprocess.run(children, capture_output=True, text=True)
        (pid,) = [int(line.split()[0]) for line in listed.stdout.splitlines() if "gcs_server " in line]
        os.kill(pid, signal.SIGKILL)
        while tried(lambda: check_answers(store.address)) is None:
            time.sleep(0.1)
        began_s = time.monotonic()
        say(stop=tried(store.stop), again=tried(store.stop), took_s=time.monotonic() - began_s)
    """)
    assert (said["stop"], said["again"], said["ray"]) == (None, None, None)
    assert said["took_s"] < 30


def test_a_ray_that_has_died_is_said_at_once(world):
    """Ray itself goes on asking the dead GCS for a minute, and then ends the process."""
    (said,) = world.run("""
        import subprocess
        from kvstore.actors.session.probing import check_answers
        ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=80 << 20,
                 log_to_driver=False)
        store = kvstore.start("16MiB")
        children = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(os.getpid())]
        listed = subprocess.run(children, capture_output=True, text=True).stdout.splitlines()
        for pid in [int(line.split()[0]) for line in listed if "gcs_server " in line or "raylet/raylet " in line]:
            os.kill(pid, signal.SIGKILL)
        while tried(lambda: check_answers(store.address)) is None:
            time.sleep(0.1)
        def text(call):
            try:
                call()
            except kvstore.KVStoreError as error:
                return [type(error).__name__, str(error)]
        began_s = time.monotonic()
        say(start=text(lambda: kvstore.start("16MiB")), connect=text(kvstore.connect), stop=text(store.stop),
            destroy=text(store.destroy), close=text(store.close), took_s=time.monotonic() - began_s)
        os._exit(0)  # Ray would wait for what it has lost.
    """)
    for verb in ("start", "connect"):
        assert said[verb][0] == "StoreNotRunning"
        assert "has ended" in said[verb][1]
        assert "ray.shutdown()" in said[verb][1]
    for verb in ("stop", "destroy"):
        assert said[verb][0] == "StoreNotRunning"
        assert "has ended, and its stores with it; close() this handle" in said[verb][1]
    assert said["close"] is None
    assert said["took_s"] < 5


def test_a_recorded_ray_that_does_not_answer_is_said_and_not_replaced_in_silence(world):
    (world.folder / "ray").mkdir()
    (world.folder / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    (said,) = world.run("""
        def text(call):
            try:
                call()
            except kvstore.KVStoreError as error:
                return [type(error).__name__, str(error)]
        say(start=text(lambda: kvstore.start("16MiB")), connect=text(kvstore.connect))
    """)
    for kind, text in (said["start"], said["connect"]):
        assert kind == "StoreNotRunning"
        assert "127.0.0.1:1" in text
        assert "address='local'" in text
        assert "ray_current_cluster" in text
    assert said["ray"] is None


def test_a_home_that_takes_no_token_is_a_typed_error(world):
    (said,) = world.run('say(start=tried(lambda: kvstore.start("16MiB")))', HOME="/dev/null/home", RAY_AUTH_MODE=None)
    assert said == {"start": "ConfigError", "ray": None}


def test_what_runs_here_is_found(head):
    from kvstore.actors.session.rays import rays_here

    (found,) = [one for one in rays_here() if one.address == head.address]
    assert (found.folder, found.outlives_starter) == (f"{head.folder}/ray", True)


def test_several_rays_are_refused_by_name(head, monkeypatch):
    from kvstore.actors.session import joining
    from kvstore.actors.session.rays import LocalRay
    from kvstore.errors import ConfigError

    monkeypatch.setenv("RAY_TMPDIR", str(head.folder))
    folder = f"{head.folder}/ray"
    private, elsewhere = LocalRay("127.0.0.1:3", folder, False), LocalRay("127.0.0.1:4", "/tmp/x", True)
    own = LocalRay(head.address, folder, True)
    monkeypatch.setattr(joining, "rays_here", lambda: [own, private, elsewhere])
    assert joining.find_ray()[0] == head.address
    monkeypatch.setattr(joining, "rays_here", lambda: [own, private, LocalRay("127.0.0.1:2", folder, True)])
    with pytest.raises(ConfigError, match=r"got 2: 127\.0\.0\.1:2, .*; say which with address="):
        joining.find_ray()

"""Every way that a Ray call fails is one of our errors, and one place knows them."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import threading

import pytest
import ray
from ray import exceptions as ray_errors
from ray._private import auto_init_hook

import kvstore
from kvstore.actors import calls
from kvstore.actors.calls import answer, call, find_actor, ray_failures
from kvstore.actors.cluster import Store
from kvstore.actors.session.rays import RaySession
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError, KVStoreError, PeerLost, PoolExhausted, StoreNotRunning, TransferTimeout


def classes_below(cls):
    return {cls}.union(*(classes_below(child) for child in cls.__subclasses__()))


#: Ray makes more of them: for each error of an actor one that is of its class, too.
RAY_ERRORS = [cls for cls in classes_below(ray_errors.RayError) if cls.__module__ == ray_errors.__name__]
TIMEOUTS = {ray_errors.GetTimeoutError, ray_errors.RayChannelTimeoutError}


@pytest.fixture
def initialised(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)


CONSTRUCTOR = """\
The actor died because of an error raised in its creation task, \x1b[36mray::A.__init__()\x1b[39m (pid=1, ip=192.0.2.2)

The above exception was the direct cause of the following exception:

\x1b[36mray::A.__init__()\x1b[39m (pid=1, ip=192.0.2.2)
           ^^^^^^^^
  File "/x/node_store.py", line 10, in __init__
    raise OSError("gone") from error
OSError: the disk
  is gone"""


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (CONSTRUCTOR, "The actor died because of an error raised in its creation task: OSError: the disk\n  is gone"),
        (CONSTRUCTOR.partition("\n\n")[2], "OSError: the disk\n  is gone"),
        ("\x1b[31mno frames\x1b[0m\nhere", "no frames\nhere"),
        ('  File "x.py", line 1\n    cut off', '  File "x.py", line 1\n    cut off'),
    ],
)
def test_of_a_traceback_only_the_error_at_its_end_is_said(initialised, monkeypatch, said, text):
    monkeypatch.setattr(ray_errors.ActorDiedError, "__str__", lambda self: said)
    with pytest.raises(PeerLost) as caught, ray_failures("asking"):
        raise ray_errors.ActorDiedError
    assert str(caught.value) == f"asking: ActorDiedError: {text}"
    assert str(caught.value.__cause__) == said


def test_the_tree_is_a_tree():
    assert len(RAY_ERRORS) > 30


@pytest.mark.parametrize("cls", sorted(RAY_ERRORS, key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__)
def test_each_error_of_ray_is_one_of_ours(initialised, cls, monkeypatch):
    # Their constructors want what only Ray has.
    error = cls.__new__(cls)
    error.cause = None
    monkeypatch.setattr(cls, "__str__", lambda self: "text")
    with pytest.raises(KVStoreError, match="asking: ") as caught, ray_failures("asking"):
        raise error
    if cls is not ray_errors.RayTaskError:
        assert type(caught.value) is (TransferTimeout if cls in TIMEOUTS else PeerLost)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        ConnectionError("no"),
        OSError("no"),
        RuntimeError("no"),
        SystemError("no"),
        AttributeError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_ray_raises_besides_its_own_errors_is_one_of_ours(initialised, error):
    with pytest.raises(PeerLost, match=f"asking: {type(error).__name__}: no"), ray_failures("asking"):
        raise error


def test_our_errors_pass_as_they_are_and_so_do_faults_of_the_caller(initialised):
    with pytest.raises(PoolExhausted, match=r"^full$"), ray_failures("asking"):
        raise PoolExhausted("full")
    with pytest.raises(TypeError), ray_failures("asking"):
        raise TypeError("an argument of the caller")


@pytest.mark.parametrize("cause", [PoolExhausted("full"), KeyError("x")], ids=repr)
def test_what_an_actor_raised_is_that_or_says_so(initialised, cause):
    raised = ray_errors.RayTaskError("f", "traceback", cause).as_instanceof_cause()
    with pytest.raises(KVStoreError) as caught, ray_failures("asking"):
        raise raised
    assert type(caught.value) is (PoolExhausted if isinstance(cause, KVStoreError) else KVStoreError)


@pytest.mark.parametrize("name", ["", "a/b", "é", "a\n", "x" * 41, None, 5])
def test_a_name_that_no_store_can_have_is_refused(name):
    for ask in (lambda: kvstore.connect(name), lambda: kvstore.node_store(name=name)):
        with pytest.raises(ConfigError, match="name: wanted 1 to 40 letters"):
            ask()


def test_a_hint_to_start_a_store_again_names_it():
    for name, wanted in (("s2", "kvstore.start(name='s2')"), ("default", "kvstore.start()")):
        store = Store(StoreConfig(name=name), RaySession("127.0.0.1:1", "session", is_own=True))
        store._closed = True
        for has_ended, then in ((False, "makes another"), (True, "starts it again")):
            store._has_ended = has_ended
            with pytest.raises(StoreNotRunning, match=re.escape(f"; {wanted} {then}")):
                store.node_ids()


def test_without_ray_nothing_is_asked_and_no_ray_is_started():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent("""
            import ray
            from kvstore.actors.calls import call, find_actor
            from kvstore.errors import StoreNotRunning
            for ask in (lambda: find_actor("raykv/x/directory"), lambda: call("it", None, timeout_s=1.0)):
                try:
                    ask()
                except StoreNotRunning:
                    print("refused", ray.is_initialized())
        """)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["refused", "False"] * 2


_STOPPED_GCS = """
import os, signal, time
from pathlib import Path
import kvstore
import ray
from kvstore.actors.calls import call, find_actor, ray_failures
from kvstore.actors.finding import alive_nodes
from kvstore.actors.session import probing
from kvstore.errors import KVStoreError

ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
session = ray._private.worker.global_worker.node.get_session_dir_path()
gcs = next(
    int(p.name) for p in Path("/proc").iterdir()
    if p.name.isdigit() and "gcs_server" in (text := (p / "cmdline").read_bytes().decode(errors="replace"))
    and session in text
)
probing._CONNECT_S = 2.0
address = ray.get_runtime_context().gcs_address
assert len(alive_nodes()) == 1
probing.check_answers(address)
os.kill(gcs, signal.SIGSTOP)
try:
    for ask in (lambda: find_actor("raykv/x/directory"), alive_nodes, lambda: probing.check_answers(address)):
        try:
            ask()
        except KVStoreError as error:
            print(type(error).__name__, flush=True)
    for ask in (lambda: kvstore.connect(timeout_s=1), lambda: kvstore.start("16MiB", timeout_s=1)):
        began_s = time.monotonic()
        try:
            ask()
        except KVStoreError as error:
            print(type(error).__name__, 0.9 < time.monotonic() - began_s < 5.5, flush=True)
finally:
    os.kill(gcs, signal.SIGCONT)
try:
    find_actor("raykv/x/directory")
except KVStoreError as error:
    print(type(error).__name__, flush=True)
ray.shutdown()
"""


@pytest.mark.ray
def test_a_cluster_whose_gcs_hangs_times_out(monkeypatch):
    # Far from the second that calls of ours get, so that a busy machine is not taken for a call that waits for Ray.
    monkeypatch.setenv("RAY_gcs_server_request_timeout_seconds", "6")
    done = subprocess.run(
        [sys.executable, "-c", _STOPPED_GCS], capture_output=True, text=True, timeout=100, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [
        *["TransferTimeout", "PeerLost", "StoreNotRunning"], *["StoreNotRunning", "True"] * 2, "StoreNotRunning"
    ]  # fmt: skip


def test_an_unknown_name_and_a_lost_reference(initialised, monkeypatch):
    def unknown(*args, **options):
        raise ValueError("Failed to look up actor")

    monkeypatch.setattr(ray, "get_actor", unknown)
    with pytest.raises(StoreNotRunning, match=r"raykv/x/directory.*kvstore\.start"):
        find_actor("raykv/x/directory")
    monkeypatch.setattr(ray, "get", unknown)
    with pytest.raises(PeerLost, match="directory"):
        answer("directory", None, 1.0)


@pytest.mark.parametrize("timeout_s", [-0.5, -0.0, -1e9])
def test_a_time_that_is_over_is_a_timeout(initialised, monkeypatch, timeout_s):
    """Ray's core ends the whole process at a negative one."""

    def get(ref, timeout):
        assert timeout >= 0.0
        raise ray.exceptions.GetTimeoutError("not ready")

    def wait(refs, timeout):
        assert timeout >= 0.0
        return [], refs

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)
    with pytest.raises(TransferTimeout, match=r"^directory \(no time was left for it\): no answer in time"):
        answer("directory", None, timeout_s)
    assert not calls.is_answered("directory", None, timeout_s)


def test_a_search_that_the_gcs_does_not_answer_ends(initialised, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(ray, "get_actor", lambda *_, **__: over.wait(30))
    try:
        with pytest.raises(TransferTimeout, match=r"raykv/x/directory.*not done within 0\.2 s"):
            find_actor("raykv/x/directory", 0.2)
        monkeypatch.setattr(calls, "within", lambda what, timeout_s, do: timeout_s)
        assert find_actor("raykv/x/directory") == 10.0
    finally:
        over.set()


def test_a_ray_that_another_thread_shuts_down_is_not_replaced_by_another(monkeypatch):
    begun, connected, called = [], [True], []
    verb = auto_init_hook.wrap_auto_init(lambda: called.append("done"))  # As ray.get_actor and the others are.
    monkeypatch.setattr(ray, "is_initialized", lambda: connected[0])
    monkeypatch.setattr(ray, "init", lambda: begun.append("here"))

    def ask():
        with ray_failures("asking"):
            connected[0] = False  # After it was looked whether there is a Ray.
            verb()

    with pytest.raises(StoreNotRunning, match="disconnected"):
        ask()
    assert (begun, called) == ([], [])
    verb()  # Of the program itself.
    assert (begun, called) == (["here"], ["done"])


class Lost:
    """A method of an actor of a Ray that this process is no longer connected to."""

    def remote(self, *args):
        raise ConnectionError("Failed to connect")


def test_a_call_that_cannot_be_sent_is_one_of_our_errors(initialised):
    with pytest.raises(PeerLost, match="directory: ConnectionError"):
        call("directory", Lost(), timeout_s=1.0)


def test_one_that_is_looked_at_after_the_time_had_all_of_it(initialised, monkeypatch):
    waited = []

    def get(ref, timeout):
        waited.append(timeout)
        monkeypatch.setattr(calls.time, "monotonic", lambda: 1010.0)
        raise ray_errors.GetTimeoutError("no answer")

    monkeypatch.setattr(calls.time, "monotonic", lambda: 1000.0)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(calls, "begin", lambda what, method: method)
    said = calls.ask_all({"n1": "ref1", "/0": "ref2"}, timeout_s=10.0)
    assert waited == [10.0, 0.1]
    assert str(said["/0"]).startswith("shard 0 of the directory, asked 10 s ago (within 0.1 s): ")

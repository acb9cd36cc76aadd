"""Handles, calls and threads of one process do not end the Ray of each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import pytest

from kvstore.actors.session import handles
from kvstore.actors.session.handles import RayUse
from kvstore.actors.session.joining import Joined
from kvstore.actors.session.rays import RaySession
from kvstore.config import StoreConfig
from kvstore.errors import StoreBusy, StoreNotRunning, StoreUnavailable

OWN = RaySession("127.0.0.1:1", "session_own", is_own=True)
OTHER = RaySession("127.0.0.1:2", "session_other")


class Handle:
    def __init__(self, name, session=OWN, has_started=False):
        self.config, self.session, self.started = StoreConfig(name=name), session, has_started

    def _is_of(self, session):
        return self.session == session

    def _has_started(self, name, session):
        return self.started and self._is_of(session) and self.config.name == name


class World:
    """What Ray would be: which one this process is in, which stores it has, and whether it says so."""

    def __init__(self):
        self.session, self.stores, self.answers = None, [], True

    def join(self, address, *, may_start, deadline_s):
        connected = self.session is None
        self.session = self.session or (OWN if may_start else OTHER)
        return Joined(self.session, connected and may_start, connected, "why")

    def stores_here(self):
        if not self.answers:
            raise StoreUnavailable("it hangs")
        return self.stores

    def shutdown(self):
        self.session = None


@pytest.fixture
def world(monkeypatch):
    world = World()
    monkeypatch.setattr(handles, "join_ray", world.join)
    monkeypatch.setattr(handles, "stores_here", world.stores_here)
    monkeypatch.setattr(handles, "check_answers", lambda address: None)
    monkeypatch.setattr(handles, "is_connected", lambda session: world.session == session)
    monkeypatch.setattr(handles.ray, "shutdown", world.shutdown)
    return world


@pytest.fixture
def use():
    return RayUse()


def joined(use, name="a", *, may_start=True):
    return use.joined(None, name, time.monotonic() + 5, may_start=may_start)


def fail(use, **options):
    with pytest.raises(KeyError), joined(use, **options):
        raise KeyError


def test_a_ray_of_which_nothing_is_known_goes_on_for_the_open_handles_of_this_process(use, world):
    world.session, world.answers = OWN, False
    a, b = Handle("a"), Handle("b")
    for handle in (a, b):
        use.hold(handle)
    use.drop(a)
    assert use.leave(OWN, "a") == ["b"]
    assert world.session is OWN
    use.drop(b)
    assert use.leave(OWN, "b") == []
    assert world.session is None


def test_a_ray_that_has_ended_goes_on_for_no_handle(use, world, monkeypatch):
    def refuse(address):
        raise StoreNotRunning("nobody listens") from ConnectionRefusedError()

    world.session, b = OWN, Handle("b")
    use.hold(b)
    monkeypatch.setattr(handles, "check_answers", refuse)
    assert use.leave(OWN, "a") == []
    assert world.session is None


def test_what_the_cluster_says_counts_more_than_handles(use, world):
    world.session, forgotten = OWN, Handle("b")
    use.hold(forgotten)
    world.stores = ["c"]
    assert use.leave(OWN, "a") == ["c"]
    world.stores = ["a"]  # Just killed, say.
    assert use.leave(OWN, "a") == []
    assert world.session is None


def test_a_start_under_way_keeps_the_ray_that_another_thread_leaves(use, world):
    with joined(use, "b"):
        assert use.leave(OWN, "a") == ["b"]
        fail(use, name="c")
        assert world.session is OWN
        b = Handle("b")
        use.hold(b)
        world.stores = ["b"]
    fail(use, name="c")
    assert world.session is OWN


def test_a_failed_start_ends_the_ray_that_it_began_and_the_last_of_several_does(use, world):
    fail(use)
    assert world.session is None
    meanwhile = []

    def fails_while_another_does():
        with joined(use, "a"):
            fail(use, name="b")
            meanwhile.append(world.session)
            raise KeyError

    with pytest.raises(KeyError):
        fails_while_another_does()
    assert (meanwhile, world.session) == ([OWN], None)


def test_a_failed_connect_leaves_what_it_joined_and_nothing_else(use, world):
    fail(use, may_start=False)
    assert world.session is None
    with joined(use, may_start=False):
        handle = Handle("a", OTHER)
        use.hold(handle)
    fail(use, may_start=False)
    assert world.session is OTHER
    use.drop(handle)
    fail(use, may_start=False)
    assert world.session is OTHER, "a call before it had connected this process, and the program may have stayed"
    world.session = RaySession("127.0.0.1:3", "of the program itself")
    fail(use, may_start=False)
    assert world.session is not None


def test_two_threads_do_not_join_at_once_and_the_wait_has_an_end(use, world, monkeypatch):
    inside, go = threading.Event(), threading.Event()

    def join(address, **options):
        inside.set()
        go.wait(10)
        return world.join(address, **options)

    monkeypatch.setattr(handles, "join_ray", join)

    def call():
        with joined(use):
            pass

    thread = threading.Thread(target=call)
    thread.start()
    assert inside.wait(10)
    with (
        pytest.raises(StoreBusy, match="another thread"),
        use.joined(None, "b", time.monotonic() + 0.1, may_start=True),
    ):
        pass
    go.set()
    thread.join(10)
    call()


def test_a_handler_of_a_signal_may_call_while_its_thread_does(use, world):
    # On a thread of its own, which would wait for ever.
    done, inside = threading.Event(), use._lock

    def call():
        with inside:
            use.drop(Handle("a"))
            done.set()

    threading.Thread(target=call, daemon=True).start()
    assert done.wait(10)


SCRIPT = """
import json, os, signal, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import kvstore, ray

def tried(call):
    try:
        call()
    except BaseException as error:
        return type(error).__name__

def say(**what):
    print(json.dumps(what | {"ray": ray.is_initialized()}), flush=True)

with ThreadPoolExecutor(2) as threads:
    started = {name: threads.submit(kvstore.start, "16MiB", name=name, timeout_s=90) for name in "ab"}
    a, b = started["a"].result(90), started["b"].result(90)
time.sleep(1)
say(b=tried(b.stats))
say(failed=tried(lambda: kvstore.start("1TiB", name="c")), b=tried(b.stats))
pid = ray.get(
    ray.get_actor("raykv/a/supervisor", namespace="raykv").__ray_call__.remote(lambda self: os.getpid()), timeout=30
)
os.kill(pid, signal.SIGSTOP)
say(stop=tried(a.stop), b=tried(b.stats))
say(gone=tried(lambda: kvstore.connect("a")))
say(stop=tried(b.stop))
"""


@pytest.mark.ray
def test_stores_that_threads_started_outlive_them_and_a_stop_that_the_supervisor_does_not_answer():
    with tempfile.TemporaryDirectory(prefix="rk", dir="/tmp", ignore_cleanup_errors=True) as folder:
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(SCRIPT)],
            env=environment | {"RAY_TMPDIR": folder, "RAYKV_SOCKET_DIR": f"{folder}/s"},
            capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert said[0]["b"] is None
    assert said[1:] == [
        {"failed": "ConfigError", "b": None, "ray": True},
        {"stop": None, "b": None, "ray": True},
        {"gone": "StoreNotRunning", "ray": True},
        {"stop": None, "ray": False},
    ]
    assert "SIGTERM handler" not in done.stderr

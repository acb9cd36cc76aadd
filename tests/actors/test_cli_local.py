"""`kvstore start --local`: a store in a Ray of its own, which ends with its process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.memory.room import find_room

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def local(name):
    """`kvstore start --local`, in a process group of its own, when it serves; the process and its Ray's address."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "127.0.0.1:1"}
    code = "from kvstore.cli import main; main()"
    command = [sys.executable, "-c", code, "start", "--local", "--capacity", "64MiB", "--name", name]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            lines = [process.stdout.readline() for _ in range(2)]
            address = lines[1].removeprefix("Ray listens at ").split(";")[0]
            assert lines[0] == f"store {name!r} runs on 1 node(s) of the Ray at {address}, 64 MiB each\n"
            yield process, address
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_local_serves_until_it_is_told_to_stop():
    with local("default") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        # Ray's core may have the last word: that its cluster has gone.
        assert [line for line in process.stderr.read().splitlines() if "GOAWAY" not in line][-1] == "stopping"


def test_local_ends_soon_when_its_whole_group_is_told_to():
    """As by Ctrl-C in a terminal, or `timeout`: Ray is told, too, and may be gone before the store has been stopped."""
    with local("group") as (process, _):
        began_s = time.monotonic()
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(25) == 0
        assert time.monotonic() - began_s < 20
        assert "Traceback" not in process.stderr.read()


def test_local_ends_when_others_stop_its_store():
    with local("elsewhere") as (process, address):
        script = f"import kvstore; kvstore.connect('elsewhere', address={address!r}).destroy()"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", script], env=environment, timeout=60, check=True)
        assert process.wait(30) == 0
        assert process.stdout.read() == "store 'elsewhere' was stopped by another process; its Ray ends with it\n"


def test_a_capacity_that_rays_memory_monitor_would_punish_is_refused(monkeypatch):
    """The store's process has the variable from its raylet."""
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.5")
    room = find_room()
    if room.room_bytes < 1 << 30:
        pytest.skip("half of this machine's memory is used")
    code = "from kvstore.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "start", "--local", "--capacity", str(room.room_bytes + (1 << 28)), "--name", "p"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "or Ray ends processes of this node" in done.stderr
    assert "RAY_memory_usage_threshold=0.5" in done.stderr

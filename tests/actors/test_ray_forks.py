"""Ray does not work in a fork of a process that was connected to it; that is said at once, and harms nobody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import faulthandler, json, os, sys
import kvstore, ray

early = sys.argv[2] == "loaded"
space = kvstore.Namespace(
    model="m", shape=kvstore.KVShape(num_layers=1, num_kv_heads=1, head_dim=16, dtype="float16", block_size=16)
)
ray.init(address=sys.argv[1], log_to_driver=False, namespace="raykv")

def in_fork(*calls):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        # One that hangs says nothing. On a busy machine its imports take long.
        faulthandler.dump_traceback_later(60, exit=True)
        said = []
        for call in calls:
            try:
                said.append(repr(call()))
            except BaseException as error:
                said.append(type(error).__name__)
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return json.loads(said or "null")

doors = (kvstore.connect, lambda: kvstore.start("32MiB", name="forks"), kvstore.node_store)
if early:
    store = kvstore.start("32MiB", name="forks")
    path = store.control_path()
    def own_client():
        client = kvstore.Client(path, space)
        num_blocks = client.lookup(space.block_hashes(range(16))).num_blocks
        client.close()
        return num_blocks
    said = {"doors": in_fork(*doors), "client": in_fork(own_client), "clear": store.clear(space)}
    store.stop()
else:
    said = {"doors": in_fork(*doors)}
print(json.dumps(said), flush=True)
"""


def said_by(address: str, how: str) -> dict[str, object]:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, address, how],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            return json.loads(process.communicate(timeout=150)[0])
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def test_a_fork_of_a_connected_process_is_refused_at_once_and_makes_its_own_client(ray_cluster):
    said = said_by(ray_cluster.address, "loaded")
    assert said["doors"] == ["ForkedClient"] * 3
    assert said["client"] == ["0"]
    assert said["clear"] == 0


def test_a_fork_that_loads_the_store_only_then_is_refused_too(ray_cluster):
    assert said_by(ray_cluster.address, "not loaded")["doors"] == ["ForkedClient"] * 3

"""A lone node on which no mover can begin, as where UCX is pinned to a device that the machine has not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONE = """
import torch
import kvstore

store = kvstore.start("8MiB", block_bytes=1 << 13, address="local", timeout_s=120)
shape = kvstore.KVShape(num_layers=1, num_kv_heads=2, head_dim=64, dtype="float32", block_size=4)
space = kvstore.Namespace(model="m", shape=shape)
with store.client(space) as client:
    source = torch.randn(2, 4, 4, 2, 64)
    client.register_kv_caches([source], "PBTHD")
    hashes, before = space.block_hashes(range(8)), source[:, :2].clone()
    print(client.save(hashes, [0, 1]).result().num_written)
    print(client.load(hashes, [2, 3]).result().num_blocks, torch.equal(source[:, 2:], before))
(node,) = store.stats()["nodes"].values()
print(node["mover_pid"], node["mover_problem"])
store.stop()
"""


@pytest.mark.ray
def test_a_lone_node_serves_without_a_mover_and_says_why_it_has_none():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "UCX_NET_DEVICES": "no_such_device:1"}
    done = subprocess.run(
        [sys.executable, "-c", LONE], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    saved, loaded, why = done.stdout.splitlines()
    assert (saved, loaded) == ("2", "2 True")
    assert why.startswith("0 could not start NIXL's UCX backend")
    assert "UCX_NET_DEVICES=no_such_device:1" in why

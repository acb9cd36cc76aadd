"""Clusters of plain processes with real NIXL, whose parts can be killed and stopped; engines with stamped blocks."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from waiting import eventually, stop_process

from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
from kvstore.client.client import Client
from kvstore.config import StoreConfig

SPACE = Namespace(model="m", shape=KVShape(num_layers=4, num_kv_heads=4, head_dim=64, dtype="bfloat16", block_size=16))
POISON = 0x5A5A
SETTINGS = {
    "capacity_bytes": 16 << 20, "chunk_bytes": 1 << 20, "lease_ttl_s": 2.0, "lease_margin_s": 0.2,
    "transfer_timeout_s": 1.0, "call_timeout_s": 0.7, "max_quarantine_s": 60.0, "max_quarantined_fraction": 1.0,
    "max_pinned_fraction": 1.0,
}  # fmt: skip


class Part:
    """One process of the cluster, asked over its standard input."""

    def __init__(self, *arguments):
        script = str(Path(__file__).with_name("processes.py"))
        self.process = subprocess.Popen(
            [sys.executable, script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self.process.pid

    def ask(self, do, timeout_s=25.0, **more):
        self.process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
        self.process.stdin.flush()
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        assert poll.poll(timeout_s * 1000), f"no answer to {do!r}"
        answer = json.loads(self.process.stdout.readline())
        assert "is" in answer, answer
        return answer["is"]

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)
        with contextlib.suppress(BrokenPipeError):  # What it never read is flushed here.
            self.process.stdin.close()
        self.process.stdout.close()


class Engine:
    """An engine whose every block is stamped from its hash; what a load calls usable is compared."""

    def __init__(self, path, num_blocks=256):
        shape = SPACE.shape
        self.client = Client(path, SPACE)
        dims = (2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.layers = [torch.zeros(dims, dtype=torch.bfloat16) for _ in range(shape.num_layers)]
        self._bits = [layer.view(torch.int16).numpy() for layer in self.layers]
        self.client.register_kv_caches(self.layers)

    @staticmethod
    def _stamp(block_hash):
        shape = SPACE.shape
        size = (shape.num_layers, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
        return np.random.default_rng(list(block_hash[:8])).integers(-(2**15), 2**15, size, np.int16)

    def save(self, hashes):
        for block, block_hash in enumerate(hashes):
            for bits, stamped in zip(self._bits, self._stamp(block_hash), strict=True):
                bits[:, block] = stamped
        return self.client.save(hashes, range(len(hashes))).result(20)

    def begin_load(self, hashes, **more):
        for bits in self._bits:
            bits[:, : len(hashes)] = POISON
        return self.client.load(hashes, range(len(hashes)), **more)

    def check(self, hashes, result):
        """Compare every block that the result calls usable with its stamp."""
        for block, block_hash in enumerate(hashes[: result.num_blocks]):
            found = np.stack([bits[:, block] for bits in self._bits])
            assert np.array_equal(found, self._stamp(block_hash)), f"block {block} of {result} is wrong"
        assert [failure.index for failure in result.failed] == list(range(result.num_blocks, len(hashes)))
        return result

    def load(self, hashes, **more):
        return self.check(hashes, self.begin_load(hashes, **more).result(30))


class Cluster:
    """Two nodes, "source" and "reader", and a directory."""

    def __init__(self, folder, **settings):
        self.folder = folder
        self.config = StoreConfig(**(SETTINGS | settings)).to_json()
        self.directory = Part("directory", folder)
        self.stores, self.engines, self._stopped = {}, {}, []
        self._seed = 0
        #: Whether the next test may use it.
        self.is_whole = True
        for node in ("source", "reader"):
            self.start_store(node)
        for node in ("source", "reader"):
            self.open(node)

    def start_store(self, node):
        if node in self.stores:
            self.stores[node].end()
        self.stores[node] = Part("store", self.folder, node, self.config)

    def open(self, node):
        """Make a new engine on a node, once its store is ready."""
        if node in self.engines:
            self.engines.pop(node).client.close()
        assert self.stores[node].ask("ready")
        self.engines[node] = Engine(self.stores[node].ask("path"))
        return self.engines[node]

    def restart_directory(self):
        self.directory.end()
        self.directory = Part("directory", self.folder)

    def chain(self, num_blocks=64):
        """Hashes that nothing holds yet."""
        self._seed += 1
        return SPACE.block_hashes(np.arange(num_blocks * SPACE.shape.block_size) + 1_000_000 * self._seed)

    def stats(self, node):
        return self.stores[node].ask("stats")

    def pool(self, node):
        return self.stats(node)["pool"]

    def pid(self, victim):
        """The process id of "directory", "source", "reader", or the mover of one of the latter."""
        if victim == "directory":
            return self.directory.pid
        node, _, part = victim.partition("_")
        return self.stats(node)["mover_pid"] if part else self.stores[node].pid

    def send(self, victim, number):
        pid = self.pid(victim)
        if number == signal.SIGSTOP:
            self._stopped.append(pid)
            stop_process(pid)
        else:
            os.kill(pid, number)
        return pid

    def resume(self):
        while self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._stopped.pop(), signal.SIGCONT)

    def settle(self):
        """Wait until nothing is held any more on either node, and check that the pools are whole."""
        keys = ("num_pinned", "num_leases", "num_writing", "num_writes", "num_quarantined")
        for node, part in self.stores.items():

            def is_settled(node=node):
                pool = self.pool(node)
                return not any(pool[key] for key in keys)

            eventually(is_settled, 8)
            part.ask("check")

    def stop(self):
        self.resume()
        for engine in self.engines.values():
            engine.client.close(2.0)
        for part in [*self.stores.values(), self.directory]:
            part.end()


@pytest.fixture(scope="module")
def sockets():
    """Control sockets lie in a private folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="rkf", dir="/tmp") as folder:
        before = os.environ.get("RAYKV_SOCKET_DIR")
        os.environ["RAYKV_SOCKET_DIR"] = folder
        yield
        if before is None:
            del os.environ["RAYKV_SOCKET_DIR"]
        else:
            os.environ["RAYKV_SOCKET_DIR"] = before


@pytest.fixture(scope="module")
def start_cluster(sockets):
    """Starts clusters with settings of one's choice; all end with the module."""
    made = []
    with tempfile.TemporaryDirectory(prefix="rkn", dir="/tmp") as folder:

        def start(**settings):
            here = Path(folder) / str(len(made))
            here.mkdir()
            made.append(Cluster(str(here), **settings))
            return made[-1]

        yield start
        for cluster in made:
            cluster.stop()


@pytest.fixture(name="eventually")
def _eventually():
    return eventually

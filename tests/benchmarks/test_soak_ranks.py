"""The rank processes of the soak, at work on a real node store, say so when the store does wrong."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore.config import StoreConfig
from kvstore.errors import PeerLost
from kvstore.node.core import NodeCore
from kvstore.remote.directory import DirectoryServer
from tests.soak import plan
from tests.soak.ranks import RankWorker
from tests.soak.settings import WorkerSettings
from tests.soak.weights import Weights


def nobody(node_id, within_s):
    raise PeerLost("there is no other node")


class Ranks:
    """One node store, two ranks on threads, and what they say."""

    def __init__(self, folder: Path) -> None:
        config = StoreConfig(capacity_bytes=plan.CAPACITY_BYTES, **plan.SETTINGS)
        self._directory = DirectoryServer("127.0.0.1")
        self.weights = Weights(folder / "weights", writer=True)
        self.core = NodeCore("node", config, "127.0.0.1", nobody, self._directory.address)
        path_file = folder / "node.path"
        path_file.write_text(self.core.control_path)
        self.workers, self._pipes, self._threads = [], [], []
        for rank in range(plan.NUM_RANKS):
            settings = WorkerSettings(
                seed=1, client=rank, life=0, node=0, path_files=(path_file,), mail=folder / "mail",
                weights_file=folder / "weights", log_file=folder / f"log-{rank}", error_file=folder / "err", rank=rank,
            )  # fmt: skip
            pipe, theirs = multiprocessing.Pipe()
            self._pipes.append((pipe, theirs))
            self.workers.append(RankWorker(settings, theirs))
            self._threads.append(threading.Thread(target=self.workers[-1].run, daemon=True))
        self.findings, self.num_verified, self.num_in_parts = [], 0, 0

    def work(self, num_verified: int, timeout_s: float = 20.0) -> None:
        """Let both work until something was found, or enough blocks were compared."""
        for thread in self._threads:
            if not thread.is_alive():
                thread.start()
        deadline_s, verified = time.monotonic() + timeout_s, self.num_verified
        while not self.findings and self.num_verified < verified + num_verified:
            assert time.monotonic() < deadline_s
            self.hear(0.05)

    def hear(self, timeout_s: float) -> None:
        for pipe, _ in self._pipes:
            while pipe.poll(timeout_s):
                what, value = pipe.recv()
                if what == "finding":
                    self.findings.append(value)
                else:
                    self.num_verified += value[0].get(("blocks", "verified"), 0)
                    self.num_in_parts += value[0].get(("blocks", "written in parts"), 0)

    def end(self) -> None:
        for pipe, _ in self._pipes:
            pipe.send("close")
        deadline_s = time.monotonic() + 30.0
        while any(thread.is_alive() for thread in self._threads):
            assert time.monotonic() < deadline_s
            self.hear(0.05)
        self.hear(0)
        for ends in self._pipes:
            for end in ends:
                end.close()
        self.core.stop()
        self._directory.stop()


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    with tempfile.TemporaryDirectory(prefix="rks", dir="/tmp") as folder:
        monkeypatch.setenv("RAYKV_SOCKET_DIR", folder)
        made = Ranks(tmp_path)
        with contextlib.closing(made.weights._memory):
            yield made


def test_two_ranks_save_and_load_without_a_finding(ranks):
    ranks.work(100)
    ranks.end()
    assert ranks.findings == []
    assert ranks.num_in_parts > 0


def test_a_wrong_byte_of_one_part_is_found(ranks):
    ranks.work(50)
    arena = np.frombuffer(ranks.core.state.arena.memory, np.uint8)
    deadline_s = time.monotonic() + 10
    while not ranks.findings and time.monotonic() < deadline_s:
        arena[100 :: plan.SHAPE.block_bytes] ^= 1
        ranks.hear(0.05)
    del arena
    ranks.end()
    assert "WRONG BYTES in parts" in ranks.findings[0]


def test_parts_of_two_versions_in_one_block_are_found(ranks, monkeypatch):
    """As if a rank had been slow, and what it saved were of the weights before."""
    ranks.weights.changed()
    one_behind = contextlib.contextmanager(lambda: iter([0]))
    monkeypatch.setattr(ranks.workers[1]._weights, "using", one_behind)
    ranks.work(10_000)
    ranks.end()
    assert any("WRONG BYTES in parts" in finding for finding in ranks.findings)


def test_weights_do_not_change_while_they_are_used(tmp_path):
    weights = Weights(tmp_path / "weights", writer=True)
    changed = threading.Event()

    def change() -> None:
        with weights.changing():
            weights.changed()
        changed.set()

    with weights.using() as version:
        thread = threading.Thread(target=change)
        thread.start()
        assert not changed.wait(0.2)
        assert weights.newest == version
    assert changed.wait(10)
    thread.join(10)
    assert weights.newest == version + 1
    weights._memory.close()

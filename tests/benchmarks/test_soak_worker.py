"""A client of the soak, at work on a real node store, says so when the store does wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvstore.config import StoreConfig
from kvstore.errors import PeerLost
from kvstore.handoff.table import HandoffTable
from kvstore.node.core import NodeCore
from kvstore.remote.directory import DirectoryServer
from tests.soak import plan, worker
from tests.soak.plan import Verb
from tests.soak.weights import Weights
from tests.soak.worker import Worker, WorkerSettings


def nobody(node_id, within_s):
    raise PeerLost("there is no other node")


class Desk:
    """One node store, one worker on a thread, and what the worker says."""

    def __init__(self, folder: Path) -> None:
        self._config = StoreConfig(capacity_bytes=plan.CAPACITY_BYTES, **plan.SETTINGS)
        self._path_file = folder / "node.path"
        self._directory = DirectoryServer("127.0.0.1")
        self.weights = Weights(folder / "weights", writer=True)
        self.start_store()
        settings = WorkerSettings(
            seed=7, client=0, life=0, node=0, path_files=(self._path_file,), mail=folder / "mail",
            weights_file=folder / "weights", log_file=folder / "log", error_file=folder / "err",
        )  # fmt: skip
        self._driver, theirs = multiprocessing.Pipe()
        self._theirs = theirs
        self._worker = Worker(settings, theirs)
        self._thread = threading.Thread(target=self._worker.run, daemon=True)
        self.findings, self.num_done, self.counts = [], 0, Counter()

    def start_store(self) -> None:
        self.core = NodeCore("node", self._config, "127.0.0.1", nobody, self._directory.address)
        self._path_file.write_text(self.core.control_path)

    def work(self, enough, timeout_s: float = 20.0) -> None:
        """Let the worker work until something was found, or enough was done."""
        if not self._thread.is_alive():
            self._thread.start()
        deadline_s, done = time.monotonic() + timeout_s, self.num_done
        while not self.findings and self.num_done < done + enough:
            assert time.monotonic() < deadline_s
            self.hear(0.1)

    def hear(self, timeout_s: float) -> None:
        while self._driver.poll(timeout_s):
            what, value = self._driver.recv()
            if what == "finding":
                self.findings.append(value)
            else:
                self.counts.update(value[0])
                self.num_done = value[2]

    def end(self) -> None:
        self._driver.send("close")
        deadline_s = time.monotonic() + 30.0
        while self._thread.is_alive():  # It may have more to say than the pipe takes.
            assert time.monotonic() < deadline_s
            self.hear(0.05)
        self._thread.join(1.0)
        self.hear(0)
        self._driver.close()
        self._theirs.close()
        self.core.stop()
        self._directory.stop()


@pytest.fixture
def desk(monkeypatch, tmp_path):
    with tempfile.TemporaryDirectory(prefix="rks", dir="/tmp") as folder:
        monkeypatch.setenv("RAYKV_SOCKET_DIR", folder)
        made = Desk(tmp_path)
        with contextlib.closing(made.weights._memory):
            yield made


def test_a_store_that_works_gives_no_finding(desk):
    desk.work(300)
    desk.end()
    assert desk.findings == []


def test_a_store_that_is_replaced_gives_no_finding(desk):
    desk.work(50)
    desk.core.stop()
    desk.start_store()
    desk.work(50)
    desk.end()
    assert desk.findings == []


def test_a_wrong_byte_in_the_arena_is_found(desk):
    desk.work(50)
    arena = np.frombuffer(desk.core.state.arena.memory, np.uint8)
    deadline_s = time.monotonic() + 10
    while not desk.findings and time.monotonic() < deadline_s:
        arena[100 :: plan.SHAPE.block_bytes] ^= 1
        desk.hear(0.05)
    del arena
    desk.end()
    assert "WRONG BYTES" in desk.findings[0]
    assert "Choice(" in desk.findings[0]


@pytest.fixture
def only_handoffs(monkeypatch):
    """Clients do nothing but publish and fetch."""
    names = {Verb.PUBLISH, Verb.BEGIN_PUBLISH, Verb.PUBLISH_AND_LEAVE, Verb.FETCH, Verb.FETCH_TWICE, Verb.FETCH_FORGED}
    chosen = plan.choices
    monkeypatch.setattr(worker, "choices", lambda *which: (c for c in chosen(*which) if c.verb in names))


def test_tickets_of_a_store_that_works_give_no_finding(desk, only_handoffs):
    desk.work(300)
    desk.end()
    assert desk.findings == []
    assert desk.counts["blocks", "handed off"] > 100
    reasons = {words[1] for words in desk.counts if words[0] == "fetches that failed"}
    assert {"not_found", "used"} <= reasons <= {"not_found", "used", "expired", "withdrawn", "owner_gone", "timeout"}


def test_a_wrong_byte_in_a_hand_off_is_found(desk, only_handoffs):
    desk.work(20)
    arena = np.frombuffer(desk.core.state.arena.memory, np.uint8)
    deadline_s = time.monotonic() + 10
    while not desk.findings and time.monotonic() < deadline_s:
        arena[100 :: plan.SHAPE.block_bytes] ^= 1
        desk.hear(0.01)
    del arena
    desk.end()
    assert "WRONG BYTES in a fetch" in desk.findings[0]


def test_a_ticket_that_is_good_twice_is_found(desk, only_handoffs, monkeypatch):
    end_claim = HandoffTable.end_claim
    monkeypatch.setattr(
        HandoffTable, "end_claim", lambda self, claim_id, owner, *, used: end_claim(self, claim_id, owner, used=False)
    )
    desk.work(2000)
    desk.end()
    assert "a ticket was good for two fetches" in desk.findings[0]


@pytest.mark.parametrize("reason", ["owner_gone", "cleared", "stale"])
def test_a_reason_that_nothing_explains_is_found(reason, desk, only_handoffs, monkeypatch):
    monkeypatch.setattr(HandoffTable, "claim", lambda *args, **how: f"{reason}: so it says")
    desk.work(40)
    assert desk.findings == []  # It may turn out to be true.
    desk.end()
    assert "nobody did that" in desk.findings[0]


def test_a_job_that_writes_after_it_was_given_up_is_found(desk):
    desk.work(50)
    while not desk.findings:
        for block in list(desk._worker._given_up):
            with contextlib.suppress(AssertionError):  # between two engines
                desk._worker.engine.cache.bits[block][0, 0, 0, 0, 0] = 1
        desk.work(5)
    desk.end()
    assert "after it was given up" in desk.findings[0]


def test_kv_of_cleared_weights_is_found(desk):
    """As if a clearing had not reached a node."""
    from tests.soak.engine import Engine

    engine = Engine(desk.core.control_path, plan.weights_space(), "PBTHD", plan.CHAIN_BLOCKS)
    deadline_s = time.monotonic() + 10
    while not desk.findings and time.monotonic() < deadline_s:
        for chain in plan.chains(plan.weights_space())[:8]:
            engine.cache.write(chain, range(plan.CHAIN_BLOCKS), 0)
            engine.client.save(chain, list(range(plan.CHAIN_BLOCKS))).result(10)
        desk.work(1)
        if desk.weights.newest == 0:
            desk.weights.changed()
    engine.close()
    desk.end()
    assert "wanted KV of one version from 1 on, got versions [0" in desk.findings[0]


def test_a_save_that_leaves_blocks_out_at_once_is_found(desk, monkeypatch):
    """Leaving them to whoever writes them takes the time of waiting for him."""
    from kvstore.client import save

    run_save = save.run_save

    def hasty(*args, **kwargs):
        result = yield from run_save(*args, **kwargs)
        return dataclasses.replace(result, num_blocks=max(result.num_blocks - 1, 0))

    monkeypatch.setattr(save, "run_save", hasty)
    desk.work(200)
    desk.end()
    assert "save of" in desk.findings[0]

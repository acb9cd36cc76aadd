"""The supervisor's rounds, without a cluster."""

from __future__ import annotations

import threading

import pytest

from kvstore.actors import supervisor as module
from kvstore.actors.supervisor import Supervisor
from kvstore.config import StoreConfig


class Idle(Supervisor):
    """Notes which nodes it saw to."""

    def __init__(self):
        super().__init__(StoreConfig(capacity_bytes=1 << 20).to_json(), watch=False)
        self.seen = []

    def _ensure_directory(self):
        self.seen.append("directory")

    def _ensure_node_store(self, node_id, resources):
        self.seen.append(node_id)
        if self.seen.count(node_id) == 1:
            raise SystemExit("of whoever raises that on a thread")


@pytest.fixture
def idle(monkeypatch):
    monkeypatch.setattr(module, "alive_nodes", lambda: {"n": {"memory": 1e12}})
    monkeypatch.setattr(module, "_ROUND_S", 5.0)
    return Idle()


def test_a_thread_that_cannot_be_started_is_tried_again_in_the_next_round(idle, monkeypatch):
    with monkeypatch.context() as patch:

        def refuse(thread):
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            idle.reconcile()
        assert "can't start new thread" in idle.problems()["n"]
    assert idle.seen == []
    idle.reconcile()
    assert sorted(idle.seen) == ["directory", "n"]


def test_whatever_ends_a_thread_the_node_is_seen_to_again(idle):
    assert idle.reconcile() == []
    assert "SystemExit" in repr(idle._running["n"].exception())
    assert idle.reconcile() == ["n"]

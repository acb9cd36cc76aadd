"""What `Store.stats` says of a store of which something is away, without a cluster."""

from __future__ import annotations

import pytest

from kvstore.actors import finding
from kvstore.actors.cluster import Store
from kvstore.actors.session.rays import RaySession
from kvstore.config import StoreConfig
from kvstore.errors import PeerLost, StoreNotRunning, TransferTimeout


class Actor:
    """Each of its questions is answered by what it has for it; an error is raised."""

    def __init__(self, **answers):
        for question, answer in answers.items():
            setattr(self, question, answer)


def finder(supervisor):
    """Find the supervisor of a store, or fail with its error, and nothing else."""

    def find(name, timeout_s=0.0):
        if not name.endswith("supervisor"):
            raise StoreNotRunning("no directory")
        if isinstance(supervisor, Exception):
            raise supervisor
        return supervisor

    return find


@pytest.fixture
def store(monkeypatch):
    def answer(what, ref, timeout_s):
        if isinstance(ref, Exception):
            raise ref
        return ref

    nodes = {"n1": Actor(stats={"pid": 1}), "n2": Actor(stats=PeerLost("the store of n2 is gone"))}
    monkeypatch.setattr(finding, "begin", lambda what, method: method)
    monkeypatch.setattr(finding, "answer", answer)
    monkeypatch.setattr(finding, "ask_all", lambda answers, timeout_s: answers)
    monkeypatch.setattr(Store, "_handles", lambda _: nodes)
    return Store(StoreConfig(capacity_bytes=1 << 20), RaySession("h:1", "s"))


@pytest.mark.parametrize(
    "error", [PeerLost("the supervisor restarts"), TransferTimeout("no answer"), StoreNotRunning("no supervisor")]
)
def test_what_the_nodes_said_counts_while_the_supervisor_is_away(store, monkeypatch, error):
    supervisor = error if isinstance(error, StoreNotRunning) else Actor(problems=error, unfinished=error)
    monkeypatch.setattr(finding, "find_actor", finder(supervisor))
    stats = store.stats()
    assert stats["nodes"] == {"n1": {"pid": 1}, "n2": {"error": "the store of n2 is gone"}}
    assert stats["problems"] == {"supervisor": str(error)}
    assert stats["starting"] == {}


def test_what_the_supervisor_says(store, monkeypatch):
    supervisor = Actor(problems={"n3": "no memory"}, unfinished={"n2": "its store is still being made"})
    monkeypatch.setattr(finding, "find_actor", finder(supervisor))
    stats = store.stats()
    assert stats["problems"] == {"n3": "no memory"}
    assert stats["starting"] == {"n2": "its store is still being made"}


def test_nodes_shards_and_supervisor_are_asked_at_once(store, monkeypatch):
    asked = list[object]()
    actors = {
        "supervisor": Actor(problems="problems", unfinished="unfinished"), "directory": Actor(stats={"num_blocks": 3})
    }  # fmt: skip
    monkeypatch.setattr(finding, "find_actor", lambda name, timeout_s=0.0: actors[name.rpartition("/")[2]])
    monkeypatch.setattr(finding, "begin", lambda what, method: asked.append(method) or {})
    monkeypatch.setattr(finding, "ask_all", lambda answers, timeout_s: asked.append(set(answers)) or answers)
    assert store.stats()["directory"] == [{"num_blocks": 3}]
    assert asked == ["problems", "unfinished", {"n1", "n2", "/0"}]

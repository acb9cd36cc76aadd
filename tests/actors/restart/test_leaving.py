"""A node that leaves the cluster while it is restarted is not waited for, without a cluster."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from kvstore.actors.restart import rolling as module
from kvstore.config import StoreConfig
from kvstore.errors import PeerLost, StoreNotRunning, StoreUnavailable, TransferTimeout


def test_a_node_that_leaves_ends_the_wait_and_the_error_says_so_but_not_when_the_cluster_is_silent(monkeypatch):
    supervisor = SimpleNamespace(unworkable=None, reconcile=None)
    said = [{"a": {}, "b": {}}, {"a": {}, "b": {}}, TransferTimeout("the cluster says nothing"), {"b": {}}, {"b": {}}]

    def alive_nodes():
        answer = said.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def find_actor(name):
        raise StoreNotRunning("there is none")

    def begin(what, method):
        raise PeerLost("no round is made")

    monkeypatch.setattr(module, "replace_supervisor", lambda *args: (supervisor, StoreConfig()))
    monkeypatch.setattr(module, "one_restart", lambda name, say: contextlib.nullcontext(lambda: None))
    monkeypatch.setattr(module, "keep_longer", lambda name, node_ids: False)
    monkeypatch.setattr(module, "call", lambda *args, **options: {})
    for fake in (alive_nodes, find_actor, begin):
        monkeypatch.setattr(module, fake.__name__, fake)
    with pytest.raises(StoreUnavailable, match="node a has no store: it left the cluster while it was restarted"):
        module.restart_store("s", None, {}, cold=False, wait_s=0.0)
    assert said == []

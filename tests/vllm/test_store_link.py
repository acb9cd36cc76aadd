"""The thread that looks for a store that went away: nothing that it meets ends it, or the engine has none for ever."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from kvstore.errors import StoreNotRunning, StoreUnavailable

OPTIONS = SimpleNamespace(store="default", address=None, node_id=None)


@pytest.fixture
def link():
    """What is tested. Imported where warnings of vLLM's own imports are none of ours."""
    from kvstore.integrations.vllm import link

    return link


@pytest.fixture
def store(link, monkeypatch):
    monkeypatch.setattr(link, "_FIRST_PAUSE_S", 0.001)
    made = SimpleNamespace(answers=[], clients=[], opened=threading.Event())

    def client(space, part, node_id):
        if made.answers:
            raise made.answers.pop(0)
        made.clients.append(SimpleNamespace(close=lambda timeout_s=0.0: None))
        return made.clients[-1]

    made.client = client
    monkeypatch.setattr(link, "connect", lambda name, address: made)
    return made


def test_a_store_is_found_again_whatever_was_raised_before(link, store):
    found = link.StoreLink(OPTIONS, None)
    first = found.client()

    def fail(timeout_s):
        raise OSError("no descriptor is left")

    first.close = fail
    store.answers = [OSError("no descriptor is left"), StoreNotRunning("not yet"), RuntimeError("not even this")]
    found.failed(first, StoreUnavailable("gone"))
    found._thread.join(10)
    assert not found._thread.is_alive()
    assert found.client() is store.clients[1] is not first
    found.close()

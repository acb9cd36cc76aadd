"""The thread that looks for a store that went away: nothing that it meets ends it, or the engine has none for ever."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
from kvstore.errors import ConfigError, StoreNotRunning, StoreUnavailable

SPACE = Namespace(model="m", shape=KVShape(num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32", block_size=16))
OPTIONS = SimpleNamespace(store="default", address=None, node_id=None, tenant="")


@pytest.fixture
def link():
    """What is tested. Imported where warnings of vLLM's own imports are none of ours."""
    from kvstore.integrations.vllm import link

    return link


@pytest.fixture
def store(link, monkeypatch):
    monkeypatch.setattr(link, "_FIRST_PAUSE_S", 0.001)
    made = SimpleNamespace(answers=[], clients=[], opened=threading.Event())

    def client(space, part, node_id, tenant):
        if made.answers:
            raise made.answers.pop(0)
        made.clients.append(SimpleNamespace(close=lambda timeout_s=0.0: None, tenant=tenant, space=made.spaces(space)))
        return made.clients[-1]

    made.client, made.spaces, made.config = client, lambda space: space, SimpleNamespace(private_tenants=True)
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


def test_the_blocks_of_a_private_tenant_are_in_its_own_namespace(link, store):
    options = SimpleNamespace(**{**vars(OPTIONS), "tenant": "a"})
    found = link.StoreLink(options, SPACE)
    assert (found.space.tenant, found.space.model, store.clients[0].tenant) == ("a", "m", "a")
    assert found.space.digest != SPACE.digest
    assert link.StoreLink(OPTIONS, SPACE).space == SPACE
    store.config.private_tenants = False
    assert link.StoreLink(options, SPACE).space == SPACE
    # A store that is private now, and was not before: this engine's hashes are others.
    store.spaces = lambda space: Namespace(model="m", shape=space.shape, tenant="a")
    with pytest.raises(ConfigError, match="private tenants; start this engine again"):
        link.StoreLink(options, SPACE)

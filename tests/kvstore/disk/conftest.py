"""Stores with a disk tier, and gates before their files; see tests/kvstore/disk_store.py."""

import os

import pytest
from disk_store import Gate, Store


@pytest.fixture(autouse=True)
def short_rests(monkeypatch):
    """A disk that was off is tried again soon."""
    monkeypatch.setattr("kvstore.disk.breaker._FIRST_REST_S", 0.05)
    monkeypatch.setattr("kvstore.disk.threads._LOOK_S", 0.01)


@pytest.fixture
def in_one_turn(monkeypatch):
    """A save is written in one turn of one thread, so its blocks have neighbouring places and are read by one call."""
    monkeypatch.setattr("kvstore.disk.writing.writer.LEAST_SHARE", 1)


@pytest.fixture
def disk_settings(tmp_path):
    return {"disk_path": str(tmp_path / "kv"), "disk_capacity_bytes": 1 << 20, "capacity_bytes": 1 << 18}


@pytest.fixture
def saved():
    """What was saved under each name, by any store of the test."""
    return {}


@pytest.fixture
def start(cluster, disk_settings, saved):
    """Start a store with a disk tier; several share what was saved, not the path."""

    def start(node_id="a", **settings):
        return Store(cluster, node_id, disk_settings | {"disk_path": start.path(node_id)} | settings, saved)

    start.path = lambda node_id: f"{disk_settings['disk_path']}-{node_id}"
    return start


# These come after the cluster is made, so that they are opened before it is stopped.
@pytest.fixture
def reads(cluster, monkeypatch):
    gate = Gate(monkeypatch, "read")
    yield gate
    gate.error = None
    gate.let_go()


@pytest.fixture
def writes(cluster, monkeypatch):
    gate = Gate(monkeypatch, "write")
    yield gate
    gate.error = None
    gate.let_go()


@pytest.fixture
def num_fds():
    """Return how many descriptors this process has open."""
    return lambda: len(os.listdir("/proc/self/fd"))

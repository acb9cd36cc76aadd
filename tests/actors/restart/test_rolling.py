"""Nodes that are restarted one after the other: their blocks stay, and no answer is ever wrong."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import ray

import kvstore
from kvstore.errors import ConfigError, InvalidRequest, KVStoreError

pytestmark = pytest.mark.ray
CAPACITY = 4 << 20


@pytest.fixture(scope="module")
def store(ray_cluster):
    made = kvstore.start(CAPACITY, name="warm", lease_ttl_s=5.0)
    yield made
    made.destroy()


def names_of(store):
    found = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"].split("/")[2] for actor in found if f"/{store.config.name}/" in actor["name"])


class Traffic(threading.Thread):
    """Loads and saves all the time on one node, with a new client after each restart; compares every byte."""

    def __init__(self, store, space, node_id, chains, open_engine):
        super().__init__(daemon=True)
        self.store, self.space, self.node_id, self.chains, self.open = store, space, node_id, chains, open_engine
        self.is_over, self.failure = threading.Event(), None
        self.num_rounds, self.num_loaded = 0, 0

    def run(self):
        try:
            while not self.is_over.is_set():
                with contextlib.suppress(KVStoreError):
                    self._use(self.open(self.store, self.space, self.node_id))
                time.sleep(0.02)
        except BaseException as error:  # noqa: BLE001 - raised in the test.
            self.failure = error

    def _use(self, engine):
        while not self.is_over.is_set() and engine.client._attached.is_open():
            for number, chain in enumerate(self.chains):
                result = engine.load(chain, timeout_s=1.0)  # Asserts that what it calls usable has the right bytes.
                self.num_loaded += result.num_blocks
                if number % 3 == self.num_rounds % 3:
                    engine.save(chain)
            self.num_rounds += 1
            engine.client.lookup(self.chains[0])

    def end(self):
        self.is_over.set()
        self.join(60)
        assert not self.is_alive()
        if self.failure is not None:
            raise self.failure


def test_a_rolling_restart_with_a_changed_setting_keeps_the_blocks(
    store, make_space, chain_of, node_ids, open_engine, eventually
):
    space = make_space("rolling")
    chains = {
        node: [chain_of(space, 12, seed) for seed in seeds]
        for node, seeds in zip(node_ids, [range(8), range(8, 16)], strict=True)
    }
    epochs = {node: said["epoch"] for node, said in store.stats()["nodes"].items()}
    traffic = [Traffic(store, space, node, chains[node], open_engine) for node in node_ids]
    for each in traffic:
        engine = open_engine(store, space, each.node_id)
        for chain in each.chains:
            engine.save(chain)
        each.start()
    try:
        eventually(lambda: all(each.num_rounds > 1 for each in traffic), 30)
        found = store.restart(wait_s=5.0, max_hard_pinned_fraction=0.25)
        before = [each.num_rounds for each in traffic]
        eventually(lambda: all(each.num_rounds > then for each, then in zip(traffic, before, strict=True)), 30)
    finally:
        for each in traffic:
            each.end()
    print(found)
    assert set(found) == set(node_ids)
    for node in node_ids:
        assert found[node]["is_warm"], found
        assert found[node]["num_blocks"] >= 0.9 * 8 * 12
    nodes = store.stats()["nodes"]
    assert all(nodes[node]["epoch"] != epochs[node] for node in node_ids)
    assert (store.config.max_hard_pinned_fraction, kvstore.connect("warm").config) == (0.25, store.config)
    assert names_of(store) == ["directory", "node", "node", "supervisor"]
    for node in node_ids:
        engine = open_engine(store, space, node)
        assert sum(engine.client.lookup(chain, remote=False).num_local for chain in chains[node]) >= 0.9 * 8 * 12
        ray.get(kvstore.node_store(node, name="warm").check_integrity.remote(), timeout=30)

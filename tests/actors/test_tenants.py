"""Tenants of a real store in Ray: quotas, names that it has not, private ones, and a restart with other quotas."""

from __future__ import annotations

import pytest

import kvstore
from kvstore.errors import ConfigError, IncompatibleStore, InvalidRequest, PoolExhausted

pytestmark = [pytest.mark.ray]

BLOCK_BYTES = 8192


@pytest.fixture(scope="module")
def store(ray_cluster):
    tenants = {"a": {"max_bytes": 8 * BLOCK_BYTES, "max_pinned_bytes": 2 * BLOCK_BYTES, "max_handoffs": 1}, "b": {}}
    store = kvstore.start("2MiB", name="tenants", tenants=tenants, private_tenants=True)
    yield store
    store.destroy()


def test_clients_of_tenants_have_their_quotas_and_spaces(store, node_ids, make_space, chain_of, open_engine):
    space = make_space("engines")
    engines = {name: open_engine(store, space, node_ids[0], tenant=name) for name in ("a", "b")}
    chains = {name: chain_of(engine.client.space, 12) for name, engine in engines.items()}
    assert engines["a"].save(chains["a"]).num_refused == 4
    assert engines["b"].load(chains["b"]).num_blocks == 0
    assert engines["b"].save(chains["b"]).num_refused == 0
    with pytest.raises(PoolExhausted, match="tenant 'a'"):
        engines["a"].client.publish(range(9))
    said = store.stats()["nodes"][node_ids[0]]["tenants"]
    assert (said["a"]["num_bytes"], said["b"]["num_bytes"]) == (8 * BLOCK_BYTES, 12 * BLOCK_BYTES)
    assert (said["a"]["num_refused_bytes"], said["b"]["num_refused_bytes"]) == (13, 0)
    assert store.clear(engines["a"].client.space) == 8
    assert engines["b"].load(chains["b"]).num_blocks == 12


def test_a_name_that_the_store_has_not_is_refused(store, node_ids, make_space, chain_of, get):
    with pytest.raises(ConfigError, match="it has a, b"):
        store.client(make_space("nobody"), tenant="c")
    handle, hashes = kvstore.node_store(node_ids[0], name="tenants"), chain_of(make_space("nobody"), 1)
    for call in (handle.lease, handle.prepare_store):
        with pytest.raises(ConfigError, match="it has a, b"):
            get(call.remote(hashes, "me", tenant="c"))
    with pytest.raises(ConfigError, match="it has a, b"):
        get(handle.adopt.remote([hashes.encode()], 1.0, ["c"]))
    with pytest.raises(InvalidRequest, match="one for each of 1 chains"):
        get(handle.adopt.remote([hashes.encode()], 1.0, ["a", "b"]))


def test_calls_through_the_handle_count_for_their_tenant(store, node_ids, make_space, chain_of, get):
    space, handle = make_space("handle", tenant="a"), kvstore.node_store(node_ids[1], name="tenants")
    get(handle.attach.remote(space.digest, space.shape.block_bytes))
    hashes = chain_of(space, 9)
    ticket = get(handle.prepare_store.remote(hashes, "me", tenant="a"))
    assert (len(ticket.slots), ticket.num_refused) == (8, 1)
    assert get(handle.complete_store.remote(ticket.write_id, "me")) == 8
    assert get(handle.lease.remote(hashes, "me", tenant="a")).num_blocks == 2
    with pytest.raises(PoolExhausted, match="tenant 'a' has used up its quota of pins"):
        get(handle.pin.remote(hashes.tail(4), "me", 5.0, tenant="a"))
    assert get(handle.tenants_of.remote([hashes.encode()])) == ["a"]
    get(handle.check_integrity.remote())


def test_another_start_with_other_quotas_is_refused(store):
    with pytest.raises(IncompatibleStore, match="tenants: wanted"):
        kvstore.start("2MiB", name="tenants", tenants={"a": {}}, private_tenants=True)


def test_a_restart_with_a_smaller_quota_keeps_the_others_blocks(
    store, node_ids, make_space, chain_of, open_engine, get
):
    space = make_space("restart")
    mine, theirs = (open_engine(store, space, node_ids[0], tenant=name) for name in ("a", "b"))
    mine.save(chain_of(mine.client.space, 8))
    theirs.save(chain_of(theirs.client.space, 6))
    quotas = {"a": {"max_bytes": 3 * BLOCK_BYTES}, "b": {}}
    found = store.restart([node_ids[0]], tenants=quotas)[node_ids[0]]
    assert (found["is_warm"], found["why_cold"]) == (True, "")
    said = store.stats()["nodes"][node_ids[0]]["tenants"]
    assert said["a"]["num_bytes"] == 3 * BLOCK_BYTES
    theirs = open_engine(store, space, node_ids[0], tenant="b")
    assert theirs.load(chain_of(theirs.client.space, 6)).num_blocks == 6
    mine = open_engine(store, space, node_ids[0], tenant="a")
    assert mine.load(chain_of(mine.client.space, 8)).num_blocks <= 3

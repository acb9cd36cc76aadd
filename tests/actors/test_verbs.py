"""The node store's Ray handle, and what the Store object does on all nodes."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import ray

import kvstore
from kvstore.client.results import MissReason
from kvstore.errors import (
    ChainBroken,
    ConfigError,
    InvalidRequest,
    LayoutMismatch,
    NamespaceMismatch,
    PoolExhausted,
    StaleTicket,
    StoreDraining,
    StoreNotRunning,
)

pytestmark = [pytest.mark.ray]

_seeds = itertools.count(1)


@pytest.fixture(scope="module")
def store(ray_cluster):
    store = kvstore.start("16MiB")
    yield store
    store.stop()


@pytest.fixture
def space(make_space):
    """A namespace of its own for each test, so that clearing it touches nothing else."""
    return make_space(f"model-{next(_seeds)}")


@pytest.fixture
def engines(store, space, node_ids, open_engine):
    """An engine on each of the two nodes."""
    return [open_engine(store, space, node_id) for node_id in node_ids]


@pytest.fixture
def handle(node_ids):
    return kvstore.node_store(node_ids[0])


@pytest.fixture
def chain(space, chain_of):
    return chain_of(space, 32)


def counts(get, handle):
    pool = get(handle.stats.remote())["pool"]
    return {key: pool[key] for key in ("num_leases", "num_pinned", "num_writes", "num_writing")}


_NOTHING_HELD = {"num_leases": 0, "num_pinned": 0, "num_writes": 0, "num_writing": 0}


def test_attach_is_the_same_twice_and_refuses_another_size(store, handle, get, space):
    size = space.shape.block_bytes
    answer = get(handle.attach.remote(space.digest, size))
    assert answer == {"slot_bytes": size, "num_slots": (16 << 20) // size}
    assert get(handle.attach.remote(space.digest, size)) == answer
    with pytest.raises(LayoutMismatch, match=rf"{size}.*{size // 2}"):
        get(handle.attach.remote(space.digest, size // 2))
    with pytest.raises(ConfigError, match=f"block_bytes={4 * size}"):
        get(handle.attach.remote(bytes(32), 4 * size))


def test_lookup_through_the_handle(engines, handle, get, chain):
    engines[0].save(chain[:20])
    assert get(handle.lookup.remote(chain)) == 20
    assert counts(get, handle) == _NOTHING_HELD
    with pytest.raises(NamespaceMismatch, match="wanted BlockHashes"):
        get(handle.lookup.remote(list(chain)))


def test_a_lease_is_released_by_its_owner_only(engines, handle, get, chain):
    engines[0].save(chain[:20])
    grant = get(handle.lease.remote(chain, "router", 30.0))
    assert len(grant.slots) == 20
    assert counts(get, handle)["num_pinned"] == 20
    assert not get(handle.release.remote(grant.lease_id, "stranger"))
    assert not get(handle.renew.remote(grant.lease_id, "stranger", 60.0))
    assert counts(get, handle)["num_pinned"] == 20
    assert get(handle.renew.remote(grant.lease_id, "router", 60.0))
    assert get(handle.release.remote(grant.lease_id, "router"))
    assert not get(handle.release.remote(grant.lease_id, "router"))
    assert not get(handle.renew.remote(grant.lease_id, "router", 60.0))
    assert counts(get, handle) == _NOTHING_HELD


def test_a_lease_of_nothing_is_no_lease(engines, handle, get, chain):
    grant = get(handle.lease.remote(chain, "router", 30.0))
    assert (grant.lease_id, grant.slots) == (0, ())
    assert not get(handle.release.remote(grant.lease_id, "router"))


def test_a_lease_ends_with_its_deadline_unless_renewed(engines, handle, get, chain, eventually):
    engines[0].save(chain)
    short = get(handle.lease.remote(chain[:8], "router", 0.4))
    longer = get(handle.lease.remote(chain[8:], "router", 3.0))
    first_deadline_s = time.monotonic() + 3.0
    assert get(handle.renew.remote(longer.lease_id, "router", 30.0))
    eventually(lambda: time.monotonic() > first_deadline_s and counts(get, handle)["num_leases"] == 1)
    assert not get(handle.release.remote(short.lease_id, "router"))
    assert get(handle.release.remote(longer.lease_id, "router"))


def test_a_write_through_the_handle_is_seen_only_when_complete(engines, handle, get, chain):
    ticket = get(handle.prepare_store.remote(chain, "writer"))
    assert ticket.indexes == tuple(range(32))
    assert get(handle.lookup.remote(chain)) == 0
    assert get(handle.complete_store.remote(ticket.write_id, "stranger")) == 0
    assert get(handle.abort_store.remote(ticket.write_id, "writer")) == 32
    assert get(handle.complete_store.remote(ticket.write_id, "writer")) == 0
    ticket = get(handle.prepare_store.remote(chain, "writer"))
    assert get(handle.complete_store.remote(ticket.write_id, "writer")) == 32
    assert get(handle.lookup.remote(chain)) == 32
    assert counts(get, handle) == _NOTHING_HELD


_NO_IDS = (0, -1, 2**64, 2**80, 1.5, None, "1", b"1", (1,))


def test_names_that_are_over_foreign_or_none_change_nothing_through_the_handle(engines, handle, get, chain):
    engines[0].save(chain[:20])
    grant = get(handle.lease.remote(chain, "router", 30.0))
    ticket = get(handle.prepare_store.remote(chain, "writer"))
    assert ticket.indexes == tuple(range(20, 32))
    before = counts(get, handle)
    asked = [
        verb.remote(number, owner)
        for verb in (handle.release, handle.renew, handle.complete_store, handle.abort_store)
        for number, owner in [*((number, "router") for number in _NO_IDS), (grant.lease_id, "writer"),
                              (ticket.write_id, "router"), (grant.lease_id + 1, "router")]
    ]  # fmt: skip
    assert not any(get(asked))
    for epoch in (b"formerly", b"", "text", 7):
        for verb in (handle.release, handle.renew, handle.abort_store):
            owner, number = ("writer", ticket.write_id) if verb is handle.abort_store else ("router", grant.lease_id)
            assert not get(verb.remote(number, owner, epoch=epoch))
        with pytest.raises(StaleTicket, match="restarted"):
            get(handle.complete_store.remote(ticket.write_id, "writer", epoch=epoch))
    for generations in (bytes(len(ticket.generations)), ticket.generations[:-1], b"", "text"):
        with pytest.raises(StaleTicket, match="generations"):
            get(handle.complete_store.remote(ticket.write_id, "writer", generations))
        assert get(handle.abort_store.remote(ticket.write_id, "writer", generations)) == 0
    for part, num_parts in ((2, 2), (-1, 2), (0, 0), (0.5, 2), ("0", 2), (0, None)):
        with pytest.raises(InvalidRequest, match="part"):
            get(handle.prepare_store.remote(chain, "writer", num_parts, part))
    assert counts(get, handle) == before
    get(handle.check_integrity.remote())
    assert get(handle.complete_store.remote(ticket.write_id, "writer", ticket.generations, ticket.epoch)) == 12
    assert get(handle.release.remote(grant.lease_id, "router", grant.epoch))
    assert counts(get, handle) == _NOTHING_HELD


def test_a_full_pool_refuses_through_the_handle_and_serves_after_one_release(engines, handle, get, space, chain_of):
    """Nothing is waited for: what cannot be had now is said now."""
    num_slots = get(handle.stats.remote())["pool"]["num_slots"]
    everything, new = chain_of(space, num_slots, 50), chain_of(space, 3, 51)
    ticket = get(handle.prepare_store.remote(everything, "writer"))
    assert len(ticket.slots) == num_slots
    refused = get(handle.prepare_store.remote(new, "other"))
    assert (refused.write_id, refused.slots, refused.num_refused) == (0, (), 3)
    assert counts(get, handle)["num_writes"] == 1
    assert get(handle.abort_store.remote(ticket.write_id, "writer")) == num_slots
    again = get(handle.prepare_store.remote(new, "other"))
    assert get(handle.complete_store.remote(again.write_id, "other")) == 3
    # The same of pins: the quota of hard ones is used up, until one of them ends.
    quota = engines[0].client.config.max_hard_pinned_fraction
    kept = chain_of(space, int(num_slots * quota) + 1, 52)
    ticket = get(handle.prepare_store.remote(kept, "writer"))
    assert get(handle.complete_store.remote(ticket.write_id, "writer")) == len(kept)
    pin = get(handle.pin.remote(kept, "router", 30.0))
    assert pin.num_refused == 1
    with pytest.raises(PoolExhausted, match="budget of pins"):
        get(handle.pin.remote(new, "router", 30.0))
    assert get(handle.release.remote(pin.lease_id, "router"))
    last = get(handle.pin.remote(new, "router", 30.0))
    assert get(handle.release.remote(last.lease_id, "router"))
    assert counts(get, handle) == _NOTHING_HELD


def test_a_run_that_hangs_nowhere_is_refused(engines, handle, get, chain):
    with pytest.raises(ChainBroken, match="pass the chain from its root"):
        get(handle.prepare_store.remote(chain[4:], "writer"))
    assert counts(get, handle) == _NOTHING_HELD


def test_stats_name_every_node(store, engines, node_ids, chain):
    engines[0].save(chain)
    engines[1].load(chain)
    stats = store.stats()
    assert (stats["name"], stats["problems"], sorted(stats["nodes"])) == ("default", {}, sorted(node_ids))
    reader = stats["nodes"][node_ids[1]]
    assert reader["capacity_bytes"] == 16 << 20
    assert reader["nixl"]["num_bytes"] >= 32 * chain_bytes(engines)
    assert len({node["epoch"] for node in stats["nodes"].values()}) == 2
    assert len({node[pid] for node in stats["nodes"].values() for pid in ("pid", "mover_pid")}) == 4


def chain_bytes(engines):
    return engines[0].space.shape.block_bytes


def test_a_node_without_a_store_is_named(store, node_ids):
    with pytest.raises(StoreNotRunning, match=node_ids[1]):
        kvstore.node_store("f" * 56)
    with pytest.raises(StoreNotRunning, match="other"):
        kvstore.node_store(node_ids[0], name="other")


def test_locate_orders_nodes_by_what_they_hold(store, engines, node_ids, chain):
    assert store.locate(chain) == []
    engines[0].save(chain[:8])
    engines[1].save(chain)
    assert store.locate(chain) == [(node_ids[1], 32), (node_ids[0], 8)]
    assert store.locate(chain[8:]) == [(node_ids[1], 24)]


def test_clear_makes_a_namespace_a_miss_everywhere(store, engines, chain, make_space, chain_of, open_engine):
    other_space = make_space("untouched")
    other = open_engine(store, other_space, engines[0].client.node_id)
    kept = chain_of(other_space, 4)
    other.save(kept)
    engines[0].save(chain)
    engines[1].load(chain)
    with engines[0].client.lease(chain) as lease:
        with pytest.raises(InvalidRequest, match="Namespace"):
            store.clear(engines[0].space.model)
        assert store.clear(engines[0].space) == 64
        for engine in engines:
            assert engine.client.lookup(chain).num_blocks == 0
            assert engine.load(chain).num_blocks == 0
        assert lease.held()
        assert bytes(lease.block(31)) == stored_bytes(engines[0], chain[31])
    assert other.client.lookup(kept).num_local == 4
    assert engines[0].save(chain).num_written == 32
    assert engines[1].load(chain).num_peer == 32


def stored_bytes(engine, block_hash):
    """A block as its slot holds it: [head, layer, plane, token, dim]."""
    return engine.stamp(block_hash).transpose(3, 0, 1, 2, 4).tobytes()


def test_drain_hands_hot_chains_over_and_grants_nothing(store, engines, node_ids, chain, get, eventually):
    engines[0].save(chain)
    with engines[0].client.lease(chain[:4]):
        left = store.drain(node_ids[0], timeout_s=2.0)
        assert left["num_handed_over"] >= 32
        assert left["num_leases"] == 1
    try:
        assert engines[1].client.lookup(chain, remote=False).num_local == 32
        assert engines[1].load(chain).num_local == 32
        with pytest.raises(StoreDraining):
            engines[0].client.lease(chain)
        with pytest.raises(StoreDraining):
            engines[0].save(chain)
        assert {failure.reason for failure in engines[0].load(chain).failed} == {MissReason.DRAINING}
        assert engines[0].client.lookup(chain).num_blocks == 0
        eventually(lambda: [node for node, _ in store.locate(chain)] == [node_ids[1]], 5)
        assert store.drain(node_ids[0], timeout_s=5.0) == {
            "num_handed_over": left["num_handed_over"], "why_none": "", "num_leases": 0, "num_writes": 0,
            "num_handoffs": 0, "is_drained": True,
        }  # fmt: skip
    finally:
        get(kvstore.node_store(node_ids[0]).undrain.remote())
    assert engines[0].load(chain).num_local == 32


def test_a_node_that_is_drained_itself_takes_no_chains(store, engines, node_ids, chain, get):
    engines[0].save(chain)
    other = kvstore.node_store(node_ids[1])
    get(other.drain.remote(0.0))
    try:
        left = store.drain(node_ids[0], timeout_s=2.0)
        assert (left["num_handed_over"], left["is_drained"]) == (0, True)
        assert node_ids[1] in left["why_none"]
    finally:
        for node_id in node_ids:
            get(kvstore.node_store(node_id).undrain.remote())
    assert engines[1].client.lookup(chain, remote=False).num_local == 0


def test_a_node_without_a_client_of_the_namespace_takes_none_and_the_drain_says_so(
    store, node_ids, make_space, chain_of, open_engine, get
):
    space = make_space("on-one-node")
    engine = open_engine(store, space, node_ids[0])
    try:
        assert store.drain(node_ids[0], hand_over_bytes=0)["why_none"].startswith("the node has no blocks")
        get(kvstore.node_store(node_ids[0]).undrain.remote())
        engine.save(chain_of(space, 4))
        left = store.drain(node_ids[0], timeout_s=5.0, hand_over_bytes=4 * engine.space.shape.block_bytes)
        assert (left["num_handed_over"], left["is_drained"]) == (0, True)
        assert left["why_none"].startswith(f"node {node_ids[1]}: no client with a namespace of these blocks")
    finally:
        get(kvstore.node_store(node_ids[0]).undrain.remote())


def test_a_drain_that_is_undone_meanwhile_says_so(store, engines, node_ids, chain, get, eventually):
    engines[0].save(chain)
    handle = kvstore.node_store(node_ids[0])
    with engines[0].client.lease(chain[:4]):
        drained = []
        waiting = threading.Thread(target=lambda: drained.append(store.drain(node_ids[0], timeout_s=60.0)))
        waiting.start()
        eventually(lambda: node_ids[0] not in [node for node, _ in store.locate(chain)], 20)  # It has handed over.
        get(handle.undrain.remote())
        waiting.join(30)
        assert not waiting.is_alive()
    assert [left["is_drained"] for left in drained] == [False]


@pytest.mark.parametrize("node_id", ["", None, 1, b"a", []])
def test_what_is_no_id_of_a_node_is_not_drained(store, node_id):
    with pytest.raises(InvalidRequest, match="node_id: wanted the id of a node"):
        store.drain(node_id)


def test_a_drained_peer_is_a_miss_until_it_serves_again(store, engines, node_ids, chain, get, eventually):
    engines[0].save(chain)
    handle = kvstore.node_store(node_ids[0])
    assert get(handle.drain.remote(1.0)) == {"num_leases": 0, "num_writes": 0, "num_handoffs": 0, "is_drained": True}
    try:
        result = engines[1].load(chain)
        assert result.num_blocks == 0
        assert result.failed[0].reason in (MissReason.PEER_LOST, MissReason.NOT_FOUND), "the directory may have heard"
    finally:
        get(handle.undrain.remote())
    eventually(lambda: engines[1].load(chain).num_peer == 32, 5)


def test_the_handle_and_the_store_travel_to_tasks(store, engines, node_ids, chain):
    engines[0].save(chain)
    handle = kvstore.node_store(node_ids[0])

    @ray.remote(num_cpus=0.1)
    def ask(store, handle, chain):
        return store.locate(chain), ray.get(handle.lookup.remote(chain), timeout=10), repr(store)

    located, found, name = ray.get(ask.remote(store, handle, chain), timeout=30)
    assert (located, found, name) == ([(node_ids[0], 32)], 32, repr(store))


def test_pools_are_whole_after_all_that(store, node_ids, get):
    for node_id in node_ids:
        handle = kvstore.node_store(node_id)
        get(handle.check_integrity.remote())
        assert counts(get, handle) == _NOTHING_HELD


@pytest.mark.parametrize(
    "ask",
    [
        lambda handle, chain: handle.lease.remote(chain, "m", float("inf")),
        lambda handle, chain: handle.lease.remote(chain, "m", 1e300),
        lambda handle, chain: handle.lease.remote(chain, "m", float("nan")),
        lambda handle, chain: handle.lease.remote(chain, "x" * 1000),
        lambda handle, chain: handle.lease.remote(chain, None),
        lambda handle, chain: handle.lease.remote("abc", "m"),
        lambda handle, chain: handle.pin.remote(chain, "m", 1e300),
        lambda handle, chain: handle.attach.remote("x", 64),
        lambda handle, chain: handle.attach.remote(b"z" * 32, -64),
        lambda handle, chain: handle.clear.remote("n" * 32),
        lambda handle, chain: handle.clear.remote(b"n" * 32, 2**64),
        lambda handle, chain: handle.clear.remote(b"n" * 32, -1),
        lambda handle, chain: handle.clear.remote(b"n"),
        lambda handle, chain: handle.begin_drain.remote(-1),
        lambda handle, chain: handle.adopt.remote([b"abc"], 1.0),
        lambda handle, chain: handle.adopt.remote("abc", 1.0),
        lambda handle, chain: handle.drain.remote(float("nan")),
    ],
)
def test_calls_that_cannot_be_are_refused_with_a_type_and_change_nothing(engines, handle, get, chain, store, ask):
    before = counts(get, handle)
    with pytest.raises((InvalidRequest, NamespaceMismatch)):
        get(ask(handle, chain))
    assert counts(get, handle) == before
    # Not drained, and the link to the directory lives.
    engines[0].save(chain)
    assert max(length for _, length in store.locate(chain)) == len(chain)

"""Tenants through real nodes: quotas hold on every way into memory, and private tenants find nothing of each other."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.blocks.codec import encode
from kvstore.blocks.hashing import Namespace
from kvstore.client.client import Client
from kvstore.client.connections import StoreConnections
from kvstore.client.results import MissReason
from kvstore.errors import ConfigError, NamespaceMismatch, PoolExhausted
from kvstore.quotas import TenantQuota
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import Attach, Prepare
from tests.kvstore.conftest import SHAPE
from tests.kvstore.handed_off import fetch, same

#: Of the nodes here. A slot of a store with a disk is a page, and the blocks of SHAPE are smaller.
NUM_SLOTS = 64


def tokens_of(num_blocks, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, num_blocks * SHAPE.block_size)


def slot_bytes_of(**settings):
    return 4096 if "disk_path" in settings else -(-SHAPE.block_bytes // 64) * 64


@pytest.fixture
def add(cluster):
    """Add a node with 64 slots, of which tenant "a" may have 8, pin 4, and have 2 hand-offs."""

    def add_node(node_id="a", quota=None, **settings):
        size = slot_bytes_of(**settings)
        if quota is None:
            quota = TenantQuota(max_bytes=8 * size, max_pinned_bytes=4 * size, max_handoffs=2)
        tenants = {"a": quota, "b": {}}
        return cluster.add(node_id, capacity_bytes=NUM_SLOTS * size, tenants=tenants, **settings)

    return add_node


def test_a_tenant_at_its_quota_evicts_its_own_blocks_and_no_others(cluster, add):
    core = add()
    mine, theirs = cluster.worker("a", tenant="a"), cluster.worker("a", tenant="b")
    theirs.save(cluster.hashes(10, seed=1), range(10))
    for seed in range(10, 16):
        mine.save(cluster.hashes(5, seed=seed), range(5))
    assert theirs.load(cluster.hashes(10, seed=1), range(20, 30)).num_blocks == 10
    assert all(same(theirs, range(10), theirs, range(20, 30)))
    said = core.stats()["tenants"]
    assert said["a"]["num_bytes"] <= 8 * core.stats()["slot_bytes"]
    assert said["a"]["num_evicted_by_quota"] == said["a"]["num_evicted"] > 0 == said["b"]["num_evicted"]


def test_a_save_beyond_the_quota_stores_less_and_the_counters_say_why(cluster, add):
    core = add()
    mine = cluster.worker("a", tenant="a")
    saved = mine.save(cluster.hashes(12), range(12))
    assert (saved.num_written, saved.num_refused) == (8, 4)
    assert core.stats()["tenants"]["a"]["num_refused_bytes"] == 4
    said = mine.client.stats()["tenants"]["a"]
    assert said["num_bytes"] == said["max_bytes"] == 8 * core.stats()["slot_bytes"]
    assert (said["max_handoffs"], said["max_disk_bytes"]) == (2, None)


def test_pins_and_loads_of_a_tenant_are_within_its_quota_of_pins(cluster, add):
    core = add()
    mine, theirs = cluster.worker("a", tenant="a"), cluster.worker("a")
    hashes = cluster.hashes(8)
    theirs.save(hashes, range(8))
    pinned = mine.client.pin(hashes)
    assert pinned.num_blocks == 4
    with pytest.raises(PoolExhausted, match="tenant 'a' has used up its quota of pins"):
        mine.client.pin(hashes[4:])
    with mine.client.lease(hashes[4:]) as lease:
        assert len(lease.slots) == 0
    found = mine.load(hashes, range(20, 28))
    assert (found.num_blocks, found.failed[0].reason) == (4, MissReason.POOL_FULL)
    assert theirs.load(hashes, range(20, 28)).num_blocks == 8
    assert core.stats()["tenants"]["a"]["num_refused_pins"] > 0
    mine.client.unpin(pinned)
    assert core.pool.tenants()["a"].num_pinned == 0


def test_hand_offs_of_a_tenant_are_counted_and_their_slots_are_its_own(cluster, add):
    core = add()
    mine, theirs = cluster.worker("a", tenant="a"), cluster.worker("a")
    tickets = [mine.client.publish(range(3)), mine.client.publish(range(3, 6))]
    with pytest.raises(PoolExhausted, match=r"tenant 'a' has 2 of the 2 .*max_handoffs"):
        mine.client.publish(range(1))
    theirs.client.publish(range(9))
    assert mine.save(cluster.hashes(4), range(4)).num_refused == 2
    said = core.stats()["tenants"]["a"]
    assert (said["num_handoffs"], said["num_refused_handoffs"]) == (2, 1)
    mine.client.withdraw(tickets[0])
    with pytest.raises(PoolExhausted, match=r"tenant 'a' has .* slots that it may have"):
        mine.client.publish(range(9))
    assert fetch(theirs, tickets[1], range(40, 43)).num_blocks == 3
    mine.client.publish(range(3))


def test_a_fetch_from_another_node_fills_slots_of_its_own_tenant(cluster, add):
    add("a")
    core = add("b")
    source, mine = cluster.worker("a"), cluster.worker("b", seed=1, tenant="a")
    assert fetch(mine, source.client.publish(range(6)), range(6)).num_blocks == 6
    assert all(same(source, range(6), mine, range(6)))
    too_many = fetch(mine, source.client.publish(range(9)), range(9))
    assert too_many.num_blocks == 0
    assert core.stats()["tenants"]["a"]["num_refused_bytes"] == 9


def test_what_a_load_brings_from_a_peer_is_its_tenants_on_this_node(cluster, add):
    quota = TenantQuota(max_bytes=8 * slot_bytes_of())
    add("a", quota)
    core = add("b", quota)
    source, other = cluster.worker("a"), cluster.worker("b", seed=1)
    mine = cluster.worker("b", seed=2, tenant="a")
    other.save(cluster.hashes(9, seed=9), range(9))
    for seed in (1, 2, 3):
        source.save(cluster.hashes(5, seed=seed), range(5))
        assert mine.load(cluster.hashes(5, seed=seed), range(20, 25)).num_blocks == 5
        assert all(same(source, range(5), mine, range(20, 25)))
    said = core.stats()["tenants"]["a"]
    assert (said["num_bytes"] <= 8 * core.stats()["slot_bytes"], said["num_evicted_by_quota"] >= 2) == (True, True)
    assert other.load(cluster.hashes(9, seed=9), range(20, 29)).num_blocks == 9


def test_a_peers_lease_counts_for_the_tenant_on_the_node_that_grants_it(cluster, add):
    core = add("a")
    add("b")
    source, mine = cluster.worker("a"), cluster.worker("b", seed=1, tenant="a")
    source.save(cluster.hashes(9), range(9))
    assert mine.load(cluster.hashes(9), range(9)).num_blocks == 4
    assert core.stats()["tenants"]["a"]["num_refused_pins"] > 0
    assert core.pool.tenants()["b"].num_refused_pins == 0


@pytest.mark.parametrize("name", ["nobody", "A", 7])
def test_a_name_that_the_store_has_not_is_refused_at_connect(cluster, add, name):
    add()
    with pytest.raises(Exception, match="tenant: wanted") as refused:
        Client(cluster.nodes["a"].control_path, cluster.space, tenant=name)
    if isinstance(name, str):
        assert refused.type is ConfigError
        assert "it has a, b" in str(refused.value)


def test_a_connection_that_replaces_a_broken_one_is_the_same_tenants(cluster, add):
    core = add()
    store = StoreConnections(core.control_path, lambda: None, "a")
    try:
        store.call(Op.ATTACH, encode(Attach(cluster.space.digest, SHAPE.block_bytes)))
        for seed in (1, 2):
            store.calls.close()
            store.call(Op.PREPARE_STORE, encode(Prepare(cluster.hashes(3, seed))))
        assert core.pool.tenants()["a"].num_slots == 6
        assert core.control.num_calls[Op.HELLO.name] >= 3
    finally:
        store.end()
        store.close(jobs_are_over=True)
        store.arena.close()


def test_a_load_from_disk_that_outgrows_the_quota_of_pins_ends_and_says_so(cluster, add, tmp_path, wait_until):
    folder = tmp_path / "disk"
    folder.mkdir()
    core = add(disk_path=str(folder), disk_capacity_bytes=1 << 20)
    mine, hashes = cluster.worker("a", tenant="a"), cluster.hashes(7)
    cluster.worker("a").save(hashes, range(7))
    wait_until(lambda: core.state.disk.pool.lookup(hashes) == 7)
    core.pool.evict(NUM_SLOTS)
    found = mine.load(hashes, range(20, 27))
    assert (found.num_blocks, found.failed[0].reason) == (4, MissReason.POOL_FULL)
    assert "quota of tenant 'a'" in found.failed[0].detail
    assert core.pool.tenants()["a"].num_slots == 7, "what was brought is the load's tenant's"


def test_what_a_drained_node_hands_over_stays_its_tenants(cluster, add):
    quota = TenantQuota(max_bytes=20 * slot_bytes_of())
    source = add("a", quota)
    core = add("b", quota)
    mine, theirs = cluster.worker("a", tenant="a"), cluster.worker("a", tenant="b")
    cluster.worker("b")
    mine.save(cluster.hashes(4, seed=1), range(4))
    theirs.save(cluster.hashes(3, seed=2), range(3))
    chains = source.begin_drain(1 << 20)
    assert core.adopt(chains, 5.0, source.tenants_of(chains)) == 7
    assert [core.pool.tenants()[name].num_slots for name in "ab"] == [4, 3]


def test_a_drain_hands_over_more_of_a_chain_than_its_tenant_may_pin(cluster, add):
    quota = TenantQuota(max_pinned_bytes=4 * slot_bytes_of())
    source, core, mine = add("a", quota), add("b", quota), cluster.worker("a", tenant="a")
    cluster.worker("b")
    mine.save(cluster.hashes(12, seed=1), range(12))
    mine.save(cluster.hashes(12, seed=2), range(12))
    mine.client.pin(cluster.hashes(12, seed=1))  # 4 blocks, its whole quota.
    chains = source.begin_drain(1 << 20)
    assert core.adopt(chains, 10.0, source.tenants_of(chains)) == 24
    said = core.pool.tenants()["a"]
    assert (said.num_slots, said.num_pinned, said.num_refused_pins) == (24, 0, 0)


def test_of_a_chain_on_disk_each_tenant_has_its_own_blocks(cluster, add, tmp_path, wait_until):
    folder = tmp_path / "disk"
    folder.mkdir()
    core, hashes = add(disk_path=str(folder), disk_capacity_bytes=1 << 20), cluster.hashes(7)
    mine, theirs = cluster.worker("a", tenant="a"), cluster.worker("a", tenant="b")
    mine.save(hashes.head(3), range(3))
    theirs.save(hashes, range(7))
    wait_until(lambda: core.state.disk.pool.lookup(hashes) == 7)
    assert [core.state.disk.pool.tenants()[name].num_slots for name in "ab"] == [3, 4]


def test_a_tenant_at_its_quota_of_disk_pushes_out_its_own_blocks_there(cluster, tmp_path, wait_until):
    stride = 4096 + 4096 + 256
    folder = tmp_path / "disk"
    folder.mkdir()
    settings = {
        "capacity_bytes": NUM_SLOTS * 4096, "disk_path": str(folder), "disk_capacity_bytes": 20 * stride,
        "tenants": {"a": {"max_disk_bytes": 6 * stride}},
    }  # fmt: skip
    core = cluster.add("a", **settings)
    mine, theirs = cluster.worker("a", tenant="a"), cluster.worker("a", seed=1)
    disk = core.state.disk
    theirs.save(cluster.hashes(10, seed=9), range(10))
    wait_until(lambda: disk.pool.lookup(cluster.hashes(10, seed=9)) == 10)
    for seed in range(1, 6):
        mine.save(cluster.hashes(4, seed=seed), range(4))
        wait_until(lambda seed=seed: disk.pool.lookup(cluster.hashes(4, seed=seed)) == 4)
    assert disk.pool.lookup(cluster.hashes(10, seed=9)) == 10
    assert core.stats()["tenants"]["a"]["num_disk_bytes"] <= 6 * stride
    disk.pool.check_integrity()
    cluster.stop_node("a")
    # The next store knows whose they are, also with other settings for them.
    core = cluster.add("a", **{**settings, "tenants": {"a": {"max_disk_bytes": 3 * stride}, "b": {}}})
    cluster.client("a")
    wait_until(lambda: not core.state.disk.is_off)
    said = core.stats()["tenants"]
    assert (said["a"]["num_disk_bytes"], said["b"]["num_disk_bytes"]) == (3 * stride, 0)
    assert core.state.disk.pool.lookup(cluster.hashes(10, seed=9)) == 10
    core.state.disk.pool.check_integrity()


@pytest.mark.parametrize("disk_write", ["through", "back"])
def test_of_a_chain_that_is_longer_than_the_quota_of_disk_the_leading_blocks_are_there(
    cluster, tmp_path, wait_until, disk_write
):
    stride = 4096 + 4096 + 256
    folder = tmp_path / "disk"
    folder.mkdir()
    settings = {
        "capacity_bytes": NUM_SLOTS * 4096, "disk_path": str(folder), "disk_capacity_bytes": 100 * stride,
        "disk_write": disk_write, "tenants": {"a": {"max_disk_bytes": 6 * stride}},
    }  # fmt: skip
    core = cluster.add("a", **settings)
    worker, hashes = cluster.worker("a", tenant="a"), cluster.hashes(20, seed=3)
    worker.save(hashes, range(20))
    if disk_write == "through":
        wait_until(lambda: core.stats()["disk"]["dropped"] == {"disk_full": 14})
        assert core.stats()["tenants"]["a"]["num_refused_disk"] == 14
    cluster.stop_node("a")  # With "back" they are written now.
    core = cluster.add("a", **settings)
    cluster.client("a")
    wait_until(lambda: not core.state.disk.is_off)
    assert core.state.disk.pool.lookup(hashes) == 6
    assert core.stats()["tenants"]["a"]["num_disk_bytes"] == 6 * stride
    core.state.disk.pool.check_integrity()


PATHS = ("memory", "peer", "disk")


@pytest.fixture
def private(cluster, tmp_path):
    """Nodes of a store with private tenants, which have a disk each."""
    for node_id in ("a", "b"):
        folder = tmp_path / node_id
        folder.mkdir()
        cluster.add(
            node_id, capacity_bytes=NUM_SLOTS * 4096, tenants={"a": {}, "b": {}}, private_tenants=True,
            disk_path=str(folder), disk_capacity_bytes=1 << 20,
        )  # fmt: skip
    return cluster


def put(cluster, path, space, tenant, wait_until):
    """Save 5 blocks as a tenant, so that node "a" has them in memory or on disk, or its peer has them."""
    worker = cluster.worker("b" if path == "peer" else "a", tenant=tenant, space=space)
    hashes = worker.client.space.block_hashes(tokens_of(5))
    worker.save(hashes, range(5))
    core = cluster.nodes["a"]
    if path == "disk":
        wait_until(lambda: core.state.disk.pool.lookup(hashes) == 5)
        core.pool.evict(NUM_SLOTS)
        assert core.pool.lookup(hashes) == 0
    return worker, hashes


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("owner", "stranger"), [("a", "b"), ("a", ""), ("", "a")])
def test_a_private_tenant_finds_nothing_of_another_on_any_path(private, wait_until, path, owner, stranger):
    worker, hashes = put(private, path, private.space, owner, wait_until)
    other = private.worker("a", seed=3, tenant=stranger)
    before = other.bytes()
    theirs = other.client.space.block_hashes(tokens_of(5))
    assert not set(theirs.hashes()) & set(hashes.hashes())
    match = other.client.lookup(theirs)
    assert (match.num_local, match.num_disk, match.nodes) == (0, 0, ())
    assert other.load(theirs, range(5)).num_blocks == 0
    assert other.bytes() == before
    with other.client.lease(theirs) as lease:
        assert len(lease.slots) == 0
    for call in (other.client.lookup, other.client.pin, other.client.prefetch):
        with pytest.raises(NamespaceMismatch):
            call(hashes)
    again = private.worker("a", seed=4, tenant=owner)
    assert again.load(hashes, range(5)).num_blocks == 5
    assert all(same(worker, range(5), again, range(5)))


@pytest.mark.parametrize("path", PATHS)
def test_another_salt_finds_nothing_on_any_path(private, wait_until, path):
    salted = [Namespace(model="m", shape=SHAPE, salt=salt) for salt in (b"one", b"two")]
    _, hashes = put(private, path, salted[0], "a", wait_until)
    other = private.worker("a", seed=3, tenant="a", space=salted[1])
    before = other.bytes()
    theirs = other.client.space.block_hashes(tokens_of(5))
    match = other.client.lookup(theirs)
    assert (match.num_local, match.num_disk, match.nodes) == (0, 0, ())
    assert other.load(theirs, range(5)).num_blocks == 0
    assert other.bytes() == before
    with pytest.raises(NamespaceMismatch):
        other.client.load(hashes, range(5))


def test_a_ticket_of_another_private_tenant_or_salt_is_refused(private):
    mine = private.worker("a", tenant="a")
    ticket = mine.client.publish(range(3))
    for node_id in ("a", "b"):
        strangers = [
            private.worker(node_id, tenant="b"),
            private.worker(node_id, tenant="a", space=Namespace(model="m", shape=SHAPE, salt=b"other")),
        ]
        for stranger in strangers:
            with pytest.raises(NamespaceMismatch):
                stranger.client.fetch(ticket, range(3))
    assert fetch(private.worker("b", seed=1, tenant="a"), ticket, range(3)).num_blocks == 3


def test_a_router_makes_the_hashes_of_a_private_tenant_from_its_namespace(private):
    worker = private.worker("a", tenant="a")
    space = Namespace(model="m", shape=SHAPE, tenant="a")
    assert space == worker.client.space
    hashes = space.block_hashes(tokens_of(4))
    worker.save(hashes, range(4))
    assert private.client("b", space, tenant="a").lookup(hashes).nodes == (("a", 4),)
    stranger = private.client("b", tenant="b")
    assert stranger.lookup(stranger.space.block_hashes(tokens_of(4))).nodes == ()


def test_a_namespace_of_one_tenant_is_refused_to_another(private):
    with pytest.raises(ConfigError, match="got one of tenant 'a'"):
        private.client("a", Namespace(model="m", shape=SHAPE, tenant="a"), tenant="b")


def test_without_private_tenants_tenants_share_what_they_have_saved(cluster, add):
    add()
    worker = cluster.worker("a", tenant="b")
    worker.save(cluster.hashes(4), range(4))
    assert cluster.worker("a", seed=1, tenant="a").load(cluster.hashes(4), range(4)).num_blocks == 4
    assert worker.client.space == cluster.space


@pytest.mark.parametrize("seed", range(2))
def test_a_greedy_tenant_costs_another_no_hit_in_a_real_store(cluster, add, seed):
    """One scans, loops, pins, and begins hand-offs that it never ends; the other's 55 blocks fit what is left."""

    def run(node_id, *, has_greedy):
        core = add(node_id)
        theirs, greedy = cluster.worker(node_id, tenant="b"), cluster.worker(node_id, seed=1, tenant="a")
        draw, mine, hits = random.Random(seed), random.Random(seed + 50), []
        for step in range(150):
            if has_greedy:
                be_greedy(cluster, greedy, mine, step)
            which = draw.randrange(11)
            hashes, ids = cluster.hashes(5, seed=100 + which), range(5 * which, 5 * which + 5)
            found = theirs.load(hashes, range(60, 65))
            assert all(same(theirs, ids[: found.num_blocks], theirs, range(60, 60 + found.num_blocks)))
            hits.append(found.num_blocks)
            assert theirs.save(hashes, ids).num_refused == 0
        core.pool.check_integrity()
        assert core.pool.num_slots == NUM_SLOTS
        said = core.stats()["tenants"]["a"]
        cluster.stop_node(node_id)  # The next one is to find nothing at a peer.
        return hits, said

    alone, _ = run("alone", has_greedy=False)
    beside, said = run("beside", has_greedy=True)
    assert beside == alone
    assert min(said[name] for name in ("num_refused_bytes", "num_refused_pins", "num_refused_handoffs")) > 0


def be_greedy(cluster, greedy, draw, step):
    client, way = greedy.client, draw.random()
    try:
        if way < 0.5:
            greedy.save(cluster.hashes(6, seed=1000 + (step if way < 0.25 else step % 3)), range(6))
        elif way < 0.75:
            client.pin(cluster.hashes(5, seed=100 + draw.randrange(11)))
        else:
            client.publish(range(draw.randint(1, 3)), ttl_s=600.0)
    except PoolExhausted:
        pass

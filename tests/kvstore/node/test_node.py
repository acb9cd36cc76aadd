"""Node cores, clients and a directory in one process: what loads and saves find, fetch and leave behind."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time

import numpy as np
import pytest
from inner_parts import parts_of

from kvstore.blocks.hashing import Namespace
from kvstore.blocks.shape import KVShape
from kvstore.client.client import Client
from kvstore.client.results import MissReason
from kvstore.errors import (
    ChainBroken,
    InvalidRequest,
    KVStoreError,
    LayoutMismatch,
    LeaseExpired,
    LeaseReleased,
    PeerLost,
    StaleVersion,
    StoreDraining,
    StoreNotRunning,
    StoreUnavailable,
)
from kvstore.mover.transport import ReadState
from kvstore.node.load_service import lookup_all
from kvstore.runtime import clock


def same(a, ids_a, b, ids_b) -> bool:
    return all(a.block(x) == b.block(y) for x, y in zip(ids_a, ids_b, strict=True))


def two_nodes(cluster, **settings):
    cluster.add("a", **settings)
    cluster.add("b", **settings)
    return cluster.worker("a", seed=1), cluster.worker("b", seed=2)


def pool(cluster, node_id):
    return cluster.nodes[node_id].pool.stats()


# Hits and misses.


def test_local_hit(cluster):
    cluster.add("a")
    one, two = cluster.worker("a", seed=1), cluster.worker("a", seed=2)
    hashes = cluster.hashes(6)
    saved = one.save(hashes, range(6))
    assert (saved.num_blocks, saved.num_written, saved.num_refused) == (6, 6, 0)
    untouched = [two.block(i) for i in range(10)]
    result = two.load(hashes, range(10, 16))
    assert (result.num_blocks, result.num_local, result.num_peer, result.failed) == (6, 6, 0, ())
    assert result.num_bytes == 0
    assert same(one, range(6), two, range(10, 16))
    assert [two.block(i) for i in range(10)] == untouched
    assert one.save(hashes, range(6)).num_written == 0


def test_peer_hit(cluster):
    one, two = two_nodes(cluster)
    hashes = cluster.hashes(8)
    one.save(hashes, range(8))
    assert two.client.lookup(hashes).nodes == (("a", 8),)
    result = two.load(hashes, range(20, 28))
    assert (result.num_blocks, result.num_local, result.num_peer, result.failed) == (8, 0, 8, ())
    assert result.peers == ("a",)
    assert result.num_bytes == 8 * cluster.space.shape.block_bytes
    assert same(one, range(8), two, range(20, 28))
    # From now on it is here as well.
    again = two.load(hashes, range(30, 38))
    assert (again.num_local, again.num_peer, again.num_lease_calls) == (8, 0, 0)
    assert same(one, range(8), two, range(30, 38))


def test_the_peers_pins_go_with_the_notification(cluster, wait_until):
    one, two = two_nodes(cluster)
    hashes = cluster.hashes(4)
    one.save(hashes, range(4))
    two.load(hashes, range(4))
    wait_until(lambda: pool(cluster, "a").num_leases == 0)
    wait_until(lambda: pool(cluster, "b").num_leases == 0)
    assert pool(cluster, "a").num_pinned == pool(cluster, "b").num_pinned == 0


def test_local_and_peer_mixed(cluster):
    one, two = two_nodes(cluster)
    hashes = cluster.hashes(7)
    one.save(hashes, range(7))
    two.load(hashes[:3], range(3))
    result = two.load(hashes, range(40, 47))
    assert (result.num_blocks, result.num_local, result.num_peer) == (7, 3, 4)
    assert same(one, range(7), two, range(40, 47))


def test_blocks_of_two_peers(cluster):
    one, two = two_nodes(cluster)
    cluster.add("c")
    three = cluster.worker("c", seed=3)
    hashes = cluster.hashes(6)
    one.save(hashes[:2], range(2))
    two.load(hashes[:2], range(2))
    two.save(hashes, range(6))
    cluster.nodes["b"].pool.clear(b"other")
    # Node b has all six, node a two: the longest is asked first and is enough.
    result = three.load(hashes, range(6))
    assert (result.num_blocks, result.peers) == (6, ("b",))
    assert same(two, range(6), three, range(6))


def test_partial_hit(cluster):
    one, two = two_nodes(cluster)
    hashes = cluster.hashes(6)
    one.save(hashes[:4], range(4))
    result = two.load(hashes, range(10, 16))
    assert result.num_blocks == 4
    assert same(one, range(4), two, range(10, 14))
    assert [(f.index, *f.block_ids, f.reason) for f in result.failed] == [
        (4, 14, MissReason.NOT_FOUND),
        (5, 15, MissReason.NOT_FOUND),
    ]


def test_miss(cluster, wait_until):
    _, two = two_nodes(cluster)
    before = two.bytes()
    result = two.load(cluster.hashes(3), range(3))
    assert result.num_blocks == 0
    assert [f.reason for f in result.failed] == [MissReason.NOT_FOUND] * 3
    assert two.bytes() == before
    wait_until(lambda: pool(cluster, "b").num_leases == 0)
    assert pool(cluster, "b").num_free == pool(cluster, "b").num_slots


def test_a_hole_ends_the_prefix(cluster):
    one, _ = two_nodes(cluster)
    hashes = cluster.hashes(5)
    one.save(hashes[:2], range(2))
    core = cluster.nodes["a"]
    ticket = core.pool.prepare_store(hashes[3:], "w", needs_parent=False)
    assert core.pool.complete_store(ticket.write_id, "w") == 2
    core.pool.check_integrity()
    assert one.client.lookup(hashes, remote=False).num_local == 2
    result = one.load(hashes, range(50, 55))
    assert (result.num_blocks, len(result.failed)) == (2, 3)
    assert len(one.client.lease(hashes, 5.0).slots) == 2


def test_the_same_tokens_of_another_namespace_never_hit(cluster):
    one, _ = two_nodes(cluster)
    tokens = list(range(16))
    one.save(cluster.space.block_hashes(tokens), range(4))
    for changes in ({"model": "other"}, {"salt": b"t"}, {"lora": "l"}, {"revision": "r"}, {"quantization": "q"}):
        space = Namespace(**({"model": "m", "shape": cluster.space.shape} | changes))
        other = cluster.worker("a", 8, space=space)
        assert other.load(space.block_hashes(tokens), range(4)).num_blocks == 0
        other.client.close()
    media = cluster.space.block_hashes(tokens, extra=[["image"], None, None, None])
    assert one.load(media, range(4)).num_blocks == 0
    assert one.load(cluster.space.block_hashes(tokens), range(4)).num_blocks == 4


@pytest.mark.parametrize("skip", range(13))
@pytest.mark.parametrize("where", ["a", "b"])
def test_not_one_byte_below_the_skip_is_written(skip, where, shared):
    cluster, saver, workers = shared
    worker, hashes, size = workers[where], cluster.hashes(3, seed=5), 4
    for cache in worker.caches:
        cache.fill_(7.0)
    result = worker.load(hashes, [4, 2, 9], skip)
    assert (result.num_blocks, result.failed) == (3, ())
    for layer, cache in enumerate(worker.caches):
        for token in range(12):
            block, at = [4, 2, 9][token // size], token % size
            got = cache[:, block, at]
            wanted = saver.caches[layer][:, token // size, at]
            assert (got == (7.0 if token < skip else wanted)).all(), f"token {token}"
        others = [i for i in range(cache.shape[1]) if i not in (4, 2, 9)]
        assert (cache[:, others] == 7.0).all()


@pytest.fixture(scope="module")
def shared(cluster_class):
    cluster = cluster_class()
    cluster.add("a")
    cluster.add("b")
    saver = cluster.worker("a", seed=1)
    saver.save(cluster.hashes(3, seed=5), range(3))
    yield cluster, saver, {"a": cluster.worker("a", 12), "b": cluster.worker("b", 12)}
    cluster.stop()


def test_skipped_blocks_are_not_even_asked_for(cluster):
    one, two = two_nodes(cluster)
    hashes = cluster.hashes(4)
    one.save(hashes, range(4))
    result = two.load(hashes, range(4), skip=10)
    assert (result.num_blocks, result.num_peer) == (4, 2)
    assert cluster.nodes["b"].state.pool_service.lookup(hashes) == 0
    assert cluster.nodes["b"].state.pool_service.lookup(hashes[2:]) == 2


# What a fetch costs.


def test_a_fetch_of_64_blocks_costs_one_call_of_the_worker_and_two_of_the_stores(cluster):
    one, two = two_nodes(cluster)
    warm = cluster.hashes(1, seed=9)
    one.save(warm, [0])
    two.load(warm, [0])
    hashes = cluster.hashes(64)
    assert one.save(hashes, range(64)).num_written == 64
    calls = []
    original = parts_of(two.client).store.for_jobs.taken

    @contextlib.contextmanager
    def counted():
        with original() as connection:
            calls.append((connection, connection.num_calls))
            yield connection

    parts_of(two.client).store.for_jobs.taken = counted
    result = two.load(hashes, range(64))
    assert (result.num_blocks, result.num_peer) == (64, 64)
    assert sum(connection.num_calls - before for connection, before in calls) == 1
    assert parts_of(two.client).store.calls.num_calls == 1, "ATTACH, at the start"
    assert (result.num_locate_calls, result.num_lease_calls) == (1, 1)
    # One chunk holds all 64 small blocks, and they are neighbours on both sides.
    assert result.num_descriptors == 1
    assert cluster.nodes["a"].stats()["calls"]["PEER_LEASE"] == 2
    assert same(one, range(64), two, range(64))


def test_adopting_what_is_here_already_ends_at_once(cluster):
    one, _ = two_nodes(cluster)
    hashes = cluster.hashes(6)
    one.save(hashes, range(6))
    began_s = time.monotonic()
    assert cluster.nodes["a"].adopt([hashes.encode()], 5.0) == 6
    assert time.monotonic() - began_s < 2.0
    assert pool(cluster, "a").num_pinned == 0


def test_a_load_after_a_lookup_does_not_ask_the_directory_again(cluster):
    one, two = two_nodes(cluster)
    hashes = cluster.hashes(6)
    one.save(hashes, range(6))
    two.load(hashes[:2], range(2))
    assert max(count for _, count in two.client.lookup(hashes).nodes) == 6
    result = two.load(hashes, range(6))
    assert (result.num_blocks, result.num_local, result.num_peer) == (6, 2, 4)
    assert (result.num_locate_calls, result.num_lease_calls) == (0, 1)
    assert same(one, range(6), two, range(6))


def test_a_load_after_a_lookup_that_is_out_of_date_asks_the_directory(cluster, wait_until):
    one, two = two_nodes(cluster)
    cluster.add("c")
    three = cluster.worker("c", seed=3)
    hashes = cluster.hashes(4)
    one.save(hashes, range(4))
    two.client.lookup(hashes)
    three.load(hashes, range(4))
    wait_until(lambda: "c" in dict(cluster.directory.index.locate(hashes.hashes())))
    cluster.nodes["a"].pool.clear(hashes.namespace_digest)
    cluster.nodes["a"].state.hints.publish_soon()
    result = two.load(hashes, range(4))
    assert (result.num_blocks, result.num_peer, result.num_lease_calls) == (4, 4, 2)
    assert result.num_locate_calls >= 1
    assert same(one, range(4), two, range(4))


def test_eight_loads_of_one_prefix_make_one_peer_lease(cluster):
    one, two = two_nodes(cluster)
    workers = [two] + [cluster.worker("b", 20, seed=i) for i in range(3, 10)]
    hashes = cluster.hashes(16)
    one.save(hashes, range(16))
    barrier, results = threading.Barrier(8), [None] * 8

    def load(i):
        barrier.wait(5)
        results[i] = workers[i].load(hashes, range(16))

    threads = [threading.Thread(target=load, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert [r.num_blocks for r in results] == [16] * 8, [r.failed[:1] for r in results]
    assert cluster.nodes["a"].stats()["calls"]["PEER_LEASE"] == 1
    assert sum(r.num_lease_calls for r in results) == 1
    assert sum(r.num_bytes for r in results) == 16 * cluster.space.shape.block_bytes
    assert all(same(one, range(16), w, range(16)) for w in workers)


def test_blocks_behind_a_gap_count_as_local_and_only_the_gap_comes_from_the_peer(cluster):
    one, two = two_nodes(cluster)
    hashes, pool_b = cluster.hashes(8), cluster.nodes["b"].pool
    one.save(hashes, range(8))
    two.load(hashes, range(8))
    held = pool_b.pin_prefix(hashes, "test", clock.now_s() + 60.0)
    pool_b.release(held.lease_id, "test")
    pool_b.discard(list(held.slots[2:5]))
    result = two.load(hashes, range(8))
    assert (result.num_blocks, result.num_local, result.num_peer) == (8, 5, 3)
    assert result.num_bytes == 3 * cluster.space.shape.block_bytes
    assert same(one, range(8), two, range(8))


# Clear.


def test_clear_makes_everything_a_miss_and_lets_readers_finish(cluster):
    one, _ = two_nodes(cluster)
    hashes = cluster.hashes(3)
    one.save(hashes, range(3))
    with one.client.lease(hashes, 10.0) as lease:
        before = [bytes(lease.block(i)) for i in range(3)]
        assert cluster.nodes["a"].state.pool_service.clear(cluster.space.digest, 1) == 3
        assert one.client.lookup(hashes).num_blocks == 0
        assert one.load(hashes, range(10, 13)).num_blocks == 0
        one.save(hashes, range(20, 23))
        assert [bytes(lease.block(i)) for i in range(3)] == before
    assert one.client.lookup(hashes).num_local == 3


def test_clearing_twice_with_one_version_clears_once(cluster):
    one, _ = two_nodes(cluster)
    core = cluster.nodes["a"]
    hashes = cluster.hashes(3)
    assert core.state.pool_service.clear(cluster.space.digest, 2) == 0
    one.save(hashes, range(3))
    for stale in (2, 1, 0):
        with pytest.raises(StaleVersion, match="wanted a later one than 2"):
            core.state.pool_service.clear(cluster.space.digest, stale)
        core.state.pool_service.hear_clearing(cluster.space.digest, stale)
    assert core.state.pool_service.lookup(hashes) == 3
    assert core.state.pool_service.clear(cluster.space.digest, 3) == 3
    assert core.state.versions.get(cluster.space.digest) == 3


def test_blocks_that_went_when_a_clearing_was_heard_are_told_to_its_caller_once(cluster):
    one, _ = two_nodes(cluster)
    core, namespace = cluster.nodes["a"].state, cluster.space.digest
    service = core.pool_service
    one.save(cluster.hashes(3), range(3))
    service.hear_clearing(namespace, 2)
    counts = []
    for version in (1, 2, 2):
        with pytest.raises(StaleVersion) as refused:
            service.clear(namespace, version)
        counts.append(pickle.loads(pickle.dumps(refused.value)).num_cleared)
    assert counts == [0, 3, 0]
    assert service.clear(namespace, 3) == 0
    for version in (4, 5):  # Two callers.
        one.save(cluster.hashes(version), range(version))
        service.hear_clearing(namespace, version)
    assert [core.versions.take_heard(namespace, version) for version in (4, 5, 5)] == [4, 5, 0]
    groups = [number.to_bytes(2, "big") + bytes(30) for number in range(2000)]
    for group in groups:
        core.versions.count_heard(group, 1, lambda namespace, is_new: 7)
    assert [core.versions.take_heard(groups[at], 1) for at in (0, 975, 976, 1999)] == [0, 0, 7, 7]


@pytest.fixture
def silent_directory(cluster, monkeypatch):
    """The directory tells nobody of clearings."""
    monkeypatch.setattr(cluster.directory.versions, "hear", lambda namespace, version: False)


@pytest.mark.usefixtures("silent_directory")
def test_a_peer_that_has_not_heard_of_a_clearing_cannot_bring_old_blocks_back(cluster):
    one, two = two_nodes(cluster)
    hashes = cluster.hashes(3)
    one.save(hashes, range(3))
    assert cluster.nodes["b"].state.pool_service.clear(cluster.space.digest, 1) == 0
    before = two.bytes()
    result = two.load(hashes, range(3))
    assert result.num_blocks == 0
    assert two.bytes() == before
    # Asking told the peer: it clears too.
    assert cluster.nodes["a"].state.versions.get(cluster.space.digest) == 1
    assert one.client.lookup(hashes).num_local == 0
    one.save(hashes, range(3))
    assert two.load(hashes, range(3)).num_blocks == 3


def test_a_load_takes_nothing_stored_after_a_clearing_that_came_between(cluster, monkeypatch):
    one, two = two_nodes(cluster)
    hashes = cluster.hashes(3)
    two.save(hashes[:2], range(2))
    hints = cluster.nodes["b"].state.hints
    locate = hints.locate

    def locate_after_new_weights(chain, until_s):
        for core in cluster.nodes.values():
            core.state.pool_service.clear(cluster.space.digest, 1)
        one.save(hashes, range(3))
        return locate(chain)

    monkeypatch.setattr(hints, "locate", locate_after_new_weights)
    result = two.load(hashes, range(10, 13))
    # What was pinned before is read to the end; the new block is not put behind the old ones.
    assert (result.num_blocks, result.num_peer) == (2, 0)
    assert [failure.reason for failure in result.failed] == [MissReason.CLEARED]
    monkeypatch.setattr(hints, "locate", locate)
    assert two.load(hashes, range(10, 13)).num_blocks == 3


@pytest.mark.usefixtures("silent_directory")
def test_a_store_that_has_not_heard_learns_from_the_peer_it_asks(cluster):
    one, two = two_nodes(cluster)
    hashes, old = cluster.hashes(3), cluster.hashes(2, seed=1)
    two.save(old, range(2))
    cluster.nodes["a"].state.pool_service.clear(cluster.space.digest, 1)
    one.save(hashes, range(3))
    first = two.load(hashes, range(3))
    assert [f.reason for f in first.failed] == [MissReason.CLEARED] * 3
    assert cluster.nodes["b"].state.versions.get(cluster.space.digest) == 1
    assert two.client.lookup(old, remote=False).num_local == 0
    assert two.load(hashes, range(3)).num_blocks == 3


def test_a_new_store_keeps_what_is_saved_before_it_meets_peers_that_know_of_a_clearing(cluster, wait_until):
    two_nodes(cluster)
    for core in cluster.nodes.values():
        core.state.pool_service.clear(cluster.space.digest, 7)
    wait_until(lambda: cluster.directory.versions.get(cluster.space.digest) == 7)
    cluster.stop_node("b")
    assert cluster.add("b").state.versions.get(cluster.space.digest) == 7
    one, two = cluster.worker("a", seed=3), cluster.worker("b", seed=4)
    hashes = cluster.hashes(5)
    assert two.save(hashes, range(5)).num_written == 5
    result = one.load(hashes, range(10, 15))
    assert (result.num_peer, result.failed) == (5, ())
    assert same(two, range(5), one, range(10, 15))
    assert two.client.lookup(hashes, remote=False).num_local == 5


def test_a_store_that_could_not_be_told_of_a_clearing_hears_of_it_from_the_directory(cluster, wait_until):
    _, two = two_nodes(cluster)
    hashes = cluster.hashes(3)
    two.save(hashes, range(3))
    cluster.nodes["a"].state.pool_service.clear(cluster.space.digest, 1)

    def heard():
        cluster.nodes["b"].state.hints.publish_soon()
        return cluster.nodes["b"].state.versions.get(cluster.space.digest) == 1

    wait_until(heard)
    wait_until(lambda: two.client.lookup(hashes, remote=False).num_local == 0)


def test_a_store_starts_beside_a_directory_that_is_away(cluster, monkeypatch):
    def nobody():
        raise PeerLost("wanted a directory, got none")

    monkeypatch.setattr(cluster.directory, "address", nobody)
    cluster.add("a")
    worker, hashes = cluster.worker("a"), cluster.hashes(3)
    assert worker.save(hashes, range(3)).num_written == 3


# Drain.


def test_a_drained_node_grants_nothing_and_its_hot_blocks_move(cluster):
    one, two = two_nodes(cluster)
    hashes = cluster.hashes(6)
    one.save(hashes, range(6))
    a, b = cluster.nodes["a"], cluster.nodes["b"]
    hot = a.begin_drain(1 << 20)
    with pytest.raises(StoreDraining):
        one.client.lease(hashes)
    with pytest.raises(StoreDraining):
        one.save(cluster.hashes(2, seed=1), range(2))
    result = one.load(hashes, range(6))
    assert (result.num_blocks, {failure.reason for failure in result.failed}) == (0, {MissReason.DRAINING})
    assert one.client.prefetch(hashes).result(10).failed[0].reason is MissReason.DRAINING
    assert one.client.lookup(hashes).num_blocks == one.client.lookup(hashes, remote=False).num_blocks == 0
    assert b.adopt(hot, 5.0) == 6
    assert b.state.pool_service.lookup(hashes) == 6
    assert a.drain(2.0) == {"num_leases": 0, "num_writes": 0, "num_handoffs": 0, "is_drained": True}
    assert b.stats()["pool"]["num_leases"] == 0
    assert one.client.lookup(hashes).num_blocks == 0, "nor does a load bring what others have"
    a.undrain()
    assert one.client.lookup(hashes).num_local == 6
    assert one.load(hashes, range(6)).num_blocks == 6
    two.load(hashes, range(6))
    assert same(one, range(6), two, range(6))


def test_drain_waits_for_leases_and_says_what_is_left(cluster):
    one, _ = two_nodes(cluster)
    hashes = cluster.hashes(2)
    one.save(hashes, range(2))
    lease = one.client.lease(hashes, 20.0)
    started_s = time.monotonic()
    assert cluster.nodes["a"].drain(0.2) == {"num_leases": 1, "num_writes": 0, "num_handoffs": 0, "is_drained": False}
    assert time.monotonic() - started_s >= 0.2
    threading.Timer(0.1, lease.release).start()
    assert cluster.nodes["a"].drain(5.0) == {"num_leases": 0, "num_writes": 0, "num_handoffs": 0, "is_drained": True}
    assert time.monotonic() - started_s < 3


def test_drain_does_not_wait_for_soft_pins(cluster):
    """They are a preference, and nobody reads under them."""
    one, _ = two_nodes(cluster)
    hashes = cluster.hashes(2)
    one.save(hashes, range(2))
    pinned = one.client.pin(hashes, soft=True)
    core = cluster.nodes["a"]
    assert core.drain(5.0) == {"num_leases": 0, "num_writes": 0, "num_handoffs": 0, "is_drained": True}
    assert one.client.unpin(pinned)
    core.undrain()
    hard = one.client.pin(hashes)
    assert core.drain(0.1) == {"num_leases": 1, "num_writes": 0, "num_handoffs": 0, "is_drained": False}
    assert one.client.unpin(hard)


def test_a_drained_node_refuses_peers(cluster, monkeypatch):
    one, two = two_nodes(cluster)
    hashes = cluster.hashes(2)
    one.save(hashes, range(2))
    with monkeypatch.context() as patch:
        patch.setattr(cluster.nodes["a"].state.hints, "follow", lambda pool: None)  # The directory has not heard yet.
        cluster.nodes["a"].drain(0.0)
    result = two.load(hashes, range(2))
    assert result.num_blocks == 0
    assert [f.reason for f in result.failed] == [MissReason.PEER_LOST] * 2
    cluster.nodes["a"].undrain()
    cluster.nodes["b"].state.peers.succeeded("a")
    assert two.load(hashes, range(2)).num_blocks == 2


def test_a_store_that_is_being_stopped_does_not_say_that_it_drains(cluster):
    """Engines look for another store then, and wait for one that drains."""
    one, _ = two_nodes(cluster)
    core = cluster.nodes["a"]
    core.state.pool_service.is_ending = core.state.pool_service.is_draining = True  # As when `stop` has begun.
    result = one.load(cluster.hashes(2), range(2))
    assert {failure.reason for failure in result.failed} == {MissReason.STORE_LOST}
    with pytest.raises(StoreUnavailable) as caught:
        one.client.lease(cluster.hashes(2))
    assert not isinstance(caught.value, StoreDraining)


def test_nobody_is_sent_to_a_drained_node(cluster, wait_until):
    one, two = two_nodes(cluster)
    hashes = cluster.hashes(2)
    one.save(hashes, range(2))
    locate, core = lambda: cluster.directory.index.locate(list(hashes)), cluster.nodes["a"]
    assert locate() == [("a", 2)]
    core.begin_drain(1 << 20)
    core.state.hints.publish_soon((begun := threading.Event()).set)
    assert begun.wait(5)
    assert locate() == [("a", 2)], "it hands over yet"
    for _ in range(2):
        core.drain(0.0)
    wait_until(lambda: locate() == [])
    assert two.client.lookup(hashes).num_blocks == 0
    assert [f.reason for f in two.load(hashes, range(2)).failed] == [MissReason.NOT_FOUND] * 2
    core.undrain()
    wait_until(lambda: locate() == [("a", 2)])
    assert two.load(hashes, range(2)).num_blocks == 2
    one.save(cluster.hashes(2, seed=1), range(2))
    assert two.client.lookup(cluster.hashes(2, seed=1)).nodes == (("a", 2),)


def test_a_node_that_is_put_back_just_after_it_was_drained_is_announced(cluster, wait_until, monkeypatch):
    one, two = two_nodes(cluster)
    hashes = cluster.hashes(2)
    one.save(hashes, range(2))
    core = cluster.nodes["a"]
    follow, threads = core.state.hints.follow, []

    def meanwhile(pool):
        if not threads:
            threads.append(threading.Thread(target=core.undrain))
            threads[0].start()  # Between the two steps of `drain`.
            threads[0].join(0.2)
        follow(pool)

    monkeypatch.setattr(core.state.hints, "follow", meanwhile)
    core.drain(0.0)
    threads[0].join(5)
    wait_until(lambda: cluster.directory.index.locate(list(hashes)) == [("a", 2)])
    assert two.client.lookup(hashes).num_blocks == 2


@pytest.mark.parametrize("end", ["undrain", "stop"])
def test_a_drain_ends_with_what_makes_it_pointless(cluster, end):
    one, _ = two_nodes(cluster)
    core, hashes = cluster.nodes["a"], cluster.hashes(2)
    one.save(hashes, range(2))
    left = []
    with contextlib.suppress(KVStoreError), one.client.lease(hashes, 30.0):
        waiting = threading.Thread(target=lambda: left.append(core.drain(60.0)))
        waiting.start()
        time.sleep(0.1)
        assert waiting.is_alive()
        getattr(core, end)()
        waiting.join(5)
        assert not waiting.is_alive()
    assert [each["is_drained"] for each in left] == [False]
    if end == "stop":
        with pytest.raises(StoreUnavailable):
            core.undrain()


def test_a_drained_node_adopts_nothing(cluster):
    one, _ = two_nodes(cluster)
    one.save(cluster.hashes(2), range(2))
    chains = cluster.nodes["a"].begin_drain(1 << 20)
    cluster.nodes["b"].begin_drain(0)
    with pytest.raises(StoreDraining):
        cluster.nodes["b"].adopt(chains, 5.0)


def test_adopt_skips_unknown_namespaces_and_stops_in_time(cluster):
    two_nodes(cluster)
    other = Namespace(model="other", shape=cluster.space.shape)
    strange = other.block_hashes(range(8)).encode()
    missing = cluster.hashes(2).encode()
    assert cluster.nodes["b"].adopt([strange, missing], 2.0) == 0
    assert cluster.nodes["b"].adopt([missing], 0.0) == 0
    cluster.add("c")
    assert cluster.nodes["c"].adopt([missing], 2.0) == 0


# Room.


def small(cluster, node_id="a", num_slots=8, **settings):
    return cluster.add(node_id, capacity_bytes=1 << 16, block_bytes=(1 << 16) // num_slots, **settings)


def test_a_pool_that_is_too_small_takes_the_front(cluster):
    small(cluster, max_pinned_fraction=1.0)
    one = cluster.worker("a", seed=1)
    hashes = cluster.hashes(11)
    saved = one.save(hashes, range(11))
    assert (saved.num_blocks, saved.num_written, saved.num_refused) == (8, 8, 3)
    result = one.load(hashes, range(20, 31))
    assert (result.num_blocks, len(result.failed)) == (8, 3)
    assert same(one, range(8), one, range(20, 28))


@pytest.mark.parametrize("after_a_lookup", [False, True])
def test_a_fetch_into_a_full_pool_ends_with_a_reason(cluster, after_a_lookup):
    cluster.add("a")
    small(cluster, "b")
    one, two = cluster.worker("a", seed=1), cluster.worker("b", seed=2)
    hashes = cluster.hashes(20)
    one.save(hashes, range(20))
    if after_a_lookup:
        assert two.client.lookup(hashes).num_blocks == 20
    result = two.load(hashes, range(20))
    assert 0 < result.num_blocks <= 8
    assert {f.reason for f in result.failed} == {MissReason.POOL_FULL}
    assert same(one, range(result.num_blocks), two, range(result.num_blocks))
    assert pool(cluster, "b").num_writing == 0


def test_leaf_goes_before_root(cluster):
    small(cluster)
    one = cluster.worker("a")
    first = cluster.hashes(6)
    one.save(first, range(6))
    one.save(cluster.hashes(4, seed=1), range(4))
    assert one.client.lookup(first).num_local == 4
    assert one.client.lookup(cluster.hashes(4, seed=1)).num_local == 4


def test_leased_blocks_stay(cluster):
    small(cluster)
    one = cluster.worker("a", seed=3)
    hashes = cluster.hashes(5)
    one.save(hashes, range(5))
    lease = one.client.lease(hashes, 10.0)
    before = [bytes(lease.block(i)) for i in range(5)]
    saved = one.save(cluster.hashes(8, seed=1), range(10, 18))
    assert (saved.num_written, saved.num_refused) == (3, 5)
    assert [bytes(lease.block(i)) for i in range(5)] == before
    assert lease.release()
    assert not lease.release()
    with pytest.raises(LeaseReleased):
        lease.block(0)


def test_pins_beyond_the_budget_shorten_the_lease(cluster):
    small(cluster, max_pinned_fraction=0.5)
    one = cluster.worker("a")
    hashes = cluster.hashes(6)
    one.save(hashes, range(6))
    assert len(one.client.lease(hashes, 5.0)) == 4


# Leases and time.


def test_leases_expire_by_themselves(cluster, wait_until):
    cluster.add("a", lease_margin_s=0.05)
    one = cluster.worker("a")
    hashes = cluster.hashes(2)
    one.save(hashes, range(2))
    lease = one.client.lease(hashes, 0.3)
    assert lease.held()
    assert pool(cluster, "a").num_pinned == 2
    wait_until(lambda: pool(cluster, "a").num_pinned == 0)
    assert not lease.held()
    with pytest.raises(LeaseExpired):
        lease.block(0)
    assert not lease.renew(5.0)
    assert not lease.release()


def test_an_expired_lease_behind_a_renewed_one_expires(cluster, wait_until):
    cluster.add("a", lease_margin_s=0.05)
    one = cluster.worker("a")
    hashes = cluster.hashes(3)
    one.save(hashes, range(3))
    renewed = one.client.lease(hashes[:1], 1.0)
    short = one.client.lease(hashes, 1.1)
    assert renewed.renew(20.0)
    wait_until(lambda: pool(cluster, "a").num_leases == 1)
    assert pool(cluster, "a").num_pinned == 1
    assert renewed.held()
    assert not short.release()
    assert renewed.release()


def test_a_lease_of_nothing(cluster):
    cluster.add("a")
    one = cluster.worker("a")
    lease = one.client.lease(cluster.hashes(2), 5.0)
    assert (len(lease), lease.held(), lease.release()) == (0, False, False)
    assert pool(cluster, "a").num_leases == 0


def test_a_client_that_closes_leaves_nothing(cluster, wait_until):
    cluster.add("a")
    one, two = cluster.worker("a"), cluster.worker("a")
    hashes = cluster.hashes(2)
    one.save(hashes, range(2))
    two.client.lease(hashes, 30.0)
    one.client.lease(hashes, 30.0)
    two.client.close()
    wait_until(lambda: pool(cluster, "a").num_leases == 1)
    assert pool(cluster, "a").num_pinned == 2


# Things that break.


def test_a_peer_that_dies_ends_the_load_with_reasons_and_is_left_alone(cluster):
    one, two = two_nodes(cluster)
    hashes = cluster.hashes(4)
    one.save(hashes, range(4))
    two.load(hashes[:1], [0])
    one.client.close()
    # The directory goes on naming the dead node: only its store is gone, hints are not cleaned up.
    cluster.directory.gone = lambda connection: None
    cluster.directory.server.owners.on_gone = lambda connection: None
    cluster.stop_node("a")
    result = two.load(hashes, range(10, 14))
    assert (result.num_blocks, result.num_local) == (1, 1)
    assert [(f.index, f.reason) for f in result.failed] == [(i, MissReason.PEER_LOST) for i in (1, 2, 3)]
    assert not cluster.nodes["b"].state.peers.is_usable("a")
    again = two.load(hashes, range(10, 14))
    assert (again.num_lease_calls, again.failed[0].reason) == (0, MissReason.PEER_LOST)
    assert pool(cluster, "b").num_writing == pool(cluster, "b").num_quarantined == 0


def test_back_off_grows_and_ends_with_a_success(cluster, monkeypatch):
    two_nodes(cluster)
    book = cluster.nodes["b"].state.peers
    now_s = [1000.0]
    monkeypatch.setattr("kvstore.runtime.clock.now_s", lambda: now_s[0])
    pauses = []
    for _ in range(6):
        book.failed("a")
        started_s = now_s[0]
        while not book.is_usable("a"):
            now_s[0] += 0.25
        pauses.append(now_s[0] - started_s)
    assert pauses == [0.5, 1.0, 2.0, 5.0, 15.0, 15.0]
    book.succeeded("a")
    book.failed("a")
    now_s[0] += 0.5
    assert book.is_usable("a")
    assert not book.is_usable("b"), "never itself"


def test_a_directory_that_is_away_makes_peers_a_miss_and_local_hits_go_on(cluster):
    one, two = two_nodes(cluster)
    hashes = cluster.hashes(3)
    one.save(hashes, range(3))
    cluster.directory.stop()
    assert two.load(hashes, range(3)).num_blocks == 0
    assert one.load(hashes, range(10, 13)).num_blocks == 3
    assert one.save(cluster.hashes(2, seed=4), range(2)).num_written == 2


def test_a_store_that_stops_under_a_client_fails_closed(cluster):
    one, _ = two_nodes(cluster)
    hashes = cluster.hashes(3)
    one.save(hashes, range(3))
    one.load(hashes, range(3))
    cluster.stop_node("a")
    result = one.load(hashes, range(10, 13))
    assert result.num_blocks == 0
    assert [f.reason for f in result.failed] == [MissReason.STORE_LOST] * 3
    assert [f.block_ids for f in result.failed] == [(10,), (11,), (12,)]
    with pytest.raises((PeerLost, StoreUnavailable)):
        one.client.lookup(hashes)
    with pytest.raises((PeerLost, StoreNotRunning)):
        one.save(hashes, range(3))


class Stuck:
    """A transport whose READs run until they are let go."""

    def __init__(self, inner):
        self.inner, self.stuck = inner, True

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def poll(self, handle):
        return ReadState.RUNNING if self.stuck else self.inner.poll(handle)


def test_a_read_that_never_ends_is_quarantined_until_it_does(cluster, wait_until):
    made = []

    def wrap(transport):
        made.append(Stuck(transport))
        return made[0]

    cluster.add("a")
    cluster.add("b", wrap=wrap, transfer_timeout_s=0.3, max_quarantined_fraction=0.02)
    one, two = cluster.worker("a", seed=1), cluster.worker("b", seed=2)
    hashes = cluster.hashes(4)
    one.save(hashes, range(4))
    before = two.bytes()
    result = two.load(hashes, range(4), timeout_s=2.0)
    assert (result.num_blocks, result.failed[0].reason) == (0, MissReason.TIMEOUT)
    assert two.bytes() == before
    cluster.check()
    assert (pool(cluster, "b").num_quarantined, pool(cluster, "b").num_writing) == (4, 0)
    assert cluster.nodes["b"].stats()["num_abandoned_reads"] == 1
    # At the cap nothing more is fetched.
    cluster.nodes["b"].state.peers.succeeded("a")
    capped = two.load(hashes, range(4), timeout_s=1.0)
    assert capped.failed[0].reason is MissReason.TIMEOUT
    assert pool(cluster, "b").num_quarantined == 4
    made[0].stuck = False
    wait_until(lambda: pool(cluster, "b").num_quarantined == 0)
    assert cluster.nodes["b"].stats()["num_abandoned_reads"] == 0
    cluster.nodes["b"].state.peers.succeeded("a")
    assert two.load(hashes, range(4)).num_blocks == 4
    assert same(one, range(4), two, range(4))


def test_the_death_of_the_mover_is_the_fence(cluster, wait_until):
    cluster.add("a")
    cluster.add("b", wrap=Stuck, transfer_timeout_s=0.3)
    one, two = cluster.worker("a", seed=1), cluster.worker("b", seed=2)
    hashes = cluster.hashes(4)
    one.save(hashes, range(4))
    two.load(hashes, range(4), timeout_s=2.0)
    assert pool(cluster, "b").num_quarantined == 4
    cluster.kill_mover("b")
    wait_until(lambda: pool(cluster, "b").num_quarantined == 0)
    cluster.nodes["b"].state.peers.succeeded("a")
    gone = two.load(hashes, range(4), timeout_s=2.0)
    assert gone.failed[0].reason is MissReason.PEER_LOST
    cluster.start_mover("b")
    cluster.nodes["b"].state.peers.succeeded("a")
    assert two.load(hashes, range(4)).num_blocks == 4
    assert same(one, range(4), two, range(4))


def test_a_node_without_a_mover_does_not_hold_that_against_its_peers(cluster):
    one, two = two_nodes(cluster)
    hashes = cluster.hashes(4)
    one.save(hashes, range(4))
    cluster.kill_mover("b")
    for _ in range(3):
        assert two.load(hashes, range(4)).failed[0].reason is MissReason.PEER_LOST
    cluster.start_mover("b")
    assert two.load(hashes, range(4)).num_blocks == 4


def test_a_new_mover_of_a_peer_is_asked_for(cluster):
    one, two = two_nodes(cluster)
    hashes = cluster.hashes(4)
    one.save(hashes, range(4))
    assert two.load(hashes[:2], range(2)).num_blocks == 2
    cluster.kill_mover("a")
    assert two.load(hashes, range(4)).num_blocks == 2, "without a mover there is nothing to read from"
    cluster.start_mover("a")
    assert two.load(hashes, range(4)).num_blocks == 4
    assert same(one, range(4), two, range(4))


def test_a_block_counts_only_if_the_lease_covered_its_read(cluster, monkeypatch):
    cluster.add("a")
    cluster.add("b", lease_ttl_s=1.2, lease_margin_s=0.5)
    one, two = cluster.worker("a", seed=1), cluster.worker("b", seed=2)
    hashes = cluster.hashes(3)
    one.save(hashes, range(3))
    late_s, real = [0.0], clock.now_s
    monkeypatch.setattr("kvstore.runtime.clock.now_s", lambda: real() + late_s[0])
    read = cluster.nodes["b"].state.mover.read

    def read_late(*args, **more):
        late_s[0] = 0.8
        return read(*args, **more)

    monkeypatch.setattr(cluster.nodes["b"].state.mover, "read", read_late)
    before = two.bytes()
    result = two.load(hashes, range(3))
    assert result.num_blocks == 0
    assert two.bytes() == before
    assert pool(cluster, "b").num_writing == 0
    assert cluster.nodes["b"].state.pool_service.lookup(hashes) == 0


# Attaching.


def test_blocks_of_another_size_share_the_slots_if_they_fit(cluster):
    cluster.add("a")
    cluster.client("a")
    base = cluster.space.shape
    half = KVShape(num_layers=1, num_kv_heads=2, head_dim=8, dtype="float32", block_size=4)
    small_space = Namespace(model="small", shape=half)
    worker = cluster.worker("a", 10, space=small_space)
    worker.save(small_space.block_hashes(range(16)), range(4))
    assert worker.load(small_space.block_hashes(range(16)), range(5, 9)).num_blocks == 4
    assert same(worker, range(4), worker, range(5, 9))
    assert worker.client.slot_bytes == base.block_bytes


def test_a_namespace_has_one_block_size(cluster):
    core = cluster.add("a")
    core.state.pool_service.attach(b"n" * 32, 1024)
    with pytest.raises(LayoutMismatch, match="1024"):
        core.state.pool_service.attach(b"n" * 32, 512)
    with pytest.raises(LayoutMismatch):
        core.state.pool_service.attach(b"n" * 32, 2048)
    assert core.state.pool_service.attach(b"n" * 32, 1024)["slot_bytes"] == 1024


def test_slots_are_aligned_and_counted(cluster):
    core = cluster.add("a")
    assert core.state.pool_service.attach(b"n" * 32, 1000) == {"slot_bytes": 1024, "num_slots": (1 << 17) // 1024}


def test_before_anything_attached(cluster):
    core = cluster.add("a")
    hashes = cluster.hashes(2)
    assert core.state.pool_service.lookup(hashes) == 0
    assert core.state.pool_service.lease(hashes, "o", 5.0).slots == ()
    assert core.state.pool_service.clear(cluster.space.digest, 1) == 0
    assert core.stats()["pool"] is None
    assert core.begin_drain(100) == []
    assert core.drain(0.1) == {"num_leases": 0, "num_writes": 0, "num_handoffs": 0, "is_drained": True}
    with pytest.raises(InvalidRequest):
        core.pool  # noqa: B018


def test_verbs_without_a_socket(cluster):
    core = cluster.add("a")
    worker = cluster.worker("a")
    hashes = cluster.hashes(3)
    ticket = core.state.pool_service.prepare_store(hashes, "ray-1")
    assert core.state.pool_service.complete_store(ticket.write_id, "ray-2") == 0
    assert core.state.pool_service.complete_store(ticket.write_id, "ray-1") == 3
    grant = core.state.pool_service.lease(hashes, "ray-1", 5.0)
    assert core.state.pool_service.renew(grant.lease_id, "ray-1", 5.0)
    assert not core.state.pool_service.release(grant.lease_id, "ray-2")
    assert core.state.pool_service.release(grant.lease_id, "ray-1")
    other = core.state.pool_service.prepare_store(cluster.hashes(2, seed=1), "ray-1")
    assert core.state.pool_service.abort_store(other.write_id, "ray-1") == 2
    with pytest.raises(ChainBroken):
        core.state.pool_service.prepare_store(cluster.hashes(3, seed=2)[1:], "ray-1")
    assert lookup_all(core.state, hashes) == [("a", 3)]
    assert worker.client.stats()["pool"]["num_free"] == core.stats()["pool"]["num_free"]


def test_stop_may_be_repeated_and_leaves_no_socket(cluster, tmp_path):
    import os

    core = cluster.add("a")
    path = core.control_path
    assert os.path.exists(path)
    cluster.stop_node("a")
    with open(os.devnull) as other:
        assert other.fileno() == core.state.arena.fd, "the number of the arena's descriptor is free again"
        core.stop()
        os.fstat(other.fileno())
    assert not os.path.exists(path)
    with pytest.raises(StoreNotRunning, match=str(path)):
        Client(path, cluster.space)


def test_prefetch_brings_blocks_without_an_engine(cluster):
    one, two = two_nodes(cluster)
    hashes = cluster.hashes(5)
    one.save(hashes, range(5))
    client = cluster.client("b")
    result = client.prefetch(hashes).result(10)
    assert (result.num_blocks, result.num_peer) == (5, 5)
    assert cluster.nodes["b"].state.pool_service.lookup(hashes) == 5
    again = two.load(hashes, np.arange(5))
    assert again.num_local == 5
    assert same(one, range(5), two, range(5))

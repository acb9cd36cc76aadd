"""A save is of the version under which it was asked for, and parts of one block are of one version."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from inner_parts import parts_of

from kvstore.blocks.shape import BLOCK_ORDER_VERSION
from kvstore.client.client import Client
from kvstore.errors import InvalidRequest, PeerLost, StaleVersion
from kvstore.memory.clears import group_of
from kvstore.remote.messages import PeerLease

NUM_THREADS = 4  # of a client's jobs


@pytest.fixture
def core(cluster):
    return cluster.add("a", mover=False)


@contextmanager
def held_up(client):
    """Hold up every copy into slots; yields what lets them go."""
    go, copy = threading.Event(), parts_of(client).copier.into_slots

    def late(*args):
        assert go.wait(20)
        copy(*args)

    parts_of(client).copier.into_slots = late
    try:
        yield go
    finally:
        go.set()


def fill_threads(cluster, client):
    """Give every thread of a client a save that is held up."""
    return [client.save(cluster.hashes(1, seed=50 + i), [60 + i]) for i in range(NUM_THREADS)]


def test_a_save_that_waits_for_a_thread_while_its_namespace_is_cleared_stores_nothing(cluster, core, wait_until):
    old, reader = cluster.worker("a", seed=1), cluster.worker("a", seed=2)
    hashes = cluster.hashes(10)
    with held_up(old.client) as go:
        busy = fill_threads(cluster, old.client)
        wait_until(lambda: core.pool.stats().num_writes == NUM_THREADS)
        late = old.client.save(hashes, list(range(10)))
        core.state.pool_service.clear(cluster.space.digest)
        go.set()
        assert [job.result(10).num_blocks for job in busy] == [0] * NUM_THREADS
        result = late.result(10)
    assert (result.num_blocks, result.num_written, result.num_refused) == (0, 0, 0)
    assert reader.client.lookup(hashes).num_blocks == 0
    assert reader.load(hashes, range(10)).num_blocks == 0
    # What is asked for since is stored.
    assert old.save(hashes, range(10)).num_written == 10
    assert reader.load(hashes, range(10)).num_blocks == 10


def rank_of(cluster, core, rank, value):
    """A rank of two with all KV of one value."""
    client, shape = Client(core.control_path, cluster.space, (rank, 2, 0, 1)), cluster.space.shape
    cluster.clients.append(client)
    dims = (2, 80, shape.block_size, shape.num_kv_heads // 2, shape.head_dim)
    caches = [torch.full(dims, float(value)) for _ in range(shape.num_layers)]
    client.register_kv_caches(caches)
    return client, caches


def test_parts_of_one_block_are_of_one_version_or_it_is_not_stored(cluster, core, wait_until):
    (first, caches), (second, _) = rank_of(cluster, core, 0, 1), rank_of(cluster, core, 1, 1)
    reader, hashes = cluster.worker("a", seed=9), cluster.hashes(3)
    with held_up(second) as go:
        fill_threads(cluster, second)
        wait_until(lambda: core.pool.stats().num_writes == NUM_THREADS)
        late = second.save(hashes, [0, 1, 2])
        core.state.pool_service.clear(cluster.space.digest)
        for layer in caches:
            layer.fill_(2.0)
        new = first.save(hashes, [0, 1, 2])
        wait_until(lambda: core.pool.stats().num_writing == 3 + NUM_THREADS)
        go.set()
        assert late.result(10).num_blocks == 0
    assert reader.load(hashes, range(3)).num_blocks == 0
    # The other rank's part of the new weights makes them whole.
    for layer in parts_of(second).copier.cache.caches:
        layer.fill_(2.0)
    assert second.save(hashes, [0, 1, 2]).result(10).num_blocks == 3
    assert new.result(10).num_blocks == 3
    assert reader.load(hashes, range(3)).num_blocks == 3
    assert all(bool((layer[:, :3] == 2.0).all()) for layer in reader.caches)


def test_what_is_published_is_of_the_version_of_the_call(cluster, core, monkeypatch):
    """As for a save: between the call and its first question the namespace is cleared."""
    worker = cluster.worker("a")
    get = parts_of(worker.client).clears.get

    def get_and_clear(namespace):
        count = get(namespace)
        core.state.pool_service.clear(namespace)
        return count

    monkeypatch.setattr(parts_of(worker.client).clears, "get", get_and_clear)
    with pytest.raises(StaleVersion, match="publish what is computed anew"):
        worker.client.publish([0, 1])
    assert core.pool.stats().num_writing == 0
    monkeypatch.undo()
    assert worker.client.publish([0, 1]).num_blocks == 2


def test_namespaces_that_share_a_counter_cost_each_other_no_more_than_a_save(cluster, core):
    worker, hashes = cluster.worker("a"), cluster.hashes(3)
    digest = cluster.space.digest
    neighbour = digest[:1] + bytes([digest[1] ^ 1]) + digest[2:]
    worker.save(hashes, range(3))
    core.state.pool_service.clear(neighbour)
    assert worker.client.lookup(hashes).num_blocks == 3
    assert worker.save(cluster.hashes(5), range(5)).num_blocks == 5


def test_namespaces_of_a_group_are_cleared_together_and_no_number_of_clearings_is_too_many(cluster, core):
    worker, hashes, digest = cluster.worker("a"), cluster.hashes(3), cluster.space.digest
    worker.save(hashes, range(3))
    group, before = digest[:2], core.state.pool_service.current.num_clears(digest)
    for number in range(2000):
        core.state.pool_service.clear(bytes([group[0] ^ 1]) + number.to_bytes(31, "big"))
    assert worker.client.lookup(hashes).num_blocks == 3
    mate = group + bytes(30)
    assert core.state.pool_service.clear(mate) == 3, "blocks of all that are cleared with it"
    assert worker.client.lookup(hashes).num_blocks == 0
    assert core.state.versions.get(digest) == core.state.versions.get(mate) == 1
    assert core.state.pool_service.current.num_clears(digest) == before + 1, (
        "what was asked to be saved before is not stored"
    )
    assert worker.save(hashes, range(3)).num_blocks == 3


def test_a_ray_caller_may_name_the_count_from_before_it_computed(cluster, core):
    worker, hashes = cluster.worker("a"), cluster.hashes(3)
    chain, before = (
        parts_of(worker.client).chain(hashes),
        core.state.pool_service.current.num_clears(cluster.space.digest),
    )
    core.state.pool_service.clear(cluster.space.digest)
    ticket = core.state.pool_service.prepare_store(chain, "ray:x", ttl_s=5.0, num_clears=before)
    assert (ticket.write_id, len(ticket.slots), ticket.num_clears) == (0, 0, before + 1)
    assert core.state.pool_service.prepare_store(chain, "ray:x", ttl_s=5.0, num_clears=before + 1).write_id


def test_a_version_far_ahead_is_refused_at_every_door_and_clearing_goes_on(cluster, core):
    far, space = 2**64 - 1, cluster.space
    worker, hashes = cluster.worker("a"), cluster.hashes(3)
    worker.save(hashes, range(3))
    with pytest.raises(InvalidRequest, match="wanted an int from 0 to 4294967296"):
        core.state.pool_service.clear(space.digest, far)
    peer = core.state.peers.get("a")
    lease = PeerLease(
        chain=parts_of(worker.client).chain(hashes), block_bytes=space.shape.block_bytes,
        slot_format=BLOCK_ORDER_VERSION, namespace_version=far, ttl_s=5.0, within_s=2.0,
    )  # fmt: skip
    with pytest.raises(PeerLost, match="InvalidRequest: version: wanted an int from 0"):
        peer.lease(peer.client, lease)
    cluster.directory.versions._known[group_of(space.digest)] = far, 1, space.digest
    cluster.directory.versions._serial = 1
    heard = threading.Event()
    core.state.hints.publish_soon(heard.set)
    assert heard.wait(10)
    assert worker.client.lookup(hashes).num_blocks == 3
    assert core.state.pool_service.clear(space.digest) == 3
    assert core.state.versions.get(space.digest) == 1


def test_a_clearing_is_known_before_anything_new_can_be_stored_and_after_nothing_old_can_be_found(cluster, core):
    """Whoever knows the new version finds nothing old; whoever finds something new, knows it."""
    worker, hashes = cluster.worker("a"), cluster.hashes(3)
    worker.save(hashes, range(3))
    pool, seen = core.pool, []

    def is_news():
        seen.append((core.state.versions.advance(cluster.space.digest), pool._lock.locked()))
        return True

    assert pool.clear(cluster.space.digest, is_news) == 3
    assert seen == [(1, True)]
    assert pool.clear(cluster.space.digest, lambda: False) is None


def test_what_the_first_client_saves_while_a_clearing_begins_is_cleared_also_on_the_disk(
    cluster, monkeypatch, tmp_path
):
    core = cluster.add("b", disk_path=str(tmp_path), disk_capacity_bytes=1 << 20)
    service, hashes, saved = core.state.pool_service, cluster.hashes(3), []
    first = service.current
    begin_clear = first.begin_clear

    def attach_and_save(*args):
        # After the clearing has chosen the pool that the node had until now.
        saved.append(cluster.worker("b").save(hashes, range(3)).num_written)
        return begin_clear(*args)

    monkeypatch.setattr(first, "begin_clear", attach_and_save)
    assert service.clear(cluster.space.digest) == 3
    assert (saved, service.current is first) == ([3], False)
    assert cluster.worker("b").client.lookup(hashes).num_blocks == 0
    assert not core.state.disk.lookup(parts_of(cluster.worker("b").client).chain(hashes))

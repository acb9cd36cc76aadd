"""Blocks that a process has leased in one life of a store stay for it in the next one, and no longer than it lives."""

from __future__ import annotations

import os

import pytest

from kvstore.node.handover import processes, taking
from kvstore.node.handover.processes import has_ended, pid_of
from kvstore.rpc.connection import Role
from kvstore.runtime import clock
from tests.kvstore.node.handover.lives import NODE, SETTINGS, Lives

HOUR_S = 3600.0


@pytest.fixture
def lives(cluster, monkeypatch):
    monkeypatch.setattr(taking, "end", lambda pidfd, patience_s, killed_within_s: True)
    monkeypatch.setattr(taking, "pid_of", lambda pidfd: 1)
    monkeypatch.setattr(processes, "_LOOK_S", 0.05)
    cluster.add(NODE, **SETTINGS)
    return Lives(cluster)


@pytest.fixture
def hashes(cluster, lives):
    """Three blocks that are in the store."""
    made = cluster.hashes(3)
    cluster.worker(NODE, seed=1).save(made, range(3))
    return made


def lease(cluster, hashes, process):
    """Lease blocks for an hour to a worker whose connections are those of another process; return its lease."""
    connections = cluster.nodes[NODE].control.server.connections
    before = {connection.owner for connection in connections}
    made = cluster.worker(NODE, seed=2).client.lease(hashes, ttl_s=HOUR_S)
    for connection in list(connections):
        if connection.owner not in before and connection.role is Role.CLIENT:
            os.dup2(process.pidfd, connection.pidfd, inheritable=False)
            connection.pid = process.pid
    return made


def uses_of(cluster):
    """Return, by owner, the processes of the last life for which the present one keeps slots."""
    return {use.owner: sorted(map(pid_of, use.pidfds)) for use in cluster.nodes[NODE].old.processes.uses()}


@pytest.mark.parametrize("num_restarts", [1, 2])
def test_blocks_that_a_process_has_leased_are_kept_while_it_lives_and_no_longer(
    cluster, lives, hashes, process, wait_until, num_restarts
):
    held = lease(cluster, hashes, process)
    for _ in range(num_restarts):
        assert lives.go_on().num_blocks == 3
    pool = cluster.nodes[NODE].pool
    assert uses_of(cluster) == {"old-reader-0": [process.pid]}
    pool.evict(pool.num_slots)
    assert (pool.stats().num_pinned, pool.lookup(hashes), len(held)) == (3, 3, 3)
    process.kill()
    wait_until(lambda: pool.stats().num_pinned == 0)
    assert pool.lookup(hashes) == 3
    assert pool.evict(pool.num_slots) == 3
    pool.check_integrity()


@pytest.mark.parametrize("num_restarts", [1, 2])
@pytest.mark.parametrize("clear_in", [0, 1])
def test_cleared_blocks_that_a_process_has_leased_take_slots_while_it_lives_and_no_longer(
    cluster, lives, hashes, process, wait_until, num_restarts, clear_in
):
    held = lease(cluster, hashes, process)
    for life in range(num_restarts + clear_in):
        if life == clear_in:
            cluster.nodes[NODE].state.pool_service.clear(cluster.space.digest)
        lives.go_on()
    pool = cluster.nodes[NODE].pool
    assert uses_of(cluster) == {"old-writer-0": [process.pid]}
    taken = set(pool.reserve(pool.num_free, "new").slots)
    assert (len(taken), taken & set(held.slots)) == (pool.num_slots - 3, set())
    process.kill()
    wait_until(lambda: pool.num_free == 3)
    pool.check_integrity()


@pytest.mark.parametrize("is_cleared", [False, True])
def test_blocks_that_two_processes_have_leased_are_kept_until_both_have_ended(
    cluster, lives, hashes, process, other, wait_until, is_cleared
):
    leases = [lease(cluster, hashes, each) for each in (process, other)]
    if is_cleared:
        cluster.nodes[NODE].state.pool_service.clear(cluster.space.digest)
    lives.go_on()
    pool, (use,) = cluster.nodes[NODE].pool, cluster.nodes[NODE].old.processes.uses()
    process.kill()
    wait_until(lambda: any(map(has_ended, use.pidfds)))
    assert not use.is_over(clock.now_s(), set(filter(has_ended, use.pidfds)))
    assert (pool.num_free, len(leases)) == (pool.num_slots - 3, 2)
    other.kill()
    wait_until(lambda: pool.stats().num_pinned == pool.stats().num_writing == 0)
    pool.check_integrity()


@pytest.mark.parametrize("is_cleared", [False, True])
def test_blocks_that_a_caller_over_ray_has_leased_too_are_kept_until_the_time_is_over(
    cluster, lives, hashes, process, is_cleared
):
    service = cluster.nodes[NODE].state.pool_service
    held = lease(cluster, hashes, process)
    service.lease(hashes, "ray:job", HOUR_S / 2)
    if is_cleared:
        service.clear(cluster.space.digest)
    for _ in range(2):
        lives.go_on()
        pool, old = cluster.nodes[NODE].pool, cluster.nodes[NODE].old.processes
        assert not any(use.pidfds for use in old.uses())
        assert all(use.until_s > clock.now_s() + HOUR_S / 2 for use in old.uses())
        assert (pool.num_free, len(held)) == (pool.num_slots - 3, 3)
    assert pool.expire(clock.now_s() + HOUR_S / 2) == 0
    assert pool.expire(clock.now_s() + HOUR_S + 1) == (0 if is_cleared else 1)

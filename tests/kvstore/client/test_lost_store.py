"""A client whose store has ended: it fails closed and unmaps that store's memory, so that another one has room."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
from inner_parts import parts_of

from kvstore.client.results import MissReason
from kvstore.errors import KVStoreError, StoreUnavailable
from tests.kvstore.standing_still import standing_still


def mappings_of(arena) -> int:
    """Count the mappings of one arena in this process; the store's own and the mover's are two of them."""
    inode = os.fstat(arena.fd).st_ino
    return sum(f" {inode} " in line for line in Path("/proc/self/maps").read_text().splitlines() if "arena" in line)


def test_the_memory_of_a_store_that_ended_is_unmapped(cluster, wait_until):
    core = cluster.add("a", mover=False)
    arena, hashes = core.state.arena, cluster.hashes(3)
    inode = os.fstat(arena.fd).st_ino
    worker = cluster.worker("a", 8)
    worker.save(hashes, range(3))
    lease = worker.client.lease(hashes)
    assert mappings_of(arena) >= 2
    cluster.stop_node("a")

    def is_unmapped():
        # By name, too: files of other file systems may have the same number.
        lines = Path("/proc/self/maps").read_text().splitlines()
        return not any(f" {inode} " in line and "arena" in line for line in lines)

    lost = worker.load(hashes, range(3))
    assert (lost.num_blocks, lost.failed[0].reason) == (0, MissReason.STORE_LOST)
    wait_until(is_unmapped)
    # It goes on failing closed, in the same ways.
    assert worker.load(hashes, range(3)).failed[0].reason is MissReason.STORE_LOST
    with pytest.raises(KVStoreError):
        worker.save(hashes, range(3))
    with pytest.raises(StoreUnavailable, match="new lease"):
        lease.block(0)
    worker.client.close()


def test_a_store_of_another_life_at_the_same_place_is_not_mistaken_for_it(cluster, wait_until):
    core = cluster.add("a", mover=False)
    worker, hashes = cluster.worker("a", 8), cluster.hashes(3)
    worker.save(hashes, range(3))
    path = core.control_path
    cluster.stop_node("a")
    again = cluster.add("a", mover=False)
    os.symlink(again.control_path, path)
    try:
        assert worker.load(hashes, range(3)).failed[0].reason is MissReason.STORE_LOST
        with pytest.raises(StoreUnavailable, match="restarted"):
            worker.client.lookup(hashes)
        wait_until(lambda: parts_of(worker.client).is_unmapped)
        assert cluster.worker("a", 8).load(hashes, range(3)).num_blocks == 0
    finally:
        os.unlink(path)


def test_a_store_that_only_does_not_answer_is_not_given_up(cluster, monkeypatch):
    core = cluster.add("a", call_timeout_s=0.3)
    worker, hashes = cluster.worker("a", 8), cluster.hashes(3)
    worker.save(hashes, range(3))
    assert worker.load(hashes, range(3)).num_blocks == 3
    serve = core.control.server.handler

    def hang(connection, message):
        core.control.server.handler = serve
        time.sleep(1.0)
        return serve(connection, message)

    core.control.server.handler = hang
    with pytest.raises(KVStoreError):
        worker.client.lookup(hashes)
    deadline_s = time.monotonic() + 5
    while True:
        with contextlib.suppress(KVStoreError):
            assert worker.client.lookup(hashes, timeout_s=3.0).num_local == 3
            break
        assert time.monotonic() < deadline_s
    assert not parts_of(worker.client).is_lost
    assert worker.load(hashes, range(3)).num_blocks == 3


def test_a_load_that_gets_no_connection_in_time_fails_closed(cluster):
    core = cluster.add("a", mover=False, call_timeout_s=0.2)
    worker, hashes = cluster.worker("a", 8), cluster.hashes(3)
    assert len(parts_of(worker.client).store.for_jobs) == 0
    with standing_still(core):
        late = worker.load(hashes, range(3))
    assert (late.num_blocks, [failure.reason for failure in late.failed]) == (0, [MissReason.STORE_LOST] * 3)
    assert not parts_of(worker.client).is_lost
    worker.save(hashes, range(3))
    assert worker.load(hashes, range(3)).num_blocks == 3

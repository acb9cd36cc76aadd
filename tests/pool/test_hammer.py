"""Threads, and processes with a real node store, that do everything at once and leave nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from poolcheck.chains import NAMESPACES
from poolcheck.hammer import ROLES, assert_at_rest, hammer_threads

BLOCK_BYTES, NUM_SLOTS, NUM_ROUNDS = 4096, 16, 300


@pytest.mark.parametrize("eviction", ["lru", "learned"])
@pytest.mark.parametrize("seed", [1, 2])
def test_threads_leave_the_pool_whole(seed, eviction):
    num_rounds = 1000
    hammered = hammer_threads(num_slots=12, num_rounds=num_rounds, seed=seed, eviction=eviction)
    assert len(hammered.counts) == len(ROLES)
    assert set(hammered.counts.values()) == {num_rounds}
    assert hammered.pool.stats().num_evicted > num_rounds
    assert_at_rest(hammered.pool)


def test_processes_leave_the_node_store_whole(cluster, wait_until):
    core = cluster.add("a", mover=False, capacity_bytes=BLOCK_BYTES * NUM_SLOTS)
    core.state.pool_service.attach(NAMESPACES[0], BLOCK_BYTES)
    assert core.pool.stats().num_slots == NUM_SLOTS
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[2]}"}
    command = [sys.executable, "-m", "poolcheck.process", core.control_path, NAMESPACES[0].hex(), str(BLOCK_BYTES)]
    last_words = {0: [], 1: [], 2: ["die"], 3: []}
    workers = [
        subprocess.Popen([*command, str(seed), str(NUM_ROUNDS), *more], stdout=subprocess.PIPE, env=environment)
        for seed, more in last_words.items()
    ]
    try:
        outputs = [worker.communicate(timeout=60)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)
    assert [worker.returncode for worker in workers] == [0, 0, 0, 0]
    for counts in map(json.loads, outputs):
        assert counts["blocks read"] > 100
        assert counts["blocks written"] > 100
        assert counts["lies refused"] == NUM_ROUNDS / 4
    # The one that ended without a word has left a lease and slots half written; the kernel tells the store.
    wait_until(lambda: core.pool.stats().num_leases == core.pool.stats().num_writes == 0)
    assert core.pool.stats().num_evicted > 100
    core.pool.drain_events()
    core.pool.check_integrity()
    stats = core.pool.stats()
    assert (stats.num_pinned, stats.num_writing, stats.num_quarantined) == (0, 0, 0)
    assert stats.num_free + stats.num_idle == NUM_SLOTS

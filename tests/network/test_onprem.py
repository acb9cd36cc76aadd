"""The cluster of cluster.yaml on two machines with addresses of their own, and a store on it."""

from __future__ import annotations

import json

import pytest
from waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_BLOCKS, BLOCK_BYTES = 128, 64 << 10
MEGABITS_PER_S = 40  # a load of all blocks takes about two seconds
LOAD_S = 3.0


@pytest.fixture(scope="module")
def cluster(make_cluster):
    made = make_cluster(2)
    started = made.kvstore(made.workers[0], "start", "--capacity", "64MiB")
    assert started.returncode == 0, started.stderr
    assert "on 2 node(s)" in started.stdout
    return made


@pytest.fixture(scope="module")
def engines(cluster):
    """An engine on each machine, the head's first."""
    return cluster.open_engines(cluster.lab.machines)


@pytest.mark.timeout(240)
def test_every_machine_has_a_store(cluster):
    said = cluster.kvstore(cluster.head, "status", "--json")
    assert said.returncode == 0, said.stderr
    status = json.loads(said.stdout)
    assert len(status["nodes"]) == 2
    assert status["without_store"] == []


def test_what_one_machine_saved_the_other_loads_over_the_wire(cluster, engines):
    head, worker = engines
    before = cluster.lab.num_bytes_to(cluster.workers[0])
    assert head.ask("save", seed=0, num_blocks=NUM_BLOCKS) == NUM_BLOCKS
    said = worker.load(0, NUM_BLOCKS)
    assert said["num_blocks"] == NUM_BLOCKS, said
    assert cluster.lab.num_bytes_to(cluster.workers[0]) - before >= NUM_BLOCKS * BLOCK_BYTES


@pytest.mark.timeout(180)
def test_a_link_that_is_cut_during_a_load_costs_no_wrong_byte_and_hits_come_back(cluster, engines):
    (head, worker), machine = engines, cluster.workers[0]
    assert head.ask("save", seed=1, num_blocks=NUM_BLOCKS) == NUM_BLOCKS
    cluster.lab.slow_down(machine, MEGABITS_PER_S)
    try:
        before = cluster.lab.num_bytes_to(machine)
        worker.begin("load", seed=1, num_blocks=NUM_BLOCKS, timeout_s=LOAD_S)
        eventually(lambda: cluster.lab.num_bytes_to(machine) - before > NUM_BLOCKS * BLOCK_BYTES // 4)
    finally:
        cluster.lab.cut(machine)
        cluster.lab.speed_up(machine)
    try:
        said = worker.checked(worker.answer(LOAD_S + 10))
        assert said["num_blocks"] < NUM_BLOCKS
        assert set(said["why"]) <= {"timeout", "peer_lost", "not_found", "lease_expired"}, said
        # What this machine itself has is served without the link.
        assert worker.load(0, NUM_BLOCKS, LOAD_S)["num_blocks"] == NUM_BLOCKS
    finally:
        cluster.lab.mend(machine)
    eventually(lambda: worker.load(1, NUM_BLOCKS, LOAD_S)["num_blocks"] == NUM_BLOCKS, timeout_s=60)

"""Faults that take minutes, and jobs, on clusters with addresses of their own. `make test-network` runs them."""

from __future__ import annotations

import itertools

import pytest
from waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_BLOCKS = 32
LOAD_S = 3.0
#: A load's own time, and what it may need besides: a question to the store, the copies, a busy machine.
BOUND_S = LOAD_S + 10
DELAY_S, LOSS = 0.05, 0.01  # in each direction


def started(cluster):
    said = cluster.kvstore(cluster.workers[0], "start", "--capacity", "64MiB")
    assert said.returncode == 0, said.stderr
    return cluster


@pytest.fixture(scope="module")
def pair(make_cluster):
    """Two machines on wires that can delay and lose packets."""
    return started(make_cluster(2, relays=True))


@pytest.fixture(scope="module")
def pair_engines(pair):
    return pair.open_engines(pair.lab.machines, NUM_BLOCKS)


@pytest.fixture(scope="module")
def four(make_cluster):
    return started(make_cluster(4))


@pytest.fixture(scope="module")
def four_engines(four):
    return four.open_engines(four.lab.machines, NUM_BLOCKS)


def load(engine, seed):
    """Load within a time; nothing wrong is delivered, and the load ends in time."""
    said = engine.load(seed, NUM_BLOCKS, LOAD_S)
    assert said["took_s"] < BOUND_S, said
    return said["num_blocks"]


def whole(engine, seed):
    return load(engine, seed) == NUM_BLOCKS


def test_a_long_and_lossy_way_costs_time_and_no_wrong_byte(pair, pair_engines):
    head, worker = pair_engines
    assert head.ask("save", seed=0, num_blocks=NUM_BLOCKS) == NUM_BLOCKS
    pair.lab.delay(DELAY_S, LOSS)
    try:
        # A load may not end in time, but what has arrived stays, so that in the end all is there.
        eventually(lambda: whole(worker, 0), timeout_s=120)
        assert worker.ask("save", seed=1, num_blocks=NUM_BLOCKS) == NUM_BLOCKS
        eventually(lambda: whole(head, 1), timeout_s=120)
        assert len(pair.status(pair.head)["nodes"]) == 2
    finally:
        pair.lab.delay(0.0, 0.0)
    assert worker.ask("save", seed=2, num_blocks=NUM_BLOCKS) == NUM_BLOCKS
    eventually(lambda: whole(head, 2), timeout_s=60)


def test_a_serving_job_with_a_token_and_a_runtime_environment_uses_the_store(pair, repo_root):
    words = [
        "--working-dir",
        str(repo_root / "examples"),
        "--runtime-env-json",
        '{"env_vars": {"HF_HUB_OFFLINE": "1"}}',
    ]
    job = ["ray", "job", "submit", "--address", "http://127.0.0.1:8265", *words, "--", "python", "serving_job.py"]
    refused = pair.run(pair.head, *job, RAY_AUTH_TOKEN="not-the-token")
    assert refused.returncode != 0
    assert "AuthenticationError" in refused.stderr
    said = pair.run(pair.head, *job)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "with a worker on each of 2 node(s)" in said.stdout
    assert "every byte right: yes" in said.stdout


def test_a_machine_that_was_cut_off_for_too_long_joins_again_as_a_new_node(pair, pair_engines):
    (head, worker), machine = pair_engines, pair.workers[0]
    lost = worker.node_id
    assert worker.ask("save", seed=3, num_blocks=NUM_BLOCKS) == NUM_BLOCKS
    pair.lab.cut(machine)
    try:
        assert load(head, 3) == 0
        assert head.ask("save", seed=4, num_blocks=NUM_BLOCKS) == NUM_BLOCKS
        eventually(lambda: lost not in pair.status(pair.head)["nodes"], timeout_s=180)
        assert whole(head, 4)
    finally:
        pair.lab.mend(machine)
    # Ray ends the node when it hears that it was given up; until then its start commands change nothing.
    eventually(lambda: not pair.runs(machine, "raylet"), timeout_s=180)
    pair.start_ray(machine)
    eventually(lambda: len(pair.status(pair.head)["nodes"]) == 2, timeout_s=120)
    again = pair.open_engine(machine, NUM_BLOCKS)
    assert again.node_id != lost
    eventually(lambda: whole(again, 4), timeout_s=60)
    assert again.ask("save", seed=5, num_blocks=NUM_BLOCKS) == NUM_BLOCKS
    eventually(lambda: whole(head, 5), timeout_s=60)


@pytest.mark.parametrize("has_directory", [False, True])
def test_while_one_of_four_machines_is_frozen_the_others_serve_and_it_goes_on_afterwards(
    four, four_engines, has_directory
):
    machines, seeds = four.lab.machines, [100 * has_directory + number for number in range(4)]
    home = next(number for number, machine in enumerate(machines) if four.runs(machine, "ray::Directory"))
    frozen = home if has_directory else next(number for number in (3, 2) if number != home)
    others = [number for number in range(4) if number != frozen]
    for seed, engine in zip(seeds, four_engines, strict=True):
        assert engine.ask("save", seed=seed, num_blocks=NUM_BLOCKS) == NUM_BLOCKS
    machines[frozen].freeze()
    try:
        for number in others:
            assert load(four_engines[number], seeds[frozen]) == 0
            assert whole(four_engines[number], seeds[number])
        for number, other in itertools.pairwise(others):
            if has_directory:  # Without it no node knows which others have a block.
                load(four_engines[number], seeds[other])
            else:
                eventually(lambda pair=(number, other): whole(four_engines[pair[0]], seeds[pair[1]]), timeout_s=60)
    finally:
        machines[frozen].thaw()
    assert whole(four_engines[frozen], seeds[frozen])
    for number in others:
        eventually(lambda number=number: whole(four_engines[number], seeds[frozen]), timeout_s=60)
    assert len(four.status(four.head)["nodes"]) == 4

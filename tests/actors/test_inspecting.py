"""`kvstore inspect` against a real store of two nodes, also where one of them does not answer."""

from __future__ import annotations

import json
import time

import pytest
from click.testing import CliRunner

import kvstore
from kvstore import cli

pytestmark = pytest.mark.ray

NAME = "inspected"


@pytest.fixture(scope="module")
def store(ray_cluster):
    made = kvstore.start("8MiB", name=NAME, address=ray_cluster.address)
    yield made
    made.stop()


def run(*words, wants=0):
    done = CliRunner().invoke(cli.main, ["inspect", *words, "--name", NAME, "--json"], prog_name="kvstore")
    assert done.exit_code == wants, done.output
    return json.loads(done.stdout)


def test_chains_leases_and_hand_offs_of_two_nodes_are_seen(store, node_ids, make_space, chain_of, open_engine):
    space = make_space("inspected")
    first, second = (open_engine(store, space, node_id) for node_id in node_ids)
    hashes = chain_of(space, 6)
    first.save(hashes)
    assert second.load(hashes[:4]).num_blocks == 4
    prefix = space.digest.hex()[:10]
    nodes = run("namespace", prefix)["nodes"]
    memory = {node: found["namespaces"][0]["tiers"]["memory"] for node, found in nodes.items()}
    assert {node: each["num_blocks"] for node, each in memory.items()} == {node_ids[0]: 6, node_ids[1]: 4}

    found = run("chain", "--hash", hashes[5].hex())
    runs = {node: [(r["start"], r["num_blocks"]) for r in each["runs"]] for node, each in found["nodes"].items()}
    assert {node: sum(count for _, count in each) for node, each in runs.items()} == {node_ids[0]: 6, node_ids[1]: 4}
    assert (found["num_blocks"], found["absent"]) == (6, [])

    ticket = first.publish(hashes[:2], [10, 11], ttl_s=60.0)
    pinned = second.client.pin(hashes[:3])
    (lease,) = [each for node in run("lease")["nodes"].values() for each in node["leases"] if each["kind"] == "hard"]
    assert (lease["num_blocks"], lease["left_s"]) == (3, None)
    assert run("lease", str(lease["id"]))["nodes"][node_ids[1]]["runs"][0]["num_blocks"] == 3
    second.client.unpin(pinned)
    assert run("lease", str(lease["id"]), wants=2)["error"] == "InvalidRequest"
    tickets = run("handoff")["nodes"][node_ids[0]]["tickets"]
    assert [(each["num_blocks"], each["waits_for"]) for each in tickets] == [(2, "a fetch")]
    assert first.client.withdraw(ticket)


def test_a_node_that_hangs_is_named_within_the_time_and_the_others_answer(store, node_ids, stopped):
    pids = {node: each["pid"] for node, each in store.stats()["nodes"].items()}
    stopped(pids[node_ids[1]])
    began_s = time.monotonic()
    nodes = run("namespace", "--timeout", "1", wants=1)["nodes"]
    assert time.monotonic() - began_s < 30
    assert "error" in nodes[node_ids[1]]
    assert "namespaces" in nodes[node_ids[0]]

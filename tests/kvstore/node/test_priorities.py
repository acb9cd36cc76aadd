"""What a save says of its blocks reaches the pool of its node; what is no priority changes nothing."""

from __future__ import annotations

import math

import pytest

import kvstore
from kvstore.blocks.codec import encode
from kvstore.blocks.priority import Retention
from kvstore.config import PROTOCOL_VERSION
from kvstore.errors import InvalidRequest
from kvstore.rpc.connect import connect_local
from kvstore.rpc.framing import Op
from kvstore.rpc.messages import Prepare


@pytest.fixture
def node(cluster):
    return cluster.add("a", mover=False)


def counts(node):
    stats = node.pool.stats()
    return stats.num_low, stats.num_high


def test_saves_of_all_priorities(cluster, node):
    worker = cluster.worker("a", 12)
    chains = [cluster.hashes(4, seed=seed) for seed in range(3)]
    terms = ({"priority": "low"}, {"priority": kvstore.Priority.HIGH, "priority_s": 60}, {})
    for at, (chain, more) in enumerate(zip(chains, terms, strict=True)):
        assert worker.client.save(chain, range(4 * at, 4 * at + 4), **more).result(10).num_written == 4
    assert counts(node) == (4, 4)
    assert worker.client.stats()["pool"]["num_high"] == 4
    worker.save(chains[0][:1], [0])
    assert counts(node) == (3, 4)
    worker.load(chains[0], range(4))
    assert counts(node) == (0, 4)
    cluster.check()


def test_a_load_by_a_low_job_leaves_its_blocks_low(cluster, node):
    worker, chain = cluster.worker("a", 8), cluster.hashes(4)
    worker.client.save(chain, range(4), priority="low").result(10)
    for low in ("low", kvstore.Priority.LOW):
        assert worker.load(chain, range(4, 8), priority=low).num_local == 4
        assert counts(node) == (4, 0)
    with pytest.raises(InvalidRequest, match="priority: wanted "):
        worker.client.load(chain, range(4, 8), priority="urgent")
    assert counts(node) == (4, 0)
    worker.load(chain, range(4, 8), priority="high")
    assert counts(node) == (0, 0), "a load makes nothing HIGH"
    cluster.check()


@pytest.mark.parametrize("priority", ["low", "normal"])
def test_a_low_job_on_another_node_leaves_blocks_low_too(cluster, node, priority):
    cluster.start_mover("a")
    cluster.add("b")
    source, reader, chain = cluster.worker("a", 4), cluster.worker("b", 4), cluster.hashes(4)
    source.client.save(chain, range(4), priority="low").result(10)
    assert reader.load(chain, range(4), priority=priority).num_peer == 4
    assert counts(node) == (4 if priority == "low" else 0, 0)
    cluster.check()


def test_a_low_load_that_waits_for_the_rest_leaves_it_low(cluster, wait_until):
    """Its lease grows by what a save brings meanwhile."""
    core = cluster.add("a", mover=False, save_wait_s=10.0)
    worker, chain = cluster.worker("a", 8), cluster.hashes(4)
    worker.client.save(chain[:2], range(2), priority="low").result(10)
    ticket = core.pool.prepare_store(chain, "saver", retention=Retention(kvstore.Priority.LOW, math.inf))
    job = worker.client.load(chain, range(4, 8), priority="low", timeout_s=10.0)
    wait_until(lambda: core.pool.num_leases() == 1)
    core.pool.complete_store(ticket.write_id, "saver")
    assert job.result(10).num_local == 4
    assert counts(core) == (4, 0)
    cluster.check()


@pytest.mark.parametrize(
    "wrong",
    [
        {"priority": "urgent"}, {"priority": 1}, {"priority": None}, {"priority_s": 0}, {"priority_s": -1.0},
        {"priority_s": math.nan}, {"priority_s": 86_401}, {"priority_s": "60"}, {"priority_s": True},
        {"priority": "high", "priority_s": math.inf}, {"priority_s": 60}, {"priority": "normal", "priority_s": 60},
    ],
)  # fmt: skip
def test_what_is_no_priority_is_refused_and_nothing_changed(cluster, node, wrong):
    worker = cluster.worker("a", 4)
    before = node.pool.stats()
    with pytest.raises(InvalidRequest, match=r"priority(_s)?: wanted "):
        worker.client.save(cluster.hashes(4), range(4), **wrong)
    assert node.pool.stats() == before


@pytest.mark.parametrize("priority_s", [0.0, -1.0, math.nan, 86_401.0, math.inf, -math.inf])
def test_a_node_refuses_a_time_that_no_client_sends(cluster, node, priority_s):
    cluster.worker("a", 4)
    client, fd = connect_local(node.control_path, {"role": "client", "protocol": PROTOCOL_VERSION}, timeout_s=5.0)
    fd.close()
    before = node.pool.stats()
    asked = Prepare(cluster.hashes(4), priority=kvstore.Priority.HIGH, priority_s=priority_s)
    with pytest.raises(InvalidRequest, match="priority_s: wanted "):
        client.call(Op.PREPARE_STORE, encode(asked), timeout_s=5.0)
    client.close()
    assert node.pool.stats() == before

"""A fetch on its publisher's node counts the time of its claim from when that was made, not from its own question."""

import pytest
from inner_parts import parts_of

from kvstore.client.results import MissReason
from kvstore.runtime import clock as clocks
from tests.kvstore.handed_off import is_empty, reason, same


class Clock:
    """The clock of the client's and the store's halves of a fetch, which a test may put forward."""

    def __init__(self):
        self.ahead_s = 0.0

    def now_s(self):
        return clocks.now_s() + self.ahead_s


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in ("client.handoff.fetch", "node.handoff_service"):
        monkeypatch.setattr(f"kvstore.{module}.clock", made)
    return made


@pytest.fixture
def waiting(cluster, wait_until):
    """A publisher, a reader of the same node, an early ticket of 5 blocks and a fetch of it that waits."""
    core = cluster.add("a", mover=False)
    source, target = cluster.worker("a", seed=1), cluster.worker("a", seed=2)
    ticket = source.client.prepare_ticket(5)
    job = target.client.fetch(ticket, range(5), timeout_s=20.0)
    wait_until(lambda: len(core.control.handoffs.waiting) == 1)
    return source, target, ticket, job


def test_a_fetch_that_waits_longer_than_a_claim_lasts_delivers(cluster, clock, waiting, wait_until):
    source, target, ticket, job = waiting
    clock.ahead_s = 10 * target.client.config.lease_ttl_s
    source.client.publish(range(5), ticket=ticket)
    result = job.result(10)
    assert (result.num_blocks, result.failed, result.num_local) == (5, (), 5)
    assert all(same(source, range(5), target, range(5)))
    wait_until(lambda: is_empty(cluster.nodes["a"]))


def test_a_copy_that_outlasts_its_claim_does_not_count_however_long_its_fetch_waited(
    cluster, clock, waiting, monkeypatch
):
    source, target, ticket, job = waiting
    ttl_s, copier = target.client.config.lease_ttl_s, parts_of(target.client).copier
    copy = copier.out_of_slots

    def slow(*args):
        clock.ahead_s += ttl_s
        copy(*args)

    monkeypatch.setattr(copier, "out_of_slots", slow)
    clock.ahead_s = 10 * ttl_s
    source.client.publish(range(5), ticket=ticket)
    assert reason(job.result(10)) is MissReason.LEASE_EXPIRED
    source.client.withdraw(ticket)

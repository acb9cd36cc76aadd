"""Single flight: one fetches, the others wait without a thread, each for as long as it wants."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
from inner_parts import parts_of

from kvstore.client.results import MissReason
from kvstore.remote.single_flight import Flights
from kvstore.runtime import clock


@dataclass(eq=False)
class Parked:
    deadline_s: float


@pytest.fixture
def resumed():
    return []


@pytest.fixture
def flights(resumed):
    return Flights(resumed.append)


def later(seconds: float = 60.0) -> Parked:
    return Parked(clock.now_s() + seconds)


def test_the_first_leads_and_the_others_are_parked_until_it_leaves(flights, resumed):
    flight = flights.lead(b"a", later())
    others = [later(), later()]
    assert [flights.lead(b"a", load) for load in others] == [None, None]
    assert flights.num_waiting == 2
    assert flights.lead(b"b", later()) is not None, "another block is another flight"
    assert resumed == []
    flights.leave([b"a"], flight)
    assert resumed == others
    assert flights.num_waiting == 0
    assert flights.lead(b"a", later()) is not None


def test_blocks_that_come_along_are_waited_for_too(flights, resumed):
    flight = flights.lead(b"a", later())
    assert flights.enter([b"b", b"a", b"c"], flight) == [b"b", b"c"]
    waiting = later()
    assert flights.lead(b"c", waiting) is None
    flights.leave([b"b", b"c"], flight)
    assert resumed == [waiting]
    flights.leave([b"a"], flight)


def test_who_waited_long_enough_goes_on_alone(flights, resumed):
    flight = flights.lead(b"a", later())
    late, patient = later(-1), later()
    flights.lead(b"a", late)
    flights.lead(b"a", patient)
    flights.give_up_overdue()
    assert (resumed, flights.num_waiting) == ([late], 1)
    flights.leave([b"a"], flight)
    assert resumed == [late, patient]
    flights.give_up_overdue()
    assert len(resumed) == 2


class Gate:
    """Stands before one node's leases to peers: they wait until it opens."""

    def __init__(self, monkeypatch, peer_class):
        self.opened, self.num_waiting = threading.Event(), 0
        lease = peer_class.lease

        def wait(peer, *args):
            self.num_waiting += 1
            assert self.opened.wait(20)
            return lease(peer, *args)

        monkeypatch.setattr(peer_class, "lease", wait)


@pytest.fixture
def gate(monkeypatch):
    from kvstore.remote.peers import Peer

    made = Gate(monkeypatch, Peer)
    yield made
    made.opened.set()


def test_fifty_loads_of_one_prefix_hold_one_thread_and_make_one_fetch(cluster, wait_until, gate):
    cluster.add("a", capacity_bytes=1 << 20)
    core = cluster.add("b", capacity_bytes=1 << 20)
    one = cluster.worker("a", 16, seed=1)
    workers = [cluster.worker("b", 16, seed=2) for _ in range(13)]
    hashes = cluster.hashes(16)
    one.save(hashes, range(16))
    jobs = [worker.client.load(hashes, range(16)) for worker in workers for _ in range(4)]
    wait_until(lambda: gate.num_waiting == 1 and core.state.fetcher.flights.num_waiting == len(jobs) - 1)
    # A load of something else is not held up by those that wait.
    local = cluster.hashes(4, seed=5)
    cluster.worker("b", 8).save(local, range(4))
    missing = cluster.client("b").prefetch(cluster.hashes(3, seed=9)).result(3)
    assert missing.failed[0].reason is MissReason.NOT_FOUND
    gate.opened.set()
    results = [job.result(10) for job in jobs]
    assert [result.num_blocks for result in results] == [16] * len(jobs), [r.failed[:1] for r in results if r.failed]
    assert sum(result.num_lease_calls for result in results) == 1
    assert cluster.nodes["a"].stats()["calls"]["PEER_LEASE"] == 1
    assert all(worker.block(i) == one.block(i) for worker in workers for i in range(16))
    assert core.state.fetcher.flights.num_waiting == 0


def test_each_waits_for_as_long_as_it_wants(cluster, wait_until, gate):
    cluster.add("a")
    core = cluster.add("b")
    one, first, second = cluster.worker("a", 8, seed=1), cluster.worker("b", 8), cluster.worker("b", 8)
    hashes = cluster.hashes(4)
    one.save(hashes, range(4))
    leading = first.client.load(hashes, range(4), timeout_s=20)
    wait_until(lambda: gate.num_waiting == 1)
    started_s = clock.now_s()
    result = second.load(hashes, range(4), timeout_s=0.3)
    assert 0.3 <= clock.now_s() - started_s < 2
    assert [failure.reason for failure in result.failed] == [MissReason.TIMEOUT] * 4
    assert core.state.fetcher.flights.num_waiting == 0
    gate.opened.set()
    assert leading.result(10).num_blocks == 4


def test_who_waits_does_not_fail_with_the_one_it_waits_for(cluster, wait_until, monkeypatch):
    from kvstore.errors import PeerLost
    from kvstore.remote.peers import Peer

    for node in "abc":
        cluster.add(node)
    one, two = cluster.worker("a", 8, seed=1), cluster.worker("b", 8, seed=2)
    first, second = cluster.worker("c", 8), cluster.worker("c", 8)
    hashes = cluster.hashes(4)
    one.save(hashes, range(4))
    two.load(hashes, range(4))
    wait_until(lambda: len(first.client.lookup(hashes).nodes) == 2)
    opened, asked, lease = threading.Event(), [], Peer.lease

    def fail_once(peer, *args):
        asked.append(peer.node_id)
        if len(asked) == 1:
            assert opened.wait(10)
            raise PeerLost("gone in the middle")
        return lease(peer, *args)

    monkeypatch.setattr(Peer, "lease", fail_once)
    flights = cluster.nodes["c"].state.fetcher.flights
    jobs = [first.client.load(hashes, range(4))]
    wait_until(lambda: len(asked) == 1)
    jobs.append(second.client.load(hashes, range(4)))
    wait_until(lambda: flights.num_waiting == 1)
    opened.set()
    assert [job.result(10).num_blocks for job in jobs] == [4, 4]
    assert len(asked) == 2, "one fetch from the other peer served both"
    assert all(worker.block(i) == one.block(i) for worker in (first, second) for i in range(4))


def test_nothing_more_is_pinned_for_a_client_that_hung_up(cluster, wait_until, gate):
    cluster.add("a")
    core = cluster.add("b", lease_ttl_s=3.0)
    one, two = cluster.worker("a", 8, seed=1), cluster.worker("b", 8)
    hashes = cluster.hashes(4)
    one.save(hashes, range(4))
    job = two.client.load(hashes, range(4))
    wait_until(lambda: gate.num_waiting == 1)
    connection = next(c for c in parts_of(two.client).store.open if c is not parts_of(two.client).store.calls)
    served = set(core.control.server.connections)
    connection.channel.sock.shutdown(2)
    assert job.result(5).failed[0].reason is MissReason.STORE_LOST
    wait_until(lambda: any(connection.closed for connection in served))
    gate.opened.set()
    wait_until(lambda: core.pool.stats().num_idle == 4)
    assert core.pool.stats().num_pinned == 0
    wait_until(lambda: core.pool.stats().num_leases == 0)

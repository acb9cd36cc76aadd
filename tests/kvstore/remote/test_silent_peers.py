"""Loads with little time, and a peer that hangs: none outlasts its own time, and the peer is left alone soon."""

from __future__ import annotations

import threading

import pytest

from kvstore.client.results import MissReason
from kvstore.errors import PeerLost
from kvstore.node.peer_service import PeerControl
from kvstore.remote.peers import PeerAddress

SOON_S = 20.0


@pytest.fixture
def hang(monkeypatch):
    """While it is set, the control thread of a store that grants a lease is stuck; the kernel still accepts."""
    is_on, go, original = threading.Event(), threading.Event(), PeerControl.began

    def began(control, lease_id, deadline_s):
        if is_on.is_set():
            go.wait(SOON_S)
        original(control, lease_id, deadline_s)

    def let_go():
        is_on.clear()
        go.set()

    is_on.let_go = let_go
    monkeypatch.setattr(PeerControl, "began", began)
    yield is_on
    let_go()


def nodes(cluster, **settings):
    """A worker on node b, which has loaded the first of some chains of node a."""
    cluster.add("a")
    cluster.add("b", **settings)
    one, two = cluster.worker("a", 40, seed=1), cluster.worker("b", 40, seed=2)
    chains = [cluster.hashes(4, seed=seed) for seed in range(8)]
    for at, hashes in enumerate(chains):
        one.save(hashes, range(4 * at, 4 * at + 4))
    assert two.load(chains[0], range(4)).num_peer == 4
    return two, chains


def reasons(worker, chains):
    """Load chains one after the other with little time, and return the reason of each miss."""
    return [worker.load(hashes, range(4), timeout_s=0.3).failed[0].reason for hashes in chains]


def test_short_loads_of_a_peer_that_hangs_miss_in_time_until_it_is_left_alone(cluster, hang, monkeypatch):
    """Scenario 20: loads with little time, and a slow peer.

    Each has a second for a question. To connect for a whole call would outlast the client's limit for an answer.
    """
    two, chains = nodes(cluster)
    peers, connect, given_s = cluster.nodes["b"].state.peers, PeerAddress.connect, []

    def look(address, *args):
        given_s.append(args[-1])
        return connect(address, *args)

    monkeypatch.setattr(PeerAddress, "connect", look)
    hang.set()
    assert reasons(two, chains[1:3]) == [MissReason.TIMEOUT, MissReason.PEER_LOST]
    assert given_s == [1.0]
    assert not peers.is_usable("a")
    assert peers.failures["a"][0] == 1
    assert reasons(two, chains[3:4]) == [MissReason.PEER_LOST]


def test_a_peer_that_hung_for_a_moment_is_asked_again_at_once(cluster, hang):
    two, chains = nodes(cluster, call_timeout_s=SOON_S)
    peers = cluster.nodes["b"].state.peers
    hang.set()
    assert reasons(two, chains[1:3]) == [MissReason.TIMEOUT] * 2
    assert peers.failures == {}
    peer = peers.get("a")
    assert peer.silence.total_s() > 1.5, "of the lease, and of the new connection"
    hang.let_go()
    assert two.load(chains[3], range(4)).num_peer == 4
    assert peers.get("a") is peer
    assert peer.silence.total_s() == 0.0


def test_a_peer_that_grants_leases_and_never_describes_its_slab_is_left_alone(cluster, monkeypatch):
    """Each timeout closes the common connection, and each load gets a lease before it."""
    monkeypatch.setattr(PeerControl, "_transport", lambda *_: None)  # The answer would come later.
    cluster.add("a")
    core = cluster.add("b")
    one, two = cluster.worker("a", 16, seed=1), cluster.worker("b", 4, seed=2)
    chains = [cluster.hashes(4, seed=seed) for seed in range(4)]
    for at, hashes in enumerate(chains):
        one.save(hashes, range(4 * at, 4 * at + 4))
    assert reasons(two, chains[:1]) == [MissReason.TIMEOUT]
    assert core.state.peers.is_usable("a")
    assert reasons(two, chains[1:2]) == [MissReason.TIMEOUT]
    assert not core.state.peers.is_usable("a")
    assert reasons(two, chains[2:3]) == [MissReason.PEER_LOST]


def test_where_a_peer_is_known_the_cluster_is_not_asked_for_each_connection(cluster, monkeypatch):
    """The cluster asks the process that may hang, and for a whole call's time."""
    core, _ = cluster.add("a", mover=False), cluster.add("b", mover=False)
    peers = core.state.peers
    peer = peers.get("b")

    def away(node_id, within_s):
        raise PeerLost("the cluster was asked")

    monkeypatch.setattr(peers, "resolve", away)
    peers.keep_spare(peer, peers.take_spare(peer))
    peer.silence.add("PEER_TRANSPORT", 0.0)
    peer.client.close()  # As a timeout does.
    again = peers.get("b")
    assert again is not peer
    assert again.silence is peer.silence
    again.silence.end("PEER_TRANSPORT")
    again.client.close()
    with pytest.raises(PeerLost, match="the cluster was asked"):
        peers.get("b")  # It may have been restarted.

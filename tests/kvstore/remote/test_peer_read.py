"""What a READ from a peer counts for: only the peer's same life, its mover's same life, and within the lease."""

from __future__ import annotations

import time

import msgspec
import pytest

from kvstore.client.results import MissReason
from kvstore.errors import PeerLost, TransferTimeout
from kvstore.mover.transport import ReadState
from kvstore.remote.directory_link import Hints
from kvstore.remote.peers import Peer
from kvstore.runtime import clock as leases


def nodes(cluster, **settings):
    cluster.add("a")
    cluster.add("b", **settings)
    one, two = cluster.worker("a", 8, seed=1), cluster.worker("b", 8, seed=2)
    hashes = cluster.hashes(4)
    one.save(hashes, range(4))
    return one, two, hashes


def num_pinned(cluster):
    return cluster.nodes["a"].pool.stats().num_pinned


def test_a_peers_mover_that_was_replaced_after_the_lease_makes_a_miss(cluster, monkeypatch, wait_until):
    one, two, hashes = nodes(cluster)
    lease = Peer.lease

    def replace_mover(peer, *args):
        grant = lease(peer, *args)
        monkeypatch.setattr(Peer, "lease", lease)
        cluster.kill_mover("a")
        cluster.start_mover("a")
        return grant

    monkeypatch.setattr(Peer, "lease", replace_mover)
    before = two.bytes()
    result = two.load(hashes, range(4))
    assert (result.num_blocks, result.failed[0].reason) == (0, MissReason.PEER_LOST)
    assert two.bytes() == before
    wait_until(lambda: num_pinned(cluster) == 0)
    wait_until(lambda: cluster.nodes["b"].state.peers.is_usable("a"))
    assert two.load(hashes, range(4)).num_blocks == 4
    assert all(two.block(i) == one.block(i) for i in range(4))


def test_a_grant_of_another_life_of_the_peer_makes_a_miss(cluster, monkeypatch):
    _, two, hashes = nodes(cluster)
    lease = Peer.lease
    monkeypatch.setattr(
        Peer, "lease", lambda peer, *args: msgspec.structs.replace(lease(peer, *args), epoch=b"anewlife")
    )
    before = two.bytes()
    result = two.load(hashes, range(4))
    assert (result.num_blocks, result.failed[0].reason) == (0, MissReason.PEER_LOST)
    assert two.bytes() == before
    assert cluster.nodes["b"].pool.stats().num_idle == 0


def test_while_too_many_slots_wait_for_lost_transfers_no_peer_is_asked(cluster, monkeypatch):
    _, two, hashes = nodes(cluster)
    monkeypatch.setattr("kvstore.remote.fetch.is_quarantine_full", lambda *_: True)
    result = two.load(hashes, range(4))
    assert (result.num_blocks, result.failed[0].reason, result.num_lease_calls) == (0, MissReason.TIMEOUT, 0)
    assert num_pinned(cluster) == 0
    assert cluster.nodes["b"].state.peers.is_usable("a"), "it is not the peer's fault"


def test_a_lease_under_which_nothing_is_read_is_given_back_at_once(cluster, monkeypatch, wait_until):
    _, two, hashes = nodes(cluster)
    transport = Peer.transport

    def replaced(peer, *args):
        monkeypatch.setattr(Peer, "transport", transport)
        raise PeerLost("the mover was replaced meanwhile")

    monkeypatch.setattr(Peer, "transport", replaced)
    result = two.load(hashes, range(4))
    assert (result.num_blocks, result.failed[0].reason) == (0, MissReason.PEER_LOST)
    wait_until(lambda: num_pinned(cluster) == 0)
    stats = cluster.nodes["b"].pool.stats()
    assert (stats.num_writing, stats.num_writes) == (0, 0), "slots that were claimed while the peer was asked"


def slots_claimed_while_asking(cluster, monkeypatch):
    """Note how many slots of node b are being written at the moment when the peer's answer is taken."""
    lease, seen = Peer.lease, []

    def look(peer, *args):
        grant = lease(peer, *args)
        seen.append(cluster.nodes["b"].pool.stats().num_writing)
        return grant

    monkeypatch.setattr(Peer, "lease", look)
    return seen


def test_slots_are_claimed_while_the_peer_is_asked(cluster, monkeypatch):
    one, two, hashes = nodes(cluster)
    seen = slots_claimed_while_asking(cluster, monkeypatch)
    assert two.load(hashes, range(4)).num_blocks == 4
    assert seen == [4]
    assert all(two.block(i) == one.block(i) for i in range(4))


@pytest.mark.parametrize("num_hinted", [1, 4, 99])
def test_a_hint_of_another_length_costs_nothing_but_the_claim(cluster, monkeypatch, num_hinted):
    one, two, _ = nodes(cluster)
    hashes = cluster.hashes(6)
    monkeypatch.setattr(Hints, "locate", lambda hints, chain, until_s: [("a", num_hinted)])
    seen = slots_claimed_while_asking(cluster, monkeypatch)
    result = two.load(hashes, range(6))
    assert (result.num_blocks, result.num_peer, result.failed[0].reason) == (4, 4, MissReason.NOT_FOUND)
    assert seen == [min(num_hinted, 6)]
    assert all(two.block(i) == one.block(i) for i in range(4))
    stats = cluster.nodes["b"].pool.stats()
    assert (stats.num_writing, stats.num_writes, stats.num_quarantined) == (0, 0, 0)


def test_slots_claimed_for_a_peer_that_refuses_are_free_again(cluster, monkeypatch):
    _, two, hashes = nodes(cluster)
    cluster.nodes["a"].state.pool_service.is_closed_to_peers = cluster.nodes["a"].state.pool_service.is_draining = True
    seen = slots_claimed_while_asking(cluster, monkeypatch)
    assert two.load(hashes, range(4)).num_blocks == 0
    assert seen == []
    stats = cluster.nodes["b"].pool.stats()
    assert (stats.num_writing, stats.num_writes, stats.num_free) == (0, 0, stats.num_slots)


def test_a_read_that_ends_after_its_lease_publishes_nothing(cluster, monkeypatch):
    _, two, hashes = nodes(cluster, lease_ttl_s=2.0, lease_margin_s=0.9)
    read = cluster.nodes["b"].state.mover.read

    def late(request, description, on_done, **more):
        def hear(done, error):
            # The bytes are there; only their lease is over.
            clock.now_s += 5.0
            on_done(done, error)

        return read(request, description, hear, **more)

    class Clock:
        now_s = 0.0

    clock = Clock()
    real = leases.now_s
    monkeypatch.setattr("kvstore.runtime.clock.now_s", lambda: real() + clock.now_s)
    monkeypatch.setattr(cluster.nodes["b"].state.mover, "read", late)
    before = two.bytes()
    result = two.load(hashes, range(4))
    assert result.num_blocks == 0
    assert two.bytes() == before
    assert cluster.nodes["b"].pool.stats().num_idle == 0


class SlowLane:
    """A lane on which every READ takes a while."""

    def __init__(self, transport):
        self._transport, self._ends_s = transport, {}

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def post(self, request):
        handle = self._transport.post(request)
        self._ends_s[handle] = time.monotonic() + 0.2
        return handle

    def poll(self, handle):
        return ReadState.RUNNING if time.monotonic() < self._ends_s[handle] else self._transport.poll(handle)


def test_a_load_with_little_time_does_not_have_its_peer_left_alone(cluster):
    cluster.add("a")
    core = cluster.add("b", wrap=SlowLane)
    one, two = cluster.worker("a", 8, seed=1), cluster.worker("b", 8, seed=2)
    hashes = cluster.hashes(4)
    one.save(hashes, range(4))
    assert two.load(hashes, range(4), timeout_s=0.05).num_blocks == 0
    assert core.state.peers.is_usable("a")
    assert two.load(hashes, range(4), timeout_s=20.0).num_blocks == 4
    assert all(two.block(i) == one.block(i) for i in range(4))


@pytest.mark.parametrize("verb", ["lease", "transport"])
def test_a_peer_that_had_too_little_time_is_not_backed_off(cluster, monkeypatch, verb):
    _, two, hashes = nodes(cluster)
    original = getattr(Peer, verb)

    def late(peer, *args):
        monkeypatch.setattr(Peer, verb, original)
        raise TransferTimeout("no answer in time")

    monkeypatch.setattr(Peer, verb, late)
    result = two.load(hashes, range(4))
    assert (result.num_blocks, result.failed[0].reason) == (0, MissReason.TIMEOUT)
    assert cluster.nodes["b"].state.peers.is_usable("a")
    assert two.load(hashes, range(4)).num_blocks == 4


def test_a_peer_that_is_silent_for_as_long_as_a_call_may_take_is_backed_off(cluster, monkeypatch):
    _, two, hashes = nodes(cluster)
    monkeypatch.setattr(Peer, "is_silent", lambda peer, call_timeout_s: True)

    def late(peer, *args):
        raise TransferTimeout("no answer in time")

    monkeypatch.setattr(Peer, "lease", late)
    assert two.load(hashes, range(4)).num_blocks == 0
    assert not cluster.nodes["b"].state.peers.is_usable("a")

"""When a peer is left alone, and for how long."""

from __future__ import annotations

import threading

import pytest

from kvstore.blocks.codec import encode
from kvstore.blocks.indexes import ints_in
from kvstore.errors import PeerLost, TransferTimeout
from kvstore.remote.messages import PeerGrant, PeerLease
from kvstore.remote.peers import Peer, PeerBook
from poolcheck.chains import chain_of


@pytest.fixture
def book(monkeypatch):
    def nowhere(node_id, within_s):
        raise PeerLost(f"{node_id} is away")

    made = PeerBook("own", b"ownepoch", nowhere, 1.0)
    made.now_s = 100.0
    monkeypatch.setattr("kvstore.runtime.clock.now_s", lambda: made.now_s)
    yield made
    made.close()


def pause_s(book) -> float:
    """How long the peer is left alone from now on."""
    began_s, step_s = book.now_s, 0.125
    while not book.is_usable("other"):
        book.now_s += step_s
    return book.now_s - began_s


def test_loads_that_fail_together_are_one_failure(book):
    threads = [threading.Thread(target=book.failed, args=("other",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5.0)
    assert pause_s(book) == 0.5
    book.failed("other")
    assert pause_s(book) == 1.0


def test_who_cannot_be_reached_is_left_alone(book):
    with pytest.raises(PeerLost, match="other is away"):
        book.get("other")
    assert not book.is_usable("other")


def test_nodes_that_failed_long_ago_are_not_remembered(book):
    for number in range(100):
        book.failed(f"n{number}")
    book.now_s += 601.0
    book.failed("other")
    assert list(book.failures) == ["other"]
    assert pause_s(book) == 0.5
    for _ in range(5):
        book.failed("other")
        assert pause_s(book) > 0.5
    book.now_s += 620.0
    book.failed("other")
    assert pause_s(book) == 0.5, "its own earlier failures are forgotten too"


def test_connections_to_stores_that_ended_are_closed_when_another_is_made(cluster):
    core = cluster.add("a", mover=False)
    lost = []
    for number in range(3):
        cluster.add(f"n{number}", mover=False)
        lost.append(core.state.peers.get(f"n{number}"))
        cluster.stop_node(f"n{number}")
    cluster.add("b", mover=False)
    peer = core.state.peers.get("b")
    assert [old.client.closed for old in lost] == [True] * 3
    assert list(core.state.peers.peers) == ["b"]
    assert not peer.client.has_ended()
    peer.close()
    assert peer.client.has_ended()


def test_failures_of_nodes_that_never_were_are_bounded_and_the_longest_are_kept(book, monkeypatch):
    monkeypatch.setattr("kvstore.remote.peers._MOST_FAILED", 8)
    for _ in range(5):
        book.now_s += 15.0
        book.failed("other")
    for number in range(100):
        book.failed(f"n{number}")
    assert len(book.failures) == 8
    assert not book.is_usable("other")
    assert pause_s(book) == 15.0


def test_after_a_burst_few_connections_to_a_peer_are_kept(cluster):
    core, _ = cluster.add("a", mover=False), cluster.add("b", mover=False)
    peers = core.state.peers
    peer = peers.get("b")
    taken = [peers.take_spare(peer) for _ in range(12)]

    def num_open_after(num_back):
        for _ in range(num_back):
            peers.keep_spare(peer, taken.pop())
        return len(peer.spare), sum(not connection.closed for connection in peer.opened)

    # As many are kept as are in use: loads that come and go need not connect each time.
    assert num_open_after(6) == (6, 12)
    assert num_open_after(2) == (4, 8)
    assert num_open_after(4) == (4, 4)
    again = [peers.take_spare(peer) for _ in range(4)]
    assert peer.spare == []
    again[0].close()  # As a timeout does.
    for connection in again:
        peers.keep_spare(peer, connection)
    assert len(peer.spare) == 3


class Unanswered:
    """The address of a store, at which nothing answers in time."""

    def __init__(self, book, error):
        self.book, self.error = book, error

    def connect(self, role, node_id, epoch, owner_key, timeout_s):
        self.book.now_s += timeout_s
        raise self.error


def lost_host():
    """The error where not even the kernel of a host answers."""
    error = PeerLost("no answer")
    error.__cause__ = TimeoutError("timed out")
    return error


@pytest.mark.parametrize("error", [TransferTimeout("no HELLO"), lost_host()])
def test_to_wait_for_a_connection_in_vain_is_a_failure_only_after_most_of_a_calls_time(book, error):
    book.resolve = lambda node_id, within_s: Unanswered(book, error)
    for _ in range(2):
        with pytest.raises(TransferTimeout, match=r"node other within 0\.3 s"):
            book.get("other", 0.3)
        assert book.is_usable("other")
    with pytest.raises(PeerLost, match="cannot be reached"):
        book.get("other", 0.3)
    assert pause_s(book) == 0.5
    with pytest.raises(PeerLost, match="cannot be reached"):
        book.get("other")
    assert pause_s(book) == 1.0


def test_a_slab_is_of_the_life_that_was_asked_for():
    class Replaced(tuple):
        """When its life is looked at, another thread learns of the next one."""

        def __getitem__(self, index):
            if index == 0:
                peer._transport = (2, "the slab of life 2")
            return tuple.__getitem__(self, index)

    peer = Peer("n", None, bytes(8), b"key")
    peer._transport = Replaced((1, "the slab of life 1"))
    name, slab = peer.known_transport(1)
    assert (name.rpartition("/")[2], slab) == ("1", "the slab of life 1")


CHAIN = chain_of("abc")
NOTHING = encode(PeerGrant(lease_id=0, epoch=bytes(8), namespace_version=0, mover_generation=1, slots=ints_in(b"")))


def ask(peer, connection, within_s):
    """Ask for a lease, which may take so long."""
    wanted = PeerLease(chain=CHAIN, block_bytes=1024, slot_format=1, namespace_version=0, ttl_s=5.0, within_s=within_s)
    return peer.lease(connection, wanted)


class Silent:
    """A connection on which no answer comes in time; `answer` is one that does."""

    def __init__(self, book):
        self.book, self.answer = book, None

    def call(self, op, payload, *, timeout_s, meanwhile):
        if self.answer is not None:
            return self.answer
        self.book.now_s += timeout_s
        raise TransferTimeout("no answer")


def test_a_peer_has_failed_only_after_silence_for_most_of_the_time_that_a_call_may_take(book):
    connection = Silent(book)
    peer = Peer("n", None, bytes(8), b"key")

    def is_silent_after(within_s):
        with pytest.raises(TransferTimeout):
            ask(peer, connection, within_s)
        return peer.is_silent(5.0)

    assert [is_silent_after(1.0) for _ in range(4)] == [False, False, False, True]
    connection.answer = NOTHING
    assert len(ask(peer, connection, 1.0).slots) == 0
    assert not peer.is_silent(5.0)
    connection.answer = None
    assert is_silent_after(5.0)


def test_the_silence_of_questions_that_wait_together_counts_once(book):
    peer, began_s = Peer("n", None, bytes(8), b"key"), book.now_s
    for _ in range(8):
        book.now_s = began_s  # All were asked at the same time.
        with pytest.raises(TransferTimeout):
            ask(peer, Silent(book), 1.0)
    assert not peer.is_silent(2.0)

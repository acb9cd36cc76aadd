"""Fetches with little time, and a publisher's node that says nothing: no question to it gets a whole call's time."""

from __future__ import annotations

import dataclasses
import math
import socket
import threading
from types import SimpleNamespace

import pytest

from kvstore.blocks.codec import encode
from kvstore.client.results import MissReason
from kvstore.errors import TransferTimeout
from kvstore.handoff.messages import PeerClaim
from kvstore.handoff.source_claim import SourceClaim
from kvstore.handoff.waiting import WaitingClaims
from kvstore.node.handoff_peers import HandoffPeers
from kvstore.remote.peers import Peer, PeerAddress
from kvstore.rpc.connection import Role
from kvstore.rpc.framing import Op
from kvstore.rpc.handoff_messages import End, FetchRequest
from tests.kvstore.handed_off import fetch, is_empty, reason

#: A whole call's time. Fetches here have less, and no question of a fetch has less than a second.
CALL_S = 8.0


@pytest.fixture
def silent():
    """An address at which the kernel accepts, as for a store that is stopped, and nothing answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield PeerAddress("127.0.0.1", server.getsockname()[1], "t")


@pytest.fixture
def given_s(monkeypatch):
    """The time that each new connection to a peer was given."""
    times, connect = [], PeerAddress.connect

    def look(address, role, *args):
        if role is Role.PEER:  # Meanwhile the stores connect to their directory.
            times.append(args[-1])
        return connect(address, role, *args)

    monkeypatch.setattr(PeerAddress, "connect", look)
    return times


@pytest.fixture
def nodes(cluster):
    """A publisher on node a, a reader on node b, and the nodes that the store of b knows."""
    cluster.add("a")
    core = cluster.add("b", call_timeout_s=CALL_S)
    return cluster.worker("a", seed=1).client, cluster.worker("b", seed=2), core.state.peers


def missed(worker, ticket):
    """The reason for which a fetch with little time delivers nothing."""
    return reason(fetch(worker, ticket, range(3), timeout_s=0.3))


def test_at_a_silent_address_a_short_fetch_ends_in_about_its_time(nodes, silent, given_s, monkeypatch):
    source, target, peers = nodes
    ticket = source.publish(range(3))
    with monkeypatch.context() as patch:
        patch.setattr(peers, "resolve", lambda node_id, within_s: silent)
        assert missed(target, ticket) is MissReason.TIMEOUT
    assert given_s == [1.0]
    assert peers.is_usable("a"), "it had little time to answer"
    assert fetch(target, ticket, range(3)).num_peer == 3


def test_where_the_cluster_does_not_name_the_address_a_short_fetch_ends_in_about_its_time(nodes, monkeypatch):
    """It asks the actor of the node's store, which is stopped, too."""
    source, target, peers = nodes
    ticket, asked_s = source.publish(range(3)), []

    def hung(node_id, within_s):
        asked_s.append(within_s)
        raise TransferTimeout("the actor does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(peers, "resolve", hung)
        assert missed(target, ticket) is MissReason.TIMEOUT
    assert asked_s == [1.0]
    assert peers.is_usable("a")
    assert fetch(target, ticket, range(3)).num_peer == 3


def test_a_further_connection_to_a_silent_node_gets_the_time_of_its_fetch(nodes, silent, given_s):
    source, target, peers = nodes
    ticket = source.publish(range(3))
    peer = peers.get("a")  # Known, and without a connection for a claim.
    there, peer.address = peer.address, silent
    del given_s[:]
    assert missed(target, ticket) is MissReason.TIMEOUT
    assert given_s == [1.0]
    peer.address = there
    assert fetch(target, ticket, range(3)).num_peer == 3


def test_to_look_for_a_later_life_of_a_silent_store_takes_the_time_of_its_fetch(nodes, silent, given_s, monkeypatch):
    source, target, peers = nodes
    ticket = dataclasses.replace(source.publish(range(3)), epoch=b"laterone")
    peers.get("a")
    del given_s[:]
    monkeypatch.setattr(peers, "resolve", lambda node_id, within_s: silent)
    assert missed(target, ticket) is MissReason.TIMEOUT
    assert given_s == [1.0]


def test_a_publisher_that_does_not_describe_its_memory_has_the_time_of_the_fetch_and_its_claim_back(nodes, monkeypatch):
    source, target, peers = nodes
    ticket, given_s = source.publish(range(3)), []

    def no_answer(peer, generation, timeout_s):
        given_s.append(timeout_s)
        raise TransferTimeout("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Peer, "transport", no_answer)
        assert missed(target, ticket) is MissReason.TIMEOUT
    assert given_s == [1.0]
    assert peers.is_usable("a"), "it had little time to answer"
    assert fetch(target, ticket, range(3)).num_peer == 3


def test_a_claim_without_an_answer_is_silence_and_no_failure_yet(cluster, nodes, monkeypatch, wait_until):
    source, target, peers = nodes
    ticket = source.publish(range(3))
    peer = peers.get("a")
    with monkeypatch.context() as patch:
        patch.setattr(HandoffPeers, "_claim_there", lambda *_: True)  # The answer would come later.
        assert missed(target, ticket) is MissReason.TIMEOUT
        assert peers.is_usable("a")
        assert peer.silence.total_s() >= 1.0
    assert fetch(target, ticket, range(3)).num_peer == 3
    assert peer.silence.total_s() == 0.0
    wait_until(lambda: is_empty(cluster.nodes["b"]))


def test_a_node_that_answers_no_claim_for_most_of_a_calls_time_is_left_alone(cluster, monkeypatch):
    cluster.add("a")
    peers = cluster.add("b", call_timeout_s=2.0).state.peers
    ticket = cluster.worker("a", seed=1).client.publish(range(3))
    target = cluster.worker("b", seed=2)
    monkeypatch.setattr(HandoffPeers, "_claim_there", lambda *_: True)
    assert missed(target, ticket) is MissReason.TIMEOUT
    assert peers.is_usable("a")
    assert missed(target, ticket) is MissReason.TIMEOUT
    assert not peers.is_usable("a")
    assert missed(target, ticket) is MissReason.PEER_LOST


def asked_claim(nodes, ticket, connection, then=lambda found: None):
    """A claim whose question was sent on this connection, and whose answer nobody looks for."""
    _, target, peers = nodes
    request = FetchRequest(
        key=ticket.name(ticket.namespace), namespace=ticket.namespace, epoch=ticket.epoch, node_id="a", num_blocks=3,
        ttl_s=5.0, timeout_s=0.3, from_slab=0, slab=0, generation=0, is_early=False,
    )  # fmt: skip
    server = SimpleNamespace(watch=lambda *_: None, unwatch=lambda *_: None)
    context = SimpleNamespace(config=target.client.config, peers=peers, server=server)
    claim = SourceClaim(context, request, ticket.block_bytes, 0, 0.0, then, lambda: True)
    claim.ask(peers.get("a"), connection, to_host=True)
    return claim


@pytest.fixture
def stopped(monkeypatch):
    """Stores that hang at a claim, until the event that this returns is set."""
    goes_on, serve = threading.Event(), WaitingClaims.serve

    def hang(*args):
        assert goes_on.wait(20)
        serve(*args)

    monkeypatch.setattr(WaitingClaims, "serve", hang)
    yield goes_on
    goes_on.set()


def test_a_publisher_that_goes_on_keeps_no_claim_of_a_fetch_that_gave_up(cluster, nodes, stopped, wait_until):
    """Else the same reader would hear for the time of a lease that the ticket is used."""
    source, target, _ = nodes
    ticket, other = source.publish(range(3)), source.publish(range(3))
    assert missed(target, ticket) is MissReason.TIMEOUT
    stopped.set()
    table = cluster.nodes["a"].control.handoffs.table
    assert fetch(target, other, range(3)).num_peer == 3
    wait_until(lambda: not table.claims)
    assert fetch(target, ticket, range(3)).num_peer == 3
    wait_until(lambda: is_empty(cluster.nodes["a"]))


def test_a_question_that_is_given_up_while_its_blocks_are_awaited_waits_no_more(cluster, nodes, wait_until):
    source, _, peers = nodes
    ticket, waiting = source.prepare_ticket(3), cluster.nodes["a"].control.handoffs.waiting
    wanted = PeerClaim(
        key=ticket.name(ticket.namespace), namespace=ticket.namespace, num_blocks=3, block_bytes=ticket.block_bytes,
        slot_format=1, namespace_version=0, ttl_s=5.0, wait_s=60.0, to_host=True, is_early=True,
    )  # fmt: skip
    connection = peers.take_spare(peers.get("a"))
    question = connection.ask(Op.PEER_CLAIM, encode(wanted))
    wait_until(lambda: len(waiting) == 1)
    question.say(Op.PEER_CLAIM_END, encode(End(question.number, used=False)))
    wait_until(lambda: len(waiting) == 0)
    question.close()
    connection.close()


def test_a_question_that_is_given_up_takes_no_other_claim_of_its_connection_back(cluster, nodes, wait_until):
    """A claim outlives its fetch where its READ was given up: the next question on the connection is another one's."""
    source, _, peers = nodes
    connection, heard, table = peers.take_spare(peers.get("a")), [], cluster.nodes["a"].control.handoffs.table
    claim = asked_claim(nodes, source.publish(range(3)), connection, heard.append)
    wait_until(lambda: heard or claim.look())
    question = connection.channel.request
    connection.call(Op.PEER_CLAIM_END, encode(End(question + 1, used=False)), timeout_s=5.0)
    assert list(table.claims) == [heard[0].claim_id]
    connection.call(Op.PEER_CLAIM_END, encode(End(heard[0].claim_id, used=True)), timeout_s=5.0)
    assert is_empty(cluster.nodes["a"])
    connection.close()


def test_a_connection_that_waits_in_vain_is_closed_before_its_fetch_hears_of_it(nodes, monkeypatch):
    """Else the fetch gives it back as a spare one, and the next load finds it closed."""
    monkeypatch.setattr(HandoffPeers, "_claim_there", lambda *_: True)
    source, _, peers = nodes
    connection, heard = peers.take_spare(peers.get("a")), []
    claim = asked_claim(nodes, source.publish(range(3)), connection, lambda found: heard.append(connection.closed))
    claim.tick(math.inf)
    assert heard == [True]


def test_a_failed_fetch_gives_its_claim_back_in_a_moment_or_not_at_all(nodes, silent, given_s):
    """Its client hears of the failure after that."""
    source, _, peers = nodes
    peer = peers.get("a")
    claim = asked_claim(nodes, source.publish(range(3)), peers.take_spare(peer))
    claim.close()
    peer.address = silent
    del given_s[:]
    claim.give_back(1, used=False)
    assert given_s == [0.5]

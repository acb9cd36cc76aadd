"""A ticket does not say what its blocks are: publisher and reader each say it, by hashes of their own making."""

import dataclasses

import pytest

import kvstore
from kvstore.client.results import MissReason
from kvstore.errors import InvalidRequest, LayoutMismatch, NamespaceMismatch
from tests.kvstore.conftest import SHAPE
from tests.kvstore.handed_off import fetch, is_empty, reason, same

NUM = 4
LOST = (MissReason.NOT_FOUND, MissReason.STALE, MissReason.TIMEOUT)


@pytest.fixture(params=[False, True], ids=["two nodes", "one node"])
def pair(cluster, request):
    """A worker that publishes, and one that fetches."""
    cluster.add("a")
    cluster.add("b")
    return cluster.worker("a", seed=1), cluster.worker("a" if request.param else "b", seed=2)


#: What an attacker changes in a ticket for `one`, and which hashes the reader has that gets it: of its own prompt.
FORGED = {
    "with another prompt": ({}, lambda one, other: other[:]),
    "with another prompt of the same beginning": ({}, lambda one, other: one[: NUM - 1]),
    "with a longer prompt": ({}, lambda one, other: one.extended),
    "with a prompt of no block": ({}, lambda one, other: one[:0]),
    "fewer blocks, another prompt": ({"num_blocks": NUM - 1}, lambda one, other: other[: NUM - 1]),
    "fewer blocks, the same prompt": ({"num_blocks": NUM - 1}, lambda one, other: one[: NUM - 1]),
    "fewer blocks, all hashes": ({"num_blocks": NUM - 1}, lambda one, other: one[:]),
    "more blocks": ({"num_blocks": NUM + 1}, lambda one, other: one[:]),
    "another nonce": ({"nonce": bytes(16)}, lambda one, other: one[:]),
    "another nonce, another prompt": ({"nonce": bytes(16)}, lambda one, other: other[:]),
    "another memory": ({"slab": 3}, lambda one, other: one[:]),
    "another memory, another prompt": ({"slab": 3}, lambda one, other: other[:]),
    "another life": ({"epoch": bytes(8)}, lambda one, other: one[:]),
    "early": ({"is_early": True}, lambda one, other: one[:]),
    "early, another prompt": ({"is_early": True}, lambda one, other: other[:]),
    "another time, another prompt": ({"expires_s": 1e12}, lambda one, other: other[:]),
    "no hashes": ({}, lambda one, other: None),
}


class Chain:
    """A prompt's hashes, and those of the same prompt with one block more."""

    def __init__(self, cluster, seed):
        self.extended = cluster.hashes(NUM + 1, seed)
        self.own = self.extended[:NUM]

    def __getitem__(self, what):
        return self.own[what]


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_ticket_brings_nothing_and_harms_nothing(cluster, pair, wait_until, name):
    source, target = pair
    one, other = Chain(cluster, 1), Chain(cluster, 2)
    change, choose = FORGED[name]
    ticket = source.client.publish(range(NUM), hashes=one.own)
    forged = kvstore.HandoffTicket.from_bytes(dataclasses.replace(ticket, **change).to_bytes())
    hashes, before = choose(one, other), target.bytes()
    timeout_s = 0.3 if forged.is_early else 10.0
    assert reason(fetch(target, forged, range(20, 20 + forged.num_blocks), hashes=hashes, timeout_s=timeout_s)) in LOST
    assert target.bytes() == before
    assert target.client.lookup(other.own).num_blocks == 0
    result = fetch(target, ticket, range(20, 20 + NUM), hashes=one.own)
    assert result.num_blocks == NUM, "the ticket is as good as before, for who knows what it is"
    assert all(same(source, range(NUM), target, range(20, 20 + NUM)))
    wait_until(lambda: all(is_empty(cluster.nodes[each.client.node_id]) for each in pair))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"namespace": bytes(32)}, NamespaceMismatch), ({"part": (1, 2, 0, 1)}, LayoutMismatch),
        ({"block_bytes": 64}, LayoutMismatch), ({"block_order": 9}, LayoutMismatch),
    ],
)  # fmt: skip
def test_a_ticket_that_this_client_cannot_have_is_refused_at_once(cluster, pair, change, error):
    source, target = pair
    hashes = cluster.hashes(NUM)
    ticket = source.client.publish(range(NUM), hashes=hashes)
    for ask in (lambda each: target.client.fetch(each, range(NUM), hashes=hashes), source.client.withdraw):
        with pytest.raises(error):
            ask(dataclasses.replace(ticket, **change))
    assert fetch(target, ticket, range(NUM), hashes=hashes).num_blocks == NUM


def test_a_reader_of_another_namespace_gets_nothing_whatever_the_ticket_says(cluster, pair):
    source, target = pair
    other = cluster.worker(target.client.node_id, space=kvstore.Namespace(model="other", shape=SHAPE))
    ticket = source.client.publish(range(NUM), hashes=cluster.hashes(NUM))
    forged = dataclasses.replace(ticket, namespace=other.client.space.digest)
    before = other.bytes()
    for hashes in (None, other.client.space.block_hashes(list(range(NUM * SHAPE.block_size)))):
        assert reason(fetch(other, forged, range(NUM), hashes=hashes)) is MissReason.NOT_FOUND
    assert other.bytes() == before


def test_blocks_that_were_published_without_hashes_are_not_taken_for_any(cluster, pair):
    source, target = pair
    ticket, before = source.client.publish(range(NUM)), target.bytes()
    for num_hashes in (NUM, 0):
        hashes = cluster.hashes(NUM)[:num_hashes]
        assert reason(fetch(target, ticket, range(NUM), hashes=hashes)) is MissReason.NOT_FOUND
    assert target.bytes() == before
    assert fetch(target, ticket, range(NUM)).num_blocks == NUM, "who names no hashes trusts the sender of the ticket"


@pytest.mark.parametrize("begin", [False, True])
def test_an_early_ticket_waits_under_what_its_reader_wants(cluster, pair, wait_until, begin):
    source, target = pair
    one, other = cluster.hashes(NUM, 1), cluster.hashes(NUM, 2)
    ticket, before = source.client.prepare_ticket(NUM), [target.block(i) for i in range(NUM)]
    wrong = target.client.fetch(ticket, range(NUM), hashes=other, timeout_s=1.5)
    right = target.client.fetch(ticket, range(20, 20 + NUM), hashes=one)
    wait_until(lambda: len(cluster.nodes["a"].control.handoffs.waiting) == 2)
    if begin:
        source.client.begin_publish(range(NUM), hashes=one, ticket=ticket).job.result(20)
    else:
        source.client.publish(range(NUM), hashes=one, ticket=ticket)
    assert right.result(20).num_blocks == NUM
    assert all(same(source, range(NUM), target, range(20, 20 + NUM)))
    assert reason(wrong.result(20)) is MissReason.TIMEOUT
    assert [target.block(i) for i in range(NUM)] == before


def test_blocks_are_taken_back_by_what_they_were_published_as(cluster, pair):
    source, target = pair
    one, other = cluster.hashes(NUM, 1), cluster.hashes(NUM, 2)
    ticket = source.client.publish(range(NUM), hashes=one)
    source.client.withdraw(ticket)
    source.client.withdraw(ticket, hashes=other)
    assert cluster.nodes["a"].stats()["num_handoff_slots"] == NUM
    assert source.client.withdraw(ticket, hashes=one)
    assert not source.client.withdraw(ticket, hashes=one)
    assert is_empty(cluster.nodes["a"])
    assert reason(fetch(target, ticket, range(NUM), hashes=one)) is MissReason.WITHDRAWN


@pytest.mark.parametrize("hashes", [b"x" * 32, [b"x" * 32], "x", 5])
def test_what_is_no_hashes_is_refused_and_nothing_is_kept(cluster, pair, hashes):
    source, target = pair
    ticket = source.client.publish([1])
    for ask in (
        lambda: source.client.publish([2], hashes=hashes),
        lambda: source.client.begin_publish([2], hashes=hashes),
        lambda: source.client.withdraw(ticket, hashes=hashes),
        lambda: target.client.fetch(ticket, [2], hashes=hashes),
    ):
        with pytest.raises(InvalidRequest, match="hashes: wanted BlockHashes"):
            ask()
    assert cluster.nodes["a"].stats()["num_handoff_slots"] == 1
    assert fetch(target, ticket, [2]).num_blocks == 1


def test_hashes_of_another_namespace_are_refused(cluster, pair):
    source, target = pair
    others = kvstore.Namespace(model="other", shape=SHAPE).block_hashes(list(range(NUM * SHAPE.block_size)))
    ticket = source.client.publish(range(NUM))
    for ask in (
        lambda: source.client.publish(range(NUM), hashes=others),
        lambda: target.client.fetch(ticket, range(NUM), hashes=others),
    ):
        with pytest.raises(NamespaceMismatch):
            ask()

"""Publishing under a ticket that was made elsewhere, and fetching behind what an engine has: as vLLM's halves do."""

import dataclasses
import re
import time
from types import SimpleNamespace

import pytest
import torch
from inner_parts import parts_of

import kvstore
from kvstore.blocks.ticket import HandoffTicket
from kvstore.client.results import MissReason
from kvstore.errors import InvalidRequest, LayoutMismatch, NamespaceMismatch, PoolExhausted
from tests.kvstore.conftest import SHAPE, Worker
from tests.kvstore.handed_off import named

TOKENS = SHAPE.block_size


@pytest.fixture
def pair(cluster):
    """A worker that publishes on node a and one that fetches on node b."""
    cluster.add("a")
    cluster.add("b")
    return cluster.worker("a", seed=1), cluster.worker("b", seed=2)


class LargeBlocks(Worker):
    """A worker whose engine blocks hold two stored ones."""

    def __init__(self, client):
        self.client = client
        dims = (2, 20, 2 * TOKENS, SHAPE.num_kv_heads, SHAPE.head_dim)
        self.caches = [torch.randn(dims, generator=torch.Generator().manual_seed(5)) for _ in range(SHAPE.num_layers)]
        client.register_kv_caches(self.caches, "PBTHD")


def tokens_of(worker, ids, num_tokens):
    """The first tokens of some engine blocks, [layers, K and V, tokens, heads, head_dim]."""
    rows = [torch.cat([cache[:, i] for i in ids], dim=1) for cache in worker.caches]
    return torch.stack(rows)[:, :, :num_tokens].clone()


def test_blocks_are_fetched_under_the_name_that_was_given_out(cluster, pair, wait_until):
    source, target = pair
    ticket = HandoffTicket.from_bytes(named(source.client, 3).to_bytes())
    early = target.client.fetch(ticket, [1, 2, 3]).result(20)
    assert early.failed[0].reason is MissReason.NOT_FOUND
    publication = source.client.begin_publish([5, 6, 7], ticket=ticket)
    assert publication.ticket == ticket == publication.job.result(20)
    assert target.client.fetch(ticket, [1, 2, 3]).result(20).num_blocks == 3
    assert [target.block(i) for i in (1, 2, 3)] == [source.block(i) for i in (5, 6, 7)]
    wait_until(lambda: cluster.nodes["a"].stats()["num_handoffs"] == 0)


def test_the_last_engine_block_may_hold_more_than_is_published(cluster, pair):
    _, target = pair
    source = LargeBlocks(cluster.client("a"))
    publication = source.client.begin_publish([4, 9], ticket=named(source.client, 3))
    untouched = target.block(4)
    assert target.client.fetch(publication.ticket, [1, 2, 3]).result(20).num_blocks == 3
    assert torch.equal(tokens_of(target, [1, 2, 3], 3 * TOKENS), tokens_of(source, [4, 9], 3 * TOKENS))
    assert target.block(4) == untouched


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"epoch": bytes(8)}, InvalidRequest),
        ({"node_id": "b"}, InvalidRequest),
        ({"namespace": bytes(32)}, NamespaceMismatch),
        ({"part": (1, 2, 0, 1)}, LayoutMismatch),
        ({"block_bytes": 64}, LayoutMismatch),
        ({"num_blocks": 4}, InvalidRequest),
    ],
)
def test_a_name_that_does_not_fit_is_refused(cluster, pair, change, error):
    source, _ = pair
    with pytest.raises(error):
        source.client.begin_publish([5, 6, 7], ticket=named(source.client, **{"num_blocks": 3} | change))
    assert cluster.nodes["a"].stats()["num_handoff_slots"] == 0


def test_a_name_is_good_for_one_publication(cluster, pair, wait_until):
    source, target = pair
    ticket = named(source.client, 2)
    source.client.begin_publish([5, 6], ticket=ticket).job.result(20)
    with pytest.raises(InvalidRequest, match="never used, got one whose blocks are published and wait for their fetch"):
        source.client.begin_publish([7, 8], ticket=ticket)
    assert target.client.fetch(ticket, [1, 2]).result(20).num_blocks == 2
    assert target.block(1) == source.block(5)
    wait_until(lambda: cluster.nodes["a"].stats()["num_handoff_slots"] == 0)  # It hears of the end after the reader.
    with pytest.raises(InvalidRequest, match="never used, got one whose blocks have been fetched"):
        source.client.begin_publish([7, 8], ticket=ticket)


@pytest.mark.parametrize("same_node", [False, True])
@pytest.mark.parametrize("skip", [0, 1, TOKENS - 1, TOKENS, TOKENS + 1, 3 * TOKENS])
def test_tokens_that_the_engine_has_are_not_written(cluster, pair, wait_until, skip, same_node):
    source, target = pair
    target = cluster.worker("a", seed=3) if same_node else target
    had, given = tokens_of(target, [1, 2, 3], 3 * TOKENS), tokens_of(source, [5, 6, 7], 3 * TOKENS)
    ticket = source.client.publish([5, 6, 7])
    result = target.client.fetch(ticket, [1, 2, 3], skip).result(20)
    assert (result.num_blocks, result.failed) == (3, ())
    now = tokens_of(target, [1, 2, 3], 3 * TOKENS)
    assert torch.equal(now[:, :, :skip], had[:, :, :skip])
    assert torch.equal(now[:, :, skip:], given[:, :, skip:])
    wait_until(lambda: cluster.nodes["a"].stats()["num_handoffs"] == 0)


def test_a_fetch_that_failed_counts_what_the_engine_has(pair):
    source, target = pair
    ticket = source.client.publish([5, 6, 7])
    source.client.withdraw(ticket)
    result = target.client.fetch(ticket, [1, 2, 3], TOKENS + 1).result(20)
    assert (result.num_blocks, [failure.index for failure in result.failed]) == (1, [1, 2])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("skip_prefix_tokens", -1), ("skip_prefix_tokens", 1.0), ("skip_prefix_tokens", None),
        ("skip_prefix_tokens", TOKENS + 1), ("timeout_s", -1), ("timeout_s", "3"), ("num_copy_threads", -1),
        ("num_copy_threads", "4"),
    ],
)  # fmt: skip
def test_an_argument_that_cannot_be_leaves_the_ticket_good(pair, name, value):
    source, target = pair
    ticket = source.client.publish([5])
    assert len(parts_of(target.client).store.for_fetches) == 0
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=name):
            target.client.fetch(ticket, [1], **{name: value})
        # The next one has a connection at once, and asks before all else.
        assert target.client.fetch(source.client.publish([6]), [2]).result(20).num_blocks == 1
    assert target.client.fetch(ticket, [1]).result(20).num_blocks == 1


def test_what_is_no_ticket_is_not_withdrawn(pair):
    for wrong in ("x", None, b"x"):
        with pytest.raises(InvalidRequest, match="ticket: wanted a HandoffTicket"):
            pair[0].client.withdraw(wrong)


# Tickets that come before their blocks.


def early_fetch(cluster, node, target, ticket, ids, wait_until, **more):
    """A fetch that waits at the store of a node for blocks which nobody has published."""
    job, waiting = target.client.fetch(ticket, ids, **more), cluster.nodes[node].control.handoffs.waiting
    wait_until(lambda: len(waiting) == 1)
    assert not job.done()
    return job


@pytest.mark.parametrize("same_node", [False, True])
@pytest.mark.parametrize("begin", [False, True])
def test_a_fetch_may_come_before_its_blocks_are_published(cluster, pair, wait_until, same_node, begin):
    source, target = pair
    target = cluster.worker("a", seed=3) if same_node else target
    ticket = HandoffTicket.from_bytes(source.client.prepare_ticket(3).to_bytes())
    job = early_fetch(cluster, "a", target, ticket, [1, 2, 3], wait_until)
    if begin:
        assert source.client.begin_publish([5, 6, 7], ticket=ticket).job.result(20) == ticket
    else:
        assert source.client.publish([5, 6, 7], ticket=ticket) == ticket
    assert job.result(20).num_blocks == 3
    assert [target.block(i) for i in (1, 2, 3)] == [source.block(i) for i in (5, 6, 7)]
    wait_until(lambda: cluster.nodes["a"].stats()["num_handoffs"] == 0)
    assert target.client.fetch(ticket, [1, 2, 3]).result(20).failed[0].reason is MissReason.USED


@pytest.mark.parametrize("same_node", [False, True])
def test_a_fetch_waits_for_a_publication_no_longer_than_it_may(cluster, pair, wait_until, same_node):
    source, target = pair
    target = cluster.worker("a", seed=3) if same_node else target
    ticket = source.client.prepare_ticket(2)
    had = [target.block(i) for i in (1, 2)]
    result = early_fetch(cluster, "a", target, ticket, [1, 2], wait_until, timeout_s=1.2).result(20)
    assert (result.num_blocks, result.failed[0].reason) == (0, MissReason.TIMEOUT)
    assert "not all there yet" in result.failed[0].detail
    assert "not_ready" not in result.failed[0].detail, "a word of the stores among themselves"
    assert [target.block(i) for i in (1, 2)] == had
    source.client.publish([5, 6], ttl_s=20.0, ticket=ticket)
    assert target.client.fetch(ticket, [1, 2]).result(20).num_blocks == 2, "the ticket is as good as before"


@pytest.mark.parametrize("same_node", [False, True])
def test_a_fetch_that_was_abandoned_before_the_blocks_came_uses_no_ticket(cluster, pair, wait_until, same_node):
    source, target = pair
    target = cluster.worker("a", seed=3) if same_node else target
    ticket, fetches = source.client.prepare_ticket(2), cluster.nodes["b"].control.handoffs.fetcher
    job = early_fetch(cluster, "a", target, ticket, [1, 2], wait_until)
    assert job.abandon()
    assert job.result(20).failed[0].reason is MissReason.ABANDONED
    source.client.publish([5, 6], ticket=ticket)
    wait_until(lambda: not len(fetches))
    assert target.client.fetch(ticket, [1, 2]).result(20).num_blocks == 2
    assert [target.block(i) for i in (1, 2)] == [source.block(i) for i in (5, 6)]


@pytest.mark.parametrize("same_node", [False, True])
def test_who_will_not_publish_says_so(cluster, pair, wait_until, same_node):
    source, target = pair
    target = cluster.worker("a", seed=3) if same_node else target
    ticket = source.client.prepare_ticket(2)
    job = early_fetch(cluster, "a", target, ticket, [1, 2], wait_until)
    assert source.client.withdraw(ticket), "the ticket is void, and was not before"
    assert not source.client.withdraw(ticket)
    assert job.result(20).failed[0].reason is MissReason.WITHDRAWN
    with pytest.raises(InvalidRequest, match=r"never used, got one whose blocks are given up \(withdrawn\)"):
        source.client.publish([5, 6], ticket=ticket)


def test_an_early_ticket_whose_blocks_have_no_room_may_be_published_later(cluster, pair, wait_until):
    source, target = pair
    num_most = int(cluster.nodes["a"].pool.num_slots * cluster.nodes["a"].state.config.max_handoff_fraction)
    held = source.client.publish(range(num_most))
    ticket = source.client.prepare_ticket(2)
    job = early_fetch(cluster, "a", target, ticket, [1, 2], wait_until)
    with pytest.raises(PoolExhausted):
        source.client.publish([5, 6], ticket=ticket)
    assert source.client.withdraw(held)
    source.client.publish([5, 6], ticket=ticket)
    assert job.result(20).num_blocks == 2


def test_fetches_that_wait_hold_up_nothing_else(cluster, pair, wait_until):
    source, target = pair
    tickets = [source.client.prepare_ticket(1) for _ in range(12)]
    jobs = [target.client.fetch(ticket, [i]) for i, ticket in enumerate(tickets)]
    wait_until(lambda: len(cluster.nodes["a"].control.handoffs.waiting) == 12)
    hashes = cluster.hashes(2)
    assert target.save(hashes, [18, 19]).num_blocks == 2
    assert target.client.load(hashes, [16, 17]).result(20).num_blocks == 2
    assert target.client.fetch(source.client.publish([5]), [15]).result(20).num_blocks == 1
    assert not any(job.done() for job in jobs)
    for i, ticket in enumerate(tickets):
        source.client.publish([i], ticket=ticket)
    assert [job.result(20).num_blocks for job in jobs] == [1] * 12
    assert [target.block(i) for i in range(12)] == [source.block(i) for i in range(12)]


def test_a_ticket_is_not_made_early_by_who_has_it(cluster, pair, wait_until):
    source, target = pair
    ticket = source.client.publish([5, 6])
    forged = dataclasses.replace(ticket, is_early=True)
    result = early_fetch(cluster, "a", target, forged, [1, 2], wait_until, timeout_s=0.3).result(20)
    assert result.failed[0].reason is MissReason.TIMEOUT
    assert target.client.fetch(ticket, [1, 2]).result(20).num_blocks == 2


@pytest.mark.parametrize("num_blocks", [0, -1, 1 << 32, 1.0, None, "2"])
def test_a_ticket_for_no_number_of_blocks(pair, num_blocks):
    with pytest.raises(InvalidRequest, match="num_blocks"):
        pair[0].client.prepare_ticket(num_blocks)


@pytest.mark.parametrize("begin", [False, True])
def test_publishing_says_until_when_the_blocks_are_kept(pair, begin):
    """What an early ticket says was guessed when it was made."""
    source, target = pair
    early = source.client.prepare_ticket(2, ttl_s=5000.0)
    assert abs(early.expires_s - time.time() - 5000.0) < 5
    if begin:
        published = source.client.begin_publish([5, 6], ticket=early, ttl_s=20.0).job.result(20)
    else:
        published = source.client.publish([5, 6], ticket=early, ttl_s=20.0)
    assert abs(published.expires_s - time.time() - 20.0) < 5
    names = [ticket.name(ticket.namespace) for ticket in (published, early)]
    assert (published, names[0], hash(published)) == (early, names[1], hash(early))
    # Either is good, and there is one fetch for both.
    assert target.client.fetch(published if begin else early, [1, 2]).result(20).num_blocks == 2
    result = target.client.fetch(early if begin else published, [1, 2]).result(20)
    assert result.failed[0].reason is MissReason.USED


def test_the_routers_recipe_of_the_documentation_works(cluster, pair, repo_root):
    page = (repo_root / "docs" / "handoff.md").read_text()
    (recipe,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "HandoffTicket(" in code]
    source, target = pair
    stats = {"nodes": {name: node.stats() for name, node in cluster.nodes.items()}}
    names = {
        "store": SimpleNamespace(stats=lambda: stats), "node_id": source.client.node_id, "kvstore": kvstore,
        "time": time, "space": source.client.space, "num_blocks": 2,
    }  # fmt: skip
    exec(recipe, names)
    job = target.client.fetch(names["ticket"], [1, 2])
    source.client.begin_publish([5, 6], ticket=names["ticket"]).job.result(20)
    assert job.result(20).num_blocks == 2
    assert [target.block(i) for i in (1, 2)] == [source.block(i) for i in (5, 6)]

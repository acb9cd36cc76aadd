"""Hand-offs between clients of one and of two node stores: right bytes once, or a reason, and nothing left behind."""

import dataclasses
import pickle
import threading
import time

import numpy as np
import pytest
from inner_parts import parts_of

import kvstore
from kvstore.blocks.chain import BlockHashes
from kvstore.blocks.ticket import HandoffTicket
from kvstore.client.results import MissReason
from kvstore.errors import InvalidRequest, LayoutMismatch, NamespaceMismatch, PoolExhausted, TransferTimeout
from tests.kvstore.conftest import SHAPE
from tests.kvstore.handed_off import Held, fetch, is_empty, reason, same


@pytest.fixture
def pair(cluster):
    """A worker that publishes on node a and one that fetches on node b."""
    cluster.add("a")
    cluster.add("b")
    return cluster.worker("a", seed=1), cluster.worker("b", seed=2)


@pytest.mark.parametrize("num_blocks", [1, 7, 40])
def test_blocks_reach_a_client_of_another_node_once_and_leave_nothing(cluster, pair, wait_until, num_blocks):
    source, target = pair
    here, there = [3 + i for i in range(num_blocks)], [70 - i for i in range(num_blocks)]
    before = target.bytes()
    ticket = source.client.publish(here)
    assert cluster.nodes["a"].stats()["num_handoff_slots"] == num_blocks
    result = fetch(target, ticket, there)
    assert (result.num_blocks, result.failed, result.route) == (num_blocks, (), "host")
    assert (result.num_local, result.num_peer, result.peers) == (0, num_blocks, ("a",))
    assert result.num_bytes == ticket.num_bytes == num_blocks * SHAPE.block_bytes
    assert all(same(source, here, target, there))
    untouched = sorted(set(range(80)) - set(there))
    now = [np.frombuffer(data, np.float32).reshape(2, 80, -1)[:, untouched] for data in target.bytes()]
    then = [np.frombuffer(data, np.float32).reshape(2, 80, -1)[:, untouched] for data in before]
    assert all(np.array_equal(a, b) for a, b in zip(now, then, strict=True))
    wait_until(lambda: is_empty(cluster.nodes["a"]) and is_empty(cluster.nodes["b"]))
    assert [core.pool.stats().num_idle for core in cluster.nodes.values()] == [0, 0]


def test_on_one_node_they_are_copied_straight_out_of_the_publishers_slots(cluster, wait_until):
    cluster.add("a", mover=False)
    source, target = cluster.worker("a", seed=1), cluster.worker("a", seed=2)
    result = fetch(target, source.client.publish([5, 4, 9]), [0, 1, 2])
    assert result == kvstore.FetchResult(num_blocks=3, num_local=3)
    assert all(same(source, [5, 4, 9], target, [0, 1, 2]))
    wait_until(lambda: is_empty(cluster.nodes["a"]))


def test_a_published_block_is_found_by_nobody(cluster, pair):
    source, target = pair
    hashes = cluster.hashes(4)
    ticket = source.client.publish(range(4))
    core = cluster.nodes["a"]
    assert source.client.lookup(hashes).num_blocks == 0
    name = ticket.name(ticket.namespace)
    assert core.state.pool_service.lookup(BlockHashes(name, name, 0, name)) == 0
    assert core.pool.resident_hashes() == []
    assert core.pool.drain_events() == []
    assert target.load(hashes, range(4)).num_blocks == 0


def test_a_published_block_is_not_evicted(cluster, pair):
    source, target = pair
    ticket = source.client.publish(range(10))
    for seed in range(20):
        source.save(cluster.hashes(30, seed), range(20, 50))
    assert cluster.nodes["a"].pool.stats().num_evicted > 0
    assert fetch(target, ticket, range(10)).num_blocks == 10
    assert all(same(source, range(10), target, range(10)))


def test_tickets_travel_as_pickles_and_as_bytes(pair):
    source, target = pair
    ticket = source.client.publish([1, 2])
    assert pickle.loads(pickle.dumps(ticket)) == ticket
    again = HandoffTicket.from_bytes(ticket.to_bytes())
    assert again == ticket
    assert len(ticket.to_bytes()) < 200
    assert abs(ticket.expires_s - time.time() - source.client.config.lease_ttl_s) < 5
    assert fetch(target, again, [1, 2]).num_blocks == 2


@pytest.mark.parametrize("data", [b"", b"RKVH", bytes(200), b"RKVH\x09\x00" + bytes(150)])
def test_other_bytes_are_no_ticket(data):
    with pytest.raises(InvalidRequest, match="ticket: wanted"):
        HandoffTicket.from_bytes(data)


@pytest.mark.parametrize("data", ["x", None, 5, [1, 2]])
def test_what_is_no_bytes_is_no_ticket(data):
    with pytest.raises(InvalidRequest, match="ticket: wanted the bytes of a ticket"):
        HandoffTicket.from_bytes(data)


def test_a_ticket_that_was_cut_is_not_taken_for_one_of_another_version(pair):
    data = pair[0].client.publish([1]).to_bytes()
    for cut in (data[:7], data[:90], data[:-1], data + b"x"):
        with pytest.raises(InvalidRequest, match="cut or joined"):
            HandoffTicket.from_bytes(cut)
    with pytest.raises(InvalidRequest, match="got version 9"):
        HandoffTicket.from_bytes(data[:4] + b"\x09\x00" + data[6:])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("node_id", b"n"), ("node_id", "n" * 201),
        ("node_id", None), ("epoch", "0102030405060708"), ("epoch", b"short"), ("nonce", "x" * 16),
        ("namespace", "m"), ("namespace", bytes(31)), ("num_blocks", 0), ("num_blocks", 1.5), ("num_blocks", True),
        ("num_blocks", 1 << 32), ("block_bytes", "64"), ("expires_s", "soon"), ("expires_s", float("nan")),
        ("block_order", -1), ("part", (0, 1, 0)), ("part", [0, 1, 0, 1]), ("part", (0, 1, 0, "1")), ("slab", -1),
        ("is_early", 1), ("node_id", ""), ("part", (1, 1, 0, 1)), ("part", (0, 1, 0, 0)), ("part", (0, 64, 0, 64)),
    ],
)  # fmt: skip
def test_a_ticket_says_which_of_its_fields_is_wrong(field, value):
    fields = {
        "node_id": "n", "epoch": bytes(8), "namespace": bytes(32), "num_blocks": 3, "block_bytes": 64, "expires_s": 9.5
    }  # fmt: skip
    assert HandoffTicket.from_bytes(HandoffTicket(**fields).to_bytes()).num_blocks == 3
    with pytest.raises(InvalidRequest, match=f"^{field}: wanted"):
        HandoffTicket(**fields | {field: value})


# A ticket that is no good.


def test_a_ticket_is_good_for_one_fetch(cluster, pair, wait_until):
    source, target = pair
    ticket = source.client.publish([1, 2])
    assert fetch(target, ticket, [1, 2]).num_blocks == 2
    wait_until(lambda: is_empty(cluster.nodes["a"]))
    assert reason(fetch(target, ticket, [1, 2])) is MissReason.USED
    assert reason(fetch(source, ticket, [8, 9])) is MissReason.USED
    assert cluster.nodes["b"].state.peers.is_usable("a"), "that is not the peer's fault"
    wait_until(lambda: is_empty(cluster.nodes["b"]))  # What it held is given back after its result.


@pytest.mark.parametrize("change", [{"nonce": bytes(16)}, {"num_blocks": 2}], ids=["nonce", "blocks"])
def test_a_forged_ticket_finds_nothing_and_harms_nothing(cluster, pair, wait_until, change):
    source, target = pair
    ticket = source.client.publish([1, 2, 3])
    forged = dataclasses.replace(ticket, **change)
    assert reason(fetch(target, forged, range(forged.num_blocks))) is MissReason.NOT_FOUND
    assert fetch(target, ticket, [1, 2, 3]).num_blocks == 3
    wait_until(lambda: is_empty(cluster.nodes["a"]) and is_empty(cluster.nodes["b"]))


def test_a_ticket_of_another_life_of_the_store_is_stale(cluster, pair, wait_until):
    source, target = pair
    ticket = source.client.publish([1, 2])
    stale = dataclasses.replace(ticket, epoch=bytes(8))
    assert reason(fetch(target, stale, [1, 2])) is MissReason.STALE
    assert reason(fetch(source, stale, [8, 9])) is MissReason.STALE
    assert not source.client.withdraw(stale)
    wait_until(lambda: is_empty(cluster.nodes["b"]))


def test_a_connection_to_an_earlier_life_of_the_store_makes_no_ticket_stale(cluster, pair):
    source, target = pair
    peers = cluster.nodes["b"].state.peers
    before = peers.get("a")
    before.epoch = bytes(8)  # As long as nobody used it since that store ended.
    result = fetch(target, source.client.publish([1, 2]), [1, 2])
    assert result.num_blocks == 2, result.failed
    assert peers.get("a") is not before
    assert before.client.closed


def test_a_ticket_of_another_namespace_is_refused_at_once(cluster, pair):
    source, _ = pair
    other = cluster.worker("b", space=kvstore.Namespace(model="other", shape=SHAPE))
    ticket = source.client.publish([1, 2])
    with pytest.raises(NamespaceMismatch, match="publish and fetch with one space"):
        other.client.fetch(ticket, [1, 2])
    forged = dataclasses.replace(ticket, namespace=other.client.space.digest)
    assert reason(fetch(other, forged, [1, 2])) is MissReason.NOT_FOUND


@pytest.mark.parametrize("change", [{"block_bytes": 64}, {"block_order": 9}, {"part": (1, 2, 0, 1)}])
def test_a_ticket_of_other_blocks_is_refused_at_once(pair, change):
    source, target = pair
    ticket = dataclasses.replace(source.client.publish([1, 2]), **change)
    with pytest.raises(LayoutMismatch, match="ticket: wanted"):
        target.client.fetch(ticket, [1, 2])


@pytest.mark.parametrize("ids", [[], [1], [1, 2, 3], [1, 1], [1, 99], [0.5, 1], "ab"])
def test_block_ids_must_fit_the_ticket(cluster, pair, ids):
    source, target = pair
    ticket = source.client.publish([1, 2])
    with pytest.raises(InvalidRequest, match="block_ids"):
        target.client.fetch(ticket, ids)
    assert fetch(target, ticket, [1, 2]).num_blocks == 2


@pytest.mark.parametrize("ids", [[], [1, 1], [99], [-1], [0.5], [[1], [2, 3]], None])
def test_block_ids_must_be_the_engines(cluster, pair, ids):
    source, _ = pair
    with pytest.raises(InvalidRequest, match="block_ids"):
        source.client.publish(ids)
    assert is_empty(cluster.nodes["a"])


@pytest.mark.parametrize("ttl_s", [0, -1, float("inf"), float("nan")])
def test_ttl_must_be_a_time(pair, ttl_s):
    with pytest.raises(InvalidRequest, match="ttl_s"):
        pair[0].client.publish([1], ttl_s=ttl_s)


def test_something_else_is_no_ticket(pair):
    with pytest.raises(InvalidRequest, match="HandoffTicket"):
        pair[1].client.fetch(b"ticket", [1])


# Time, owners, room.


def test_what_nobody_fetches_comes_back_with_its_time(cluster, pair, wait_until):
    source, target = pair
    ticket = source.client.publish(range(5), ttl_s=0.3)
    assert not is_empty(cluster.nodes["a"])
    wait_until(lambda: is_empty(cluster.nodes["a"]), timeout_s=2.0)
    assert reason(fetch(target, ticket, range(5))) is MissReason.EXPIRED


def test_a_publisher_that_is_closed_takes_its_blocks_along(cluster, pair, wait_until):
    source, target = pair
    ticket = source.client.publish(range(5), ttl_s=600)
    source.client.close()
    wait_until(lambda: is_empty(cluster.nodes["a"]))
    assert reason(fetch(target, ticket, range(5))) is MissReason.OWNER_GONE


def test_a_publisher_takes_blocks_back(cluster, pair):
    source, target = pair
    ticket = source.client.publish(range(5))
    assert source.client.withdraw(ticket)
    assert not source.client.withdraw(ticket)
    assert not target.client.withdraw(ticket)
    assert is_empty(cluster.nodes["a"])
    assert reason(fetch(target, ticket, range(5))) is MissReason.WITHDRAWN


def test_no_room_at_the_source_is_refused_and_leaves_nothing(cluster, pair):
    source, _ = pair
    core = cluster.nodes["a"]
    most = int(core.pool.stats().num_slots * core.state.config.max_handoff_fraction)
    held = [source.client.publish(range(most // 2)) for _ in range(2)]
    with pytest.raises(PoolExhausted, match="max_handoff_fraction"):
        source.client.publish(range(2))
    assert core.stats()["num_handoff_slots"] == 2 * (most // 2)
    assert [source.client.withdraw(ticket) for ticket in held] == [True, True]
    assert is_empty(core)


def test_a_pool_full_of_pins_at_the_source_is_refused_and_leaves_nothing(cluster):
    core = cluster.add("a", max_pinned_fraction=1.0, max_handoff_fraction=1.0)
    source = cluster.worker("a")
    hashes = cluster.hashes(60)
    source.save(hashes, range(60))
    num_slots = core.pool.stats().num_slots
    with source.client.lease(hashes):
        with pytest.raises(PoolExhausted, match="pinned or being written"):
            source.client.publish(range(num_slots - 59))
        assert core.stats()["num_handoff_slots"] == 0
        source.client.withdraw(source.client.publish(range(num_slots - 60)))
    assert is_empty(core)


def test_no_room_at_the_reader_is_a_reason_and_the_ticket_stays_good(cluster, wait_until):
    cluster.add("a")
    core = cluster.add("b", capacity_bytes=1 << 16, max_pinned_fraction=1.0)
    source, target = cluster.worker("a", seed=1), cluster.worker("b", seed=2)
    hashes = cluster.hashes(60)
    assert target.save(hashes, range(60)).num_blocks == 60
    ticket = source.client.publish(range(20))
    with target.client.lease(hashes) as lease:
        assert len(lease) == 60
        assert reason(fetch(target, ticket, range(60, 80))) is MissReason.POOL_FULL
        wait_until(lambda: core.pool.stats().num_writing == 0)
    assert fetch(target, ticket, range(60, 80)).num_blocks == 20
    assert all(same(source, range(20), target, range(60, 80)))


@pytest.mark.parametrize("is_known", [False, True])
def test_a_fetch_of_what_is_not_there_evicts_nothing(cluster, is_known, wait_until):
    """Room is made when the source has the blocks: anybody can name a ticket that does not exist."""
    cluster.add("a")
    core = cluster.add("b", capacity_bytes=1 << 16)
    source, target = cluster.worker("a", seed=1), cluster.worker("b", seed=2)
    hashes = cluster.hashes(60)
    if is_known:
        assert fetch(target, source.client.publish([1]), [61]).num_blocks == 1
    assert target.save(hashes, range(60)).num_blocks == 60
    ticket = source.client.publish(range(20))
    source.client.withdraw(ticket)
    assert fetch(target, ticket, range(60, 80)).num_blocks == 0
    assert (core.pool.stats().num_evicted, target.client.lookup(hashes, remote=False).num_local) == (0, 60)
    assert fetch(target, source.client.publish(range(20)), range(60, 80)).num_blocks == 20
    assert all(same(source, range(20), target, range(60, 80)))
    assert core.pool.stats().num_evicted > 0
    wait_until(lambda: core.pool.stats().num_writing == 0)
    core.pool.check_integrity()


def test_a_cleared_namespace_takes_hand_offs_along(cluster, pair, wait_until):
    source, target = pair
    tickets = [source.client.publish([1, 2]) for _ in range(2)]
    cluster.nodes["a"].state.pool_service.clear(cluster.space.digest, 1)
    assert reason(fetch(target, tickets[0], [1, 2])) is MissReason.CLEARED
    assert reason(fetch(source, tickets[1], [8, 9])) is MissReason.CLEARED
    # The reader has heard of the clearing by now, and what is published since is good.
    assert fetch(target, source.client.publish([1, 2]), [1, 2]).num_blocks == 2
    assert reason(fetch(target, tickets[0], [1, 2])) is MissReason.CLEARED
    wait_until(lambda: is_empty(cluster.nodes["a"]))


def test_a_drained_node_publishes_nothing_more_but_is_read_from(cluster, pair):
    source, target = pair
    ticket = source.client.publish([1, 2])
    cluster.nodes["a"].begin_drain(0)
    with pytest.raises(kvstore.errors.StoreDraining):
        source.client.publish([3])
    assert fetch(target, ticket, [1, 2]).num_blocks == 2
    assert reason(fetch(source, target.client.publish([1]), [1])) is MissReason.DRAINING


def test_two_fetches_of_one_ticket_at_once_give_it_to_one(cluster, pair, wait_until):
    source, target = pair
    other = cluster.worker("b", seed=3)
    for _ in range(20):
        ticket = source.client.publish(range(10))
        jobs = [worker.client.fetch(ticket, list(range(10))) for worker in (target, other)]
        results = [job.result(20) for job in jobs]
        assert sorted(result.num_blocks for result in results) == [0, 10]
        assert {failure.reason for result in results for failure in result.failed} == {MissReason.USED}
    wait_until(lambda: is_empty(cluster.nodes["a"]) and is_empty(cluster.nodes["b"]))


def test_fifty_hand_offs_at_once_leave_nothing(cluster, pair, wait_until):
    source, target = pair

    def one(i):
        ticket = source.client.publish([i, i + 1])
        assert fetch(target, ticket, [i, i + 1]).num_blocks == 2

    threads = [threading.Thread(target=one, args=(2 * (i % 40),)) for i in range(8)]
    for _ in range(6):
        batch = [threading.Thread(target=thread._target, args=thread._args) for thread in threads]
        for thread in batch:
            thread.start()
        for thread in batch:
            thread.join(20)
    assert all(same(source, range(16), target, range(16)))
    wait_until(lambda: is_empty(cluster.nodes["a"]) and is_empty(cluster.nodes["b"]))


# Faults on the way.


@pytest.fixture
def held_pair(cluster):
    """As `pair`, but READs of node b end when they are told to."""
    holds = []

    def wrap(transport):
        holds.append(Held(transport))
        return holds[-1]

    cluster.add("a")
    cluster.add("b", wrap=wrap)
    return cluster.worker("a", seed=1), cluster.worker("b", seed=2), holds[0]


def test_a_read_that_takes_too_long_keeps_its_slots_until_it_is_over(cluster, held_pair, wait_until):
    source, target, hold = held_pair
    ticket = source.client.publish(range(6))
    assert reason(fetch(target, ticket, range(6), timeout_s=0.5)) is MissReason.TIMEOUT
    core = cluster.nodes["b"]
    wait_until(lambda: core.pool.stats().num_quarantined == 6)
    assert cluster.nodes["a"].stats()["num_handoff_slots"] == 6, "it may still be read"
    hold.go.set()
    wait_until(lambda: is_empty(core))
    # Whether its late end counts as the one fetch depends on which word comes first; its slots go either way.
    source.client.withdraw(ticket)
    wait_until(lambda: is_empty(cluster.nodes["a"]))


def test_a_reader_whose_client_dies_keeps_the_slots_until_the_read_is_over(cluster, held_pair, wait_until):
    source, target, hold = held_pair
    core = cluster.nodes["b"]
    job = target.client.fetch(source.client.publish(range(6)), list(range(6)), timeout_s=20)
    wait_until(lambda: core.pool.stats().num_writing == 6)
    assert job.abandon()
    assert core.pool.stats().num_writing + core.pool.stats().num_quarantined == 6
    hold.go.set()
    wait_until(lambda: is_empty(core))
    assert reason(job.result(20)) in (MissReason.ABANDONED, MissReason.STORE_LOST, MissReason.TIMEOUT)


def test_the_sources_slots_outlive_their_publisher_while_they_are_read(cluster, held_pair, wait_until):
    source, target, hold = held_pair
    core = cluster.nodes["a"]
    wanted = [source.block(i) for i in range(6)]
    ticket = source.client.publish(range(6))
    job = target.client.fetch(ticket, list(range(6)))
    wait_until(lambda: core.stats()["calls"].get("PEER_CLAIM"))
    source.client.close()
    wait_until(lambda: reason(fetch(target, ticket, range(6))) is MissReason.OWNER_GONE)
    assert core.stats()["num_handoff_slots"] == 6
    hold.go.set()
    assert job.result(20).num_blocks == 6
    assert [target.block(i) for i in range(6)] == wanted
    wait_until(lambda: is_empty(core))


def test_a_mover_that_dies_at_the_reader_is_a_reason_and_the_ticket_stays_good(cluster, held_pair, wait_until):
    source, target, _ = held_pair
    ticket = source.client.publish(range(6))
    job = target.client.fetch(ticket, list(range(6)), timeout_s=20)
    wait_until(lambda: cluster.nodes["a"].stats()["calls"].get("PEER_TRANSPORT"))
    cluster.kill_mover("b")
    assert reason(job.result(20)) is MissReason.PEER_LOST
    wait_until(lambda: is_empty(cluster.nodes["b"]))
    cluster.start_mover("b")
    assert fetch(target, ticket, range(6)).num_blocks == 6


def test_a_mover_that_dies_at_the_source_is_a_reason_and_the_ticket_stays_good(cluster, pair, wait_until):
    source, target = pair
    ticket = source.client.publish(range(6))
    cluster.kill_mover("a")
    assert reason(fetch(target, ticket, range(6))) is MissReason.PEER_LOST
    cluster.start_mover("a")
    result = wait_until(lambda: (r := fetch(target, ticket, range(6))).num_blocks and r)
    assert result.num_blocks == 6
    wait_until(lambda: is_empty(cluster.nodes["a"]) and is_empty(cluster.nodes["b"]))


def test_a_node_that_is_gone_is_a_reason(cluster, pair, wait_until):
    source, target = pair
    ticket = source.client.publish(range(6))
    source.client.close()
    cluster.stop_node("a")
    assert reason(fetch(target, ticket, range(6))) is MissReason.PEER_LOST
    wait_until(lambda: is_empty(cluster.nodes["b"]))


def test_blocks_that_come_after_the_claim_do_not_count(cluster, wait_until):
    cluster.add("a", lease_ttl_s=0.6, lease_margin_s=0.2)
    holds = []
    cluster.add("b", wrap=lambda t: holds.append(Held(t)) or holds[-1], lease_ttl_s=0.6, lease_margin_s=0.2)
    source, target = cluster.worker("a", seed=1), cluster.worker("b", seed=2)
    ticket = source.client.publish(range(6), ttl_s=30)
    threading.Timer(1.0, holds[0].go.set).start()
    assert reason(fetch(target, ticket, range(6), timeout_s=10)) in (MissReason.LEASE_EXPIRED, MissReason.TIMEOUT)
    wait_until(lambda: is_empty(cluster.nodes["b"]))


def test_a_copy_at_the_publisher_that_fails_leaves_nothing(cluster, pair, monkeypatch):
    source, target = pair

    def fail(*_):
        raise RuntimeError("no such page")

    with monkeypatch.context() as patch:
        patch.setattr(parts_of(source.client).copier, "into_slots", fail)
        with pytest.raises(RuntimeError, match="no such page"):
            source.client.publish(range(4))
    assert is_empty(cluster.nodes["a"])
    assert fetch(target, source.client.publish(range(4)), range(4)).num_blocks == 4


def test_a_copy_at_the_reader_that_fails_leaves_nothing_there(cluster, pair, monkeypatch, wait_until):
    source, target = pair

    def fail(*_):
        raise RuntimeError("no such page")

    ticket = source.client.publish(range(4))
    with monkeypatch.context() as patch:
        patch.setattr(parts_of(target.client).copier, "out_of_slots", fail)
        with pytest.raises(RuntimeError, match="no such page"):
            fetch(target, ticket, range(4))
    wait_until(lambda: is_empty(cluster.nodes["b"]))


def test_a_store_that_does_not_answer_fails_the_publication_in_time(cluster, pair, monkeypatch):
    source, _ = pair
    core = cluster.nodes["a"]
    parts_of(source.client).store.call_timeout_s = 0.2
    blocked = threading.Event()
    table = core.control.handoffs.table
    with monkeypatch.context() as patch:
        patch.setattr(table, "complete", lambda *_: blocked.wait(1.0))
        with pytest.raises(TransferTimeout):
            source.client.publish(range(4))
        blocked.set()


def test_slots_that_the_publisher_never_heard_of_come_back_while_it_lives(cluster, pair, monkeypatch, wait_until):
    source, target = pair
    core = cluster.nodes["a"]
    parts_of(source.client).store.call_timeout_s = 0.2
    may_go_on, table = threading.Event(), core.control.handoffs.table
    prepare = table.prepare

    def late(*args):
        may_go_on.wait(5.0)
        return prepare(*args)

    with monkeypatch.context() as patch:
        patch.setattr(table, "prepare", late)
        with pytest.raises(TransferTimeout):
            source.client.begin_publish(range(4))
        may_go_on.set()
        wait_until(lambda: core.pool.stats().num_writing == 0 and is_empty(core))
    parts_of(source.client).store.call_timeout_s = 5.0
    publication = source.client.begin_publish(range(4))
    publication.job.result(5)
    assert fetch(target, publication.ticket, range(4)).num_blocks == 4


def test_a_fetch_that_is_refused_after_the_store_was_asked_leaves_nothing(cluster, pair, monkeypatch, wait_until):
    source, target = pair
    assert fetch(target, source.client.publish(range(4)), range(4)).num_blocks == 4
    wait_until(lambda: len(parts_of(target.client).store.for_fetches) == 1)
    ticket, before = source.client.publish(range(10)), target.bytes()

    def changed():
        raise LayoutMismatch("the cache was resized")

    with monkeypatch.context() as patch:
        patch.setattr(parts_of(target.client).copier, "check_unchanged", changed)
        with pytest.raises(LayoutMismatch):
            target.client.fetch(ticket, range(10))
    source.client.withdraw(ticket)  # It may be used up: the store was asked for its blocks.
    wait_until(lambda: is_empty(cluster.nodes["a"]) and is_empty(cluster.nodes["b"]))
    assert target.bytes() == before
    assert fetch(target, source.client.publish(range(10)), range(10)).num_blocks == 10
    assert all(same(source, range(10), target, range(10)))
    wait_until(lambda: is_empty(cluster.nodes["a"]) and is_empty(cluster.nodes["b"]))


def test_fetches_one_after_the_other_share_a_connection(pair, wait_until):
    source, target = pair
    for _ in range(3):
        assert fetch(target, source.client.publish(range(4)), range(4)).num_blocks == 4
        wait_until(lambda: len(parts_of(target.client).store.for_fetches) == 1)


def test_what_a_drained_node_had_published_is_fetched_and_waited_for(cluster, pair):
    source, target = pair
    core = cluster.nodes["a"]
    ticket = source.client.publish([3, 4])
    assert core.drain(0.1) == {"num_leases": 0, "num_writes": 0, "num_handoffs": 1, "is_drained": False}
    with pytest.raises(kvstore.errors.StoreDraining):
        source.client.publish([5])
    ended = []
    waiting = threading.Thread(target=lambda: ended.append(core.drain(20.0)))
    waiting.start()
    assert fetch(target, ticket, [70, 71]).num_blocks == 2
    waiting.join(20)
    assert ended == [{"num_leases": 0, "num_writes": 0, "num_handoffs": 0, "is_drained": True}]
    assert all(same(source, [3, 4], target, [70, 71]))
    assert is_empty(core)


def test_what_was_published_before_a_clearing_is_not_waited_for(cluster, pair, wait_until):
    source, target = pair
    core = cluster.nodes["a"]
    ticket = source.client.publish([3, 4])
    core.state.pool_service.clear(cluster.space.digest)
    wait_until(lambda: is_empty(core))
    assert core.drain(0.0)["is_drained"]
    assert reason(fetch(target, ticket, [70, 71])) is MissReason.CLEARED


@pytest.mark.parametrize("where", ["a", "b"])
def test_an_early_ticket_of_a_node_that_is_drained_meanwhile_says_so(cluster, pair, wait_until, where):
    source, target = pair
    target = target if where == "b" else cluster.worker("a", seed=9)
    core = cluster.nodes["a"]
    job = target.client.fetch(source.client.prepare_ticket(1), [70], timeout_s=20)
    wait_until(lambda: len(core.control.handoffs.waiting))
    core.drain(0.0)
    assert reason(job.result(10)) is MissReason.DRAINING
    late = target.client.fetch(source.client.prepare_ticket(1), [70], timeout_s=20)
    assert reason(late.result(10)) is MissReason.DRAINING
    assert is_empty(core)

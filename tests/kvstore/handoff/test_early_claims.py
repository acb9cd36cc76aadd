"""Fetches over a lane that is known: asked for and begun on the control thread, and safe when anything is late."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from inner_parts import parts_of

from kvstore.blocks.codec import encode
from kvstore.client.results import MissReason
from kvstore.config import StoreConfig
from kvstore.errors import PeerLost, TransferTimeout
from kvstore.handoff.messages import PeerClaimed
from kvstore.handoff.records import NOT_READY
from kvstore.handoff.source_claim import SourceClaim
from kvstore.rpc.framing import Op
from kvstore.rpc.handoff_messages import End, FetchRequest, decode_end
from kvstore.runtime import clock
from kvstore.runtime.silence import Silence
from tests.kvstore.handed_off import fetch, reason, same
from tests.kvstore.handoff.host_stages import HeldBlocks, held_packing, nothing_held
from tests.kvstore.kept_work import kept_work, see_done


@pytest.fixture
def warm(pair, wait_until):
    """The pair of workers after a hand-off: the lane is known and a connection to the source is idle."""
    source, target = pair
    assert fetch(target, source.client.publish([1]), [1]).route == "gpu"
    wait_until(lambda: len(parts_of(target.client).store.for_fetches) == 1)
    return source, target


@pytest.fixture
def threads(cluster, warm, wait_until, monkeypatch):
    """What the threads of node b were to run, in place of those."""
    given, state = [], cluster.nodes["b"].state
    (peer,) = state.peers.peers.values()
    wait_until(lambda: peer.spare)
    monkeypatch.setattr(state.threads, "submit", lambda kind, run, **_: not given.append(run))
    return given


def num_claims(cluster):
    return cluster.nodes["a"].control.num_calls["PEER_CLAIM"]


@pytest.mark.parametrize("begin", [False, True])
def test_no_thread_is_needed_until_the_blocks_are_there(cluster, warm, threads, wait_until, begin):
    source, target = warm
    if begin:
        packing = held_packing(source.client)
        publication = source.client.begin_publish(range(10))
        job = target.client.fetch(publication.ticket, list(range(40, 50)))
        wait_until(lambda: len(cluster.nodes["a"].control.handoffs.waiting) == 1)
        assert not job.done()
        packing.set()
        result = job.result(10)
    else:
        result = fetch(target, source.client.publish(range(10)), range(40, 50))
    assert (result.num_blocks, result.route, result.num_lease_calls) == (10, "gpu", 1)
    assert all(same(source, range(10), target, range(40, 50)))
    wait_until(lambda: threads)
    (run,) = threads
    run()
    nothing_held(cluster, wait_until)


def test_a_fetch_that_came_before_its_blocks_were_published_needs_no_thread(cluster, warm, threads, wait_until):
    source, target = warm
    ticket = source.client.prepare_ticket(10)
    job = target.client.fetch(ticket, list(range(40, 50)))
    wait_until(lambda: len(cluster.nodes["a"].control.handoffs.waiting) == 1)
    assert source.client.publish(range(10), ticket=ticket) == ticket
    assert (job.result(10).num_blocks, job.result(10).route) == (10, "gpu")
    assert all(same(source, range(10), target, range(40, 50)))
    wait_until(lambda: threads)
    (run,) = threads
    run()
    nothing_held(cluster, wait_until)


@pytest.mark.parametrize("asked_again", [False, True])
def test_a_reader_that_waits_is_woken_when_the_device_comes_to_its_blocks(
    cluster, warm, monkeypatch, wait_until, asked_again
):
    source, target = warm
    if asked_again:  # by a thread, after the time for which a source keeps a question
        monkeypatch.setattr("kvstore.handoff.source_claim._MOST_WAIT_S", 0.02)
    computed, heard = threading.Event(), []
    monkeypatch.setattr(parts_of(source.client).stage.attached.copier, "computed", computed)
    packing, link = held_packing(source.client), cluster.nodes["b"].state.mover
    expect_read = link.expect_read
    publication = source.client.begin_publish(range(10))
    job = target.client.fetch(publication.ticket, list(range(40, 50)))
    if asked_again:
        wait_until(lambda: num_claims(cluster) > 3)
        monkeypatch.setattr("kvstore.handoff.source_claim._MOST_WAIT_S", 60.0)
        asked = num_claims(cluster)
        wait_until(lambda: num_claims(cluster) > asked)
    wait_until(lambda: len(cluster.nodes["a"].control.handoffs.waiting) == 1)
    monkeypatch.setattr(link, "expect_read", lambda word: (heard.append(word), expect_read(word)))
    computed.set()
    wait_until(lambda: heard)
    assert heard[0] in cluster.movers["b"].mover.reads.waking, "the mover knows which lane that is"
    assert not job.done(), "they are not packed yet"
    packing.set()
    assert job.result(10).num_blocks == 10
    assert all(same(source, range(10), target, range(40, 50)))
    assert publication.job.result(10) == publication.ticket
    nothing_held(cluster, wait_until)


def test_of_blocks_that_the_device_has_come_to_already_nobody_is_told(cluster, warm):
    source, target = warm
    assert fetch(target, source.client.publish(range(10)), range(40, 50)).num_blocks == 10
    assert "HANDOFF_PACKING" not in cluster.nodes["a"].control.num_calls


def test_a_lane_that_is_known_is_woken_and_counted_for_blocks_alone(cluster, warm, monkeypatch):
    source, target = warm
    before, woken = cluster.nodes["b"].stats(), []
    reads = cluster.movers["b"].mover.reads
    wake = reads.wake
    monkeypatch.setattr(reads, "wake", lambda word: (woken.append(word in reads.waking), wake(word)))
    ticket = source.client.publish(range(10))
    assert fetch(target, ticket, range(40, 50)).route == "gpu"
    assert woken == [True]
    after = cluster.nodes["b"].stats()
    assert after["num_lane_warm_up_bytes"] == before["num_lane_warm_up_bytes"] > 0, "that was when it was measured"
    assert after["nixl"]["num_bytes"] - before["nixl"]["num_bytes"] == ticket.num_bytes


def test_of_two_fetches_of_one_ticket_one_gets_the_blocks_and_the_other_touches_nothing(
    cluster,
    warm,
    stages,
    wait_until,
):
    source, target = warm
    held = HeldBlocks(stages[1].transport)
    cluster.movers["b"].mover.slabs.into = dict.fromkeys(cluster.movers["b"].mover.slabs.into, held)
    ticket = source.client.publish(range(8))
    first = target.client.fetch(ticket, list(range(8)))
    wait_until(lambda: len(held.waiting) == 2)  # Its two chunks.
    before = target.bytes()
    assert reason(fetch(target, ticket, range(20, 28))) is MissReason.USED
    assert target.bytes() == before
    assert len(held.waiting) == 2, "nothing was read for it"
    held.go.set()
    assert first.result(10).num_blocks == 8
    assert all(same(source, range(8), target, range(8)))
    nothing_held(cluster, wait_until)


def test_a_source_that_does_not_answer_costs_its_time_and_no_slot(cluster, warm, monkeypatch, wait_until):
    source, target = warm
    control, kept = cluster.nodes["a"].control.handoffs.peers, []
    monkeypatch.setattr(control, "_claim_there", lambda *args: bool(kept.append(args) or True))
    ticket, before = source.client.publish(range(6)), target.bytes()
    assert reason(fetch(target, ticket, range(6), timeout_s=0.2)) is MissReason.TIMEOUT
    assert len(kept) == 1
    monkeypatch.undo()
    control._claim_there(*kept[0])
    (mine,) = cluster.nodes["b"].control.handoffs.stages.all()
    wait_until(lambda: mine.pool.stats().num_free == mine.pool.num_slots)
    assert target.bytes() == before
    # The right that nobody took note of ends with its time; until then nobody else has it.
    core = cluster.nodes["a"]
    assert core.stats()["num_handoffs"] == 1
    core.control.handoffs.tick(clock.now_s() + core.state.config.lease_ttl_s + 1)
    source.client.withdraw(ticket)
    nothing_held(cluster, wait_until)


def test_who_speaks_to_the_mover_holds_up_the_read_and_not_the_store(cluster, warm, wait_until):
    source, target = warm
    ticket, core = source.client.publish(range(6)), cluster.nodes["b"]
    with core.state.mover._lock:
        job = target.client.fetch(ticket, list(range(6)))
        wait_until(lambda: cluster.nodes["a"].control.num_calls.get("PEER_CLAIM") == 2)
        for _ in range(3):
            assert target.client.lookup(cluster.hashes(2)).num_blocks == 0
        assert not job.done()
    assert job.result(10).num_blocks == 6
    assert all(same(source, range(6), target, range(6)))
    nothing_held(cluster, wait_until)


def test_a_stage_that_is_another_one_by_now_is_met_anew(cluster, warm, stages, wait_until):
    source, target = warm
    cluster.kill_mover("a")
    cluster.start_mover("a")

    def published():
        ticket = source.client.publish(range(10))
        return ticket if ticket.slab else source.client.withdraw(ticket) and None

    ticket = wait_until(published)
    result = fetch(target, ticket, range(10))
    assert (result.num_blocks, result.route, result.num_lease_calls) == (10, "gpu", 1)
    assert all(same(source, range(10), target, range(10)))
    assert len(stages) == 3
    nothing_held(cluster, wait_until)


def test_a_source_that_was_restarted_has_nothing_and_nothing_is_read(cluster, warm, wait_until):
    source, target = warm
    ticket, before = source.client.publish(range(6)), target.bytes()
    cluster.stop_node("a")
    cluster.add("a")
    result = wait_until(
        lambda: (r := fetch(target, ticket, range(6))).failed[0].reason is not MissReason.PEER_LOST and r, 10
    )
    assert reason(result) is MissReason.STALE
    assert target.bytes() == before
    nothing_held(cluster, wait_until)


def test_a_fetch_that_is_given_up_before_it_began_leaves_nothing(cluster, warm, wait_until):
    source, target = warm
    given = []
    jobs, parts_of(target.client).threads = parts_of(target.client).threads, kept_work(given)
    ticket, before = source.client.publish(range(6)), target.bytes()
    assert target.client.fetch(ticket, list(range(6))).abandon()
    parts_of(target.client).threads = jobs
    see_done(given[0])
    assert target.bytes() == before
    source.client.withdraw(ticket)
    nothing_held(cluster, wait_until)
    assert fetch(target, source.client.publish([1]), [1]).num_blocks == 1, "its connection is another one"


def test_a_fetch_whose_client_left_while_its_source_was_asked_uses_no_ticket(cluster, warm, wait_until):
    source, target = warm
    fetcher, ticket = cluster.nodes["b"].control.handoffs.fetcher, source.client.prepare_ticket(6)
    job = target.client.fetch(ticket, list(range(6)))
    wait_until(lambda: len(cluster.nodes["a"].control.handoffs.waiting) == 1)
    ((_, owner),) = fetcher.users()
    assert fetcher.release_owner(owner) == 1
    source.client.publish(range(6), ticket=ticket)
    assert reason(job.result(20)) is MissReason.ABANDONED
    assert fetch(target, ticket, range(6)).num_blocks == 6
    nothing_held(cluster, wait_until)


class Connection:
    """A connection to a source whose answer is `answer` once the test sets it."""

    def __init__(self):
        self.closed, self.answer, self.num_asked, self.said = False, None, 0, []

    def ask(self, op, question, progress):
        self.num_asked, self.asked_at_s = self.num_asked + 1, clock.now_s()
        return self

    def fileno(self):
        return 7

    def take(self):
        if self.closed:
            raise PeerLost("closed")
        answer, self.answer = self.answer, None
        return answer

    @property
    def number(self):
        return self.num_asked

    def say(self, op, payload):
        self.said.append((op, decode_end(payload)))

    def close(self):
        self.said.append("question closed")


@pytest.fixture
def asked():
    """A claim that was asked for: its connection, what it told, and the descriptors that are watched."""
    told, watched, connection = [], {}, Connection()
    server = SimpleNamespace(watch=watched.__setitem__, unwatch=watched.pop, stay_awake=lambda seconds: None)
    config = StoreConfig(capacity_bytes=1 << 20, call_timeout_s=2.0)
    fetcher = SimpleNamespace(server=server, config=config, mover=SimpleNamespace(expect_read=lambda word: None))
    request = FetchRequest(
        key=bytes(32), namespace=bytes(32), epoch=bytes(8), node_id="a", num_blocks=3, ttl_s=30.0, timeout_s=5.0,
        from_slab=0, slab=0, generation=0, is_early=True,
    )  # fmt: skip
    wanted = [True]
    claim = SourceClaim(fetcher, request, 512, 0, clock.now_s() + 5.0, told.append, lambda: wanted[0])
    claim.ask(SimpleNamespace(node_id="a", silence=Silence()), connection, to_host=True)
    return SimpleNamespace(
        claim=claim, connection=connection, told=told, watched=watched, wanted=wanted, asked_at_s=connection.asked_at_s
    )  # fmt: skip


def answer(reason=""):
    slots = np.arange(0 if reason else 3, dtype=np.int32)
    return encode(
        PeerClaimed(claim_id=5, epoch=bytes(8), namespace_version=0, mover_generation=1, slots=slots, reason=reason)
    )


def test_an_answer_is_told_once(asked):
    look = asked.watched[7]
    look()
    assert (asked.told, list(asked.watched)) == ([], [7]), "it was only part of it"
    asked.connection.answer = answer()
    look()
    look()
    assert ([claimed.claim_id for claimed in asked.told], asked.watched) == ([5], {})


def test_a_claim_is_good_for_less_than_the_source_keeps_it_from_before_it_was_asked_for(asked):
    config, lasts_s = StoreConfig(capacity_bytes=1 << 20), asked.claim.valid_until_s - asked.claim.asked_s
    assert lasts_s == pytest.approx(config.lease_ttl_s - config.lease_margin_s)
    assert asked.claim.asked_s <= asked.asked_at_s


def test_a_source_that_has_not_all_blocks_is_asked_again_without_a_thread(asked):
    for count in range(2, 5):
        asked.claim.asked_s -= 0.5
        asked.connection.answer = answer(NOT_READY)
        asked.watched[7]()
        assert (asked.connection.num_asked, asked.told) == (count, [])
    asked.connection.answer = answer(NOT_READY)
    asked.watched[7]()
    assert asked.connection.num_asked == 4, "one that answers at once is not asked at once"
    asked.claim.tick(clock.now_s() + 0.01)
    assert asked.connection.num_asked == 5
    asked.connection.answer = answer()
    asked.watched[7]()
    assert [claimed.claim_id for claimed in asked.told] == [5]


@pytest.mark.parametrize("how", ["time", "client"])
def test_a_source_is_not_asked_again_for_nobody(asked, how):
    if how == "time":
        asked.claim._deadline_s = clock.now_s() - 1
    else:
        asked.wanted[0] = False
    asked.connection.answer = answer(NOT_READY)
    asked.watched[7]()
    (claimed,) = asked.told
    assert claimed.reason.startswith("timeout: the blocks of this ticket were not all there yet")
    assert (asked.connection.num_asked, asked.watched) == (1, {})


def test_an_answer_that_does_not_come_is_given_up_and_its_connection(asked):
    asked.claim.tick(clock.now_s() + 1.0)
    assert asked.told == []
    asked.claim.tick(clock.now_s() + 3.0)
    assert [type(told) for told in asked.told] == [TransferTimeout]
    given_up = (Op.PEER_CLAIM_END, End(1, used=False))
    assert (asked.watched, asked.connection.said) == ({}, [given_up, "question closed"])
    asked.connection.answer = answer()
    asked.claim.look()
    asked.claim.tick(clock.now_s() + 9.0)
    assert len(asked.told) == 1


def test_a_connection_that_breaks_ends_the_claim(asked):
    asked.connection.closed = True
    asked.watched[7]()
    assert [type(told) for told in asked.told] == [PeerLost]
    assert asked.watched == {}


@pytest.mark.parametrize("num", [33, 200])
def test_fetches_that_wait_for_their_blocks_hold_up_no_ready_one(cluster, wait_until, num):
    for node in "ab":
        cluster.add(node, capacity_bytes=1 << 19, transfer_timeout_s=20.0)
    source, target = cluster.worker("a", seed=1), cluster.worker("b", num_blocks=300, seed=2)
    assert fetch(target, source.client.publish([70]), [250]).num_blocks == 1
    early = [source.client.prepare_ticket(1) for _ in range(num)]
    before = threading.active_count()
    jobs = [target.client.fetch(ticket, [i]) for i, ticket in enumerate(early)]
    wait_until(lambda: len(cluster.nodes["a"].control.handoffs.waiting) == num)
    assert threading.active_count() - before <= 16 + 5, "those that connect, and those of the client"
    for i in range(3):
        result = target.client.fetch(source.client.publish([71]), [260 + i], timeout_s=5.0).result(10)
        assert result.num_blocks == 1
    for i in (0, num // 2, num - 1):
        source.client.publish([i % 80], ticket=early[i])
        assert jobs[i].result(20).num_blocks == 1
        assert all(same(source, [i % 80], target, [i]))
    for job in jobs:
        job.abandon(1)
    for ticket in early:
        source.client.withdraw(ticket)
    nothing_held(cluster, wait_until)


def test_more_fetches_than_a_node_bears_are_told_so(cluster, wait_until, monkeypatch):
    monkeypatch.setattr("kvstore.handoff.fetcher._MOST_FETCHES", 2)
    for node in "ab":
        cluster.add(node, transfer_timeout_s=20.0)
    source, target = cluster.worker("a", seed=1), cluster.worker("b", seed=2)
    early = [source.client.prepare_ticket(1) for _ in range(2)]
    jobs = [target.client.fetch(ticket, [i]) for i, ticket in enumerate(early)]
    wait_until(lambda: len(cluster.nodes["a"].control.handoffs.waiting) == 2)
    assert reason(fetch(target, source.client.publish([1]), [5])) is MissReason.BUSY
    for i, ticket in enumerate(early):
        source.client.publish([i], ticket=ticket)
    assert [job.result(10).num_blocks for job in jobs] == [1, 1]
    # Their clients have the results a moment before the node forgets them.
    wait_until(lambda: len(cluster.nodes["b"].control.handoffs.fetcher) == 0)
    assert fetch(target, source.client.publish([1]), [5]).num_blocks == 1

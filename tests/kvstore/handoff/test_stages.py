"""Hand-offs through stages, with stages in host memory: whose memory it is makes no difference to the bookkeeping.

What a stage on a GPU adds (mapping, kernels, NIXL between GPUs) is met in tests/actors/test_cuda_handoff.py.
"""

import threading
import time

import pytest
from inner_parts import parts_of

import kvstore
from kvstore.client.handoff import publish as publishing
from kvstore.client.handoff.stage_link import StageLink
from kvstore.client.results import MissReason
from kvstore.config import StoreConfig
from kvstore.errors import ConfigError, CopyStuck, InvalidRequest, KernelError, RegistrationFailed, StoreUnavailable
from kvstore.handoff.lanes import StageLanes
from kvstore.node.fence import MoverFence
from kvstore.pool.pool import Pool
from kvstore.runtime import clock
from tests.kvstore.handed_off import fetch, named, reason, same
from tests.kvstore.handoff.host_stages import BLOCK, HeldBlocks, Order, held_packing, nothing_held
from tests.kvstore.kept_work import kept_work, see_done


def logged_failures(caplog):
    return [record for record in caplog.records if "after its ticket was given out" in record.getMessage()]


def test_blocks_go_from_stage_to_stage_and_leave_nothing(cluster, pair, stages, wait_until):
    source, target = pair
    ticket = source.client.publish(range(10))
    assert ticket.slab == 1
    arena = cluster.nodes["a"].pool.stats()
    assert (arena.num_writing, arena.num_free) == (0, arena.num_slots)
    result = fetch(target, ticket, range(40, 50))
    assert (result.num_blocks, result.route, result.note, result.num_peer) == (10, "gpu", "", 10)
    assert all(same(source, range(10), target, range(40, 50)))
    assert [parts_of(worker.client).stage.attached.copier.num_expected for worker in pair] == [10, 10]
    nothing_held(cluster, wait_until)
    assert reason(fetch(target, ticket, range(10))) is MissReason.USED


def test_two_clients_of_one_stage_move_no_byte(cluster, stages, monkeypatch, wait_until):
    monkeypatch.setattr("kvstore.client.handoff.stage_link.stage_uuid", lambda layout: "07")
    source, target = cluster.worker("a", seed=1), cluster.worker("a", seed=2)
    assert [w.client.attach_handoff(64 * BLOCK).route for w in (source, target)] == ["gpu", "gpu"]
    assert len(stages) == 1
    result = fetch(target, source.client.publish(range(10)), range(10))
    assert (result.num_blocks, result.num_local, result.num_bytes, result.route) == (10, 10, 0, "gpu")
    assert all(same(source, range(10), target, range(10)))
    nothing_held(cluster, wait_until)


def test_stages_of_one_mover_copy_without_the_engine(cluster, stages, wait_until):
    source, target = cluster.worker("a", seed=1), cluster.worker("a", seed=2)
    for worker in (source, target):
        assert worker.client.attach_handoff(64 * BLOCK, peers=["a"]).route == "gpu"
    assert len(stages) == 2
    before = stages[1].num_copied
    result = fetch(target, source.client.publish(range(10)), range(10, 20))
    assert (result.num_blocks, result.route) == (10, "gpu")
    assert stages[1].num_copied - before == 10 * BLOCK
    assert all(same(source, range(10), target, range(10, 20)))
    nothing_held(cluster, wait_until)


def test_a_reader_without_a_stage_gets_them_through_the_arenas(cluster, pair, wait_until):
    source, _ = pair
    target = cluster.worker("b", seed=3)
    result = fetch(target, source.client.publish(range(10)), range(10))
    assert (result.num_blocks, result.route) == (10, "host")
    assert "no stage" in result.note
    assert all(same(source, range(10), target, range(10)))
    nothing_held(cluster, wait_until)


def test_a_stage_is_no_use_for_what_was_published_in_the_arena(cluster, pair, wait_until):
    _, target = pair
    source = cluster.worker("a", seed=4)
    result = fetch(target, source.client.publish(range(10)), range(10))
    assert (result.num_blocks, result.route, result.note) == (10, "host", "")
    assert all(same(source, range(10), target, range(10)))
    nothing_held(cluster, wait_until)


def test_an_emulated_lane_is_said_once_and_not_taken(cluster, stages, monkeypatch, caplog, wait_until):
    measured = StageLanes._read
    monkeypatch.setattr(StageLanes, "_read", lambda *args: max(measured(*args), 1.0))
    source, target = cluster.worker("a", seed=1), cluster.worker("b", seed=2)
    assert source.client.attach_handoff(64 * BLOCK).route == "gpu"
    route = target.client.attach_handoff(64 * BLOCK, peers=["a"])
    assert (route.route, route.gb_per_s) == ("host", {"a": 0.0})
    assert "emulated" in route.why_not
    assert target.client.publish([1]).slab == 0, "its hand-offs go through host memory from now on"
    # A client that named no peers meets the lane with its first fetch.
    other = cluster.worker("b", seed=3)
    assert other.client.attach_handoff(64 * BLOCK).route == "gpu"
    for _ in range(3):
        result = fetch(other, source.client.publish(range(10)), range(10))
        assert (result.num_blocks, result.route) == (10, "host")
        assert "emulated" in result.note
        assert all(same(source, range(10), other, range(10)))
    said = [r for r in caplog.records if "emulated" in r.getMessage() and r.name == "kvstore.handoff.lanes"]
    assert len(said) == 2, "one for each lane"
    target.client.close()
    nothing_held(cluster, wait_until)


def test_a_full_stage_is_passed_by(cluster, pair, wait_until):
    source, target = pair
    tickets = [source.client.publish(range(40)) for _ in range(2)]
    assert [ticket.slab for ticket in tickets] == [1, 0]
    for ticket, route in zip(tickets, ("gpu", "host"), strict=True):
        result = fetch(target, ticket, range(40))
        assert (result.num_blocks, result.route) == (40, route)
    nothing_held(cluster, wait_until)


def test_more_blocks_than_the_readers_stage_holds_are_a_reason(cluster, stages, wait_until):
    source, target = cluster.worker("a", seed=1), cluster.worker("b", seed=2)
    source.client.attach_handoff(64 * BLOCK)
    target.client.attach_handoff(8 * BLOCK)
    ticket = source.client.publish(range(10))
    assert reason(fetch(target, ticket, range(10))) is MissReason.POOL_FULL
    source.client.withdraw(ticket)
    nothing_held(cluster, wait_until)


def test_the_readers_mover_takes_its_stage_along_and_the_next_one_has_another(cluster, pair, stages, wait_until):
    source, target = pair
    ticket = source.client.publish(range(10))
    cluster.kill_mover("b")
    cluster.start_mover("b")
    result = wait_until(lambda: (r := fetch(target, ticket, range(10))).num_blocks and r)
    assert (result.num_blocks, result.route) == (10, "host")
    assert result.note.startswith("stage_lost")
    result = fetch(target, source.client.publish(range(10)), range(10))
    assert (result.num_blocks, result.route) == (10, "gpu"), "attached anew"
    assert len(stages) == 3
    assert all(same(source, range(10), target, range(10)))
    nothing_held(cluster, wait_until)


def test_who_fetches_or_publishes_does_not_wait_for_a_stage_that_takes_long_to_make(
    cluster, pair, stages, monkeypatch, wait_until
):
    """The next mover's stage comes when it comes: until then the arena serves, and nobody's time is spent on it."""
    source, target = pair
    make, goes_on = cluster.make_stage, threading.Event()

    def make_late(*args):
        assert goes_on.wait(30)
        return make(*args)

    tickets = [source.client.publish(range(4), ttl_s=60) for _ in range(2)]
    cluster.make_stage = make_late
    cluster.kill_mover("b")
    cluster.start_mover("b")
    assert wait_until(lambda: fetch(target, tickets[0], range(4)).num_blocks) == 4, "the loss is noticed"
    asked, ask = [], parts_of(target.client).stage._ask
    monkeypatch.setattr(parts_of(target.client).stage, "_ask", lambda *args: (asked.append(args[0]), ask(*args))[1])

    begun_s = time.monotonic()
    job = target.client.fetch(tickets[1], range(4), timeout_s=0.5)
    assert time.monotonic() - begun_s < 0.5
    assert job.result(5).route == "host"
    begun_s = time.monotonic()
    ticket = target.client.publish(range(2))
    assert time.monotonic() - begun_s < 2.0, "as long as a call may take"
    assert ticket.slab == 0, "the arena serves"
    time.sleep(1.1)  # When it is tried again, if nobody has been asked.
    assert target.client.publish(range(2)).slab == 0
    assert len(asked) == 1, "one question waits for the stage, whoever wants that"
    goes_on.set()
    assert wait_until(lambda: (t := target.client.publish(range(2))).slab and t), "attached when it was there"


def test_what_was_claimed_in_one_movers_stage_is_not_read_into_the_next_ones(cluster, pair, wait_until):
    source, target = pair
    other, reader = cluster.worker("b", seed=3), cluster.worker("a", seed=4)
    assert fetch(target, source.client.publish(range(10)), range(10)).num_blocks == 10
    ticket = source.client.prepare_ticket(10)
    job = target.client.fetch(ticket, list(range(10)))
    wait_until(lambda: len(cluster.nodes["a"].control.handoffs.waiting) == 1)
    cluster.kill_mover("b")
    cluster.start_mover("b")
    assert other.client.attach_handoff(64 * BLOCK).route == "gpu"
    published = other.client.publish(range(60))
    assert published.slab == 1, "the next mover's stage has the same number"
    source.client.publish(range(10), ticket=ticket)
    assert reason(job.result(10)) is MissReason.PEER_LOST
    assert fetch(reader, published, range(60)).num_blocks == 60
    assert all(same(other, range(60), reader, range(60))), "another READ went into its slots"
    source.client.withdraw(ticket)
    nothing_held(cluster, wait_until)


def test_the_sources_mover_takes_published_blocks_along(cluster, pair, wait_until):
    source, target = pair
    assert fetch(target, source.client.publish([1]), [1]).route == "gpu", "the lane is known"
    ticket = source.client.publish(range(10), ttl_s=600)
    cluster.kill_mover("a")
    wait_until(lambda: cluster.nodes["a"].stats()["num_handoffs"] == 0)
    assert reason(fetch(target, ticket, range(10))) is MissReason.PEER_LOST
    # Without a mover, and so without a stage, the arena serves.
    assert source.client.publish([1]).slab == 0
    cluster.start_mover("a")
    again = wait_until(lambda: (t := source.client.publish(range(10))).slab and t)
    assert cluster.nodes["b"].state.peers.is_usable("a")
    result = fetch(target, again, range(10))
    assert (result.num_blocks, result.route) == (10, "gpu")
    assert all(same(source, range(10), target, range(10)))


def test_a_publisher_that_is_closed_takes_its_blocks_along(cluster, pair, wait_until):
    source, target = pair
    ticket = source.client.publish(range(10), ttl_s=600)
    source.client.close()
    nothing_held(cluster, wait_until)
    assert reason(fetch(target, ticket, range(10))) is MissReason.OWNER_GONE


@pytest.mark.parametrize(
    ("settings", "uuid", "why"), [({"lane": "tcp"}, "01", "lane='tcp'"), ({}, "00", "no such GPU")]
)
def test_where_no_stage_can_be_made_hand_offs_go_through_host_memory(cluster, stages, monkeypatch, settings, uuid, why):
    cluster.add("c", **settings)
    monkeypatch.setattr("kvstore.client.handoff.stage_link.stage_uuid", lambda layout: uuid)
    worker = cluster.worker("c")
    route = worker.client.attach_handoff(64 * BLOCK)
    assert route.route == "host"
    assert why in route.why_not
    assert worker.client.publish([1]).slab == 0


def test_a_cache_on_the_cpu_has_no_stage(cluster):
    cluster.add("a")
    route = cluster.worker("a").client.attach_handoff()
    assert route == kvstore.HandoffRoute(route="host", why_not="the registered cache is on no GPU")


def test_a_mover_that_cannot_stage_says_so(cluster, monkeypatch):
    core = cluster.add("a")
    cluster.worker("a")
    with pytest.raises(RegistrationFailed, match="cannot"):
        core.control.handoffs.stages.make("01", 64 * BLOCK, BLOCK)


def test_a_stage_has_to_fit_the_blocks(cluster, stages):
    book = cluster.nodes["a"].control.handoffs.stages
    book.make("01", 64 * BLOCK, BLOCK)
    with pytest.raises(ConfigError, match="slots of 1024"):
        book.make("01", 64 * BLOCK, 4 * BLOCK)
    with pytest.raises(ConfigError, match="at least 2 blocks"):
        book.make("02", BLOCK, BLOCK)


def test_a_read_into_a_stage_that_takes_too_long_keeps_its_slots_until_it_is_over(cluster, pair, stages, wait_until):
    source, target = pair
    assert fetch(target, source.client.publish([1]), [1]).route == "gpu", "the lane is known"
    held = HeldBlocks(stages[1].transport)
    stages[1].transport = held
    cluster.movers["b"].mover.slabs.into = dict.fromkeys(cluster.movers["b"].mover.slabs.into, held)
    ticket = source.client.publish(range(6))
    assert reason(fetch(target, ticket, range(6), timeout_s=0.5)) is MissReason.TIMEOUT
    (mine,), (theirs,) = (cluster.nodes[node].control.handoffs.stages.all() for node in ("b", "a"))
    wait_until(lambda: mine.pool.stats().num_quarantined == 6)
    assert theirs.pool.stats().num_writing == 6, "it may still be read"
    assert cluster.nodes["b"].pool.stats().num_quarantined == 0
    held.go.set()
    wait_until(lambda: mine.pool.stats().num_free == mine.pool.num_slots)
    source.client.withdraw(ticket)
    nothing_held(cluster, wait_until)


def test_a_mover_that_dies_while_blocks_are_packed_takes_them_along(cluster, pair, caplog, wait_until):
    source, target = pair
    packing = held_packing(source.client)
    ticket = source.client.publish(range(10))
    cluster.kill_mover("a")
    packing.set()
    wait_until(lambda: logged_failures(caplog))
    assert reason(fetch(target, ticket, range(10))) is MissReason.PEER_LOST
    ticket = source.client.publish(range(10))
    assert ticket.slab == 0
    cluster.start_mover("a")
    result = wait_until(lambda: (r := fetch(target, ticket, range(10))).num_blocks and r)
    assert (result.num_blocks, result.route) == (10, "host")
    assert all(same(source, range(10), target, range(10)))
    nothing_held(cluster, wait_until)


def test_a_mover_that_hangs_over_a_copy_to_the_arena_keeps_the_slots_until_it_is_through(
    cluster, pair, stages, wait_until
):
    source, _ = pair
    target = cluster.worker("b", seed=3)
    ticket = source.client.publish(range(6))
    stages[0].may_copy.clear()
    assert reason(fetch(target, ticket, range(6), timeout_s=1.0)) is MissReason.TIMEOUT
    core = cluster.nodes["a"]
    wait_until(lambda: core.state.mover.num_abandoned == 1, 6)
    assert core.pool.stats().num_writing == 6, "it may still write to them"
    stages[0].may_copy.set()
    wait_until(lambda: core.pool.stats().num_writing == 0)
    assert core.state.mover.num_abandoned == 0
    source.client.withdraw(ticket)
    nothing_held(cluster, wait_until)


class MoverWithReadsGivenUp:
    """The mover as its fence sees it."""

    pid = 1

    def __init__(self):
        self.num_killed = 0

    def lost_touch(self):
        return False

    def abandoned_since_s(self):
        return clock.now_s()

    def fence(self):
        self.num_killed += 1
        return True


def test_too_many_slots_of_a_stage_that_wait_are_a_reason_to_kill_the_mover():
    config, mover, pools = StoreConfig(max_quarantined_fraction=0.25), MoverWithReadsGivenUp(), [Pool(100), Pool(8)]
    fence = MoverFence(config, mover, lambda: pools)
    for number, killed in ((1, 0), (2, 1)):
        ticket = pools[1].reserve(1, "w")
        pools[1].abort_store(ticket.write_id, "w", quarantine=f"read-{number}")
        fence.check()
        assert mover.num_killed == killed


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("node", ["a", "b"])
def test_a_fetch_waits_for_blocks_that_are_still_being_packed(cluster, stages, wait_until, node, staged):
    source, target = cluster.worker("a", seed=1), cluster.worker(node, seed=2)
    if staged:
        for worker in (source, target):
            worker.client.attach_handoff(64 * BLOCK)
    packing = held_packing(source.client)
    publication = source.client.begin_publish(range(10))
    job = target.client.fetch(publication.ticket, list(range(10)))
    time.sleep(0.1)
    assert not job.done()
    assert not publication.job.done()
    packing.set()
    assert publication.job.result(10) == publication.ticket
    result = job.result(10)
    assert (result.num_blocks, result.route) == (10, "gpu" if staged else "host")
    assert result.num_lease_calls == (staged or node == "b"), "it is told when they are there, and asks once"
    assert all(same(source, range(10), target, range(10)))
    nothing_held(cluster, wait_until)


@pytest.mark.parametrize("node", ["a", "b"])
def test_who_waits_for_blocks_hears_at_once_that_they_were_withdrawn(cluster, stages, wait_until, node):
    source, target = cluster.worker("a", seed=1), cluster.worker(node, seed=2)
    packing = held_packing(source.client)
    publication = source.client.begin_publish(range(10))
    job = target.client.fetch(publication.ticket, list(range(10)))
    wait_until(lambda: len(cluster.nodes["a"].control.handoffs.waiting) == 1)
    assert source.client.withdraw(publication.ticket)
    assert len(cluster.nodes["a"].control.handoffs.waiting) == 0
    assert reason(job.result(10)) is MissReason.WITHDRAWN
    packing.set()
    with pytest.raises(StoreUnavailable):
        publication.job.result(10)
    nothing_held(cluster, wait_until)


def fail(*args):
    raise KernelError("the device failed")


def test_copies_that_fail_after_the_ticket_was_given_out_void_it(cluster, pair, caplog, wait_until):
    source, target = pair
    parts_of(source.client).stage.attached.copier.finish = fail
    publication = source.client.begin_publish(range(10))
    with pytest.raises(KernelError):
        publication.job.result(10)
    assert reason(fetch(target, publication.ticket, range(10))) is MissReason.WITHDRAWN
    assert not logged_failures(caplog), "who has the job is told by it"
    ticket = source.client.publish(range(10))
    wait_until(lambda: logged_failures(caplog))
    assert reason(fetch(target, ticket, range(10))) is MissReason.WITHDRAWN
    nothing_held(cluster, wait_until)


@pytest.mark.parametrize("step", ["check_unchanged", "expect", "begin_into_slots"])
def test_copies_that_cannot_be_queued_are_refused_at_once_and_leave_nothing(cluster, pair, wait_until, step):
    source, target = pair
    copier = parts_of(source.client).stage.attached.copier
    setattr(copier, step, lambda *args, **more: fail())
    for publish in (source.client.publish, source.client.begin_publish):
        with pytest.raises(KernelError):
            publish(range(10))
    nothing_held(cluster, wait_until)
    delattr(copier, step)
    assert fetch(target, source.client.publish(range(10)), range(10)).route == "gpu", "over the same connection"


@pytest.mark.parametrize("ids", [[], [1, 1], [99], [0.5], [[1], [2]], None])
def test_blocks_that_are_not_the_engines_leave_nothing_in_the_stage(cluster, pair, wait_until, ids):
    source, _ = pair
    with pytest.raises(InvalidRequest, match="block_ids"):
        source.client.publish(ids)
    nothing_held(cluster, wait_until)


@pytest.mark.parametrize("verb", ["publish", "begin_publish"])
def test_only_publish_holds_the_engine_back_and_neither_waits_for_the_copies(cluster, pair, wait_until, verb):
    source, target = pair
    order, packing = Order(), held_packing(source.client)
    parts_of(source.client).stage.attached.copier.order = lambda: order
    published = getattr(source.client, verb)(range(10))
    assert order.asked == (["hold"] if verb == "publish" else [])
    ticket = published if verb == "publish" else published.ticket
    job = target.client.fetch(ticket, list(range(10)))
    wait_until(lambda: len(cluster.nodes["a"].control.handoffs.waiting) == 1)
    packing.set()
    assert job.result(10).num_blocks == 10
    nothing_held(cluster, wait_until)


def test_copies_that_are_queued_are_over_before_the_job_counts_as_abandoned(cluster, pair, wait_until):
    source, target = pair
    order, given, jobs = Order(), [], parts_of(source.client).threads
    parts_of(source.client).stage.attached.copier.order = lambda: order
    parts_of(source.client).threads = kept_work(given)
    publication = source.client.begin_publish(range(10))
    assert publication.job.abandon()
    assert order.asked == ["settle"]
    parts_of(source.client).threads = jobs
    see_done(given[0])
    assert publication.job.result(0) == publication.ticket
    assert fetch(target, publication.ticket, range(10)).num_blocks == 10
    nothing_held(cluster, wait_until)
    assert parts_of(source.client).stage.attached.num_users == 0


def test_a_client_that_is_closed_meanwhile_waits_for_what_it_queued(cluster, pair, monkeypatch, wait_until):
    source, _ = pair
    stage, ended = parts_of(source.client).stage.attached, []
    monkeypatch.setattr(stage.copier, "finish", ended.append)

    def closed(*args):
        raise StoreUnavailable("closed")

    monkeypatch.setattr(publishing, "submit", closed)
    with pytest.raises(StoreUnavailable):
        source.client.publish(range(10))
    wait_until(lambda: (len(ended), stage.num_users) == (1, 0))
    nothing_held(cluster, wait_until)


def test_copies_that_are_stuck_keep_their_slots_and_the_stage_mapped(cluster, pair, monkeypatch, wait_until):
    source, target = pair

    def stuck(pages):
        raise CopyStuck("the device did not come to it")

    stage = parts_of(source.client).stage.attached
    stage.copier.finish = stuck
    ticket = source.client.publish(range(10))
    wait_until(lambda: parts_of(source.client).is_stuck)
    assert reason(fetch(target, ticket, range(10), timeout_s=0.3)) is MissReason.TIMEOUT
    source.client.close()
    (theirs,) = cluster.nodes["a"].control.handoffs.stages.all()
    assert theirs.pool.stats().num_writing == 10
    assert stage.num_users == 1


def test_a_publication_takes_the_arena_where_there_is_no_stage(cluster, stages, wait_until):
    source, target = cluster.worker("a", seed=1), cluster.worker("b", seed=2)
    publication = source.client.begin_publish(range(10))
    assert publication.ticket.slab == 0
    assert fetch(target, publication.ticket, range(10)).num_blocks == 10
    assert publication.job.result(10) == publication.ticket
    assert all(same(source, range(10), target, range(10)))
    nothing_held(cluster, wait_until)


def test_a_reader_gives_up_on_blocks_that_do_not_come(cluster, pair, wait_until):
    source, target = pair
    packing = held_packing(source.client)
    publication = source.client.begin_publish(range(4))
    assert reason(fetch(target, publication.ticket, range(4), timeout_s=0.3)) is MissReason.TIMEOUT
    packing.set()
    publication.job.result(10)
    assert fetch(target, publication.ticket, range(4)).num_blocks == 4
    nothing_held(cluster, wait_until)


def test_a_ticket_made_elsewhere_names_the_stage(cluster, pair, wait_until):
    source, target = pair
    ticket = named(source.client, 10, slab=source.client.handoff_slab)
    assert ticket.slab
    assert source.client.begin_publish(range(10), ticket=ticket).job.result(10) == ticket
    result = fetch(target, ticket, range(10))
    assert (result.num_blocks, result.route) == (10, "gpu")
    assert all(same(source, range(10), target, range(10)))
    nothing_held(cluster, wait_until)


@pytest.mark.parametrize("why", ["full", "gone"])
@pytest.mark.parametrize("where", ["another node", "another GPU", "the same GPU", "no GPU"])
def test_blocks_of_a_ticket_that_names_a_stage_are_found_in_the_arena(cluster, pair, wait_until, where, why):
    source, target = pair
    if where != "another node":
        target = cluster.worker("b" if where == "no GPU" else "a", seed=3)
    if where == "another GPU":
        assert target.client.attach_handoff(64 * BLOCK).route == "gpu"
    elif where == "the same GPU":
        parts_of(target.client).stage = parts_of(source.client).stage
    ticket = named(source.client, 10, slab=source.client.handoff_slab)
    if why == "full":
        filling = source.client.publish(range(60))
        assert filling.slab
    else:
        link = parts_of(source.client).stage
        parts_of(source.client).stage = StageLink(parts_of(source.client).store.ask)
    assert source.client.begin_publish(range(60, 70), ticket=ticket).job.result(10) == ticket
    if why == "full":
        assert source.client.withdraw(filling)
    else:
        parts_of(source.client).stage = link
    result = fetch(target, ticket, range(10))
    assert (result.num_blocks, result.failed, result.route) == (10, (), "host")
    assert all(same(source, range(60, 70), target, range(10)))
    nothing_held(cluster, wait_until)


def test_a_fetch_that_failed_may_be_tried_again_at_once(cluster, pair, wait_until, monkeypatch):
    """However long the way is on which the source hears that the first one is over."""
    source, target = pair
    ticket = source.client.publish(range(4))
    [stage], peers = cluster.nodes["b"].control.handoffs.stages.all(), cluster.nodes["b"].state.peers
    pool, get = stage.pool, peers.get

    def late(node_id, within_s):
        time.sleep(0.1)
        return get(node_id, within_s)

    monkeypatch.setattr(peers, "get", late)
    taken = pool.reserve(pool.stats().num_free, "full")
    assert reason(fetch(target, ticket, range(4))) is MissReason.POOL_FULL
    pool.abort_store(taken.write_id, "full")
    assert fetch(target, ticket, range(4)).num_blocks == 4
    nothing_held(cluster, wait_until)


def test_no_room_in_the_arena_either_is_a_reason(cluster, pair, wait_until):
    source, target = pair
    ticket = named(source.client, 10, slab=source.client.handoff_slab)
    filling = source.client.publish(range(60))
    source.client.begin_publish(range(60, 70), ticket=ticket).job.result(10)
    pool = cluster.nodes["b"].pool
    taken = pool.reserve(pool.stats().num_free, "full")
    assert reason(fetch(target, ticket, range(10))) is MissReason.POOL_FULL
    pool.abort_store(taken.write_id, "full")
    assert fetch(target, ticket, range(10)).num_blocks == 10
    source.client.withdraw(filling)
    nothing_held(cluster, wait_until)


@pytest.mark.parametrize("verb", ["publish", "begin_publish"])
def test_slots_of_a_client_that_is_closed_while_it_publishes_stay_until_their_copies_have_ended(
    cluster, pair, stages, wait_until, verb
):
    """Beside the publication, when its copies are queued and their end is not waited for yet."""
    source, closed = pair[0], threading.Event()
    pool, go_on = cluster.nodes["a"].control.handoffs.stages.all()[0].pool, held_packing(source.client)
    copier = parts_of(source.client).stage.attached.copier
    begin = copier.begin_into_slots

    def begun(*args):
        begin(*args)
        closing = threading.Thread(target=lambda: (source.client.close(0.2), closed.set()))
        closing.start()
        assert closed.wait(5)

    copier.begin_into_slots = begun
    refused = []

    def publish():
        with pytest.raises(StoreUnavailable):
            getattr(source.client, verb)(range(10))
        refused.append(1)

    publishing = threading.Thread(target=publish, daemon=True)
    publishing.start()
    assert closed.wait(5)
    time.sleep(0.2)
    assert pool.stats().num_free == pool.stats().num_slots - 10, "copies to them are still to run"
    go_on.set()
    publishing.join(5)
    assert refused
    nothing_held(cluster, wait_until)

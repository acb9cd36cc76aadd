"""What waits for others holds no thread of a client that others need; time in a queue counts."""

import threading
import time

import pytest
import torch
from inner_parts import parts_of

from kvstore.client.client import Client
from kvstore.client.results import MissReason
from tests.kvstore.conftest import SHAPE
from tests.kvstore.handed_off import same


def rank(cluster, node_id, index, num_ranks=2):
    """A client with the part of one rank, and a cache for it."""
    client = Client(cluster.nodes[node_id].control_path, cluster.space, (index, num_ranks, 0, 1))
    cluster.clients.append(client)
    dims = (2, 80, SHAPE.block_size, SHAPE.num_kv_heads // num_ranks, SHAPE.head_dim)
    client.register_kv_caches([torch.zeros(dims) for _ in range(SHAPE.num_layers)])
    return client


def names_of_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("raykv-")]


@pytest.mark.parametrize("num", [16, 40])
def test_two_engines_that_wait_for_each_others_blocks_do_not_starve_their_publications(cluster, num):
    for node in "ab":
        cluster.add(node, capacity_bytes=1 << 18)
    one, two = cluster.worker("a", seed=1), cluster.worker("b", seed=2)
    mine = [one.client.prepare_ticket(1) for _ in range(num)]
    theirs = [two.client.prepare_ticket(1) for _ in range(num)]
    fetches = [one.client.fetch(ticket, [i], timeout_s=20) for i, ticket in enumerate(theirs)]
    fetches += [two.client.fetch(ticket, [i], timeout_s=20) for i, ticket in enumerate(mine)]
    published = [one.client.begin_publish([40 + i], ticket=ticket) for i, ticket in enumerate(mine)]
    published += [two.client.begin_publish([40 + i], ticket=ticket) for i, ticket in enumerate(theirs)]
    assert [each.job.result(10) for each in published] == mine + theirs
    assert [job.result(19).num_blocks for job in fetches] == [1] * 2 * num
    assert all(same(one, range(40, 40 + num), two, range(num)))
    assert all(same(two, range(40, 40 + num), one, range(num)))


def test_fetches_that_wait_hold_no_thread(cluster, wait_until):
    cluster.add("a", capacity_bytes=1 << 18, transfer_timeout_s=30.0)
    source, target = cluster.worker("a", seed=1), cluster.worker("a", num_blocks=300, seed=2)
    hashes = cluster.hashes(2)
    target.save(hashes, [0, 1])
    before = len(names_of_threads())
    tickets = [source.client.prepare_ticket(1) for _ in range(200)]
    jobs = [target.client.fetch(ticket, [i]) for i, ticket in enumerate(tickets)]
    wait_until(lambda: parts_of(target.client).threads.num_parked == len(jobs))
    assert len(names_of_threads()) <= before + 5, "those that copy, and one that watches"
    assert target.load(hashes, [250, 251]).num_blocks == 2
    for i in (0, 120, 199):
        source.client.publish([i % 80], ticket=tickets[i])
        assert jobs[i].result(1.0).num_blocks == 1, "though the thread that asks waits for less than the fetch may take"
    assert sum(job.abandon(1) for job in jobs) == len(jobs)
    assert target.load(hashes, [250, 251]).num_blocks == 2


def test_ranks_that_wait_for_their_sister_hold_up_no_load(cluster):
    cluster.add("a", mover=False, transfer_timeout_s=20.0)
    whole, hashes = cluster.worker("a", seed=1), cluster.hashes(5)
    whole.save(hashes, range(5))
    first, second = (rank(cluster, "a", index) for index in range(2))
    chains = [cluster.hashes(1, seed=100 + i) for i in range(8)]
    saves = [first.save(chain, [20 + i]) for i, chain in enumerate(chains)]
    assert first.load(hashes, range(5), timeout_s=2.0).result(10).num_blocks == 5
    assert not any(job.done() for job in saves)
    for i, chain in enumerate(chains):
        second.save(chain, [20 + i])
    assert [job.result(10).num_written for job in saves] == [1] * len(saves)


class Gate:
    """Stands in for a function of which calls wait until it is opened."""

    def __init__(self, function):
        self.function, self.open, self.num_entered = function, threading.Event(), 0

    def __call__(self, *args):
        self.num_entered += 1
        self.open.wait(20)
        return self.function(*args)


@pytest.fixture
def busy(cluster, wait_until):
    """A worker of which all threads that copy are in the middle of a save."""
    cluster.add("a", transfer_timeout_s=20.0)
    worker = cluster.worker("a", seed=1)
    hashes = cluster.hashes(3, seed=7)
    worker.save(hashes, range(3))
    gate = parts_of(worker.client).copier.into_slots = Gate(parts_of(worker.client).copier.into_slots)
    saves = [worker.client.save(cluster.hashes(1, seed=i), [10 + i]) for i in range(4)]
    wait_until(lambda: gate.num_entered == 4)
    yield worker, hashes, gate, saves
    gate.open.set()


def test_time_in_the_queue_is_the_loads_own(cluster, busy):
    worker, hashes, gate, saves = busy
    before = worker.bytes()
    late = worker.client.load(hashes, [30, 31, 32], timeout_s=0.05)
    patient = worker.client.load(hashes, [40, 41, 42], timeout_s=20)
    time.sleep(0.1)
    gate.open.set()
    assert {failure.reason for failure in late.result(10).failed} == {MissReason.TIMEOUT}
    assert patient.result(10).num_blocks == 3
    assert cluster.nodes["a"].stats()["calls"]["LOAD"] == 1, "the other was never begun"
    assert [own[30:33].tobytes() for own in worker.caches[0].numpy()] == [
        torch.frombuffer(bytearray(before[0]), dtype=torch.float32)
        .view(worker.caches[0].shape)[side, 30:33]
        .numpy()
        .tobytes()
        for side in range(2)
    ]
    assert all(job.result(10).num_written for job in saves)


def test_time_in_the_queue_is_the_fetchs_own(cluster, busy):
    worker, _, gate, _ = busy
    source = cluster.worker("a", seed=3)
    ticket = source.client.publish([1])
    job = worker.client.fetch(ticket, [50], timeout_s=0.05)
    time.sleep(0.1)
    gate.open.set()
    while not job.done():
        time.sleep(0.01)
    assert [failure.reason for failure in job.result(0).failed] == [MissReason.TIMEOUT]
    assert worker.client.fetch(ticket, [50]).result(10).num_blocks == 1, "the ticket was not used"


def test_a_callback_may_publish_save_load_and_fetch(cluster):
    cluster.add("a")
    worker, target = cluster.worker("a", seed=1), cluster.worker("a", seed=2)
    gate = parts_of(worker.client).copier.into_slots = Gate(parts_of(worker.client).copier.into_slots)
    done, told = [], threading.Event()
    jobs = [worker.client.save(cluster.hashes(1, seed=i), [i]) for i in range(4)]

    def callback(i):
        ticket = worker.client.publish([40 + i])
        assert target.client.fetch(ticket, [i]).result(10).num_blocks == 1
        assert worker.save(cluster.hashes(1, seed=50 + i), [50 + i]).num_written == 1
        assert worker.load(cluster.hashes(1, seed=i), [60 + i]).num_blocks == 1
        done.append(i)
        if len(done) == 4:
            told.set()

    for i, job in enumerate(jobs):
        job.add_done_callback(lambda _, i=i: callback(i))
    gate.open.set()
    assert told.wait(20)
    assert all(same(worker, range(40, 44), target, range(4)))


def test_a_callback_that_blocks_holds_up_no_job_and_close_not_for_ever(cluster, caplog):
    cluster.add("a")
    worker, entered, go, called = cluster.worker("a"), threading.Event(), threading.Event(), []
    worker.client.save(cluster.hashes(1), [0]).add_done_callback(lambda job: (entered.set(), go.wait(20)))
    assert entered.wait(10)
    for i in range(6):
        job = worker.client.save(cluster.hashes(1, seed=i + 1), [i])
        job.add_done_callback(lambda job: called.append(job))
        assert job.result(10).num_written == 1
    assert worker.load(cluster.hashes(1, seed=3), [10]).num_blocks == 1
    assert called == []
    worker.client.close(0.2)
    go.set()


def test_a_callback_that_fails_is_logged_and_the_next_one_called(cluster, caplog):
    cluster.add("a")
    worker, called = cluster.worker("a"), threading.Event()
    job = worker.client.save(cluster.hashes(1), [0])
    job.add_done_callback(lambda job: 1 // 0)
    job.add_done_callback(lambda job: called.set())
    assert called.wait(10)
    assert "the callback of a job failed" in caplog.text


def test_a_client_may_be_closed_in_a_callback(cluster):
    cluster.add("a")
    worker, closed = cluster.worker("a"), threading.Event()
    job = worker.client.save(cluster.hashes(1), [0])
    job.add_done_callback(lambda job: (worker.client.close(10.0), closed.set()))
    assert closed.wait(5), "at once: no callback waits for itself"


def test_a_client_that_is_closed_has_called_all_callbacks(cluster):
    cluster.add("a")
    worker, called = cluster.worker("a"), []
    for i in range(5):
        worker.client.save(cluster.hashes(1, seed=i), [i]).add_done_callback(called.append)
    worker.client.close()
    assert len(called) == 5


def test_jobs_that_wait_end_with_their_store(cluster, wait_until):
    cluster.add("a", transfer_timeout_s=30.0)
    source, target = cluster.worker("a", seed=1), cluster.worker("a", seed=2)
    jobs = [target.client.fetch(source.client.prepare_ticket(1), [i]) for i in range(3)]
    wait_until(lambda: parts_of(target.client).threads.num_parked == 3)
    cluster.stop_node("a")
    for job in jobs:
        wait_until(job.done)
        assert [failure.reason for failure in job.result(0).failed] == [MissReason.STORE_LOST]


def test_a_fetch_that_is_abandoned_while_it_waits_gives_the_ticket_up_at_once(cluster, wait_until):
    core = cluster.add("a", transfer_timeout_s=30.0)
    source, target = cluster.worker("a", seed=1), cluster.worker("a", seed=2)
    assert target.client.fetch(source.client.publish([1]), [1]).result(10).num_blocks == 1
    ticket = source.client.prepare_ticket(1)
    job = target.client.fetch(ticket, [2])
    wait_until(lambda: len(core.control.handoffs.waiting) == 1)
    assert job.abandon()
    wait_until(lambda: len(parts_of(target.client).threads) == 0)
    before = target.bytes()
    source.client.publish([3], ticket=ticket)
    assert target.client.fetch(ticket, [4]).result(10).num_blocks == 1, "nobody else got it"
    assert target.block(2) == [cache[:, 2].numpy().tobytes() for cache in target.caches]
    assert before != target.bytes()

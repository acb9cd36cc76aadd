"""Lookups and loads count what a save of their node is writing just now: the last turn of a chat, mostly."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.client.client import Client
from kvstore.client.results import MissReason
from kvstore.engine.host_copier import HostCopier
from kvstore.remote.single_flight import Flight
from tests.kvstore.conftest import SHAPE

#: Far longer than any step of these tests takes.
SOON_S = 20.0
NUM_BLOCKS = 6


@pytest.fixture
def calls():
    with ThreadPoolExecutor(16) as threads:
        yield threads


@pytest.fixture
def core(cluster):
    return cluster.add("a", save_wait_s=SOON_S, call_timeout_s=8 * SOON_S, transfer_timeout_s=2 * SOON_S)


@pytest.fixture
def saving(cluster, core):
    """The store with a save of a chain under way, which has four blocks already."""
    worker, hashes = cluster.worker("a"), cluster.hashes(NUM_BLOCKS)
    worker.save(hashes[:4], range(4))
    ticket = core.pool.prepare_store(hashes, "saver")
    yield worker, hashes, ticket
    core.pool.abort_store(ticket.write_id, "saver")


def is_waiting(call):
    """Whether a call has no answer though it had time for one."""
    time.sleep(0.1)
    return not call.done()


@pytest.mark.parametrize("remote", [False, True])
def test_a_lookup_counts_what_is_being_saved(core, saving, calls, remote):
    worker, hashes, ticket = saving
    lookup = calls.submit(worker.client.lookup, hashes, remote=remote)
    assert is_waiting(lookup)
    core.pool.complete_store(ticket.write_id, "saver")
    assert lookup.result(SOON_S).num_local == NUM_BLOCKS


@pytest.mark.parametrize("remote", [False, True])
def test_a_lookup_ends_when_the_save_is_given_up(core, saving, calls, remote):
    worker, hashes, ticket = saving
    lookup = calls.submit(worker.client.lookup, hashes, remote=remote)
    assert is_waiting(lookup)
    core.pool.abort_store(ticket.write_id, "saver")
    assert lookup.result(SOON_S / 2).num_local == 4


def test_a_chain_whose_lookup_waits_for_its_first_block_is_not_surely_absent(cluster, core, calls):
    """Else a caller that looks there first would not ask, and compute what is there a moment later."""
    client, hashes = cluster.worker("a").client, cluster.hashes(NUM_BLOCKS)
    client.map_presence()
    ticket = core.pool.prepare_store(hashes, "saver")
    lookup = calls.submit(client.lookup, hashes, remote=False)
    assert is_waiting(lookup)
    assert not client.is_surely_absent(hashes, remote=False)
    core.pool.complete_store(ticket.write_id, "saver")
    assert lookup.result(SOON_S).num_local == NUM_BLOCKS


def test_a_load_counts_what_is_being_saved(core, saving):
    worker, hashes, ticket = saving
    job = worker.client.load(hashes, range(20, 20 + NUM_BLOCKS))
    assert is_waiting(job)
    core.pool.complete_store(ticket.write_id, "saver")
    result = job.result(SOON_S)
    assert (result.num_blocks, result.num_local, result.num_peer) == (NUM_BLOCKS, NUM_BLOCKS, 0)


def test_a_load_ends_when_the_save_is_given_up(core, saving):
    worker, hashes, ticket = saving
    job = worker.client.load(hashes, range(20, 20 + NUM_BLOCKS))
    assert is_waiting(job)
    core.pool.abort_store(ticket.write_id, "saver")
    result = job.result(SOON_S / 2)
    assert (result.num_blocks, result.failed[0].reason) == (4, MissReason.NOT_FOUND)


def test_bytes_of_a_save_that_was_waited_for_are_right(cluster, core, monkeypatch):
    saver, reader, hashes = cluster.worker("a", seed=1), cluster.worker("a", seed=2), cluster.hashes(NUM_BLOCKS)
    go, original = threading.Event(), HostCopier.into_slots

    def held(*args):
        assert go.wait(SOON_S)
        return original(*args)

    monkeypatch.setattr(HostCopier, "into_slots", held)
    save = saver.client.save(hashes, range(NUM_BLOCKS))
    try:
        deadline_s = time.monotonic() + SOON_S
        while not core.pool.stats().num_writing:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        load = reader.client.load(hashes, range(NUM_BLOCKS))
        assert is_waiting(load)
    finally:
        go.set()
    assert load.result(SOON_S).num_local == NUM_BLOCKS
    assert [reader.block(i) for i in range(NUM_BLOCKS)] == [saver.block(i) for i in range(NUM_BLOCKS)]
    save.result(SOON_S)


def test_the_wait_is_bounded(cluster):
    core = cluster.add("a", save_wait_s=0.2)
    worker, hashes = cluster.worker("a"), cluster.hashes(NUM_BLOCKS)
    core.pool.prepare_store(hashes, "saver")
    for ask in (worker.client.lookup, lambda hashes: worker.load(hashes, range(NUM_BLOCKS))):
        began_s = time.monotonic()
        assert ask(hashes).num_blocks == 0
        assert time.monotonic() - began_s >= 0.2
    assert worker.client.lookup(hashes, timeout_s=0.4, save_wait_s=SOON_S).num_blocks == 0, "never its whole time"
    core.pool.release_owner("saver")


def test_a_load_waits_once(cluster):
    """Also where another save goes on with its chain."""
    core = cluster.add("a", save_wait_s=0.3)
    worker, hashes = cluster.worker("a"), cluster.hashes(NUM_BLOCKS)
    first = core.pool.prepare_store(hashes[:3], "saver")
    core.pool.prepare_store(hashes, "another")
    job = worker.client.load(hashes, range(NUM_BLOCKS))
    assert is_waiting(job)
    core.pool.complete_store(first.write_id, "saver")
    result = job.result(SOON_S)
    assert (result.num_blocks, result.num_local) == (3, 3)
    core.pool.release_owner("another")


def test_it_can_be_turned_off(cluster, saving, monkeypatch):
    worker, hashes, _ = saving
    assert worker.client.lookup(hashes, save_wait_s=0.0).num_local == 4
    core = cluster.add("b", save_wait_s=0.0)
    worker = cluster.worker("b")
    ticket = core.pool.prepare_store(hashes, "saver")
    monkeypatch.setattr(core.pool, "watch", None)
    assert worker.client.lookup(hashes, remote=False).num_local == 0
    assert worker.load(hashes, range(NUM_BLOCKS)).num_blocks == 0
    monkeypatch.undo()
    core.pool.abort_store(ticket.write_id, "saver")


def test_what_nobody_writes_is_not_waited_for(cluster, core, monkeypatch):
    worker, hashes = cluster.worker("a"), cluster.hashes(NUM_BLOCKS)
    worker.save(hashes[:4], range(4))
    core.pool.prepare_store(cluster.hashes(2, seed=9), "saver")
    monkeypatch.setattr(core.pool, "watch", None)
    assert worker.client.lookup(hashes).num_local == 4
    assert worker.load(hashes, range(20, 20 + NUM_BLOCKS)).num_blocks == 4
    monkeypatch.undo()
    core.pool.release_owner("saver")


def test_a_lookup_does_not_wait_for_what_comes_from_another_node(core, saving):
    """The node that has it is named at once."""
    worker, hashes, _ = saving
    flights, flight = core.state.fetcher.flights, Flight()
    entered = flights.enter([hashes[4]], flight)
    assert worker.client.lookup(hashes).num_local == 4
    flights.leave(entered, flight)


def test_parts_of_other_ranks_are_waited_for(cluster, core, calls):
    def rank(index):
        client = Client(core.control_path, cluster.space, (index, 2, 0, 1))
        cluster.clients.append(client)
        import torch

        dims = (2, 80, SHAPE.block_size, SHAPE.num_kv_heads // 2, SHAPE.head_dim)
        client.register_kv_caches([torch.zeros(dims) for _ in range(SHAPE.num_layers)])
        return client

    one, two, asking, hashes = rank(0), rank(1), cluster.client("a"), cluster.hashes(NUM_BLOCKS)
    saves = [one.save(hashes, range(NUM_BLOCKS))]
    deadline_s = time.monotonic() + SOON_S
    while not core.pool.stats().num_writing:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    lookup = calls.submit(asking.lookup, hashes)
    assert is_waiting(lookup)
    saves.append(two.save(hashes, range(NUM_BLOCKS)))
    assert lookup.result(SOON_S).num_local == NUM_BLOCKS
    for save in saves:
        save.result(SOON_S)


def test_lookups_that_wait_keep_no_other_waiting(cluster, core, saving, calls):
    worker, hashes, ticket = saving
    clients = [cluster.client("a") for _ in range(12)]
    lookups = [calls.submit(client.lookup, hashes) for client in clients]
    assert is_waiting(lookups[-1])
    assert worker.client.lookup(hashes[:4]).num_local == 4
    assert worker.load(hashes[:4], range(20, 24)).num_local == 4
    assert worker.client.lookup(cluster.hashes(3, seed=5)).num_blocks == 0
    core.pool.complete_store(ticket.write_id, "saver")
    assert [lookup.result(SOON_S).num_local for lookup in lookups] == [NUM_BLOCKS] * 12


def test_loads_that_wait_for_one_save_all_get_it(cluster, core, saving):
    _, hashes, ticket = saving
    workers = [cluster.worker("a", 12) for _ in range(6)]
    jobs = [worker.client.load(hashes, range(NUM_BLOCKS)) for worker in workers]
    assert is_waiting(jobs[-1])
    core.pool.complete_store(ticket.write_id, "saver")
    results = [job.result(SOON_S) for job in jobs]
    assert [(result.num_local, result.num_peer) for result in results] == [(NUM_BLOCKS, 0)] * 6


def test_a_client_that_leaves_while_it_waits_leaves_nothing(cluster, core, saving, calls):
    _, hashes, ticket = saving
    client = cluster.client("a")
    lookup = calls.submit(client.lookup, hashes)
    assert is_waiting(lookup)
    worker = cluster.worker("a", 12)
    job = worker.client.load(hashes, range(NUM_BLOCKS))
    assert is_waiting(job)
    job.abandon(1.0)
    client.close(0.1)
    core.pool.complete_store(ticket.write_id, "saver")
    deadline_s = time.monotonic() + SOON_S
    while core.pool.num_leases():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    core.pool.check_integrity()
